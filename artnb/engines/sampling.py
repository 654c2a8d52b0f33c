"""From logits to tokens, for many requests at once.

Every token takes one uniform number that is a hash of (request seed, position in the answer), so a request's
tokens do not depend on which others share its batch. Knows nothing of models, caches or requests.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from .base import SamplingParams

CANDIDATES = 1024
"""top-p looks at this many most likely tokens first; only where they hold too little mass is everything sorted."""

_MASK = (1 << 64) - 1


def mix(value: int) -> int:
    """One step of the splitmix64 generator: 64 bits in, 64 well mixed bits out. https://prng.di.unimi.it/splitmix64.c"""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 24 bits: what float32 holds exactly."""
    return (mix(mix(seed & _MASK) ^ position) >> 40) / (1 << 24)


def sample(
    logits_RV: torch.Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]
) -> tuple[list[int], list[float]]:
    """One token for each row, and its log-prob under softmax(logits / temperature) before any cut.

    The cuts come in the order top-k, top-p, min-p, each on what the one before left over.
    Raises ValueError for a row whose logits are NaN.
    """
    device = logits_RV.device
    logits_RV = logits_RV.float()
    temperature_R = torch.tensor([p.temperature or 1.0 for p in params], device=device)
    if any(p.temperature not in (0.0, 1.0) for p in params):
        logits_RV = logits_RV / temperature_R[:, None]
    best_R = logits_RV.argmax(dim=-1)
    total_R = torch.logsumexp(logits_RV, dim=-1)
    token_R = best_R.clone()
    plain = [i for i, p in enumerate(params) if p.temperature > 0 and not _cuts(p)]
    cut = [i for i, p in enumerate(params) if p.temperature > 0 and _cuts(p)]
    uniform_R = torch.tensor(np.asarray(uniforms, dtype=np.float32), device=device)
    for rows, draw in ((plain, _draw), (cut, _draw_cut)):
        if not rows:
            continue
        all_rows = len(rows) == len(params)
        rows_t = torch.tensor(rows, device=device)
        part_RV = logits_RV if all_rows else logits_RV[rows_t]
        prob_RV = torch.exp(part_RV - total_R[rows_t, None])
        token_R[rows_t] = draw(prob_RV, uniform_R[rows_t], [params[i] for i in rows], best_R[rows_t])
    logprob_R = logits_RV.gather(1, token_R[:, None])[:, 0] - total_R
    both = torch.stack([token_R.double(), logprob_R.double()]).tolist()  # one transfer from the device
    logprobs = [float(x) for x in both[1]]
    if any(x != x for x in logprobs):
        raise ValueError("the model's logits are NaN")
    return [int(x) for x in both[0]], logprobs


def _cuts(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0


def _draw(
    prob_RV: torch.Tensor, uniform_R: torch.Tensor, params: Sequence[SamplingParams], best_R: torch.Tensor
) -> torch.Tensor:
    """Inverse of the cumulative distribution: the first token whose cumulated mass exceeds the uniform number."""
    cumulated_RV = prob_RV.cumsum(dim=-1)
    target_R1 = (uniform_R * cumulated_RV[:, -1])[:, None]
    index_R = torch.searchsorted(cumulated_RV, target_R1, right=True)[:, 0]
    # Rounding can put the target on the very end; then no token lies beyond it.
    return torch.where(index_R < prob_RV.shape[1], index_R, best_R)


def _draw_cut(
    prob_RV: torch.Tensor, uniform_R: torch.Tensor, params: Sequence[SamplingParams], best_R: torch.Tensor
) -> torch.Tensor:
    """The same among the tokens that the cuts leave, most likely first."""
    device = prob_RV.device
    vocab = prob_RV.shape[1]
    top_p_R1 = torch.tensor([p.top_p for p in params], device=device)[:, None]
    top_k_R1 = torch.tensor([min(p.top_k or vocab, vocab) for p in params], device=device)[:, None]
    min_p_R1 = torch.tensor([p.min_p for p in params], device=device)[:, None]
    wanted = min(vocab, max(CANDIDATES, max(min(p.top_k, vocab) for p in params)))
    sorted_RN, token_RN = prob_RV.topk(wanted, dim=-1)
    if wanted < vocab:
        # A row is settled by the candidates if top-k ends among them, or top-p's mass, or min-p's threshold.
        mass_R1 = sorted_RN.sum(dim=-1, keepdim=True)
        settled = (
            (top_k_R1 <= wanted)
            | ((top_p_R1 < 1) & (mass_R1 >= top_p_R1))
            | (sorted_RN[:, -1:] < min_p_R1 * sorted_RN[:, :1])
        )
        if not bool(settled.all()):
            sorted_RN, token_RN = prob_RV.sort(dim=-1, descending=True)
    kept_RN = sorted_RN.masked_fill(torch.arange(sorted_RN.shape[1], device=device)[None] >= top_k_R1, 0.0)
    # top-p is a share of what top-k left. Without top-k that is everything, also what lies past the candidates.
    total_R1 = torch.where(top_k_R1 < vocab, kept_RN.sum(dim=-1, keepdim=True), torch.ones_like(top_p_R1))
    before_RN = kept_RN.cumsum(dim=-1) - kept_RN
    cut = (before_RN >= top_p_R1 * total_R1) & (top_p_R1 < 1) | (kept_RN < min_p_R1 * kept_RN[:, :1])
    cut[:, 0] = False  # the likeliest token always stays
    kept_RN = kept_RN.masked_fill(cut, 0.0)
    index_R = _draw(kept_RN, uniform_R, params, torch.zeros_like(best_R))
    return token_RN.gather(1, index_R[:, None])[:, 0]
