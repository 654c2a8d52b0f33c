"""The GRPO family of losses and the SFT loss, as pure functions of tensors.

Every loss is a sum over packs: `StepTotals` is counted once over all packs of an optimizer step, so adding the
gradients of the packs gives the gradient of the whole batch, however it was cut. Formulas, names and normalisers are
those of TRL's GRPOTrainer (https://huggingface.co/docs/trl/grpo_trainer), whose "sequence" is a row here: a
trajectory whose history was rewritten makes two rows and counts as two. No model, no optimizer, no state.

Axes: R rows, T sampled tokens of a row, padded on the right. What lies under a False mask is never read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..config import TrainConfig
from .types import Bools

Sums = dict[str, Tensor]

LOG_RATIO_LIMIT = 20.0
"""|log(policy / old)| is clamped here (a ratio of 5e8): beyond it exp() overflows in fp32, and the clipped side of the
objective would turn the infinity into a NaN gradient (0 · inf). No loss type trains on such a ratio unclipped."""


@dataclass(frozen=True, slots=True)
class StepTotals:
    """What the loss of one optimizer step is divided by, counted over all its packs.

    Rows without a single sampled token do not count, so adding one changes nothing.
    """

    rows: int  # with at least one sampled token
    tokens: int  # sampled tokens of all rows
    max_completion_length: int  # dr_grpo's constant: the option, or the longest row's sampled tokens

    @classmethod
    def of(cls, masks: Iterable[Bools | Tensor], max_completion_length: int | None = None) -> StepTotals:
        """Count over the masks [R, T] of a step's packs (numpy or torch; the T may differ).

        totals = StepTotals.of((pack.mask_RT for pack in packs), config.max_completion_length)
        """
        length_R = np.concatenate([np.zeros(0, np.int64), *(np.asarray(_numpy(m)).sum(-1).reshape(-1) for m in masks)])
        longest = int(length_R.max(initial=0))
        return cls(
            rows=int((length_R > 0).sum()),
            tokens=int(length_R.sum()),
            max_completion_length=max(1, longest if max_completion_length is None else max_completion_length),
        )


@dataclass(frozen=True, slots=True)
class LossOutput:
    """`loss` is this pack's share of the step's loss: call backward on it. `sums` go to `add_sums`."""

    loss: Tensor  # scalar
    sums: Sums


def policy_loss(
    logp_RT: Tensor,
    *,
    mask_RT: Tensor,
    advantage_R: Tensor,
    config: TrainConfig,
    totals: StepTotals,
    old_logp_RT: Tensor | None = None,
    sampler_logp_RT: Tensor | None = None,
    ref_logp_RT: Tensor | None = None,
    entropy_RT: Tensor | None = None,
) -> LossOutput:
    """This pack's share of the step's loss, and its metrics as sums.

    Args:
        logp_RT: the policy's log-probs of the sampled tokens, in nats, with gradient.
        mask_RT: True where a token was sampled.
        old_logp_RT: the trainer's log-probs before the step's first update; None means `logp_RT` itself (ratio 1).
        sampler_logp_RT: the engine's log-probs, needed by `importance_correction`; always reported when given.
        ref_logp_RT: the base model's (adapter off), needed by `beta`; the KL is reported when given.
        entropy_RT: the policy's entropy at each token, in nats; needs a gradient for `entropy_coef`.

    Raises: ValueError when the config needs one of these and it is missing.
    """
    if config.beta != 0.0 and ref_logp_RT is None:
        raise ValueError("beta needs ref_logp_RT, the base model's log-probs")
    if config.entropy_coef != 0.0 and entropy_RT is None:
        raise ValueError("entropy_coef needs entropy_RT, the policy's entropy")
    if config.importance_correction != "none" and sampler_logp_RT is None:
        raise ValueError(
            f"importance_correction={config.importance_correction!r} needs sampler_logp_RT, the engine's log-probs"
        )
    mask_RT = mask_RT.bool()
    mask = mask_RT.float()
    logp_RT = _under(mask_RT, logp_RT)
    old_RT = logp_RT.detach() if old_logp_RT is None else _under(mask_RT, old_logp_RT).detach()
    advantage_R1 = advantage_R.float().unsqueeze(-1)
    row_tokens_R1 = mask.sum(-1, keepdim=True)
    sums: Sums = {"tokens": mask.sum(), "rows": (row_tokens_R1 > 0).float().sum()}

    log_ratio = logp_RT - old_RT  # [R, T]; [R, 1] at sequence level, as everything made from it
    if config.importance_sampling_level == "sequence":  # GSPO: the mean, https://arxiv.org/abs/2507.18071
        log_ratio = (log_ratio * mask).sum(-1, keepdim=True) / row_tokens_R1.clamp(min=1.0)
    ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    token_loss = _surrogate(ratio, logp_RT, advantage_R1, config)

    if sampler_logp_RT is not None:
        sampler_RT = _under(mask_RT, sampler_logp_RT).detach()
        correction, corrected = importance_correction(old_RT, sampler_RT, mask_RT, config)
        sums |= _mismatch_sums(old_RT, sampler_RT, mask_RT)
        sums["corrected"] = (corrected * mask).sum()
        token_loss = token_loss * correction

    if ref_logp_RT is not None:
        # k3, http://joschu.net/blog/kl-approx.html. After the correction, as TRL does: it is not importance-weighted.
        ref_diff = _under(mask_RT, ref_logp_RT).detach() - logp_RT
        kl_RT = ref_diff.exp() - ref_diff - 1.0
        sums["kl_base"] = (kl_RT.detach() * mask).sum()
        if config.beta != 0.0:
            token_loss = token_loss + config.beta * kl_RT

    loss = _normalise(token_loss * mask, row_tokens_R1, config, totals)
    sums["loss"] = loss.detach()

    if entropy_RT is not None:
        entropy_sum = (_under(mask_RT, entropy_RT) * mask).sum()
        sums["entropy"] = entropy_sum.detach()
        if config.entropy_coef != 0.0:
            # A mean over the step's tokens whatever the loss type, so the coefficient keeps its meaning.
            loss = loss - config.entropy_coef * entropy_sum / max(1, totals.tokens)

    sums |= _ratio_sums(ratio.detach(), advantage_R1, mask, config)
    return LossOutput(loss, sums)


def importance_correction(
    old_RT: Tensor, sampler_RT: Tensor, mask_RT: Tensor, config: TrainConfig
) -> tuple[Tensor, Tensor]:
    """Weight of each token against the mismatch trainer / sampler, and where the cap changed it.

    Truncated importance sampling (https://fengyao.notion.site/off-policy-rl) truncates the ratio at
    `importance_cap`, masked importance sampling drops what lies above it. At sequence level the ratio is the product
    over the row. For log-prob differences of standard deviation s that come from sampling (whose mean is then
    −s²/2), at most 7 % of rows exceed the default cap of 3 however long they are, and under 5 % while
    s·√tokens < 0.93 — but a constant difference of one sign, 0.012 nats over 100 tokens, is a bug that exceeds it
    at once: the raw values in the metrics show which of the two it is.

    Returns: weight [R, T] or [R, 1]; and a bool of the same shape, True where it was truncated or masked.
    """
    diff = (old_RT - sampler_RT) * mask_RT
    mode = config.importance_correction
    if mode == "none":
        return torch.ones_like(diff), torch.zeros_like(diff, dtype=torch.bool)
    if mode.startswith("sequence"):
        diff = diff.sum(-1, keepdim=True)
    weight = diff.exp()
    above = weight > config.importance_cap
    if mode.endswith("truncate"):
        return weight.clamp(max=config.importance_cap), above
    return weight.masked_fill(above, 0.0), above


def sft_loss(logp_RT: Tensor, mask_RT: Tensor, totals: StepTotals) -> LossOutput:
    """Mean negative log-likelihood over the step's sampled tokens; this pack's share of it."""
    mask_RT = mask_RT.bool()
    nll = -_under(mask_RT, logp_RT).sum()
    loss = nll / max(1, totals.tokens)
    sums = {
        "tokens": mask_RT.float().sum(),
        "rows": mask_RT.any(-1).float().sum(),
        "loss": loss.detach(),
        "nll": nll.detach(),
    }
    return LossOutput(loss, sums)


def add_sums(total: Sums, pack: Sums) -> Sums:
    """The sums of two sets of packs; keys that end in `_max` keep the greater. Neither argument is changed."""
    merged = dict(total)
    for key, value in pack.items():
        if key not in merged:
            merged[key] = value
        else:
            merged[key] = torch.maximum(merged[key], value) if key.endswith("_max") else merged[key] + value
    return merged


def finish_metrics(sums: Sums) -> dict[str, float]:
    """A step's sums as metrics: means over tokens (over rows where the value is one per row).

    loss                     the step's loss without the entropy bonus; near 0 on-policy by construction
    kl_base                  KL(policy || base), k3 estimate
    entropy, nll             nats per token
    ratio, ratio_max         policy / old
    clip_low, clip_high, clip   share of tokens (rows at sequence level) whose gradient the clip stops
    mismatch_ratio, mismatch_log_ratio_max, mismatch_row_log_ratio_max, mismatch_k1, mismatch_k3
                             trainer / sampler, raw, before any correction; k1 and k3 estimate KL(sampler || trainer)
    corrected                share of tokens whose correction was truncated or masked

    Values without a single token are left out, never NaN.
    """
    values = {key: float(value) for key, value in sums.items()}
    tokens, rows = values.pop("tokens", 0.0), values.pop("rows", 0.0)
    metrics = {"loss": values.pop("loss")} if "loss" in values else {}
    if tokens == 0.0:
        return metrics
    units = values.pop("ratio_units", tokens)
    for key, value in values.items():
        if key.endswith("_max"):
            if rows and value > -math.inf:
                metrics[key] = value
        elif key in ("ratio", "clip_low", "clip_high", "clip"):
            metrics[key] = value / units
        else:
            metrics[key] = value / tokens
    return metrics


def _surrogate(ratio: Tensor, logp_RT: Tensor, advantage_R1: Tensor, config: TrainConfig) -> Tensor:
    """Loss per token before any weighting: [R, T], or [R, 1] at sequence level (for cispo always [R, T])."""
    low, high = config.epsilon, _epsilon_high(config)
    if config.loss_type == "cispo":  # https://arxiv.org/abs/2506.13585, the cap is epsilon_high itself
        return -ratio.clamp(max=high).detach() * advantage_R1 * logp_RT
    clipped = ratio.clamp(1.0 - low, 1.0 + high)
    if config.delta is not None:  # two-sided clipping, https://arxiv.org/abs/2505.07291
        ratio = ratio.clamp(max=config.delta)
    return -torch.minimum(ratio * advantage_R1, clipped * advantage_R1)


def _normalise(token_loss_RT: Tensor, row_tokens_R1: Tensor, config: TrainConfig, totals: StepTotals) -> Tensor:
    """Masked token losses → this pack's share of the step's loss."""
    if config.loss_type == "grpo":  # mean over rows of the mean over the row's tokens
        return (token_loss_RT / row_tokens_R1.clamp(min=1.0)).sum() / max(1, totals.rows)
    if config.loss_type == "dr_grpo":  # https://arxiv.org/abs/2503.20783, a constant instead of the length
        return token_loss_RT.sum() / (max(1, totals.rows) * totals.max_completion_length)
    # bnpo, dapo and cispo: mean over tokens. In TRL bnpo divides by the tokens of a micro-batch and dapo by those of
    # the accumulated batch; over a whole step, which is how we define both, they are one and the same.
    return token_loss_RT.sum() / max(1, totals.tokens)


def _ratio_sums(ratio: Tensor, advantage_R1: Tensor, mask: Tensor, config: TrainConfig) -> Sums:
    """Ratio and clip fractions, per token or (sequence level) per row that has tokens."""
    unit = mask if config.importance_sampling_level == "token" else mask.any(-1, keepdim=True).float()
    high = _epsilon_high(config)
    if config.loss_type == "cispo":
        clip_low = torch.zeros_like(ratio, dtype=torch.bool)
        clip_high = (ratio > high) & (advantage_R1 > 0)
    else:
        clip_low = (ratio < 1.0 - config.epsilon) & (advantage_R1 < 0)
        clip_high = (ratio > 1.0 + high) & (advantage_R1 > 0)
    return {
        "ratio_units": unit.sum(),
        "ratio": (ratio * unit).sum(),
        "ratio_max": _masked_max(ratio, unit.bool()),
        "clip_low": (clip_low * unit).sum(),
        "clip_high": (clip_high * unit).sum(),
        "clip": ((clip_low | clip_high) * unit).sum(),
    }


def _mismatch_sums(old_RT: Tensor, sampler_RT: Tensor, mask_RT: Tensor) -> Sums:
    """Trainer against sampler on the sampler's tokens, before any correction."""
    diff = old_RT - sampler_RT
    mask = mask_RT.float()
    ratio = diff.exp()
    row_diff_R = (diff * mask).sum(-1)
    return {
        "mismatch_ratio": (ratio * mask).sum(),
        "mismatch_k1": (-diff * mask).sum(),
        "mismatch_k3": ((ratio - 1.0 - diff) * mask).sum(),
        "mismatch_log_ratio_max": _masked_max(diff.abs(), mask_RT),
        "mismatch_row_log_ratio_max": _masked_max(row_diff_R.abs(), mask_RT.any(-1)),
    }


def _epsilon_high(config: TrainConfig) -> float:
    return config.epsilon if config.epsilon_high is None else config.epsilon_high


def _under(mask_RT: Tensor, value_RT: Tensor) -> Tensor:
    """fp32, with 0 where masked: a select, because 0 · NaN is NaN."""
    return torch.where(mask_RT, value_RT.float(), 0.0)


def _masked_max(value: Tensor, mask: Tensor) -> Tensor:
    """-inf when nothing is under the mask (also for a tensor without elements)."""
    floor = value.new_full((1,), -math.inf)
    return torch.cat([floor, value.masked_fill(~mask, -math.inf).reshape(-1)]).max()


def _numpy(mask: Bools | Tensor) -> Bools:
    return mask.detach().cpu().numpy() if isinstance(mask, Tensor) else mask
