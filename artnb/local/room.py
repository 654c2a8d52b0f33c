"""Whose turn it is on the device: the engine's or the trainer's. Where both do not fit, the engine sleeps meanwhile."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from ..engines.base import SharedEngine
from ..errors import EngineError, TrainError
from ..whole import to_the_end

logger = logging.getLogger("artnb")


class Room:
    """`sleeps`: the engine gives its memory to the trainer; otherwise it only stands still."""

    def __init__(self, engine: SharedEngine, *, sleeps: bool) -> None:
        self.sleeps = sleeps
        self._engine = engine
        self._training = False
        self._waking: asyncio.Future[float] | None = None

    @asynccontextmanager
    async def for_trainer(self) -> AsyncGenerator[dict[str, float]]:
        """The device is the trainer's while the block runs. Requests that arrive meanwhile wait.

        Yields where the seconds of falling asleep go. After the block the engine begins to wake, while its caller saves
        what was trained: `awake` waits for it. When the block fails, it is awake before the error goes on.
        """
        seconds: dict[str, float] = {}
        if not self.sleeps:
            hold = self._engine.hold()
            await to_the_end(asyncio.to_thread(hold.__enter__))
            try:
                yield seconds
            finally:
                hold.__exit__(None, None, None)
            return
        self._training = True
        try:
            began = time.monotonic()
            await to_the_end(self._engine.sleep())
            seconds["seconds_sleep"] = time.monotonic() - began
            yield seconds
        except BaseException:
            self._waking = asyncio.ensure_future(self._wake())
            await self.settle()
            raise
        self._waking = asyncio.ensure_future(self._wake())

    async def awake(self) -> dict[str, float]:
        """Wait until the engine that began to wake has done so. Returns the seconds it took.

        Raises: TrainError when it cannot: it then sleeps on, and the next request or step tries again.
        """
        waking, self._waking = self._waking, None
        if waking is None:
            return {}
        try:
            return {"seconds_wake": await to_the_end(waking)}
        except EngineError as error:
            raise TrainError(f"after the step {error}", phase="wake") from error

    async def settle(self) -> None:
        """The same after a failure that is told already: when it cannot wake, that is only logged."""
        try:
            await self.awake()
        except TrainError as error:
            logger.error("%s", error)

    async def ensure_awake(self) -> None:
        """Wake an engine whose waking failed after a step. Raises: EngineError when it fails again."""
        if self.sleeps and not self._training and self._engine.state == "asleep":
            await self._engine.wake()

    async def _wake(self) -> float:
        began = time.monotonic()
        self._training = False
        await self._engine.wake()
        return time.monotonic() - began
