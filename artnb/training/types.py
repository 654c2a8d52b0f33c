"""The plain values that pass between rows, packs, loss and trainer. No torch here.

Axes in names: S positions of a pack, R rows, T sampled tokens of a row (padded on the right).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

LOGITS_BYTES = 128 << 20
"""On a GPU the trainer's fp32 logits of so many bytes exist at a time."""

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]


class SkipReason(StrEnum):
    """Why a group, or a trajectory in it, did not train."""

    EMPTY = "empty"
    """The group holds no trajectory."""
    ALL_EQUAL = "all rewards equal"
    """Every scored trajectory has the same reward: no one is better than another."""
    ONE_SCORED = "only one scored trajectory"
    """A single trajectory has nothing to be compared with."""
    UNSCORED = "unscored"
    """The reward is None."""
    NONFINITE_REWARD = "reward is NaN or infinite"
    """The reward is not a number that can be compared."""
    NO_CHOICES = "no sampled choices"
    """Every assistant message is a dict: context, nothing to train."""
    NO_LOGPROBS = "no log-probs"
    """A choice carries no token ids or log-probs: it was not sampled by this endpoint."""
    TOO_LONG = "too long"
    """A row has more tokens than the model's context or the pack's limit."""
    TRUNCATED = "truncated"
    """Cut by max_tokens or the context, and `mask_truncated_completions` is on."""
    FAILED = "failed"
    """The rollout raised, timed out or was cancelled."""


@dataclass(slots=True)
class Row:
    """One token sequence made from a trajectory.

    `sampled[i]`: token i was sampled by the engine (and is trained); `logprobs[i]` is then the
    sampler's log-prob of it at `temperatures[i]`; elsewhere both are 0 and 1.
    """

    token_ids: Ints  # [S_row]
    sampled: Bools  # [S_row]
    logprobs: Floats  # [S_row]
    temperatures: Floats  # [S_row]
    advantage: float = 0.0
    group: int = 0  # index of the group in the batch
    trajectory: int = 0  # index in the group
    truncated: bool = False
    trainer_logprobs: Floats | None = None  # [sampled tokens], of the policy before the step; None until it trained

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(slots=True)
class RowBatch:
    """The rows of one step, and everything that is not in them, with the reason."""

    rows: list[Row] = field(default_factory=list)
    group_reasons: dict[int, SkipReason] = field(default_factory=dict)  # group index → why it did not train
    trajectory_reasons: Counter[SkipReason] = field(default_factory=Counter)  # trajectories left out
    notes: list[str] = field(default_factory=list)  # sentences for people, one per skipped group or trajectory
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of pack positions [start, end) whose tokens attend to each other causally and to all of
    its ancestors' positions. `parent` is an earlier segment's index, or -1 for a root."""

    start: int
    end: int
    parent: int


def gpu_chunk(vocab: int) -> int:
    """Positions whose logits the trainer holds at a time on a GPU: a power of two from 256 to 8,192."""
    return 1 << (min(max(LOGITS_BYTES // (4 * vocab), 256), 8192).bit_length() - 1)


@dataclass(slots=True)
class Pack:
    """Rows laid out in one token tensor, shared prefixes stored once.

    Position `pred_RT[r, t]` of the pack predicts `target_RT[r, t]`, the t-th sampled token of row r.
    Two rows that share a sampled token share its position, too.
    """

    token_ids_S: Ints
    position_ids_S: Ints  # the token's place in its own row
    segments: list[Segment]
    pred_RT: Ints
    target_RT: Ints
    mask_RT: Bools
    sampler_logp_RT: Floats
    temperature_RT: Floats
    advantage_R: Floats
    rows: list[int]  # index of each row in the list that was packed
    row_tokens: int  # sum of the rows' lengths; row_tokens / len(token_ids_S) is what sharing saved
