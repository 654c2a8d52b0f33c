"""Batches of groups: the same groups in each whatever finishes first, gathered ahead, drained when left."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest

from artnb.batches import trajectory_group_batches
from artnb.errors import ConfigError, TooManyExceptionsError
from artnb.trajectories import Trajectory, TrajectoryGroup

QUIET: dict[str, Any] = {"pbar_desc": None}


@pytest.fixture(autouse=True)
async def nothing_left_over() -> AsyncIterator[None]:
    yield
    await asyncio.sleep(0)
    assert [task for task in asyncio.all_tasks() if task.get_name().startswith("artnb")] == []


class World:
    """Counts which rollouts started and which are still running."""

    def __init__(self, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.started: list[int] = []
        self.running = 0

    def group(self, number: int, *, size: int = 2, fails: bool = False) -> Any:
        return TrajectoryGroup(self.rollout(number, fails and i == 0) for i in range(size))

    async def rollout(self, number: int, fails: bool) -> Trajectory:
        self.started.append(number)
        self.running += 1
        try:
            await asyncio.sleep(self.random.uniform(0, 0.01))
            if fails:
                raise ValueError(str(number))
            return Trajectory(reward=number)
        finally:
            self.running -= 1


def numbers(batch: list[TrajectoryGroup]) -> list[float | None]:
    return [group.trajectories[0].reward for group in batch]


@pytest.mark.parametrize("seed", [1, 2])
async def test_batches_come_in_order_and_the_last_may_be_short(seed: int) -> None:
    world = World(seed)
    batches = [numbers(b) async for b in trajectory_group_batches(map(world.group, range(7)), batch_size=3, **QUIET)]
    assert batches == [[0, 1, 2], [3, 4, 5], [6]]


async def test_skipped_batches_never_start() -> None:
    world = World()
    batches = [
        numbers(b)
        async for b in trajectory_group_batches(map(world.group, range(7)), batch_size=3, skip_batches=1, **QUIET)
    ]
    assert batches == [[3, 4, 5], [6]] and min(world.started) == 3
    assert [b async for b in trajectory_group_batches([world.group(1)], batch_size=1, skip_batches=5, **QUIET)] == []


async def test_only_so_many_batches_run_ahead() -> None:
    world = World()
    batches = trajectory_group_batches(map(world.group, range(10)), batch_size=2, max_concurrent_batches=2, **QUIET)
    await anext(batches)
    await asyncio.sleep(0.05)
    assert set(world.started) == {0, 1, 2, 3} and world.running == 0  # the next batch is ready while this one trains
    await anext(batches)
    await anext(batches)
    assert max(world.started) <= 7
    await batches.aclose()


async def test_leaving_early_cancels_and_awaits_the_rest() -> None:
    world = World()
    batches = trajectory_group_batches(map(world.group, range(40)), batch_size=2, max_concurrency=3, **QUIET)
    await anext(batches)
    await batches.aclose()
    assert world.running == 0
    with pytest.raises(StopAsyncIteration):
        await anext(batches)


async def test_a_cancelled_consumer_leaves_nothing() -> None:
    world = World()

    async def consume() -> None:
        async for _ in trajectory_group_batches(map(world.group, range(40)), batch_size=20, **QUIET):
            pass

    consumer = asyncio.ensure_future(consume())
    await asyncio.sleep(0.002)
    consumer.cancel()
    with pytest.raises(asyncio.CancelledError):
        await consumer
    assert world.running == 0


async def test_max_concurrency_holds_over_all_batches() -> None:
    world = World()
    peak = 0

    async def watched(number: int) -> Trajectory:
        nonlocal peak
        peak = max(peak, world.running + 1)
        return await world.rollout(number, False)

    groups = [TrajectoryGroup([watched(n), watched(n)]) for n in range(12)]
    batches = [b async for b in trajectory_group_batches(groups, batch_size=2, max_concurrency=3, **QUIET)]
    assert len(batches) == 6 and peak == 3
    assert world.started == sorted(world.started)  # earlier groups first


async def test_failures_are_counted_per_batch_and_raise_in_their_turn() -> None:
    world = World()
    groups = [world.group(n, fails=n in (0, 3)) for n in range(6)]
    batches = [b async for b in trajectory_group_batches(groups, batch_size=2, max_batch_exceptions=1, **QUIET)]
    assert [[len(group.exceptions) for group in b] for b in batches] == [[1, 0], [0, 1], [0, 0]]

    groups = [world.group(n, fails=n >= 2) for n in range(8)]
    seen = []
    with pytest.raises(TooManyExceptionsError, match="of 4 rollouts"):
        async for batch in trajectory_group_batches(groups, batch_size=2, max_batch_exceptions=1, **QUIET):
            seen.append(numbers(batch))
    assert seen == [[0, 1]] and world.running == 0


async def test_a_share_of_failures_is_of_the_batch() -> None:
    world = World()
    groups = [world.group(n, fails=n == 0) for n in range(4)]
    batches = [b async for b in trajectory_group_batches(groups, batch_size=2, max_batch_exceptions=0.25, **QUIET)]
    assert len(batches) == 2
    groups = [world.group(n, fails=n <= 1) for n in range(40)]
    with pytest.raises(TooManyExceptionsError):
        await anext(trajectory_group_batches(groups, batch_size=2, max_batch_exceptions=0.25, **QUIET))


async def test_timeout_and_after_each() -> None:
    async def hang() -> Trajectory:
        await asyncio.Event().wait()
        raise AssertionError("never reached")

    world = World()
    groups = [TrajectoryGroup([hang(), world.rollout(1, False)]), world.group(2)]
    (batch,) = [
        b
        async for b in trajectory_group_batches(
            groups,
            batch_size=2,
            timeout=0.3,
            max_batch_exceptions=1,
            after_each=lambda group: group if group.exceptions else None,
            **QUIET,
        )
    ]
    assert numbers(batch) == [1]


@pytest.mark.parametrize(
    "options",
    [{"batch_size": 0}, {"batch_size": 1, "max_concurrent_batches": 0}, {"batch_size": 1, "skip_batches": -1},
     {"batch_size": 1, "max_batch_exceptions": -1}, {"batch_size": 1, "max_concurrency": 0},
     {"batch_size": 1, "timeout": -1}],
)  # fmt: skip
async def test_wrong_options_raise_and_leave_no_coroutine(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        await anext(trajectory_group_batches([World().group(1)], **options, **QUIET))


def test_an_interrupt_in_a_rollout_passes_through() -> None:
    async def interrupted() -> Trajectory:
        raise KeyboardInterrupt

    async def main() -> None:
        async for _ in trajectory_group_batches([TrajectoryGroup([interrupted()])], batch_size=1, **QUIET):
            pass

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(main())


async def test_the_progress_line_counts_rollouts_that_groups_start_themselves(
    capsys: pytest.CaptureFixture[str],
) -> None:
    world = World()

    async def scored(number: int) -> TrajectoryGroup:
        group: TrajectoryGroup = await world.group(number)
        return group

    async for _ in trajectory_group_batches([scored(0), scored(1), world.group(2)], batch_size=1, pbar_desc="play"):
        pass
    line = capsys.readouterr().err.split("\r")[-1]
    assert "play: 100%" in line and "6/6" in line and "reward=1" in line
