"""Tokens from the engine's thread to whichever event loop asked for them.

One call into each loop per step, however many requests it has, and none for requests whose answers are only wanted
whole. Knows nothing of models.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import cast

from .base import TokenChunk

Event = TokenChunk | Exception


class Mailbox:
    """What one request got, waiting for its consumer. Emptied in the consumer's loop, and filled there.

    Without `stream` nobody is woken for a part of an answer: parts are put in by the engine's thread, and what ends
    the answer comes through the loop behind them. Of the parts only the numbers are kept: with an object for each token
    of a few hundred answers Python's garbage collector would have more to do than everybody else.
    """

    def __init__(self, stream: bool = True) -> None:
        self.loop = asyncio.get_running_loop()
        self.stream = stream
        self.cancelled = False  # set in the consumer's loop, read by the engine's thread
        self._events: deque[Event] = deque()
        self._token_ids: list[int] = []  # of the parts that wait for the end
        self._logprobs: list[float] = []
        self._arrived = asyncio.Event()

    def put(self, event: Event) -> None:
        self._events.append(event)
        self._arrived.set()

    def keep(self, part: TokenChunk) -> None:
        """Put a part in and wake nobody; from any thread. It comes out with the next event."""
        self._token_ids += part.token_ids
        self._logprobs += part.logprobs

    async def get(self) -> TokenChunk:
        """All tokens that have arrived, as one chunk; or the request's error."""
        await self._arrived.wait()
        token_ids, logprobs, reason = self._token_ids, self._logprobs, None
        self._token_ids, self._logprobs = [], []
        if isinstance(error := self._events[0], Exception) and not token_ids:
            raise error
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
            mailbox.keep(cast(TokenChunk, event))
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
