"""Calls one function now and then, in the thread and event loop of the cell that made it, whoever asks for it.

Colab shows no change of a widget that another thread makes, so a worker's call is handed to the loop. Starts no
thread. Does not know what is sent.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

INTERVAL_S = 0.25
"""Seconds between two calls: a person reads no faster, and a notebook's connection carries it."""
STALLED_S = 2.0
"""A loop that has not run for so long sits under a synchronous call; then a worker calls by itself."""


class Courier:
    """`poke()` from anywhere; `send()` is then called soon, never twice within `interval` seconds, never twice at once.

    Without an event loop it is called by whoever pokes. What `send` raises reaches the one who poked, or the loop.
    """

    def __init__(self, send: Callable[[], None], interval: float = INTERVAL_S) -> None:
        self.interval = interval
        self._send = send
        self._sending = threading.RLock()
        self._sent = -interval
        self._asked: float | None = None  # when a worker asked the loop, which has not answered yet
        self._timer: asyncio.TimerHandle | None = None
        self.rebind()

    def rebind(self) -> None:
        """From now on this thread and its loop are where `send` is called."""
        self._thread = threading.get_ident()
        self._loop = running_loop()
        self._timer = None
        self._asked = None

    def poke(self) -> None:
        """There is something to send."""
        now = time.monotonic()
        if threading.get_ident() == self._thread:
            self._poke_here(now)
        elif self._loop is None or self._loop.is_closed():
            if now - self._sent >= self.interval:
                self.now()
        elif self._asked is None:
            self._asked = now
            self._loop.call_soon_threadsafe(self._answer)
        elif now - self._asked > STALLED_S and now - self._sent >= self.interval:
            self.now()

    def now(self) -> None:
        """Send at once, in this thread."""
        with self._sending:
            self._sent = time.monotonic()
            self._send()

    def cancel(self) -> None:
        """Forget what is scheduled."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _poke_here(self, now: float) -> None:
        if self._loop is None or self._loop.is_closed():
            self._loop, self._timer = running_loop(), None
        wait = self._sent + self.interval - now
        if wait <= 0:
            self.now()
        elif self._loop is not None and self._timer is None:
            self._timer = self._loop.call_later(wait, self._ring)

    def _ring(self) -> None:
        self._timer = None
        self.now()

    def _answer(self) -> None:
        self._asked = None
        self._poke_here(time.monotonic())


def running_loop() -> asyncio.AbstractEventLoop | None:
    """The event loop that runs in this thread, if one does."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
