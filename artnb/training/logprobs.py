"""Log-probs of a pack's sampled tokens from its hidden states, in chunks: no [positions, vocabulary] tensor exists.

What rows share is computed once: each pair of position and temperature gets one row of logits, whichever
rows ask for it and whatever tokens they sampled there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

from .types import Ints, Pack

Head = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which log-probs a pack needs. U distinct (position, temperature), E distinct (those, target)."""

    position_U: Ints
    temperature_U: np.ndarray[Any, np.dtype[np.float32]]
    unit_E: Ints  # index into U, ascending
    target_E: Ints
    entry_RT: Ints  # index into E; 0 where the mask is off

    @classmethod
    def of(cls, pack: Pack) -> Wanted:
        mask_RT = pack.mask_RT
        temperature_N = pack.temperature_RT[mask_RT].astype(np.float32)
        temperature_N[temperature_N <= 0] = 1.0  # greedy sampling: what is trained is the unscaled distribution
        bits_N = temperature_N.view(np.int32).astype(np.int64)  # orders as the value does, and stacks with integers
        key_N3 = np.stack([pack.pred_RT[mask_RT], bits_N, pack.target_RT[mask_RT]], axis=1).reshape(-1, 3)
        key_E3, entry_N = np.unique(key_N3, axis=0, return_inverse=True)
        key_U2, unit_E = np.unique(key_E3[:, :2], axis=0, return_inverse=True)
        entry_RT = np.zeros(mask_RT.shape, np.int64)
        entry_RT[mask_RT] = entry_N.reshape(-1)
        temperature_U = key_U2[:, 1].astype(np.int32).view(np.float32)
        return cls(key_U2[:, 0], temperature_U, unit_E.reshape(-1), key_E3[:, 2], entry_RT)


def output_head(model: Any, config: Any) -> Head:
    """hidden [N, D] → logits [N, V] in fp32, scaled and capped as the architecture does it after `lm_head`."""
    projection = model.get_output_embeddings()
    cap = getattr(config, "final_logit_softcapping", None)  # Gemma 2, 3
    scale = getattr(config, "logit_scale", None) or getattr(config, "lm_head_multiplier", None) or 1.0  # Cohere, Falcon
    scale = scale / (getattr(config, "logits_scaling", None) or 1.0)  # Granite

    def head(hidden_ND: torch.Tensor) -> torch.Tensor:
        logits_NV: torch.Tensor = projection(hidden_ND).float()
        if scale != 1.0:
            logits_NV = logits_NV * scale
        return logits_NV if cap is None else torch.tanh(logits_NV / cap) * cap

    return head


def _chunk(
    head: Head,
    hidden_CD: torch.Tensor,
    temperature_C: torch.Tensor | None,
    unit_E: torch.Tensor,
    target_E: torch.Tensor,
    entropy: bool,
    entropy_grad: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    logits_CV = head(hidden_CD)
    if temperature_C is not None:
        logits_CV = logits_CV / temperature_C.unsqueeze(1)
    logp_CV = logits_CV.log_softmax(-1)
    del logits_CV
    logp_E = logp_CV[unit_E, target_E]
    if not entropy:
        return logp_E, logp_CV.new_zeros(len(logp_CV))
    # Last, because the recomputation of a checkpoint ends with the last tensor that the backward pass needs.
    with torch.set_grad_enabled(entropy_grad):
        return logp_E, -torch.linalg.vecdot(logp_CV.exp(), logp_CV)


def gather_logprobs(
    head: Head, hidden_SD: torch.Tensor, pack: Pack, *, entropy: bool, entropy_grad: bool, chunk: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """log softmax(logits / T) at the sampled tokens, [R, T] in fp32 and 0 outside the mask; and the entropy.

    With grad mode on, each chunk's logits are computed again in the backward pass instead of kept.
    """
    wanted = Wanted.of(pack)
    device = hidden_SD.device
    mask_RT = torch.from_numpy(pack.mask_RT).to(device)
    if not len(wanted.unit_E):
        zero_RT = hidden_SD.new_zeros(pack.mask_RT.shape, dtype=torch.float32)
        return zero_RT, zero_RT.clone() if entropy else None
    hidden_UD = hidden_SD.index_select(0, torch.from_numpy(wanted.position_U).to(device))
    unit_E, target_E = (torch.from_numpy(x).to(device) for x in (wanted.unit_E, wanted.target_E))
    logps: list[torch.Tensor] = []
    entropies: list[torch.Tensor] = []
    for start, hidden_CD in zip(range(0, len(hidden_UD), chunk), hidden_UD.split(chunk), strict=True):
        low, high = np.searchsorted(wanted.unit_E, [start, start + chunk]).tolist()
        part_C = wanted.temperature_U[start : start + chunk]
        # Looked at here, not on the device: reading a value back would make the host wait for the GPU.
        temperature_C = None if (part_C == 1.0).all() else torch.from_numpy(part_C).to(device)
        args = (head, hidden_CD, temperature_C, unit_E[low:high] - start, target_E[low:high])
        if torch.is_grad_enabled():
            logp_E, entropy_C = checkpoint(
                _chunk, *args, entropy, entropy_grad, use_reentrant=False, preserve_rng_state=False
            )
        else:
            logp_E, entropy_C = _chunk(*args, entropy, False)
        logps.append(logp_E)
        entropies.append(entropy_C)
    entry_RT = torch.from_numpy(wanted.entry_RT).to(device)
    logp_RT = torch.where(mask_RT, torch.cat(logps)[entry_RT], 0.0)
    if not entropy:
        return logp_RT, None
    return logp_RT, torch.where(mask_RT, torch.cat(entropies)[unit_E[entry_RT]], 0.0)
