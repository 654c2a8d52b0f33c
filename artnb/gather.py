"""Run rollouts side by side; a failed one is data, not a crash.

Every rollout is its own task in a copy of the context. What failed is recorded on its group, the siblings go on, and
whatever way a gather ends, nothing that it started is still running. Does not train, score or touch a reward.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Generator, Iterable, Sequence
from typing import Any, Literal, TypeAlias, overload

from openai.types.chat.chat_completion import Choice

from .errors import RolloutError
from .limits import Slots
from .notebook.meter import Meter
from .notebook.progress import Progress
from .supervise import ROUNDS, Lease, Supervisor, close_unstarted, enclosing
from .trajectories import ExceptionRecord, MetadataValue, StopReason, Trajectory, TrajectoryGroup

GroupSource: TypeAlias = Awaitable[TrajectoryGroup] | TrajectoryGroup
Kept: TypeAlias = TrajectoryGroup | Sequence[TrajectoryGroup] | None
AfterEach: TypeAlias = Callable[[TrajectoryGroup], Kept | Awaitable[Kept]]


class PendingGroup(Awaitable[TrajectoryGroup]):
    """A group whose rollouts have not run yet: what `TrajectoryGroup(<awaitables>)` returns.

    Under a gather, or awaited in a coroutine that a gather runs, its rollouts share that gather's limits. Awaited
    alone, the first failure raises. Trajectories keep the order in which their rollouts were given. `items` may hold
    finished trajectories and exceptions too. Awaiting it again returns the same group.
    """

    def __init__(
        self,
        items: Iterable[Awaitable[Trajectory] | Trajectory | BaseException],
        *,
        exceptions: Iterable[BaseException | ExceptionRecord] = (),
        metadata: dict[str, MetadataValue] | None = None,
        metrics: dict[str, float | int | bool] | None = None,
        logs: list[str] | None = None,
    ) -> None:
        self._items = take(items, (Trajectory, BaseException), "TrajectoryGroup")
        self._exceptions = list(exceptions)
        self._fields: dict[str, Any] = {"metadata": metadata, "metrics": metrics, "logs": logs}
        self._started = False
        self._group: TrajectoryGroup | None = None

    @property
    def group(self) -> TrajectoryGroup | None:
        """The group, once it has been made."""
        return self._group

    @property
    def num_rollouts(self) -> int:
        return len(self._items)

    def __repr__(self) -> str:
        return f"PendingGroup({len(self._items)} rollouts, {'started' if self._started else 'not started'})"

    def __await__(self) -> Generator[Any, None, TrajectoryGroup]:
        return self._result().__await__()

    async def _result(self) -> TrajectoryGroup:
        if self._group is not None:
            return self._group
        lease = enclosing.get()
        if lease is not None and not lease.supervisor.closed:
            lease.hand_over(self.num_rollouts)
            return await self.collect(lease.supervisor, lease.key)
        async with Supervisor(total=self.num_rollouts) as supervisor:
            return await self.collect(supervisor, (0,))

    async def collect(self, supervisor: Supervisor, key: tuple[int, ...]) -> TrajectoryGroup:
        """Run the rollouts under `supervisor` and make the group; a group that was made before is returned as it is."""
        if self._group is not None:
            return self._group
        if self._started:
            raise RolloutError("this group was started before; a coroutine runs once, so make a new TrajectoryGroup")
        self._started = True
        pending = [item for item in self._items if isinstance(item, Awaitable)]
        supervisor.adopt(pending)
        jobs = [
            supervisor.start(supervisor.outcome(work, (*key, i), finished), f"slot {key[0]}/{i}")
            for i, work in enumerate(pending)
        ]
        outcomes = await supervisor.join(jobs)
        results = iter(outcomes)
        group = TrajectoryGroup(
            [next(results)[0] if isinstance(item, Awaitable) else item for item in self._items],
            exceptions=self._exceptions,
            **self._fields,
        )
        count_late(group, [lease for _, lease in outcomes])
        self._group = group
        return group

    def close(self) -> None:
        """Close the rollouts if they were never started."""
        if not self._started:
            self._started = True
            close_all(self._items)


def count_late(group: TrajectoryGroup, leases: list[Lease]) -> None:
    """`group.metrics["late_results"]`: rollouts that returned after their limit, also those that do so later on."""

    def add() -> None:
        group.metrics["late_results"] = int(group.metrics.get("late_results", 0)) + 1

    for lease in leases:
        if lease.late:
            add()
        else:
            lease.on_late = add


def take(items: Iterable[Any], plain: type | tuple[type, ...], owner: str) -> list[Any]:
    """The items as a list, each an awaitable or `plain`; on an error those already made are closed."""
    taken: list[Any] = []
    try:
        for item in items:
            taken.append(item)
            if not isinstance(item, (Awaitable, *(plain if isinstance(plain, tuple) else (plain,)))):
                hint = "; call it: an awaitable is wanted" if inspect.isfunction(item) else ""
                raise TypeError(f"{owner}: item {len(taken) - 1} is a {type(item).__name__}, not an awaitable{hint}")
    except BaseException:
        close_all(taken)
        raise
    return taken


def close_all(items: Iterable[object]) -> None:
    """Close those that were never started and can be closed."""
    for item in items:
        if isinstance(item, Awaitable):
            close_unstarted(item)


def finished(result: object) -> Trajectory:
    """The rollout's trajectory with what every ended one has: tokens, duration, stop reason. No reward is touched."""
    if not isinstance(result, Trajectory):
        raise TypeError(f"the rollout returned a {type(result).__name__}, not a Trajectory (is a `return` missing?)")
    counts = [count for choice in result.choices() if (count := sampled_tokens(choice)) is not None]
    if counts:
        result.metrics.setdefault("completion_tokens", sum(counts))
    if "duration" not in result.metrics:
        result.finish()
    if result.stop_reason is None:
        cut = any(choice.finish_reason == "length" for choice in result.choices())
        result.stop_reason = StopReason.TRUNCATED if cut else StopReason.FINISHED
    return result


