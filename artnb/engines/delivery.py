"""Tokens from the engine's thread to whichever event loop asked for them.

One call into each loop per step, however many requests it has, and none for requests whose answers are only wanted
whole. Knows nothing of models.
"""

from __future__ import annotations

import asyncio
from collections import deque

from .base import TokenChunk

Event = TokenChunk | Exception


class Mailbox:
    """What one request got, waiting for its consumer. Emptied in the consumer's loop, and filled there.

    Without `stream` nobody is woken for a part of an answer: parts are put in by the engine's thread, and what ends
    the answer comes through the loop behind them.
    """

    def __init__(self, stream: bool = True) -> None:
        self.loop = asyncio.get_running_loop()
        self.stream = stream
        self.cancelled = False  # set in the consumer's loop, read by the engine's thread
        self._events: deque[Event] = deque()
        self._arrived = asyncio.Event()

    def put(self, event: Event) -> None:
        self._events.append(event)
        self._arrived.set()

    def keep(self, part: Event) -> None:
        """Put a part in and wake nobody; from any thread."""
        self._events.append(part)

    async def get(self) -> TokenChunk:
        """All tokens that have arrived, as one chunk; or the request's error."""
        await self._arrived.wait()
        event = self._events.popleft()
        if isinstance(event, Exception):
            raise event
        token_ids, logprobs, reason = list(event.token_ids), list(event.logprobs), event.finish_reason
        while self._events and isinstance(more := self._events[0], TokenChunk):
            self._events.popleft()
            token_ids += more.token_ids
            logprobs += more.logprobs
            reason = more.finish_reason
        if not self._events:
            self._arrived.clear()
        return TokenChunk(token_ids, logprobs, reason)


class Deliveries:
    """The events of one step, by loop."""

    def __init__(self) -> None:
        self._by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Mailbox, Event]]] = {}

    def add(self, mailbox: Mailbox, event: Event) -> None:
        part = isinstance(event, TokenChunk) and event.finish_reason is None
        if part and not mailbox.stream and not mailbox.loop.is_closed():  # a closed loop is found out in `send`
            mailbox.keep(event)
        else:
            self._by_loop.setdefault(mailbox.loop, []).append((mailbox, event))

    def send(self) -> list[Mailbox]:
        """Hand everything over; returns the mailboxes whose loop is closed: nobody will ever read them."""
        dead: list[Mailbox] = []
        for loop, events in self._by_loop.items():
            try:
                loop.call_soon_threadsafe(_put_all, events)
            except RuntimeError:
                if not loop.is_closed():
                    raise
                dead.extend(mailbox for mailbox, _ in events)
        self._by_loop.clear()
        return dead


def _put_all(events: list[tuple[Mailbox, Event]]) -> None:
    for mailbox, event in events:
        mailbox.put(event)
