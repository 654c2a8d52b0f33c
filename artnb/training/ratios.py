"""Write the trainer's log-probs of sampled tokens beside the sampler's, on the choices they belong to.

Who reads the trajectories later sees, token by token, where sampler and trainer disagreed. Computes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..trajectories import TrajectoryGroup
from .types import Floats, Row

DIGITS = 5
"""After the point: float32 log-probs are not known better, and the history is shorter."""


def keep_trainer_logprobs(groups: Sequence[TrajectoryGroup], rows: Sequence[Row]) -> None:
    """Set `trainer_logprobs` of every choice that was trained, as long as its `token_ids`.

    They are those of the policy before the step. `rows` are the step's, made from `groups` by `rows_from_groups`, in
    its order. A choice that was not trained in this step keeps none of an earlier one.
    """
    parts: dict[tuple[int, int], list[Floats]] = {}
    for row in rows:
        if row.trainer_logprobs is not None:
            parts.setdefault((row.group, row.trajectory), []).append(row.trainer_logprobs)
    for g, group in enumerate(groups):
        for index, trajectory in enumerate(group.trajectories):
            known = parts.get((g, index))
            values = [] if known is None else np.round(np.concatenate(known).astype(np.float64), DIGITS).tolist()
            start = 0
            for choice in trajectory.choices():
                extra = choice.model_extra or {}
                count = len(extra.get("token_ids") or [])
                if known is not None and start + count <= len(values):
                    choice.trainer_logprobs = values[start : start + count]  # type: ignore[attr-defined]
                    start += count
                elif "trainer_logprobs" in extra:
                    del choice.trainer_logprobs  # type: ignore[attr-defined]
