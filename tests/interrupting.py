"""Cancel a coroutine at its k-th suspension, for every k: where an interrupt can hit a cell that awaits."""

from __future__ import annotations

import asyncio
import contextlib
import types
from collections.abc import Coroutine, Generator
from typing import Any


class Cut:
    """Which suspensions of a coroutine are cancelled, counted from 1, and how far it came.

    `late`: not as it begins to wait, but as what it waits for is there, before the coroutine hears of it.
    """

    def __init__(self, *at: int, late: bool = False) -> None:
        self.at = set(at)
        self.late = late
        self.suspended = 0

    @types.coroutine
    def _step(self, work: Coroutine[Any, Any, Any]) -> Generator[Any, Any, Any]:
        task = asyncio.current_task()
        assert task is not None
        thrown: BaseException | None = None
        while True:
            try:
                awaited: Any = work.send(None) if thrown is None else work.throw(thrown)
            except StopIteration as end:
                return end.value
            self.suspended += 1
            if self.suspended in self.at:
                if self.late and isinstance(awaited, asyncio.Future):
                    awaited.add_done_callback(lambda _: task.cancel())
                else:
                    asyncio.get_running_loop().call_soon(task.cancel)
            thrown = None
            try:
                yield awaited
            except BaseException as error:
                thrown = error

    async def run(self, work: Coroutine[Any, Any, Any]) -> bool:
        """Whether `work` came so far that it was cancelled. Its errors are raised."""

        async def whole() -> Any:
            return await self._step(work)

        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.create_task(whole())
        return self.suspended >= min(self.at)
