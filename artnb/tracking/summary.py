"""Means over the trajectories of a step, as they stand in the history."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence

from ..trajectories import TrajectoryGroup

SPENT = "judge/"
"""Metrics of a group that say what was spent on it; a step spends their sum."""


def summarize(groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
    """`reward` (mean over scored trajectories), its spread inside groups, and the mean of every metric.

    What was spent on a group (its metrics `judge/…`) is summed. `exceptions` counts the rollouts that failed, with a
    trajectory or without one.
    """
    scored = [[t.reward for t in g if t.reward is not None and math.isfinite(t.reward)] for g in groups]
    rewards = [r for rewards in scored for r in rewards]
    values: dict[str, list[float]] = defaultdict(list)
    for group in groups:
        for trajectory in group:
            for name, value in trajectory.metrics.items():
                values[name].append(float(value))
    summary = {name: statistics.fmean(v) for name, v in values.items()}
    for group in groups:
        for name, value in group.metrics.items():
            if name.startswith(SPENT):
                summary[name] = summary.get(name, 0.0) + float(value)
    if rewards:
        summary["reward"] = statistics.fmean(rewards)
    spreads = [statistics.pstdev(r) for r in scored if len(r) > 1]
    if spreads:
        summary["reward_std_in_groups"] = statistics.fmean(spreads)
    if groups:
        summary["trajectories"] = float(sum(len(g) for g in groups))
        summary["exceptions"] = float(sum(len(g.exceptions) + sum(t.error is not None for t in g) for g in groups))
    return summary
