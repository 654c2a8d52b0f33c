"""Training that starts itself: a step whenever enough groups of captured, scored trajectories are complete."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from .config import TrainConfig, check_number
from .notebook.loop import spawn

if TYPE_CHECKING:
    from .backend import TrainResult
    from .model import TrainableModel


class AutoTrainer:
    """Trains `model` in the background until stopped. A failed step ends it; `wait` raises what it raised.

    It lives on after its cell. Started again for the same model, the new one takes over and the earlier one stops.

    auto = model.auto_train(groups_per_step=4, group_size=8)
    ...  # rollouts in `async with art.trajectory(group=...) as t:` scopes
    await auto.wait(steps=10)
    auto.stop()
    """

    def __init__(
        self,
        model: TrainableModel,
        *,
        groups_per_step: int,
        group_size: int,
        config: TrainConfig | None = None,
        on_step: Callable[[TrainResult], None] | None = None,
    ) -> None:
        check_number("auto_train", "groups_per_step", groups_per_step, low=1, whole=True)
        check_number("auto_train", "group_size", group_size, low=2, whole=True)
        self.model = model
        self.groups_per_step = groups_per_step
        self.group_size = group_size
        self.config = config
        self.on_step = on_step
        self.results: list[TrainResult] = []
        self._stopping = False
        self._ready: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._future = spawn(self._run())

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ready = asyncio.Event()
        backend = await self.model.ready()
        collector = backend.collector(self.model)
        collector.take_over(self._wake, self.stop)
        try:
            while not self._stopping:
                if collector.count_ready(self.group_size) < self.groups_per_step:
                    self._ready.clear()
                    # Checked again after clear(): a trajectory may have come in between.
                    if collector.count_ready(self.group_size) < self.groups_per_step and not self._stopping:
                        await self._ready.wait()
                    continue
                groups = collector.pop_ready(self.group_size, self.groups_per_step)
                result = await backend.train(self.model, groups, self.config)
                self.results.append(result)
                if self.on_step is not None:
                    self.on_step(result)
        finally:
            collector.give_up(self.stop)

    def _wake(self) -> None:
        if self._loop is not None and self._ready is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._ready.set)

    async def wait(self, steps: int) -> list[TrainResult]:
        """Wait until `steps` steps are done since this started; returns their results."""
        while len(self.results) < steps:
            if self._future.done():
                self._future.result()
                raise RuntimeError(f"auto_train was stopped after {len(self.results)} of {steps} steps")
            await asyncio.sleep(0.05)
        return self.results[:steps]

    def stop(self) -> None:
        """End after the step that runs now, if any. May be called again."""
        self._stopping = True
        self._wake()

    def __repr__(self) -> str:
        state = "ended" if self._future.done() else "stopping" if self._stopping else "running"
        return f"<auto_train of {self.model.name}: {state}, {len(self.results)} steps>"
