"""What a gather's progress line says: reward, exceptions, completion tokens and their rate.

Adds up outcomes as they come. Display is progress.py's."""

from __future__ import annotations

import math
import time
from collections import Counter
from typing import Any

from ..supervise import Lease
from ..trajectories import Trajectory, TrajectoryGroup
from .progress import Progress


class Meter:
    """Turns outcomes into the numbers at the end of the progress line.

    `total_tokens`: show the sum of completion tokens, not the mean of a trajectory. `max_metrics`: how many of the
    rollouts' own metrics are shown besides (None: none).
    """

    def __init__(self, progress: Progress, *, total_tokens: bool = False, max_metrics: int | None = None) -> None:
        self.progress = progress
        self._total_tokens = total_tokens
        self._max_metrics = max_metrics or 0
        self._rewards: list[float] = []
        self._exceptions = 0
        self._trajectories = 0
        self._sums: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()
        self._start = time.monotonic()

    def ended(self, outcome: Any, lease: Lease) -> None:
        """A rollout, or a group's coroutine, ended. What a group's coroutine handed over has been counted."""
        if isinstance(outcome, BaseException):
            self._exceptions += 1
        elif not lease.handed_over:
            for trajectory in [outcome] if isinstance(outcome, Trajectory) else outcome:
                self._add(trajectory)
        self.progress.update(0 if lease.handed_over else 1, **self.postfix())

    def given(self, group: TrajectoryGroup) -> None:
        """A group came finished: it is shown, its failures count for nothing any more."""
        for trajectory in group:
            self._add(trajectory)
        self._exceptions += len(group.exceptions)
        self.progress.update(len(group) + len(group.exceptions), **self.postfix())

    def postfix(self) -> dict[str, Any]:
        """What is shown, in this order: reward, exceptions, completion tokens, tok/s, the rollouts' own metrics."""
        shown: dict[str, Any] = {}
        if self._rewards:
            shown["reward"] = sum(self._rewards) / len(self._rewards)
        if self._exceptions:
            shown["exceptions"] = self._exceptions
        if tokens := self._sums["completion_tokens"]:
            shown["completion_tokens"] = (
                int(tokens) if self._total_tokens else tokens / self._counts["completion_tokens"]
            )
            shown["tok/s"] = tokens / max(time.monotonic() - self._start, 1e-9)
        own = [name for name in self._counts if name not in ("completion_tokens", "duration")]
        shown.update((name, self._sums[name] / self._counts[name]) for name in own[: self._max_metrics])
        return shown

    def _add(self, trajectory: Trajectory) -> None:
        if trajectory.reward is not None and math.isfinite(trajectory.reward):
            self._rewards.append(trajectory.reward)
        for name, value in trajectory.metrics.items():
            self._sums[name] += value  # type: ignore[assignment]  # Counter's stub knows whole numbers only
            self._counts[name] += 1
