"""Whose turn it is on the device: the engine's or the trainer's. Where both do not fit, the engine sleeps meanwhile."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from ..engines.base import SharedEngine
from ..errors import EngineError, TrainError
from .worker import to_the_end

logger = logging.getLogger("artnb")


class Room:
    """`sleeps`: the engine gives its memory to the trainer; otherwise it only stands still."""

    def __init__(self, engine: SharedEngine, *, sleeps: bool) -> None:
        self.sleeps = sleeps
        self._engine = engine
        self._training = False

    @asynccontextmanager
    async def for_trainer(self) -> AsyncGenerator[dict[str, float]]:
        """The device is the trainer's while the block runs, however it ends. Requests that arrive meanwhile wait.

        Yields where the seconds of falling asleep and of waking go. Raises TrainError when the engine cannot wake: it
        then sleeps on, and the next request or step tries again.
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
        finally:
            began = time.monotonic()
            self._training = False
            await self._wake()
            seconds["seconds_wake"] = time.monotonic() - began

    async def ensure_awake(self) -> None:
        """Wake an engine whose waking failed after a step. Raises: EngineError when it fails again."""
        if self.sleeps and not self._training and self._engine.state == "asleep":
            await self._engine.wake()

    async def _wake(self) -> None:
        try:
            await to_the_end(self._engine.wake())
        except EngineError as error:
            raise TrainError(f"after the step {error}", phase="wake") from error
