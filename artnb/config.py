"""Options as frozen dataclasses, checked where they are built. An option that cannot be honoured raises.

Nothing here holds a socket, a tensor or a path that must exist.
"""

from __future__ import annotations

import functools
import math
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, TypeVar, dataclass_transform

from .errors import ConfigError, nearest

T = TypeVar("T")


@dataclass_transform(kw_only_default=True, frozen_default=True)
def config(cls: type[T]) -> type[T]:
    """A frozen keyword-only dataclass whose constructor names the nearest spelling of an unknown option."""
    made = dataclass(frozen=True, kw_only=True)(cls)
    init = made.__init__
    names = [f.name for f in fields(made)]  # type: ignore[arg-type]

    @functools.wraps(init)
    def checked(self: T, *args: Any, **options: Any) -> None:
        if args:
            raise ConfigError(f"{made.__name__} takes keyword options only, e.g. {names[0]}=...")
        for option in options:
            if option not in names:
                raise ConfigError(f"{made.__name__} has no option {option!r}{nearest(option, names)}")
        init(self, **options)
        object.__setattr__(self, "_given", frozenset(options))

    made.__init__ = checked  # type: ignore[method-assign, assignment]
    return made


def asked_for(options: Any) -> list[str]:
    """Names of the options that were given to a config, in its order: a backend that cannot honour one must say so.

    A config that was given every option (a copy of another one, or one read from a file) tells no choice from a default
    by that; then those that differ from their default count.
    """
    known = fields(options)
    given = vars(options)["_given"]
    if len(given) == len(known):
        return [f.name for f in known if getattr(options, f.name) != f.default]
    return [f.name for f in known if f.name in given]


def check_choice(owner: str, option: str, value: str, known: tuple[str, ...]) -> None:
    """Raise ConfigError unless `value` is one of `known`."""
    if value not in known:
        raise ConfigError(f"{owner}: {option}={value!r} is unknown{nearest(str(value), known)}")


def check_number(
    owner: str,
    option: str,
    value: object,
    *,
    low: float = -math.inf,
    high: float = math.inf,
    above: float | None = None,
    whole: bool = False,
) -> None:
    """Raise ConfigError unless `value` is a finite number in [low, high] (and > above, and whole)."""
    kind = int if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kind):
        raise ConfigError(f"{owner}: {option}={value!r} must be a {'whole ' if whole else ''}number")
    if not math.isfinite(value) or not low <= value <= high or (above is not None and value <= above):
        bounds = f"> {above}" if above is not None else f">= {low}"
        bounds += f" and <= {high}" if high != math.inf else ""
        raise ConfigError(f"{owner}: {option}={value} must be {bounds}")


def scheduled_rate(peak: float, schedule: str, step: int, *, warmup: int, total: int) -> float:
    """The learning rate of step `step` (from 0) of `total`: linear warm-up, then constant or down to 0 after the last.

    As transformers' schedules have it; "cosine" is half a wave.
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    if schedule == "constant":
        return peak
    done = min(1.0, (step - warmup) / max(1, total - warmup))
    return peak * (1.0 - done) if schedule == "linear" else peak * 0.5 * (1.0 + math.cos(math.pi * done))


LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo")
LossType = Literal["grpo", "bnpo", "dr_grpo", "dapo", "cispo"]
SCHEDULES = ("constant", "linear", "cosine")
CORRECTIONS = ("none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


@config
class TrainConfig:
    """One GRPO step. Names and defaults follow TRL's GRPOConfig where the two mean the same."""

    learning_rate: float = 1e-5
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"  # decays over `total_steps`
    warmup_steps: int = 0  # steps of linear warm-up from 0
    total_steps: int | None = None  # length of a decaying schedule; required by "linear" and "cosine"
    loss_type: LossType = "dapo"
    importance_sampling_level: Literal["token", "sequence"] = "token"  # "sequence" is GSPO
    epsilon: float = 0.2  # lower clip of the ratio
    epsilon_high: float | None = None  # upper clip; None takes `epsilon`. For cispo it is the cap itself
    delta: float | None = None  # two-sided clipping: hard cap of the ratio (INTELLECT-2)
    beta: float = 0.0  # weight of KL(policy || base), base = adapter off
    entropy_coef: float = 0.0  # weight of the entropy bonus
    scale_rewards: Literal["group", "batch", "none"] = "group"  # what the advantage's std is taken over
    mask_truncated_completions: bool = False  # leave answers cut by max_tokens or the context out of the loss
    num_iterations: int = 1  # optimizer passes over the same rollouts
    minibatches: int = 1  # optimizer steps in a pass; groups are split evenly
    max_grad_norm: float = 1.0  # gradient norm above which the gradient is scaled down
    weight_decay: float = 0.0
    max_completion_length: int | None = None  # dr_grpo's constant divisor, in tokens; None: longest row of the batch
    importance_correction: Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] = (
        "sequence_mask"  # for the mismatch between sampler and trainer; raw values are always reported
    )
    importance_cap: float = 3.0  # ratio at which the correction truncates or masks
    max_tokens_per_pack: int | None = None  # distinct tokens in one forward pass; None: chosen from the device
    max_mismatch_kl: float = 1.0  # nats a token between sampler and trainer; three steps above it stop the run
    max_nonfinite_steps: int = 3  # stop after this many skipped steps in a row

    def __post_init__(self) -> None:
        me = "TrainConfig"
        check_number(me, "learning_rate", self.learning_rate, low=0.0)
        check_choice(me, "lr_schedule", self.lr_schedule, SCHEDULES)
        check_number(me, "warmup_steps", self.warmup_steps, low=0, whole=True)
        check_choice(me, "loss_type", self.loss_type, LOSS_TYPES)
        check_choice(me, "importance_sampling_level", self.importance_sampling_level, ("token", "sequence"))
        check_number(me, "epsilon", self.epsilon, low=0.0)
        check_number(me, "beta", self.beta, low=0.0)
        check_number(me, "entropy_coef", self.entropy_coef)
        check_choice(me, "scale_rewards", self.scale_rewards, ("group", "batch", "none"))
        check_number(me, "num_iterations", self.num_iterations, low=1, whole=True)
        check_number(me, "minibatches", self.minibatches, low=1, whole=True)
        check_number(me, "max_grad_norm", self.max_grad_norm, above=0.0)
        check_number(me, "weight_decay", self.weight_decay, low=0.0)
        check_choice(me, "importance_correction", self.importance_correction, CORRECTIONS)
        check_number(me, "importance_cap", self.importance_cap, above=0.0)
        check_number(me, "max_mismatch_kl", self.max_mismatch_kl, above=0.0)
        check_number(me, "max_nonfinite_steps", self.max_nonfinite_steps, low=1, whole=True)
        whole = ("max_completion_length", "max_tokens_per_pack", "total_steps")
        for option in ("epsilon_high", "delta", *whole):
            if (value := getattr(self, option)) is not None:
                check_number(me, option, value, above=0, whole=option in whole)
        if self.lr_schedule != "constant" and self.total_steps is None:
            raise ConfigError(f"{me}: lr_schedule={self.lr_schedule!r} needs total_steps=<number of steps of the run>")
        if self.loss_type == "cispo" and self.epsilon_high is None:
            raise ConfigError(f"{me}: loss_type='cispo' needs epsilon_high=<cap of the ratio>, e.g. 5.0 (MiniMax-M1)")
        if self.delta is not None and self.loss_type == "cispo":
            raise ConfigError(f"{me}: delta does nothing with loss_type='cispo'; leave it out")

    def learning_rate_at(self, step: int) -> float:
        """The learning rate of the step that makes checkpoint `step + 1` out of checkpoint `step`."""
        schedule = self.lr_schedule if self.total_steps else "constant"
        total = self.total_steps or 0
        return scheduled_rate(self.learning_rate, schedule, step, warmup=self.warmup_steps, total=total)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@config
