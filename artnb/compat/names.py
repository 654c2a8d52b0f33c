"""Functions that ART has under names of its own, over what artnb has. Import them from artnb, where ART has them."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Coroutine, Iterable, Iterator
from contextvars import ContextVar
from typing import Any, Literal, overload

from ..backend import TrainResult
from ..capture import _current, auto_trajectory
from ..errors import RolloutError
from ..gather import PendingGroup
from ..supervise import Supervisor
from ..trajectories import ExceptionRecord, MetadataValue, Trajectory, TrajectoryGroup

LocalTrainResult = TrainResult
"""What a step on a LocalBackend did: ART's name for `TrainResult`."""


@overload
def current_trajectory(*, require: Literal[True]) -> Trajectory: ...
@overload
def current_trajectory(*, require: bool = False) -> Trajectory | None: ...
def current_trajectory(*, require: bool = False) -> Trajectory | None:
    """`art.auto_trajectory(required=require)`: the trajectory that records here."""
    return auto_trajectory(require)


@contextlib.contextmanager
def no_capture() -> Iterator[None]:
    """Inside, nothing is recorded on the trajectory around it, e.g. what a judge is asked. New scopes record."""
    token = _current.set(None)
    try:
        yield
    finally:
        _current.reset(token)


async def trajectory_group(
    trajectories: Iterable[Trajectory | BaseException | Awaitable[Trajectory]],
    *,
    exceptions: Iterable[BaseException | ExceptionRecord] = (),
    metadata: dict[str, MetadataValue] | None = None,
    metrics: dict[str, float | int | bool] | None = None,
    logs: list[str] | None = None,
    return_exceptions: bool = False,
) -> TrajectoryGroup:
    """`await art.TrajectoryGroup(...)`; with `return_exceptions` a rollout that fails is recorded instead of raised.

    Under a gather its limits decide about failures.
    """
    pending = PendingGroup(trajectories, exceptions=exceptions, metadata=metadata, metrics=metrics, logs=logs)
    if not return_exceptions:
        return await pending
    async with Supervisor(total=pending.num_rollouts, max_exceptions=pending.num_rollouts) as supervisor:
        return await pending.collect(supervisor, (0,))


class _Yielded:
    trajectory: Trajectory | None = None


_yielded: ContextVar[_Yielded | None] = ContextVar("artnb_yielded_trajectory", default=None)


def yield_trajectory(trajectory: Trajectory) -> None:
    """Hand a trajectory to the `capture_yielded_trajectory` around this call; without one it is a RolloutError."""
    found = _yielded.get()
    if found is None:
        raise RolloutError("yield_trajectory() is called inside of a coroutine given to capture_yielded_trajectory()")
    found.trajectory = trajectory


async def capture_yielded_trajectory(coroutine: Coroutine[Any, Any, Any]) -> Trajectory:
    """Await `coroutine`; returns the last trajectory that it yielded. Raises RolloutError if it yielded none."""
    found = _Yielded()
    token = _yielded.set(found)
    try:
        await coroutine
    finally:
        _yielded.reset(token)
    if found.trajectory is None:
        raise RolloutError("the coroutine yielded no trajectory; call art.yield_trajectory(trajectory) in it")
    return found.trajectory
