"""Log-probs of a pack's sampled tokens from its hidden states, in chunks: no [positions, vocabulary] tensor exists.

What rows share is computed once: each pair of position and temperature gets one row of logits, whichever
rows ask for it and whatever tokens they sampled there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

from .layers import compile_options
from .types import Ints, Pack


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


class OutputHead:
    """hidden [N, D] → logits [N, V] in fp32, scaled and capped as the architecture does it after `lm_head`.

    `weight`: that of a plain frozen projection; None where an adapter or packed weights are part of it.
    """

    def __init__(self, model: Any, config: Any) -> None:
        self.projection = model.get_output_embeddings()
        self.cap: float | None = getattr(config, "final_logit_softcapping", None)  # Gemma 2, 3
        # Cohere, Falcon
        scale = getattr(config, "logit_scale", None) or getattr(config, "lm_head_multiplier", None) or 1.0
        self.scale: float = scale / (getattr(config, "logits_scaling", None) or 1.0)  # Granite

    @property
    def weight(self) -> torch.Tensor | None:
        plain = type(self.projection) is torch.nn.Linear and not self.projection.weight.requires_grad
        return self.projection.weight if plain else None

    def __call__(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        return _finish(self.projection(hidden_ND), self.scale, self.cap)


def _finish(raw_NV: torch.Tensor, scale: float, cap: float | None) -> torch.Tensor:
    logits_NV = raw_NV.float()
    if scale != 1.0:
        logits_NV = logits_NV * scale
    return logits_NV if cap is None else torch.tanh(logits_NV / cap) * cap


class _Scores(NamedTuple):
    logp_E: torch.Tensor
    entropy_C: torch.Tensor
    slope_E: torch.Tensor  # d logit / d raw product, at the entries' tokens
    spread_CV: torch.Tensor | None  # probability × the same slope, in the product's dtype


def _score(
    raw_CV: torch.Tensor,
    temperature_C: torch.Tensor | None,
    unit_E: torch.Tensor,
    target_E: torch.Tensor,
    scale: float,
    cap: float | None,
    spread: bool,
) -> _Scores:
    """From the raw product of the projection. In one place, so that it can be compiled to a few passes over it."""
    logits_CV = _finish(raw_CV, scale, cap)
    heat_C = raw_CV.new_ones(len(raw_CV), dtype=torch.float32) if temperature_C is None else temperature_C
    if temperature_C is not None:
        logits_CV = logits_CV / heat_C.unsqueeze(1)
    logsumexp_C = logits_CV.logsumexp(-1)
    probability_CV = (logits_CV - logsumexp_C.unsqueeze(1)).exp()
    entropy_C = logsumexp_C - torch.linalg.vecdot(probability_CV, logits_CV)
    logit_E = logits_CV[unit_E, target_E]
    slope_E = scale / heat_C[unit_E]
    spread_CV = probability_CV * (scale / heat_C).unsqueeze(1) if spread else None
    if cap is not None:
        # Of tanh: 1 − (capped logit / cap)²; the logits here are divided by the temperature already.
        slope_E = slope_E * (1.0 - (logit_E * heat_C[unit_E] / cap).square())
        if spread_CV is not None:
            spread_CV = spread_CV * (1.0 - (logits_CV * heat_C.unsqueeze(1) / cap).square())
    return _Scores(
        logit_E - logsumexp_C[unit_E],
        entropy_C,
        slope_E,
        None if spread_CV is None else spread_CV.to(raw_CV.dtype),
    )


@functools.cache
def _compiled_score() -> Callable[..., _Scores]:
    compiled: Callable[..., _Scores] = torch.compile(_score, dynamic=True, options=compile_options())
    return compiled


class _FrozenHead(torch.autograd.Function):  # type: ignore[misc]  # torch is untyped here
    """hidden [C, D] → log-probs [E] and entropies [C], through a projection W [V, D] that does not train.

    d logp_e / d hidden = slope_e W[target_e] − Σ_v spread_v W[v]: both are known before the loss is, so that neither
    the logits nor their gradient are kept or computed again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_CD: torch.Tensor,
        head: OutputHead,
        score: Callable[..., _Scores],
        temperature_C: torch.Tensor | None,
        unit_E: torch.Tensor,
        target_E: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        trained = ctx.needs_input_grad[0]
        scores = score(head.projection(hidden_CD), temperature_C, unit_E, target_E, head.scale, head.cap, trained)
        if trained:
            ctx.weight = head.weight
            mean_CD = scores.spread_CV @ ctx.weight
            ctx.save_for_backward(mean_CD, scores.slope_E, unit_E, target_E)
        ctx.mark_non_differentiable(scores.entropy_C)
        return scores.logp_E, scores.entropy_C

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        mean_CD, slope_E, unit_E, target_E = ctx.saved_tensors
        grad_E = grads[0]
        towards_ED = ctx.weight[target_E].float() * (grad_E * slope_E).unsqueeze(1)
        away_C = grad_E.new_zeros(len(mean_CD)).index_add_(0, unit_E, grad_E)
        grad_CD = (mean_CD.float() * -away_C.unsqueeze(1)).index_add_(0, unit_E, towards_ED)
        return grad_CD.to(mean_CD.dtype), None, None, None, None, None


