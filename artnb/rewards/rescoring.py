"""Saved trajectories under another reward: no engine, no GPU, no rollout. What was saved stays as it is."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from ..config import check_choice, check_number
from ..errors import CheckpointError, ConfigError
from ..notebook.progress import Progress
from ..tracking.history import History
from ..trajectories import Trajectory, TrajectoryGroup
from .combine import as_score
from .copying import copy_group

if TYPE_CHECKING:
    from ..model import Model

log = logging.getLogger(__name__)

Saved: TypeAlias = "Trajectory | TrajectoryGroup | Iterable[Trajectory | TrajectoryGroup] | Model | Path | str"
AnyReward: TypeAlias = Callable[[Any], Any]


async def rescore(
    trajectories: Saved,
    reward: AnyReward,
    *,
    by: Literal["trajectory", "group"] = "trajectory",
    step: int | None = None,
    split: str | None = None,
    max_concurrency: int = 8,
    trajectory_type: type[Trajectory] = Trajectory,
) -> list[TrajectoryGroup]:
    """Copies of the groups with the rewards that `reward` gives; the old one is `metrics["previous_reward"]`.

        groups = await rescore(".art/demo/models/agent-001", ExactMatch(metadata="answer"), step=12)
        groups = await rescore(groups, lambda g: ruler_score_group(g, judge), by="group")

    Args:
        trajectories: groups or trajectories; or the folder of a model (or the model), whose history is read: no backend
            is needed. Loose trajectories are returned as one group.
        reward: a function of a trajectory, sync or async, that returns a number, or None for unscored. With
            by="group" one of a group, that returns the scored group (as ruler_score_group does) or a number for each.
        step, split: of a folder's trajectories; None: all of them. Their groups then have `step` and `split` in their
            metadata.
        max_concurrency: how many async rewards are awaited at a time.
        trajectory_type: your subclass of Trajectory, if the rollouts returned one; for a folder.

    A reward that raises leaves its trajectory (its group) unscored, with the error in the logs; if it raises for all
    of them, the first error is raised. Raises: ConfigError; CheckpointError when the folder has no such trajectories.
    """
    check_choice("rescore", "by", by, ("trajectory", "group"))
    check_number("rescore", "max_concurrency", max_concurrency, low=1, whole=True)
    if not callable(reward):
        raise ConfigError(f"rescore: reward is a {type(reward).__name__}, not a function of a {by}")
    groups = await asyncio.to_thread(_groups, trajectories, step, split, trajectory_type)
    slots = asyncio.Semaphore(max_concurrency)
    errors: list[Exception] = []
    units = sum(len(group) for group in groups) if by == "trajectory" else len(groups)
    with Progress(units, "rescore", by) as bar:

        async def run(function: Callable[[Any], Awaitable[None]], item: Any) -> None:
            async with slots:
                await function(item)
            bar.update(1)

        async def one(trajectory: Trajectory) -> None:
            try:
                value = as_score(await _call(reward, trajectory))
            except Exception as error:
                errors.append(error)
                _failed(trajectory, error)
            else:
                _set(trajectory, value)

        async def whole(index: int) -> None:
            group = groups[index]
            try:
                groups[index] = _scored(group, await _call(reward, group))
            except Exception as error:
                errors.append(error)
                for trajectory in group:
                    _failed(trajectory, error)

        if by == "trajectory":
            await _all(run(one, trajectory) for group in groups for trajectory in group)
        else:
            await _all(run(whole, index) for index in range(len(groups)))
    if errors:
        if len(errors) == units:
            raise errors[0]
        log.warning(
            "rescore: the reward failed for %d of %d, e.g. %r; they are unscored", len(errors), units, errors[0]
        )
    return groups


async def _all(works: Iterable[Awaitable[None]]) -> None:
    async with asyncio.TaskGroup() as tasks:
        for work in works:
            tasks.create_task(work)  # type: ignore[arg-type]


async def _call(reward: AnyReward, item: Any) -> Any:
    value = reward(item)
    return await value if inspect.isawaitable(value) else value


def _set(trajectory: Trajectory, reward: float | None) -> None:
    if trajectory.reward is not None:
        trajectory.metrics["previous_reward"] = trajectory.reward
    trajectory.reward = reward


def _failed(trajectory: Trajectory, error: Exception) -> None:
    _set(trajectory, None)
    trajectory.log(f"rescore: the reward raised {type(error).__name__}: {error}")


def _scored(group: TrajectoryGroup, result: Any) -> TrajectoryGroup:
    """The group as the reward of a group left it, with the rewards of before kept."""
    if isinstance(result, TrajectoryGroup):
        if len(result) != len(group):
            raise ConfigError(f"rescore: the reward returned {len(result)} trajectories for a group of {len(group)}")
        rewards = [trajectory.reward for trajectory in result]
        scored = result
    else:
        values = None if result is None or isinstance(result, str | bytes) else list(result)
        if values is None or len(values) != len(group):
            raise ConfigError(
                f"rescore: the reward of a group must return the scored group, or a number for each of its "
                f"{len(group)} trajectories, not {result!r:.100}"
            )
        rewards = [as_score(value) for value in values]
        scored = group
    for trajectory, old, new in zip(scored, [t.reward for t in group], rewards, strict=True):
        trajectory.reward = old
        _set(trajectory, new)
    return scored


def _groups(saved: Any, step: int | None, split: str | None, kind: type[Trajectory]) -> list[TrajectoryGroup]:
    """Copies whose rewards, metrics and logs may be changed."""
    from ..model import Model

    if isinstance(saved, Model | Path | str):
        history = saved._history() if isinstance(saved, Model) else History(_model_folder(Path(saved)))
        return _from_history(history, step, split, kind)
    if step is not None or split is not None:
        raise ConfigError("rescore: step and split select from a model's folder; these trajectories are in memory")
    items = [saved] if isinstance(saved, Trajectory | TrajectoryGroup) else list(saved)
    groups: list[TrajectoryGroup] = []
    loose: list[Trajectory] = []
    for index, item in enumerate(items):
        if isinstance(item, TrajectoryGroup):
            groups.append(item)
        elif isinstance(item, Trajectory):
            loose.append(item)
        else:
            raise ConfigError(f"rescore: item {index} is a {type(item).__name__}, neither a trajectory nor a group")
    return [copy_group(group) for group in [*groups, *([TrajectoryGroup(loose)] if loose else [])]]


def _model_folder(folder: Path) -> Path:
    """The model's folder, also when its history's or trajectories' was given."""
    inside = {"trajectories": 2, "history": 1}.get(folder.name, 0)
    model = folder.parents[inside - 1] if 0 < inside <= len(folder.parents) else folder
    if (model / "history" / "trajectories").is_dir():
        return model
    raise CheckpointError(
        f"{folder} holds no history of a model; give the model's folder, e.g. .art/<project>/models/<name>"
    )


def _from_history(
    history: History, step: int | None, split: str | None, kind: type[Trajectory]
) -> list[TrajectoryGroup]:
    saved = history.saved()
    chosen = [(at, name) for at, name in saved if step in (None, at) and split in (None, name)]
    if not chosen:
        known = ", ".join(f"{name} {at}" for at, name in saved) or "none"
        raise CheckpointError(
            f"{history.folder} has no such trajectories (step={step}, split={split}); there are: {known}"
        )
    groups: list[TrajectoryGroup] = []
    for at, name in chosen:
        for group in history.load_groups(at, name, kind):
            group.metadata |= {"step": at, "split": name}
            groups.append(group)
    return groups