def sampled_tokens(choice: Choice) -> int | None:
    """How many tokens were sampled for a choice; None if it says nothing about tokens."""
    token_ids = (choice.model_extra or {}).get("token_ids")
    if isinstance(token_ids, list):
        return len(token_ids)
    return len(choice.logprobs.content) if choice.logprobs and choice.logprobs.content is not None else None


def finished_group(result: object) -> TrajectoryGroup:
    if not isinstance(result, TrajectoryGroup):
        raise TypeError(f"the group's coroutine returned a {type(result).__name__}, not a TrajectoryGroup")
    for trajectory in result:
        finished(trajectory)
    return result


def finished_many(result: object) -> Trajectory | list[Trajectory]:
    """What a rollout given to `gather_trajectories` may return: one trajectory or several."""
    if isinstance(result, Trajectory) or not isinstance(result, Iterable):
        return finished(result)
    return [finished(trajectory) for trajectory in result]


def count_rollouts(source: object) -> int:
    """Rollouts of a source as far as is known before it runs; a group's coroutine is one until it starts more."""
    if isinstance(source, PendingGroup) and source.group is not None:
        source = source.group
    if isinstance(source, TrajectoryGroup):
        return len(source) + len(source.exceptions)
    return source.num_rollouts if isinstance(source, PendingGroup) else 1


async def run_groups(
    sources: list[GroupSource], supervisor: Supervisor, meter: Meter, after_each: AfterEach | None, first: int = 0
) -> list[TrajectoryGroup]:
    """Every source's groups, in the order given. `first` is the place of sources[0] in the queue for slots."""
    supervisor.adopt(source for source in sources if isinstance(source, Awaitable))
    jobs = [
        supervisor.start(_run_group(source, supervisor, meter, after_each, first + i), f"group {first + i}")
        for i, source in enumerate(sources)
    ]
    return [group for groups in await supervisor.join(jobs, rounds=ROUNDS + 2) for group in groups]


async def _run_group(
    source: GroupSource, supervisor: Supervisor, meter: Meter, after_each: AfterEach | None, place: int
) -> Sequence[TrajectoryGroup]:
    if isinstance(source, PendingGroup) and source.group is not None:  # a cell that is run again
        source = source.group
    if isinstance(source, TrajectoryGroup):
        group = finished_group(source)
        meter.given(group)
    elif isinstance(source, PendingGroup):
        supervisor.started(source)
        group = await source.collect(supervisor, (place,))
    else:
        # Key (place,) sorts before the rollouts (place, i) that this coroutine may start.
        outcome, _ = await supervisor.outcome(source, (place,), finished_group, is_group=True)
        if isinstance(outcome, BaseException):
            return [TrajectoryGroup(exceptions=[outcome])]
        group = outcome
    if after_each is None:
        return [group]
    kept = after_each(group)
    if inspect.isawaitable(kept):
        kept = await kept
    if kept is None:
        return []
    if isinstance(kept, TrajectoryGroup):
        return [kept]
    made = list(kept) if isinstance(kept, Iterable) else [kept]
    if all(isinstance(item, TrajectoryGroup) for item in made):
        return made
    raise TypeError(
        f"after_each returned a {type(kept).__name__}; it returns a TrajectoryGroup, a list of them, or None"
    )


