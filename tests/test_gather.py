"""Rollouts side by side: order, failures as data, limits, and nothing left running."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import logging
import random
from collections.abc import AsyncIterator, Awaitable
from typing import Any

import pytest
from openai.types.chat.chat_completion import Choice

from artnb import supervise
from artnb.errors import ConfigError, RolloutError, RolloutTimeoutError, TooManyExceptionsError
from artnb.gather import PendingGroup, gather_trajectories, gather_trajectory_groups
from artnb.trajectories import StopReason, Trajectory, TrajectoryGroup

QUIET: dict[str, Any] = {"pbar_desc": None}


@pytest.fixture(autouse=True)
async def nothing_left_over() -> AsyncIterator[None]:
    """After every test no task of ours is left; a coroutine that was never awaited is an error by pyproject."""
    yield
    await asyncio.sleep(0)
    ours = [task for task in asyncio.all_tasks() if task.get_name().startswith("artnb")]
    assert ours == []


async def rollout(reward: float | None = 0.0, delay: float = 0.0, **fields: Any) -> Trajectory:
    await asyncio.sleep(delay)
    return Trajectory(reward=reward, **fields)


async def fail(message: str = "bad", delay: float = 0.0) -> Trajectory:
    await asyncio.sleep(delay)
    raise ValueError(message)


async def hang() -> Trajectory:
    await asyncio.Event().wait()
    raise AssertionError("never reached")


def choice(finish_reason: str = "stop", **extra: Any) -> Choice:
    return Choice.model_validate(
        {"index": 0, "finish_reason": finish_reason, "message": {"role": "assistant", "content": "x"}, **extra}
    )


def rewards(groups: list[TrajectoryGroup]) -> list[list[float | None]]:
    return [[t.reward for t in group] for group in groups]


async def test_groups_of_8_7_1_and_0_survivors() -> None:
    groups = await gather_trajectory_groups(
        (TrajectoryGroup([*(rollout(i) for i in range(n)), *(fail() for _ in range(8 - n))]) for n in (8, 7, 1, 0)),
        max_exceptions=100,
        **QUIET,
    )
    assert [len(group) for group in groups] == [8, 7, 1, 0]
    assert [len(group.exceptions) for group in groups] == [0, 1, 7, 8]
    record = groups[3].exceptions[0]
    assert (record.type, record.message) == ("ValueError", "bad")
    assert "in fail" in record.traceback and "raise ValueError(message)" in record.traceback


async def test_finish_order_does_not_matter() -> None:
    async def run(seed: int) -> list[list[float | None]]:
        delay = random.Random(seed)
        return rewards(
            await gather_trajectory_groups(
                (TrajectoryGroup(rollout(10 * g + i, delay.uniform(0, 0.02)) for i in range(6)) for g in range(4)),
                **QUIET,
            )
        )

    assert await run(1) == await run(2) == [[10 * g + i for i in range(6)] for g in range(4)]


async def test_the_default_raises_at_the_first_failure_and_ends_the_rest() -> None:
    cleaned: list[str] = []

    async def sibling() -> Trajectory:
        try:
            return await hang()
        finally:
            await asyncio.sleep(0.01)  # cleanup that takes a moment is waited for
            cleaned.append("sibling")

    with pytest.raises(TooManyExceptionsError) as raised:
        await gather_trajectory_groups(
            [TrajectoryGroup([sibling(), fail("boom")]), TrajectoryGroup([sibling()])], **QUIET
        )
    assert isinstance(raised.value.__cause__, ValueError)
    assert "1 of 3 rollouts failed" in str(raised.value) and "ValueError: 1" in str(raised.value)
    assert cleaned == ["sibling", "sibling"]


@pytest.mark.parametrize(
    ("allowed", "failures", "raises"),
    [
        (0, 1, True),
        (2, 2, False),
        (2, 3, True),
        (0.25, 2, False),
        (0.25, 3, True),
        (1, 1, False),
        (float("inf"), 8, False),
    ],
)
async def test_max_exceptions(allowed: float, failures: int, raises: bool) -> None:
    work = TrajectoryGroup([*(rollout() for _ in range(8 - failures)), *(fail() for _ in range(failures))])
    if raises:
        with pytest.raises(TooManyExceptionsError):
            await gather_trajectory_groups([work], max_exceptions=allowed, **QUIET)
    else:
        (group,) = await gather_trajectory_groups([work], max_exceptions=allowed, **QUIET)
        assert len(group.exceptions) == failures


async def test_the_table_of_causes_counts_by_type() -> None:
    async def key_error() -> Trajectory:
        await asyncio.sleep(0.01)
        raise KeyError("k")

    with pytest.raises(
        TooManyExceptionsError, match=r"3 of 4 .*max_exceptions allows 2\n  ValueError: 2\n  KeyError: 1"
    ):
        await gather_trajectory_groups(
            [TrajectoryGroup([fail(), fail(), key_error(), hang()])], max_exceptions=2, **QUIET
        )


@pytest.mark.parametrize(
    "options",
    [
        {"max_exceptions": -1},
        {"max_exceptions": 1.5},
        {"max_exceptions": True},
        {"max_exceptions": float("nan")},
        {"max_concurrency": 0},
        {"max_concurrency": 2.5},
        {"timeout": 0},
    ],
)
async def test_wrong_options_raise_and_leave_no_coroutine(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        await gather_trajectory_groups([TrajectoryGroup([rollout()])], **options, **QUIET)
    with pytest.raises(ConfigError):
        await gather_trajectories([rollout()], **options, **QUIET)


async def test_what_is_not_awaitable_is_named_and_the_others_closed() -> None:
    with pytest.raises(TypeError, match="item 1 is a function, not an awaitable; call it"):
        await gather_trajectories([rollout(), rollout], **QUIET)  # type: ignore[list-item]
    with pytest.raises(TypeError, match="TrajectoryGroup: item 1 is a int"):
        TrajectoryGroup([rollout(), 3])  # type: ignore[list-item]

    def broken() -> Any:
        yield TrajectoryGroup([rollout()])
        raise LookupError("no scenario")

    with pytest.raises(LookupError):
        await gather_trajectory_groups(broken(), **QUIET)


async def test_a_rollout_that_forgets_to_return_is_a_failure() -> None:
    async def forgets() -> None:
        return None

    (group,) = await gather_trajectory_groups([TrajectoryGroup([forgets(), rollout()])], max_exceptions=1, **QUIET)  # type: ignore[list-item]
    assert len(group) == 1 and "missing" in group.exceptions[0].message


async def test_a_rollout_that_hangs_is_ended_and_its_group_remains() -> None:
    (group,) = await gather_trajectory_groups(
        [TrajectoryGroup([rollout(1), hang(), rollout(2)])], timeout=0.2, max_exceptions=1, **QUIET
    )
    assert rewards([group]) == [[1, 2]]
    (record,) = group.exceptions
    assert record.type == "artnb.errors.RolloutTimeoutError" and "0.2 s" in record.message
    assert "in hang" in record.traceback  # where it stood


async def test_waiting_for_a_slot_is_not_counted_as_time() -> None:
    (group,) = await gather_trajectory_groups(
        [TrajectoryGroup(rollout(i, 0.05) for i in range(12))], max_concurrency=1, timeout=0.5, **QUIET
    )
    assert len(group) == 12  # 0.6 s in all, each 0.05 s


async def test_a_late_result_is_dropped_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    async def stubborn() -> Trajectory:
        try:
            return await hang()
        except asyncio.CancelledError:
            return Trajectory(reward=9)

    (group,) = await gather_trajectory_groups(
        [TrajectoryGroup([stubborn(), rollout(1)])], timeout=0.2, max_exceptions=1, **QUIET
    )
    assert rewards([group]) == [[1]] and group.metrics == {"late_results": 1}
    assert "1 rollouts returned after their time limit" in caplog.text


async def test_a_rollout_that_ignores_its_cancellation_does_not_hold_its_group(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(supervise, "GRACE_S", 0.02)
    seen: list[TrajectoryGroup] = []
    told = 0

    async def stubborn() -> Trajectory:
        nonlocal told
        while told < 2:
            try:
                await hang()
            except asyncio.CancelledError:
                told += 1
        return Trajectory(reward=9)

    async def look(group: TrajectoryGroup) -> TrajectoryGroup:
        assert told == 1  # the group is complete although the rollout still runs
        seen.append(group)
        return group

    groups = await gather_trajectory_groups(
        [TrajectoryGroup([stubborn(), rollout(1)])], timeout=0.2, max_exceptions=1, after_each=look, **QUIET
    )
    assert groups == seen and rewards(groups) == [[1]] and told == 2
    await asyncio.sleep(0)
    assert groups[0].metrics["late_results"] == 1  # counted although it came after the group was made
    assert "ignores its cancellation" in caplog.text


async def test_one_rollout_cancelled_by_somebody_else_is_recorded_not_counted() -> None:
    victim = asyncio.ensure_future(hang())
    asyncio.get_running_loop().call_later(0.02, victim.cancel)
    (group,) = await gather_trajectory_groups([TrajectoryGroup([victim, rollout(1, 0.05)])], **QUIET)
    assert rewards([group]) == [[1]]
    assert "CancelledError" in group.exceptions[0].type


async def test_gather_trajectories_with_a_cancelled_one() -> None:
    async def cancels_itself() -> Trajectory:
        raise asyncio.CancelledError

    kept, cancelled = await gather_trajectories([rollout(1), cancels_itself()], max_exceptions=1, **QUIET)
    assert isinstance(kept, Trajectory) and isinstance(cancelled, asyncio.CancelledError)
    with pytest.raises(asyncio.CancelledError):  # the list is promised to hold trajectories only
        await gather_trajectories([rollout(1), cancels_itself()], **QUIET)


async def test_interrupting_a_gather_leaves_no_task_and_starts_no_more() -> None:
    started, ended = 0, 0

    async def counted() -> Trajectory:
        nonlocal started, ended
        started += 1
        try:
            return await hang()
        finally:
            await asyncio.sleep(0.01)
            ended += 1

    gather = asyncio.get_running_loop().create_task(
        gather_trajectory_groups(
            (TrajectoryGroup(counted() for _ in range(8)) for _ in range(4)), max_concurrency=5, **QUIET
        )
    )
    await asyncio.sleep(0.02)
    gather.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gather
    assert started == ended == 5


async def test_a_gather_cancelled_before_its_first_step_closes_everything() -> None:
    gather = asyncio.ensure_future(gather_trajectory_groups([TrajectoryGroup([hang()])], **QUIET))
    await asyncio.sleep(0)  # the group's task exists and has not run
    gather.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gather


async def test_a_second_interrupt_during_cleanup_still_waits_for_it() -> None:
    cleaned = False

    async def slow_cleanup() -> Trajectory:
        nonlocal cleaned
        try:
            return await hang()
        finally:
            await asyncio.sleep(0.05)
            cleaned = True

    gather = asyncio.ensure_future(gather_trajectory_groups([TrajectoryGroup([slow_cleanup()])], **QUIET))
    await asyncio.sleep(0.01)
    gather.cancel()
    await asyncio.sleep(0.01)
    gather.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gather
    assert cleaned


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_raised_in_a_rollout_passes_through(kind: type[BaseException]) -> None:
    ended = []

    async def interrupted() -> Trajectory:
        await asyncio.sleep(0.01)
        raise kind

    async def sibling() -> Trajectory:
        try:
            return await hang()
        finally:
            ended.append(True)

    async def main() -> None:
        await gather_trajectory_groups([TrajectoryGroup([interrupted(), sibling()])], max_exceptions=100, **QUIET)

    with pytest.raises(kind):
        asyncio.run(main())
    assert ended == [True]


def test_a_loop_that_goes_on_after_an_interrupt_gets_it_once_more_from_the_gather() -> None:
    """A notebook's loop survives a KeyboardInterrupt; the cell that gathers must then end, with everything drained."""

    async def interrupted() -> Trajectory:
        raise KeyboardInterrupt

    loop = asyncio.new_event_loop()
    try:
        gather = loop.create_task(
            gather_trajectory_groups([TrajectoryGroup([interrupted(), hang()])], max_exceptions=9, **QUIET)
        )
        interrupts = 0
        while not gather.done():
            try:
                loop.run_until_complete(asyncio.wait([gather]))
            except KeyboardInterrupt:
                interrupts += 1
        assert interrupts == 2 and isinstance(gather.exception(), KeyboardInterrupt)
        assert all(not task.get_name().startswith("artnb") for task in asyncio.all_tasks(loop))
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
    finally:
        loop.close()


