"""What a tracker is: something that follows a run besides the history on disk, such as W&B or TensorBoard.

The history is written first and stays what counts. A tracker is told afterwards, in a thread of its own (follow.py):
no step waits for it or fails with it. Trackers of artnb: wandb.py, tensorboard.py, and for the rewards of traced
rollouts langfuse.py and weave.py.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from ..durable import replace_file
from ..trajectories import TrajectoryGroup
from .frames import column

logger = logging.getLogger("artnb")


@dataclass(frozen=True, slots=True)
class RunInfo:
    """The run that is followed."""

    project: str
    name: str  # of the model
    run_name: str  # as it is shown
    entity: str | None  # the W&B team, if one was given
    folder: Path  # the model's, with its history
    config: dict[str, Any] = field(default_factory=dict)  # JSON values; base_model, lora, the user's own


@dataclass(frozen=True, slots=True)
class TracedReward:
    """What became of one rollout that ran inside a trace (traces.py)."""

    traces: Mapping[str, str]
    reward: float | None
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Logged:
    """What was logged at once: metrics of a step and split, as they stand in the history."""

    step: int
    split: str
    metrics: Mapping[str, Any]
    time: float  # seconds since 1970; not before the history's own
    groups: int = 0  # rollout groups that were logged with it
    rewards: Sequence[TracedReward] = ()

    def columns(self) -> dict[str, float]:
        """The metrics by the names that `model.history()` gives them; a None is NaN there, too."""
        return {
            column(self.split, name): math.nan if value is None else float(value)
            for name, value in self.metrics.items()
        }


def traced_rewards(groups: Iterable[TrajectoryGroup]) -> list[TracedReward]:
    """Of the trajectories that were made inside a trace."""
    return [
        TracedReward(
            t._traces, _number(t.reward), {k: n for k, v in t.metrics.items() if (n := _number(v)) is not None}
        )
        for group in groups
        for t in group
        if t._traces
    ]


def _number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):  # what a rollout assigned is not checked
        return None


class State:
    """What a tracker remembers of a run from one session to the next: JSON in the model's folder, never a key."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.values: dict[str, Any] = {}
        try:
            known = json.loads(path.read_bytes())
        except FileNotFoundError:
            return
        except (OSError, ValueError):
            known = None
        if isinstance(known, dict):
            self.values = known
        else:
            logger.warning("%s cannot be read or is damaged; the run is tracked as a new one", path)

    def update(self, **values: Any) -> None:
        """Change entries and write them."""
        self.values |= values
        self.path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(self.path, [json.dumps(self.values).encode()])


class TrackedRun(Protocol):
    """A run that is being followed. Called by one thread; what it raises ends the following, with a warning."""

    def log(self, logged: Logged) -> None: ...

    def configure(self, config: Mapping[str, Any]) -> None:
        """Further entries of the run's config, or new values of known ones."""
        ...

    def close(self) -> None:
        """The session ends; a later one may go on with the run."""
        ...


class Tracker(Protocol):
    """A place to report to, with its options. Compared by `==`, so that a cell that runs again changes nothing.

    `name` tells trackers of a run apart, and names the file of its state. With `resumes` it is told, when it opens,
    what was logged to the history since it was last told anything.
    """

    @property
    def name(self) -> str: ...

    @property
    def resumes(self) -> bool: ...

    def open(self, run: RunInfo, state: State) -> TrackedRun:
        """Begin, or go on with, the run. May take its time."""
        ...
