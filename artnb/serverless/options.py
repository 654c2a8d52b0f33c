"""From `TrainConfig` to the service's `experimental_config`: each option is sent, or refused with the reason.

What was not given is left to the service, except for the learning rate. Values are checked here; what the service makes
of them is its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any, Literal

from ..config import TrainConfig, TrainSFTConfig, asked_for, check_choice, check_number, config
from ..errors import ConfigError
from ..training.sft_batches import batch_size_of, learning_rates, sft_batches


@config
class ServiceOptions:
    """One RL step at the service, by the service's own names; None leaves it to the service.

    Given one by one: `await backend.train(model, groups, loss_fn="ppo", epsilon=0.2)`.
    """

    learning_rate: float | None = None
    loss_fn: Literal["cispo", "ppo"] | None = None
    ppo: bool | None = None  # the older spelling of loss_fn="ppo"
    epsilon: float | None = None  # the ratio is clipped below 1 − epsilon
    epsilon_high: float | None = None  # and above 1 + epsilon_high
    importance_sampling_level: Literal["token", "sequence", "average", "geometric_average"] | None = None
    truncated_importance_sampling: float | None = None  # cap of the weight that corrects the sampler's mismatch
    max_negative_advantage_importance_sampling_weight: float | None = None
    mask_prob_ratio: bool | None = None  # ratios outside of the clip count 0
    advantage_balance: float | None = None  # −1 trains on negative advantages only, 1 on positive ones
    normalize_advantages: bool | None = None
    scale_rewards: bool | None = None  # divide by the group's standard deviation
    kl_penalty_coef: float | None = None  # of a KL penalty on the advantages
    kl_penalty_source: Literal["current_learner", "sample"] | None = None
    kl_penalty_reference_step: int | None = None  # the checkpoint that is the KL's reference
    kl_penalty_step_lag: int | None = None  # or one that stays this many steps behind
    precalculate_logprobs: bool | None = None
    scale_learning_rate_by_reward_std_dev: bool | None = None
    logprob_calculation_chunk_size: int | None = None
    packed_sequence_length: int | None = None

    def __post_init__(self) -> None:
        me = "ServerlessBackend.train"
        for option, known in _CHOICES.items():
            if (chosen := getattr(self, option)) is not None:
                check_choice(me, option, chosen, known)
        for option in _SWITCHES:
            if (switch := getattr(self, option)) is not None and not isinstance(switch, bool):
                raise ConfigError(f"{me}: {option}={switch!r} must be True or False")
        for option, bounds in _NUMBERS.items():
            if (value := getattr(self, option)) is not None:
                check_number(me, option, value, **bounds)
        if self.ppo is not None and self.loss_fn is not None and self.ppo != (self.loss_fn == "ppo"):
            raise ConfigError(f"{me}: loss_fn={self.loss_fn!r} and ppo={self.ppo} contradict each other; give loss_fn")
        if self.kl_penalty_reference_step is not None and self.kl_penalty_step_lag is not None:
            raise ConfigError(f"{me}: give either kl_penalty_reference_step or kl_penalty_step_lag, not both")

    def to_json(self) -> dict[str, Any]:
        """What is sent: only what was given."""
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name)) is not None}


_CHOICES = {
    "loss_fn": ("cispo", "ppo"),
    "importance_sampling_level": ("token", "sequence", "average", "geometric_average"),
    "kl_penalty_source": ("current_learner", "sample"),
}
_SWITCHES = (
    *("ppo", "mask_prob_ratio", "normalize_advantages", "scale_rewards", "precalculate_logprobs"),
    "scale_learning_rate_by_reward_std_dev",
)
_NUMBERS: dict[str, dict[str, Any]] = {
    "learning_rate": {"low": 0.0},
    "epsilon": {"low": 0.0},
    "epsilon_high": {"low": 0.0},
    "truncated_importance_sampling": {"above": 0.0},
    "max_negative_advantage_importance_sampling_weight": {"above": 0.0},
    "advantage_balance": {"low": -1.0, "high": 1.0},
    "kl_penalty_coef": {"low": 0.0},
    "kl_penalty_reference_step": {"low": 0, "whole": True},
    "kl_penalty_step_lag": {"low": 1, "whole": True},
    "logprob_calculation_chunk_size": {"low": 1, "whole": True},
    "packed_sequence_length": {"low": 1, "whole": True},
}

SERVICE_NAMES = frozenset(f.name for f in fields(ServiceOptions))
_TRAIN_NAMES = {f.name for f in fields(TrainConfig)}


def experimental_config(given: TrainConfig | None, options: dict[str, Any], step: int) -> dict[str, Any]:
    """The service's `experimental_config` for the step that follows `step`.

    `options` are the service's or TrainConfig's, by name. Names that both have are the service's, unless one is there
    that only TrainConfig has. Raises ConfigError for what the service has no field for.
    """
    if given is not None and not isinstance(given, TrainConfig):
        raise ConfigError(f"train: config must be an art.TrainConfig, not {type(given).__name__}")
    if options.get("beta") == 0:  # given by every call that was written for ART 0.5.9
        options = {name: value for name, value in options.items() if name != "beta"}
    only_train = options.keys() & (_TRAIN_NAMES - SERVICE_NAMES)
    if given is not None and only_train:
        raise ConfigError(f"train: give {sorted(only_train)} in config=TrainConfig(...), which is there already")
    if only_train:
        given = TrainConfig(**{name: value for name, value in options.items() if name in _TRAIN_NAMES})
        options = {name: value for name, value in options.items() if name not in _TRAIN_NAMES}
    translated = _translate(given or TrainConfig(), step)
    twice = (translated.keys() & options.keys()) - ({"learning_rate"} if given is None else set())
    if twice:
        raise ConfigError(f"train: {sorted(twice)} are in config and beside it; give each once")
    return ServiceOptions(**{**translated, **options}).to_json()


def _translate(given: TrainConfig, step: int) -> dict[str, Any]:
    """ServiceOptions for what was given."""
    made: dict[str, Any] = {"learning_rate": given.learning_rate_at(step)}
    for name in asked_for(given):
        if name not in _IN_LEARNING_RATE:
            made |= _TRANSLATIONS.get(name, _no_field)(given, name)
    return made


_IN_LEARNING_RATE = ("learning_rate", "lr_schedule", "warmup_steps", "total_steps")


def _no_field(given: TrainConfig | TrainSFTConfig, name: str, hint: str = "") -> dict[str, Any]:
    value = getattr(given, name)
    raise ConfigError(
        f"the W&B training service has no field for {type(given).__name__}({name}={value!r}){hint and '; ' + hint}. "
        "Leave it out there"
    )


def _unless(*harmless: Any, hint: str = "") -> Callable[[TrainConfig, str], dict[str, Any]]:
    """Nothing is sent for a value that asks for nothing; any other is refused."""

    def translate(given: TrainConfig, name: str) -> dict[str, Any]:
        return {} if getattr(given, name) in harmless else _no_field(given, name, hint)

    return translate


def _loss(given: TrainConfig, name: str) -> dict[str, Any]:
    if given.loss_type == "cispo":
        return {"loss_fn": "cispo"}
    return _no_field(given, name, "it knows loss_type='cispo', and loss_fn='ppo', whose means are its own")


def _upper_clip(given: TrainConfig, name: str) -> dict[str, Any]:
    if given.epsilon_high is None:
        return {}
    # For cispo artnb's epsilon_high is the cap of the ratio itself, the service's is what it may exceed 1 by.
    return {"epsilon_high": given.epsilon_high - 1.0 if given.loss_type == "cispo" else given.epsilon_high}


def _scale(given: TrainConfig, name: str) -> dict[str, Any]:
    if given.scale_rewards == "batch":
        return _no_field(given, name, "it divides by the group's standard deviation ('group') or not at all ('none')")
    divides = given.scale_rewards == "group"
    return {"scale_rewards": divides, "normalize_advantages": divides}


def _correction(given: TrainConfig, name: str) -> dict[str, Any]:
    if given.importance_correction == "none":
        return {}
    if given.importance_correction == "token_truncate":
        return {"truncated_importance_sampling": given.importance_cap}
    return _no_field(given, name, "it knows 'none' and 'token_truncate'")


def _cap(given: TrainConfig, name: str) -> dict[str, Any]:
    if given.importance_correction == "token_truncate":
        return {}  # sent with the correction
    return _no_field(given, name, "a cap is sent with importance_correction='token_truncate' only")


_TRANSLATIONS: dict[str, Callable[[TrainConfig, str], dict[str, Any]]] = {
    "loss_type": _loss,
    "epsilon": lambda given, name: {name: given.epsilon},
    "epsilon_high": _upper_clip,
    "importance_sampling_level": lambda given, name: {name: given.importance_sampling_level},
    "scale_rewards": _scale,
    "importance_correction": _correction,
    "importance_cap": _cap,
    "delta": _unless(None),
    "beta": _unless(0.0, hint="a KL to an earlier checkpoint is kl_penalty_coef= there, on the advantages"),
    "entropy_coef": _unless(0.0),
    "mask_truncated_completions": _unless(False, hint="leave such trajectories out of the groups, if they should be"),
    "num_iterations": _unless(1),
    "minibatches": _unless(1),
    "max_completion_length": _unless(None),
    "max_tokens_per_pack": _unless(None, hint="the length of its packs is packed_sequence_length="),
}


def sft_plan(given: TrainSFTConfig, rows: int) -> tuple[dict[str, Any], list[int]]:
    """The `config` of an SFT job, and the order in which its file lists `rows` trajectories, epoch after epoch.

    Raises ConfigError for what the service has no field for.
    """
    if not isinstance(given, TrainSFTConfig):
        raise ConfigError(f"train_sft: config must be an art.TrainSFTConfig, not {type(given).__name__}")
    for name in asked_for(given):
        if name not in _IN_SFT_PLAN and getattr(given, name) is not None:
            _no_field(given, name)
    size = batch_size_of(given)
    if given.epochs > 1 and rows % size:
        raise ConfigError(
            f"train_sft: {rows} trajectories make no whole batches of {size}, and the service would mix the end of an "
            "epoch with the beginning of the next: give a batch_size that divides them, or call it once an epoch"
        )
    batches = sft_batches(rows, given)
    rates = learning_rates(given, len(batches))
    rate = rates[0] if rates and len(set(rates)) == 1 else rates
    config = {"batch_size": size, "learning_rate": rate, "assistant_turns": "all"}
    return config, [row for batch in batches for row in batch]


_IN_SFT_PLAN = (
    *("learning_rate", "lr_schedule", "warmup_ratio", "batch_size", "epochs", "shuffle", "seed"),
    "extra_metrics",  # kept in the history, here
)