async def test_500_rollouts_8_at_a_time_in_group_order() -> None:
    running, peak = 0, 0
    order: list[int] = []

    async def counted(number: int) -> Trajectory:
        nonlocal running, peak
        running += 1
        peak = max(peak, running)
        order.append(number)
        await asyncio.sleep(0)
        running -= 1
        return Trajectory(reward=number)

    groups = await gather_trajectory_groups(
        [TrajectoryGroup(counted(10 * g + i) for i in range(10)) for g in range(50)], max_concurrency=8, **QUIET
    )
    assert sum(map(len, groups)) == 500 and peak == 8
    assert order == list(range(500))


async def test_a_group_coroutine_shares_the_limits_with_the_rollouts_it_starts() -> None:
    running, peak = 0, 0

    async def counted() -> Trajectory:
        nonlocal running, peak
        running += 1
        peak = max(peak, running)
        await asyncio.sleep(0.005)
        running -= 1
        return Trajectory(reward=1)

    async def scored(place: int) -> TrajectoryGroup:
        group = await TrajectoryGroup([counted(), counted(), fail(), hang()])
        group.metadata["place"] = place
        await asyncio.sleep(0.4)  # judging may take longer than a rollout may
        return group

    groups = await gather_trajectory_groups(
        [scored(i) for i in range(4)], max_concurrency=2, timeout=0.3, max_exceptions=8, **QUIET
    )
    assert peak <= 2
    assert [group.metadata["place"] for group in groups] == [0, 1, 2, 3]
    assert [(len(group), len(group.exceptions)) for group in groups] == [(2, 2)] * 4


