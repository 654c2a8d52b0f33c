"""Groups whose scores may be changed while the group that was given stays as it is."""

from __future__ import annotations

from ..trajectories import TrajectoryGroup


def copy_group(group: TrajectoryGroup) -> TrajectoryGroup:
    """The group with trajectories whose reward, metrics, metadata and logs can be changed; messages are shared."""
    return TrajectoryGroup(
        [
            t.model_copy(update={"metrics": dict(t.metrics), "metadata": dict(t.metadata), "logs": list(t.logs)})
            for t in group
        ],
        exceptions=group.exceptions,
        metadata=dict(group.metadata),
        metrics=dict(group.metrics),
        logs=list(group.logs),
    )
