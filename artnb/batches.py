"""Batches of groups, gathered ahead of the one that trains.

Batch k always holds the same groups, whatever finishes first, so a resumed run can skip what it has trained on.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Iterable

from .config import check_number
from .gather import AfterEach, GroupSource, close_all, count_rollouts, run_groups, take
from .limits import Slots, check_max_exceptions
from .notebook.meter import Meter
from .notebook.progress import Progress
from .supervise import ROUNDS, Supervisor, drain
from .trajectories import TrajectoryGroup


async def trajectory_group_batches(
    groups: Iterable[GroupSource],
    *,
    batch_size: int,
    max_batch_exceptions: int | float = 0,
    max_concurrent_batches: int = 4,
    skip_batches: int = 0,
    pbar_desc: str | None = "batches",
    pbar_total_completion_tokens: bool = False,
    after_each: AfterEach | None = None,
    max_concurrency: int | None = None,
    timeout: float | None = None,
) -> AsyncGenerator[list[TrajectoryGroup]]:
    """Yield lists of `batch_size` groups in the order given, while later batches already run.

        async for batch in art.trajectory_group_batches(groups, batch_size=8, skip_batches=await model.get_step()):
            await model.train(batch)

    `max_batch_exceptions`: rollouts that may fail in one batch, a count or a share; one more raises
    TooManyExceptionsError when that batch's turn comes. `max_concurrent_batches`: batches in flight, the awaited one
    included. `skip_batches`: leave out that many batches from the front; their rollouts never start. `max_concurrency`
    limits rollouts over all batches. The last batch may be short. The other options are `gather_trajectory_groups`'s.
    Leaving the loop early: `aclose()` the generator (or leave it to the event loop), which cancels and awaits the rest.
    """
    sources = take(groups, TrajectoryGroup, "trajectory_group_batches")
    running: deque[asyncio.Task[list[TrajectoryGroup] | BaseException]] = deque()
    waiting: deque[tuple[int, list[GroupSource]]] = deque()
    try:
        check_number("trajectory_group_batches", "batch_size", batch_size, low=1, whole=True)
        check_number("trajectory_group_batches", "max_concurrent_batches", max_concurrent_batches, low=1, whole=True)
        check_number("trajectory_group_batches", "skip_batches", skip_batches, low=0, whole=True)
        check_max_exceptions(max_batch_exceptions)
        slots = Slots(max_concurrency)
        for first in range(batch_size * skip_batches, len(sources), batch_size):
            waiting.append((first, sources[first : first + batch_size]))
        total = sum(count_rollouts(source) for _, batch in waiting for source in batch)
        progress = Progress(total, pbar_desc, "rollout")
        meter = Meter(progress, total_tokens=pbar_total_completion_tokens)

        async def gather(first: int, batch: list[GroupSource]) -> list[TrajectoryGroup] | BaseException:
            expected = sum(map(count_rollouts, batch))

            def more(new_total: int) -> None:
                nonlocal total, expected
                total, expected = total + new_total - expected, new_total
                progress.set_total(total)

            supervisor = Supervisor(
                total=expected,
                max_exceptions=max_batch_exceptions,
                timeout=timeout,
                slots=slots,
                on_end=meter.ended,
                on_total=more,
            )
            try:
                async with supervisor:
                    return await run_groups(batch, supervisor, meter, after_each, first)
            except (KeyboardInterrupt, SystemExit) as interrupt:
                return interrupt  # raised by the consumer below: in a task of ours it would break out of the loop again

        with progress:
            while waiting or running:
                while waiting and len(running) < max_concurrent_batches:
                    first, batch = waiting.popleft()
                    name = f"artnb batch {first // batch_size}"
                    running.append(asyncio.get_running_loop().create_task(gather(first, batch), name=name))
                await asyncio.wait([running[0]])
                gathered = running.popleft().result()
                if isinstance(gathered, BaseException):
                    raise gathered
                yield gathered
    finally:
        try:
            await drain(running, rounds=ROUNDS + 3)
        finally:
            close_all(sources)