async def test_failures_inside_a_group_coroutine_count() -> None:
    async def scored() -> TrajectoryGroup:
        return await TrajectoryGroup([fail(), rollout(), hang()])

    with pytest.raises(TooManyExceptionsError, match="2 of 6"):
        await gather_trajectory_groups([scored(), scored()], max_exceptions=1, **QUIET)


async def test_a_group_coroutine_that_swallows_the_end_does_not_hide_it() -> None:
    async def swallows() -> TrajectoryGroup:
        try:
            return await TrajectoryGroup([fail()])
        except TooManyExceptionsError:
            return TrajectoryGroup([])

    with pytest.raises(TooManyExceptionsError):
        await gather_trajectory_groups([swallows()], **QUIET)


async def test_a_failed_group_coroutine_is_an_empty_group_with_its_exception() -> None:
    seen: list[TrajectoryGroup] = []

    async def broken() -> TrajectoryGroup:
        raise OSError("no file")

    groups = await gather_trajectory_groups(
        [broken(), TrajectoryGroup([rollout(1)]), TrajectoryGroup([Trajectory(reward=2)])],
        max_exceptions=1,
        after_each=lambda group: seen.append(group) or group,
        **QUIET,
    )
    assert rewards(groups) == [[], [1], [2]] and groups[0].exceptions[0].message == "no file"
    assert sorted(rewards(seen)) == [[1], [2]]


