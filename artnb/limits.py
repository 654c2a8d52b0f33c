"""The two limits of a gather: how many rollouts are in flight, and how many may fail.

Counting and order only; starts and cancels nothing (that is supervise.py)."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import math
import traceback
from collections import Counter
from typing import Any

from .config import check_number
from .errors import ConfigError, TooManyExceptionsError

Key = tuple[int, ...]
"""Place in the queue for a slot: (group, rollout). Smaller goes first."""

logger = logging.getLogger("artnb")


class Slots:
    """At most `limit` holders at a time (None: no limit); those who wait enter by key, then by arrival."""

    def __init__(self, limit: int | None) -> None:
        if limit is not None:
            check_number("gather", "max_concurrency", limit, low=1, whole=True)
        self._free: float = math.inf if limit is None else limit
        self._waiting: list[tuple[Key, int, asyncio.Future[None]]] = []
        self._arrival = itertools.count()

    async def acquire(self, key: Key) -> None:
        if self._free > 0:
            self._free -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (key, next(self._arrival), turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # the slot was ours already when the cancellation came
                self.release()
            raise

    def release(self) -> None:
        while self._waiting:
            *_, turn = heapq.heappop(self._waiting)
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1


def check_max_exceptions(value: float) -> None:
    """Raise ConfigError unless `value` is a count >= 0, a share in (0, 1), or infinity (no limit)."""
    if isinstance(value, float) and value == math.inf:
        return
    check_number("gather", "max_exceptions", value, low=0)
    if value > 1 and value != int(value):
        raise ConfigError(f"gather: max_exceptions={value} must be a whole number, or a share between 0 and 1")


def _place(error: BaseException) -> tuple[Any, ...]:
    """Where an exception and its causes were raised: equal places are the same failure, whatever the message says."""
    frames = tuple((f.filename, f.lineno) for f in traceback.extract_tb(error.__traceback__))
    below = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return (type(error), frames, *(_place(below) if below is not None else ()))


class Failures:
    """Counts failures by cause, logs each distinct traceback once, and says when there are too many."""

    def __init__(self, allowed: float) -> None:
        check_max_exceptions(allowed)
        self.allowed = allowed
        self.count = 0
        self.causes: Counter[str] = Counter()
        self.first: BaseException | None = None
        self._shown: set[tuple[Any, ...]] = set()

    def add(self, error: BaseException, total: int) -> TooManyExceptionsError | None:
        """Count one failure among `total` rollouts; returns the error to raise if that is one too many."""
        self.count += 1
        self.causes[type(error).__name__] += 1
        self.first = self.first or error
        share = 0 < self.allowed < 1
        too_many = self.count > (self.allowed * total if share else self.allowed)
        place = _place(error)
        # The very first failure that ends the gather is shown by the raised error itself, as its cause.
        if place not in self._shown and not (too_many and self.count == 1):
            logger.warning("A rollout failed (equal failures after this one are only counted)", exc_info=error)
        self._shown.add(place)
        if not too_many:
            return None
        limit = f"{self.allowed:.3g} of all" if share else f"{self.allowed:.0f}"
        raised = TooManyExceptionsError(
            f"{self.count} of {total} rollouts failed; max_exceptions allows {limit}\n{self.table()}"
        )
        raised.__cause__ = self.first
        return raised

    def table(self) -> str:
        """One line per cause, the most frequent first."""
        return "\n".join(f"  {cause}: {count}" for cause, count in self.causes.most_common())
