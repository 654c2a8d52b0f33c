"""How likely the base alone finds the assistant turns of trajectories: log-probs with every adapter off.

Computed by the trainer's side in packs, so what trajectories share is computed once; an engine has no log-probs of what
it did not sample. Without gradients, and while the engine goes on serving.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import numpy as np

from ..backend import TurnLogprobs
from ..training.pack import build_packs
from ..training.policy import Policy
from ..training.sft import SFTRows
from ..training.types import Floats, Row
from ..trajectories import Trajectory
from ..whole import StepInterrupted, in_worker
from .served import ServedBase

PACK_TOKENS = 2048
"""Distinct tokens of one pass: few enough to fit beside an engine that is awake."""


async def base_logprobs(base: ServedBase, trajectories: Sequence[Trajectory]) -> list[TurnLogprobs | None]:
    """See HasBaseLogprobs in backend.py."""
    rows: list[Row] = []
    for index, trajectory in enumerate(trajectories):
        making = SFTRows(base.chat, max_row_tokens=base.engine.context_length)
        making.add(trajectory)
        batch = making.batch()
        if not batch.trajectory_reasons:  # one that does not fit as a whole is not judged by a part of it
            for row in batch.rows:
                row.trajectory = index
            rows += batch.rows
        await asyncio.sleep(0)  # tokenizing takes the loop's time
    scored = await in_worker(lambda stop: _score(base.policy, rows, stop), threading.Event())
    found: list[TurnLogprobs | None] = [None] * len(trajectories)
    for index in {row.trajectory for row in rows}:
        mine = [number for number, row in enumerate(rows) if row.trajectory == index]
        values = np.concatenate([scored[number] for number in mine])
        found[index] = TurnLogprobs(values, row_tokens=sum(len(rows[number]) for number in mine))
    return found


def _score(policy: Policy, rows: Sequence[Row], stop: threading.Event) -> dict[int, Floats]:
    """Number of the row → log-probs of its assistant tokens, in nats."""
    scored: dict[int, Floats] = {}
    for pack in build_packs(rows, PACK_TOKENS) if rows else []:
        if stop.is_set():
            raise StepInterrupted
        logp_RT, _ = policy.token_logprobs(pack, adapter=None)
        values_RT = logp_RT.float().cpu().numpy()
        for place, number in enumerate(pack.rows):
            scored[number] = values_RT[place][pack.mask_RT[place]]
    return scored