async def test_after_each_may_keep_drop_or_split_sync_or_async() -> None:
    def split(group: TrajectoryGroup) -> list[TrajectoryGroup] | TrajectoryGroup | None:
        number = group.metadata["number"]
        return [group, TrajectoryGroup([])] if number == 0 else None if number == 1 else group

    async def split_later(group: TrajectoryGroup) -> list[TrajectoryGroup] | TrajectoryGroup | None:
        await asyncio.sleep(0)
        return split(group)

    for after_each in (split, split_later):
        groups = await gather_trajectory_groups(
            [TrajectoryGroup([rollout(n)], metadata={"number": n}) for n in range(3)], after_each=after_each, **QUIET
        )
        assert rewards(groups) == [[0], [], [2]]


@pytest.mark.parametrize("returned", [7, [None], "group"])
async def test_after_each_returning_something_else_is_named(returned: Any) -> None:
    with pytest.raises(TypeError, match="after_each returned"):
        await gather_trajectory_groups([TrajectoryGroup([rollout()])], after_each=lambda group: returned, **QUIET)


async def test_what_after_each_raises_ends_the_gather() -> None:
    def broken(group: TrajectoryGroup) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await gather_trajectory_groups(
            [TrajectoryGroup([rollout()]), TrajectoryGroup([hang()])], after_each=broken, **QUIET
        )


async def test_a_traceback_is_shown_once_and_then_counted(caplog: pytest.LogCaptureFixture) -> None:
    async def other() -> Trajectory:
        raise KeyError("k")

    with caplog.at_level(logging.WARNING, "artnb"):
        await gather_trajectory_groups(
            [TrajectoryGroup([*(fail(f"seed {i}") for i in range(20)), other()])], max_exceptions=21, **QUIET
        )
    shown = [record for record in caplog.records if record.exc_info]
    assert {record.exc_info[0] for record in shown if record.exc_info} == {ValueError, KeyError} and len(shown) == 2
    assert "21 of 21 rollouts failed:\n  ValueError: 20\n  KeyError: 1" in caplog.text