def _any_head(
    hidden_CD: torch.Tensor,
    head: OutputHead,
    temperature_C: torch.Tensor | None,
    unit_E: torch.Tensor,
    target_E: torch.Tensor,
    entropy_grad: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same through autograd, for a projection that trains and for gradients of the entropy."""
    logits_CV = head(hidden_CD)
    if temperature_C is not None:
        logits_CV = logits_CV / temperature_C.unsqueeze(1)
    logp_CV = logits_CV.log_softmax(-1)
    del logits_CV
    logp_E = logp_CV[unit_E, target_E]
    # Last, because the recomputation of a checkpoint ends with the last tensor that the backward pass needs.
    with torch.set_grad_enabled(entropy_grad):
        return logp_E, -torch.linalg.vecdot(logp_CV.exp(), logp_CV)


def gather_logprobs(
    head: OutputHead,
    hidden_SD: torch.Tensor,
    pack: Pack,
    *,
    entropy: bool,
    entropy_grad: bool,
    chunk: int,
    compiled: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """log softmax(logits / T) at the sampled tokens, [R, T] in fp32 and 0 outside the mask; and the entropy.

    `compiled`: what is computed from the logits is compiled to a few passes over them.
    """
    wanted = Wanted.of(pack)
    device = hidden_SD.device
    mask_RT = torch.from_numpy(pack.mask_RT).to(device)
    if not len(wanted.unit_E):
        zero_RT = hidden_SD.new_zeros(pack.mask_RT.shape, dtype=torch.float32)
        return zero_RT, zero_RT.clone() if entropy else None
    hidden_UD = hidden_SD.index_select(0, torch.from_numpy(wanted.position_U).to(device))
    unit_E, target_E = (torch.from_numpy(x).to(device) for x in (wanted.unit_E, wanted.target_E))
    frozen = head.weight is not None and not entropy_grad
    score = _compiled_score() if compiled else _score
    logps: list[torch.Tensor] = []
    entropies: list[torch.Tensor] = []
    for start, hidden_CD in zip(range(0, len(hidden_UD), chunk), hidden_UD.split(chunk), strict=True):
        low, high = np.searchsorted(wanted.unit_E, [start, start + chunk]).tolist()
        part_C = wanted.temperature_U[start : start + chunk]
        # Looked at here, not on the device: reading a value back would make the host wait for the GPU.
        temperature_C = None if (part_C == 1.0).all() else torch.from_numpy(part_C).to(device)
        where = (temperature_C, unit_E[low:high] - start, target_E[low:high])
        if frozen:
            logp_E, entropy_C = _FrozenHead.apply(hidden_CD, head, score, *where)
        elif torch.is_grad_enabled():
            logp_E, entropy_C = checkpoint(
                _any_head, hidden_CD, head, *where, entropy_grad, use_reentrant=False, preserve_rng_state=False
            )
        else:
            logp_E, entropy_C = _any_head(hidden_CD, head, *where, False)
        logps.append(logp_E)
        entropies.append(entropy_C)
    entry_RT = torch.from_numpy(wanted.entry_RT).to(device)
    logp_RT = torch.where(mask_RT, torch.cat(logps)[entry_RT], 0.0)
    if not entropy:
        return logp_RT, None
    return logp_RT, torch.where(mask_RT, torch.cat(entropies)[unit_E[entry_RT]], 0.0)
