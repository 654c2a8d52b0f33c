"""Training options by ART's names, in artnb's terms: each is translated, or refused with what to do instead.

A value that asks for nothing (ART's own default) is dropped. Options about how ART computes, not what, are dropped with
a line that says so. Does not decide defaults: what was not given is TrainConfig's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from ..config import TrainConfig
from ..errors import ConfigError

NOTHING: dict[str, tuple[Any, ...]] = {
    "adam_params": (None,),
    "advantage_balance": (0, None),
    "allow_training_without_logprobs": (False, None),
    "final_training_step": (None,),
    "grad_accumulation_sequences": (None,),
    "kimi_k2_tau": (None,),
    "kl_penalty_coef": (0, None),
    "kl_penalty_reference_step": (None,),
    "kl_penalty_step_lag": (None,),
    "kl_ref_adapter_path": (None,),
    "loss_fn_config": (None,),
    "mask_prob_ratio": (False, None),
    "max_negative_advantage_importance_sampling_weight": (None,),
    "num_trajectories_learning_rate_multiplier_power": (0, None),
    "plot_tensors": (False, None),
    "precalculate_logprobs": (False, None),
    "save_checkpoint": (True,),
    "scale_learning_rate_by_reward_std_dev": (False, None),
}
"""ART's options that artnb has not, with the values that ask for nothing."""

_INSTEAD = {
    "adam_params": "weight_decay= and max_grad_norm= are TrainConfig's",
    "allow_training_without_logprobs": "a choice without log-probs is never trained on: its ratio would be made up",
    "kl_penalty_coef": "beta= is a KL to the base model, in the loss",
    "max_negative_advantage_importance_sampling_weight": "delta= caps the ratio on both sides",
    "mask_prob_ratio": "importance_correction='token_mask' leaves out tokens whose ratio is off",
    "save_checkpoint": "every step is a checkpoint; keep fewer with model.delete_checkpoints()",
    "grad_accumulation_sequences": "minibatches= says how many optimizer steps a pass has",
    "plot_tensors": "model.inspect() and model.dashboard() show a step",
}

COMPUTED: dict[str, str] = {
    "logprob_calculation_chunk_size": "log-probs are computed in chunks that fit, whatever the size of the vocabulary",
    "optimizer_save_interval": "every checkpoint has its optimizer state",
    "kl_penalty_source": "there is no KL penalty on advantages",
    "verbose": "progress is always shown",
}
"""ART's options about how it computes, and why artnb needs none of them."""

TRANSLATED = frozenset(
    ("loss_fn", "ppo", "normalize_advantages", "truncated_importance_sampling", "packed_sequence_length", "_config")
)
_SHARED = frozenset(("epsilon", "epsilon_high", "importance_sampling_level", "scale_rewards"))
_OURS = frozenset(f.name for f in fields(TrainConfig))
# What ART's CISPO clips at where nothing is said: 1 + 4.
_CISPO_ABOVE = 4.0


def flat(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with those of `_config` among them. Raises ConfigError where they contradict each other."""
    inner = options.get("_config") or {}
    outer = {name: value for name, value in options.items() if name != "_config"}
    if not isinstance(inner, Mapping):
        raise ConfigError(f"train: _config={inner!r} must be a dict of options")
    if twice := sorted(name for name in inner if name in outer and outer[name] != inner[name]):
        raise ConfigError(f"train: {twice} are in _config and beside it; give each once")
    return {**inner, **outer}


def without_nothing(options: Mapping[str, Any], kept: frozenset[str] = frozenset()) -> dict[str, Any]:
    """The options without ART's that ask for nothing. Raises ConfigError for one of ART's that asks for something.

    `kept`: names that the backend has itself.
    """
    left: dict[str, Any] = {}
    for name, value in options.items():
        if name in kept or name not in NOTHING.keys() | COMPUTED.keys():
            left[name] = value
        elif name in COMPUTED:
            if name != "verbose":
                print(f"artnb: train: {name} is not needed here: {COMPUTED[name]}", flush=True)
        elif value not in NOTHING[name]:
            hint = f"; {_INSTEAD[name]}" if name in _INSTEAD else ""
            raise ConfigError(f"train: {name}={value!r} is an option of ART's that artnb has not{hint}")
    return left


def train_config(config: TrainConfig | None, options: Mapping[str, Any]) -> TrainConfig:
    """The options of a step, as a whole or one by one, by artnb's names or by ART's. Raises ConfigError."""
    if config is not None and not isinstance(config, TrainConfig):
        raise ConfigError(f"train: config must be an art.TrainConfig, not {type(config).__name__}")
    if config is not None and (single := sorted(options.keys() & _OURS)):
        raise ConfigError(f"train: give either config=TrainConfig(...) or single options, not both: {single}")
    left = without_nothing(flat(options))
    if not left:
        return config or TrainConfig()
    made = _translate(left)
    return TrainConfig(**made) if config is None else replace(config, **made)


def _translate(options: dict[str, Any]) -> dict[str, Any]:
    """ART's names in artnb's terms. Names that both have mean the same, but for CISPO's upper clip."""
    made = {name: value for name, value in options.items() if name not in TRANSLATED}
    if isinstance(made.get("scale_rewards"), bool):
        made["scale_rewards"] = "group" if made["scale_rewards"] else "none"
    if options.get("normalize_advantages") is False:
        made["scale_rewards"] = "none"
    if made.get("importance_sampling_level") in ("average", "geometric_average"):
        raise ConfigError(
            f"train: importance_sampling_level={made['importance_sampling_level']!r} is an option of ART's that artnb "
            "has not; it knows 'token' and 'sequence'"
        )
    if (cap := options.get("truncated_importance_sampling")) is not None:
        made |= {"importance_correction": "token_truncate", "importance_cap": cap}
    if (length := options.get("packed_sequence_length")) is not None:
        made["max_tokens_per_pack"] = length
    loss = _loss(options)
    if loss is not None:
        made["loss_type"] = loss
    if loss == "cispo":
        below, above = made.pop("epsilon", 1.0), made.pop("epsilon_high", _CISPO_ABOVE)
        if below is not None and below < 1.0:
            raise ConfigError(f"train: epsilon={below}: artnb's CISPO clips the ratio above only; leave it out")
        made["epsilon_high"] = 1.0 + (_CISPO_ABOVE if above is None else above)
    return {name: value for name, value in made.items() if value is not None or name not in _SHARED}


def _loss(options: Mapping[str, Any]) -> str | None:
    """ "dapo" is PPO's clipped ratio with the mean over tokens that ART takes."""
    name, ppo = options.get("loss_fn"), options.get("ppo")
    if name not in (None, "cispo", "ppo"):
        raise ConfigError(f"train: loss_fn={name!r} is unknown; ART has 'cispo' and 'ppo', artnb's are in loss_type=")
    if name is not None and ppo is not None and ppo != (name == "ppo"):
        raise ConfigError(f"train: loss_fn={name!r} and ppo={ppo} contradict each other; give loss_fn")
    if name is None and ppo is None:
        return None
    return "dapo" if name == "ppo" or ppo else "cispo"