async def test_the_failure_that_is_raised_is_not_logged_as_well(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(TooManyExceptionsError):
        await gather_trajectories([fail()], **QUIET)
    assert caplog.records == []


async def test_each_rollout_has_its_own_copy_of_the_context() -> None:
    setting: contextvars.ContextVar[str] = contextvars.ContextVar("setting")
    setting.set("caller")
    tasks = set()

    async def reads(name: str) -> Trajectory:
        seen = setting.get()
        setting.set(name)
        await asyncio.sleep(0)
        tasks.add(asyncio.current_task())
        return Trajectory(metadata={"seen": seen, "own": setting.get()})

    (group,) = await gather_trajectory_groups([TrajectoryGroup([reads("a"), reads("b")])], **QUIET)
    assert [t.metadata for t in group] == [{"seen": "caller", "own": "a"}, {"seen": "caller", "own": "b"}]
    assert setting.get() == "caller" and len(tasks) == 2


async def test_what_is_recorded_on_each_trajectory() -> None:
    async def of(*items: Any, **fields: Any) -> Trajectory:
        return Trajectory(messages_and_choices=list(items), reward=None, **fields)

    logprobs = {"content": [{"token": t, "logprob": -1.0, "top_logprobs": []} for t in "abc"]}
    trajectories = await gather_trajectories(
        [
            of(choice(token_ids=[5, 6]), {"role": "user", "content": "more"}, choice(logprobs=logprobs)),
            of(choice("length", token_ids=[1])),
            of(choice()),
            of(
                choice("length", token_ids=[1]),
                metrics={"completion_tokens": 99, "duration": 1.5},
                stop_reason=StopReason.CONTEXT_FULL,
                additional_histories=[{"messages_and_choices": [choice(token_ids=[1, 2, 3])]}],
            ),
            of(additional_histories=[{"messages_and_choices": [choice("length", token_ids=[1, 2, 3])]}]),
        ],
        **QUIET,
    )
    assert [t.metrics.get("completion_tokens") for t in trajectories] == [5, 1, None, 99, 3]
    assert [str(t.stop_reason) for t in trajectories] == [
        "finished",
        "truncated",
        "finished",
        "context_full",
        "truncated",
    ]
    assert trajectories[3].metrics["duration"] == 1.5
    assert all(t.metrics["duration"] >= 0 and t.reward is None for t in trajectories)


async def test_gather_trajectories_keeps_order_and_returns_exceptions() -> None:
    results = await gather_trajectories([rollout(1, 0.02), fail(), rollout(3)], max_exceptions=1, **QUIET)
    first, second, third = results
    assert isinstance(first, Trajectory) and isinstance(third, Trajectory) and (first.reward, third.reward) == (1, 3)
    assert isinstance(second, ValueError)
    with pytest.raises(TooManyExceptionsError):
        await gather_trajectories([hang(), fail()], **QUIET)
    assert await gather_trajectories([], **QUIET) == []


async def test_gather_trajectories_of_rollouts_that_return_several() -> None:
    async def two() -> list[Trajectory]:
        return [Trajectory(reward=1), Trajectory(reward=2)]

    ((a, b),) = await gather_trajectories([two()], **QUIET)
    assert (a.reward, b.reward) == (1, 2) and a.stop_reason is StopReason.FINISHED


async def test_gather_trajectories_timeout_and_slots() -> None:
    results = await gather_trajectories(
        [hang(), rollout(1), hang()], timeout=0.2, max_concurrency=1, max_exceptions=2, **QUIET
    )
    assert [type(r) for r in results] == [RolloutTimeoutError, Trajectory, RolloutTimeoutError]


async def test_a_pending_group_awaited_alone() -> None:
    pending = TrajectoryGroup(
        (rollout(i, 0.01 * (3 - i)) for i in range(3)), metadata={"s": 1}, metrics={"m": 2.0}, logs=["hi"],
        exceptions=[ValueError("earlier")],
    )  # fmt: skip
    assert isinstance(pending, PendingGroup) and isinstance(pending, Awaitable) and pending.num_rollouts == 3
    group = await pending
    assert rewards([group]) == [[0, 1, 2]]
    assert (group.metadata, group.metrics, group.logs) == ({"s": 1}, {"m": 2.0}, ["hi"])
    assert group.exceptions[0].message == "earlier"
    assert await pending is group
    with pytest.raises(TooManyExceptionsError):
        await TrajectoryGroup([fail(), hang()])


async def test_a_pending_group_runs_once() -> None:
    pending = TrajectoryGroup([rollout(1, 0.02)])
    first = asyncio.ensure_future(pending)
    await asyncio.sleep(0)
    with pytest.raises(RolloutError, match="make a new"):
        await pending
    assert len(await first) == 1
    assert rewards(await gather_trajectory_groups([pending], **QUIET)) == [[1]]


async def test_a_pending_group_under_a_time_limit_of_the_users() -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await TrajectoryGroup([hang(), hang()])


async def test_finished_trajectories_and_exceptions_among_awaitables_keep_their_place() -> None:
    group = await TrajectoryGroup([Trajectory(reward=1), rollout(2, 0.01), ValueError("x"), rollout(3)])  # type: ignore[list-item]
    assert rewards([group]) == [[1, 2, 3]] and len(group.exceptions) == 1


async def test_a_nested_group_inside_a_rollout_runs_on_its_own() -> None:
    async def parent() -> Trajectory:
        children = await TrajectoryGroup([rollout(1), rollout(2)])
        return Trajectory(reward=sum(t.reward or 0 for t in children))

    groups = await gather_trajectory_groups([TrajectoryGroup([parent(), parent()])], max_concurrency=1, **QUIET)
    assert rewards(groups) == [[3, 3]]


@pytest.mark.parametrize("seed", range(12))
async def test_whatever_happens_nothing_is_left_running(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    """Random failures, hangs, slow cleanups, nested groups, limits, and a cancellation at a random instant."""
    chance = random.Random(seed)
    running = 0

    async def anything() -> Trajectory:
        nonlocal running
        running += 1
        try:
            await asyncio.sleep(chance.uniform(0, 0.01))
            kind = chance.random()
            if kind < 0.1:
                raise ValueError("random")
            if kind < 0.2:
                await hang()
            return Trajectory(reward=kind)
        finally:
            try:
                if chance.random() < 0.5:
                    await asyncio.sleep(chance.uniform(0, 0.005))
            finally:
                running -= 1

    async def nested() -> TrajectoryGroup:
        group = await TrajectoryGroup(anything() for _ in range(chance.randint(1, 5)))
        await asyncio.sleep(chance.uniform(0, 0.01))
        return group

    gather = asyncio.get_running_loop().create_task(
        gather_trajectory_groups(
            [
                nested() if chance.random() < 0.4 else TrajectoryGroup(anything() for _ in range(chance.randint(0, 6)))
                for _ in range(12)
            ],
            max_exceptions=chance.choice([0, 3, 0.2, float("inf")]),
            max_concurrency=chance.choice([None, 1, 4, 16]),
            timeout=chance.choice([0.02, 0.05]),
            **QUIET,
        )
    )
    if seed % 2:
        asyncio.get_running_loop().call_later(chance.uniform(0, 0.1), gather.cancel)
    try:
        groups = await gather
        assert len(groups) == 12
    except (TooManyExceptionsError, asyncio.CancelledError):
        pass
    gc.collect()
    assert running == 0
    assert "never retrieved" not in caplog.text
    assert [task for task in asyncio.all_tasks() if task.get_name().startswith("artnb")] == []


async def test_no_groups() -> None:
    assert await gather_trajectory_groups([], **QUIET) == []


async def test_the_progress_line(capsys: pytest.CaptureFixture[str]) -> None:
    async def scored() -> TrajectoryGroup:
        return await TrajectoryGroup([rollout(1.0, messages_and_choices=[choice(token_ids=[1] * 10)])])

    await gather_trajectory_groups(
        [scored(), TrajectoryGroup([rollout(0.0, metrics={"won": 1}), fail(), rollout(None)])],
        pbar_desc="play",
        max_exceptions=1,
        max_metrics=1,
    )
    line = capsys.readouterr().err.split("\r")[-1]
    assert "play: 100%" in line and "4/4" in line
    for shown in ("reward=0.5", "exceptions=1", "completion_tokens=10", "tok/s=", "won=1"):
        assert shown in line