async def gather_trajectory_groups(
    groups: Iterable[GroupSource],
    *,
    pbar_desc: str | None = "gather",
    pbar_total_completion_tokens: bool = False,
    max_exceptions: int | float = 0,
    max_metrics: int | None = None,
    after_each: AfterEach | None = None,
    max_concurrency: int | None = None,
    timeout: float | None = None,
) -> list[TrajectoryGroup]:
    """Run the rollouts of all groups side by side and return the groups in the order given.

        groups = await art.gather_trajectory_groups(
            (art.TrajectoryGroup(rollout(model, s) for _ in range(8)) for s in scenarios), max_exceptions=0.2)

    `max_exceptions`: rollouts that may fail, as a count or as a share in (0, 1) of all; one more raises
    TooManyExceptionsError. The default 0 raises at the first. `max_concurrency`: rollouts in flight over all groups,
    earlier groups first. `timeout`: seconds for each rollout from its own start; waiting for a slot is not counted.
    A rollout that was cancelled by somebody else is recorded but not counted; cancelling or interrupting the gather
    itself passes through. `after_each(group)`, sync or async, returns the group to keep, several, or None to drop it;
    what it raises ends the gather. A group's coroutine that fails leaves an empty group with its exception, which
    `after_each` does not see. `pbar_total_completion_tokens`: show the sum of tokens, not the mean. `max_metrics`: how
    many of the rollouts' own metrics the progress line shows. `pbar_desc=None`: no progress line.
    """
    sources = take(groups, TrajectoryGroup, "gather_trajectory_groups")
    try:
        slots = Slots(max_concurrency)
        total = sum(map(count_rollouts, sources))
        progress = Progress(total, pbar_desc, "rollout", phase="gather")
        meter = Meter(progress, total_tokens=pbar_total_completion_tokens, max_metrics=max_metrics)
        supervisor = Supervisor(
            total=total,
            max_exceptions=max_exceptions,
            timeout=timeout,
            slots=slots,
            on_end=meter.ended,
            on_total=progress.set_total,
        )
    except BaseException:
        close_all(sources)
        raise
    with progress:
        async with supervisor:
            return await run_groups(sources, supervisor, meter, after_each)


@overload
async def gather_trajectories(
    trajectories: Iterable[Awaitable[Trajectory]],
    *,
    pbar_desc: str | None = ...,
    pbar_total_completion_tokens: bool = ...,
    max_exceptions: Literal[0] = ...,
    max_concurrency: int | None = ...,
    timeout: float | None = ...,
) -> list[Trajectory]: ...
@overload
async def gather_trajectories(
    trajectories: Iterable[Awaitable[Trajectory]],
    *,
    pbar_desc: str | None = ...,
    pbar_total_completion_tokens: bool = ...,
    max_exceptions: int | float,
    max_concurrency: int | None = ...,
    timeout: float | None = ...,
) -> list[Trajectory | BaseException]: ...
@overload
async def gather_trajectories(
    trajectories: Iterable[Awaitable[Iterable[Trajectory]]],
    *,
    pbar_desc: str | None = ...,
    pbar_total_completion_tokens: bool = ...,
    max_exceptions: Literal[0] = ...,
    max_concurrency: int | None = ...,
    timeout: float | None = ...,
) -> list[list[Trajectory]]: ...
@overload
async def gather_trajectories(
    trajectories: Iterable[Awaitable[Iterable[Trajectory]]],
    *,
    pbar_desc: str | None = ...,
    pbar_total_completion_tokens: bool = ...,
    max_exceptions: int | float,
    max_concurrency: int | None = ...,
    timeout: float | None = ...,
) -> list[list[Trajectory] | BaseException]: ...
async def gather_trajectories(
    trajectories: Iterable[Awaitable[Any]],
    *,
    pbar_desc: str | None = "gather",
    pbar_total_completion_tokens: bool = False,
    max_exceptions: int | float = 0,
    max_concurrency: int | None = None,
    timeout: float | None = None,
) -> list[Any]:
    """Run rollouts side by side; their trajectories in the order given, a failed one as its exception.

    Options as of `gather_trajectory_groups`. With `max_exceptions=0` the list holds trajectories only, so a rollout
    that somebody else cancelled raises its CancelledError.
    """
    works = take(trajectories, (), "gather_trajectories")
    try:
        slots = Slots(max_concurrency)
        progress = Progress(len(works), pbar_desc, "rollout", phase="gather")
        meter = Meter(progress, total_tokens=pbar_total_completion_tokens)
        supervisor = Supervisor(
            total=len(works), max_exceptions=max_exceptions, timeout=timeout, slots=slots, on_end=meter.ended
        )
    except BaseException:
        close_all(works)
        raise
    with progress:
        async with supervisor:
            supervisor.adopt(works)
            jobs = [
                supervisor.start(supervisor.outcome(work, (0, i), finished_many), f"slot {i}")
                for i, work in enumerate(works)
            ]
            results = [outcome for outcome, _ in await supervisor.join(jobs)]
            cancelled = next((r for r in results if isinstance(r, asyncio.CancelledError)), None)
            if max_exceptions == 0 and cancelled is not None:
                raise cancelled
            return results
