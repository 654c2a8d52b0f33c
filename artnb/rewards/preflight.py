"""A handful of rollouts before any training: is there something to learn from, and what will it cost?

    report = await art.preflight(rollout, scenarios, model=model, steps=20, groups_per_step=8)

Runs the user's rollouts through the usual gather and measures them. Trains nothing, writes nothing to the history,
and hands nothing to `model.train()`. What is said about the numbers is in report.py.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ..collector import not_collected
from ..config import check_number
from ..errors import ConfigError
from ..gather import gather_trajectory_groups
from ..trajectories import Trajectory, TrajectoryGroup
from .measure import Solved, measure
from .report import PreflightReport

if TYPE_CHECKING:
    from ..model import Model

RECENT_STEPS = 5
"""How many of the newest trained steps say how long training takes."""


async def preflight(
    rollout: Callable[..., Awaitable[Trajectory] | Trajectory],
    scenarios: Iterable[Any],
    *,
    model: Model,
    group_size: int = 4,
    max_scenarios: int = 4,
    steps: int | None = None,
    groups_per_step: int | None = None,
    timeout: float | None = None,
    solved: Solved = None,
    **rollout_options: Any,
) -> PreflightReport:
    """Run `rollout(model, scenario, **rollout_options)` a few times and report what training would meet.

        report = await art.preflight(rollout, scenarios, model=model, steps=20, groups_per_step=8)
        report            # a table in the notebook; print(report) in a terminal
        report.warnings   # sentences, each with its number

    Args:
        rollout: async, or a plain function, which runs in a thread and returns a Trajectory or something to await.
        scenarios: any objects. Of a list, `max_scenarios` are taken evenly over its length; else the first ones.
        group_size: rollouts of each scenario. Take that of the run: how often a group has a spread depends on it.
        steps, groups_per_step: of the planned run; with them time and tokens of a step and of the run are estimated.
        timeout: seconds for each rollout.
        solved: when a rollout counts as solved: a reward to reach, or a function of the trajectory. None takes the
            best reward seen here; if all rewards are equal, whether that is above 0; and if most rewards differ from
            each other (a score, not a verdict) the rate is left open.

    Nothing is trained or logged. A rollout that fails is counted by type and does not stop the others.
    Raises ConfigError without scenarios or with a number out of range; interrupts pass through.
    """
    check_number("preflight", "group_size", group_size, low=1, whole=True)
    check_number("preflight", "max_scenarios", max_scenarios, low=1, whole=True)
    for option, value in (("steps", steps), ("groups_per_step", groups_per_step)):
        if value is not None:
            check_number("preflight", option, value, low=1, whole=True)
    _check_function(rollout)
    if solved is not None and not callable(solved):
        check_number("preflight", "solved", solved)
    chosen = pick(scenarios, max_scenarios)
    if not chosen:
        raise ConfigError("preflight: there are no scenarios")
    context = await _context(model)  # waits for the model to be loaded, so that loading is not timed
    started = time.monotonic()
    with not_collected():
        groups = await gather_trajectory_groups(
            (
                TrajectoryGroup(_run(rollout, model, scenario, rollout_options) for _ in range(group_size))
                for scenario in chosen
            ),
            pbar_desc="preflight",
            max_exceptions=group_size * len(chosen),
            timeout=timeout,
        )
    seconds = time.monotonic() - started
    measured = measure(
        groups,
        seconds=seconds,
        solved=solved,
        context_length=context,
        rollouts_per_step=None if groups_per_step is None else groups_per_step * group_size,
        train_seconds_per_rollout=_train_seconds(model),
    )
    return PreflightReport(**measured, steps=steps, groups_per_step=groups_per_step, groups=tuple(groups))


def _check_function(rollout: object) -> None:
    if callable(rollout):
        return
    hint = "; give the function itself, not what it returned" if inspect.isawaitable(rollout) else ""
    if inspect.iscoroutine(rollout):
        rollout.close()
    raise ConfigError(f"preflight: rollout is a {type(rollout).__name__}, not a function{hint}")


def pick(scenarios: Iterable[Any], count: int) -> list[Any]:
    """`count` scenarios: evenly over a sequence, whose beginning is often its easy end; the first ones of a stream."""
    if not isinstance(scenarios, Sequence):
        return list(itertools.islice(scenarios, count))
    n = len(scenarios)
    return list(scenarios) if n <= count else [scenarios[i * n // count] for i in range(count)]


async def _run(rollout: Callable[..., Any], model: Model, scenario: Any, options: dict[str, Any]) -> Trajectory:
    call = getattr(rollout, "__call__", rollout)  # noqa: B004  # an object may have an async __call__
    if inspect.iscoroutinefunction(rollout) or inspect.iscoroutinefunction(call):
        result = await rollout(model, scenario, **options)
    else:
        result = await asyncio.to_thread(rollout, model, scenario, **options)
        if inspect.isawaitable(result):
            result = await result
    if not isinstance(result, Trajectory):
        raise TypeError(f"the rollout returned a {type(result).__name__}, not a Trajectory (is a `return` missing?)")
    return result


async def _context(model: Model) -> int | None:
    """The engine's context in tokens; None for a model that is asked elsewhere."""
    from ..model import TrainableModel

    if not isinstance(model, TrainableModel):
        return None
    backend = await model.ready()
    return backend.context_tokens(model)


def _train_seconds(model: Model) -> float | None:
    """Seconds of training a rollout, from this model's newest trained steps; None before the first."""
    frame = model.history()
    needed = ["train/seconds", "train/trajectories", "train/trained"]
    if any(column not in frame for column in needed):
        return None
    recent = frame[frame["train/trained"] == 1.0].tail(RECENT_STEPS)
    rollouts = float(recent["train/trajectories"].sum())
    return float(recent["train/seconds"].sum()) / rollouts if rollouts else None