class TrainSFTConfig:
    """Supervised fine-tuning on the assistant turns of trajectories."""

    learning_rate: float | list[float] = 5e-5  # one value, or one per batch
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"  # over the batches of one call
    warmup_ratio: float = 0.0  # share of the batches with linear warm-up from 0
    batch_size: int | Literal["auto"] = "auto"  # trajectories per optimizer step; "auto" is 2
    epochs: int = 1
    shuffle: bool = True  # each epoch in an order of its own; False keeps the given one
    seed: int = 42  # of the orders
    max_grad_norm: float = 1.0
    weight_decay: float = 0.0
    max_tokens_per_pack: int | None = None  # distinct tokens in one forward pass; None: chosen from the device
    extra_metrics: dict[str, float] | None = None  # kept in the history with the step's own, e.g. where a run stands

    def __post_init__(self) -> None:
        me = "TrainSFTConfig"
        for rate in self.learning_rate if isinstance(self.learning_rate, list) else [self.learning_rate]:
            check_number(me, "learning_rate", rate, low=0.0)
        if self.batch_size != "auto":
            check_number(me, "batch_size", self.batch_size, low=1, whole=True)
        check_number(me, "epochs", self.epochs, low=1, whole=True)
        check_number(me, "max_grad_norm", self.max_grad_norm, above=0.0)
        check_number(me, "weight_decay", self.weight_decay, low=0.0)
        if self.max_tokens_per_pack is not None:
            check_number(me, "max_tokens_per_pack", self.max_tokens_per_pack, low=1, whole=True)
        check_choice(me, "lr_schedule", self.lr_schedule, SCHEDULES)
        check_number(me, "warmup_ratio", self.warmup_ratio, low=0.0, high=1.0)
        check_number(me, "seed", self.seed, low=0, whole=True)
        if not isinstance(self.shuffle, bool):
            raise ConfigError(f"{me}: shuffle={self.shuffle!r} must be True or False")
        if isinstance(self.learning_rate, list) and (self.lr_schedule != "constant" or self.warmup_ratio):
            raise ConfigError(f"{me}: learning_rate is a list, one rate per batch; leave out lr_schedule, warmup_ratio")
        for name, value in (self.extra_metrics or {}).items():
            check_number(me, f"extra_metrics[{name!r}]", value)


@config
class LoraConfig:
    """The adapter that is trained."""

    r: int = 16  # rank
    alpha: float = 32.0  # the adapter's output is scaled by alpha / r
    target_modules: str | tuple[str, ...] = "all-linear"  # as PEFT takes it
    seed: int = 0  # of the initial A matrices

    def __post_init__(self) -> None:
        check_number("LoraConfig", "r", self.r, low=1, whole=True)
        check_number("LoraConfig", "alpha", self.alpha, above=0.0)
        check_number("LoraConfig", "seed", self.seed, low=0, whole=True)
