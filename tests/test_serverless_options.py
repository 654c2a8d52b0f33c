"""Each option of TrainConfig and TrainSFTConfig reaches the service, or is refused with the reason. None is ignored."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
from training_service import RL_KEYS

import artnb as art
from artnb.errors import ConfigError
from artnb.serverless.options import ServiceOptions, experimental_config, sft_plan

DEFAULT = {"learning_rate": 1e-5}


def made(config: art.TrainConfig | None = None, step: int = 0, **options: Any) -> dict[str, Any]:
    return experimental_config(config, options, step)


@pytest.mark.parametrize(
    "options, sent",
    [
        ({}, {}),
        ({"learning_rate": 3e-6}, {"learning_rate": 3e-6}),
        ({"loss_type": "cispo", "epsilon_high": 5.0}, {"loss_fn": "cispo", "epsilon_high": 4.0}),
        ({"epsilon": 0.1, "epsilon_high": 0.3}, {"epsilon": 0.1, "epsilon_high": 0.3}),
        ({"importance_sampling_level": "sequence"}, {"importance_sampling_level": "sequence"}),
        ({"scale_rewards": "none"}, {"scale_rewards": False, "normalize_advantages": False}),
        ({"scale_rewards": "group"}, {"scale_rewards": True, "normalize_advantages": True}),
        ({"importance_correction": "none"}, {}),
        (
            {"importance_correction": "token_truncate", "importance_cap": 2.0},
            {"truncated_importance_sampling": 2.0},
        ),
        ({"importance_correction": "token_truncate"}, {"truncated_importance_sampling": 3.0}),
        ({"beta": 0.0, "delta": None, "num_iterations": 1, "epsilon_high": None}, {}),
    ],
)
def test_what_train_config_becomes(options: dict[str, Any], sent: dict[str, Any]) -> None:
    assert made(art.TrainConfig(**options)) == {**DEFAULT, **sent}


def test_the_schedule_is_followed_here() -> None:
    config = art.TrainConfig(learning_rate=1e-4, lr_schedule="linear", warmup_steps=2, total_steps=12)
    rates = [made(config, step)["learning_rate"] for step in range(12)]
    assert rates == [config.learning_rate_at(step) for step in range(12)]
    assert rates[0] == pytest.approx(5e-5) and rates[1] == rates[2] == 1e-4 and 0 < rates[-1] < 2e-5


@pytest.mark.parametrize(
    "options, words",
    [
        ({"loss_type": "dapo"}, r"TrainConfig\(loss_type='dapo'\); it knows loss_type='cispo', and loss_fn='ppo'"),
        ({"loss_type": "grpo"}, "loss_type='grpo'"),
        ({"scale_rewards": "batch"}, "scale_rewards='batch'"),
        ({"importance_correction": "sequence_mask"}, "it knows 'none' and 'token_truncate'"),
        ({"importance_cap": 2.0}, "a cap is sent with importance_correction='token_truncate' only"),
        ({"beta": 0.1}, "kl_penalty_coef="),
        ({"max_grad_norm": 1.0}, "max_grad_norm=1.0"),  # as the default says, but the service was not asked
        ({"weight_decay": 0.0}, "weight_decay=0.0"),
        ({"max_tokens_per_pack": 4096}, "packed_sequence_length="),
    ],
)
def test_what_train_config_cannot_become(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=f"the W&B training service has no field for .*{words}.*Leave it out"):
        made(art.TrainConfig(**options))


OTHER_VALUES = {
    "learning_rate": 3e-4,
    "lr_schedule": "cosine",
    "warmup_steps": 3,
    "total_steps": 9,
    "loss_type": "cispo",
    "importance_sampling_level": "sequence",
    "scale_rewards": "batch",
    "importance_correction": "token_truncate",
    "mask_truncated_completions": True,
}


@pytest.mark.parametrize("name", [f.name for f in fields(art.TrainConfig)])
def test_no_option_is_silently_ignored(name: str) -> None:
    """user-reports #21, at the service. An option that is added to TrainConfig has to be looked at here."""
    default = getattr(art.TrainConfig(), name)
    number = 7 if isinstance(default, int) or name.startswith("max_") else 0.125
    options = {name: OTHER_VALUES.get(name, number)}
    if name == "lr_schedule":
        options["total_steps"] = 9
    if name == "total_steps":
        options["lr_schedule"] = "linear"
    if name == "loss_type":
        options["epsilon_high"] = 5.0
    config = art.TrainConfig(**options)
    try:
        sent = made(config, step=1)
    except ConfigError as error:
        assert name in str(error)
    else:
        assert sent != made(art.TrainConfig(), step=1)


def test_a_copied_config_is_refused_for_what_differs_only() -> None:
    copied = replace(art.TrainConfig(learning_rate=1e-4), learning_rate=2e-4)
    assert made(copied) == {"learning_rate": 2e-4}
    with pytest.raises(ConfigError, match=r"entropy_coef=0\.01"):
        made(replace(copied, entropy_coef=0.01))


def test_the_services_own_options() -> None:
    assert {f.name for f in fields(ServiceOptions)} == RL_KEYS
    own = {"kl_penalty_coef": 0.1, "kl_penalty_step_lag": 2, "advantage_balance": -0.5, "ppo": True, "loss_fn": "ppo"}
    assert made(**own) == {**DEFAULT, **own}
    assert made(art.TrainConfig(learning_rate=1e-4), loss_fn="cispo") == {"learning_rate": 1e-4, "loss_fn": "cispo"}
    assert made(epsilon_high=4.0) == {**DEFAULT, "epsilon_high": 4.0}  # the service's meaning
    assert made(loss_type="cispo", epsilon_high=5.0) == {**DEFAULT, "loss_fn": "cispo", "epsilon_high": 4.0}
    assert made(learning_rate=0) == {"learning_rate": 0}


@pytest.mark.parametrize(
    "options, words",
    [
        ({"learning_rat": 1e-4}, "did you mean 'learning_rate'"),
        ({"loss_fn": "grpo"}, "loss_fn='grpo' is unknown"),
        ({"loss_fn": "ppo", "ppo": False}, "contradict each other"),
        ({"kl_penalty_reference_step": 1, "kl_penalty_step_lag": 1}, "not both"),
        ({"kl_penalty_step_lag": 0}, "must be >= 1"),
        ({"advantage_balance": 2.0}, "must be >= -1"),
        ({"mask_prob_ratio": 1}, "must be True or False"),
        ({"scale_rewards": "group"}, "must be True or False"),
        ({"kimi_k2_tau": 0.1}, "no option 'kimi_k2_tau'"),
    ],
)
def test_wrong_options_of_the_service(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        made(**options)


def test_an_option_given_twice_is_told() -> None:
    with pytest.raises(ConfigError, match=r"\['epsilon'\] are in config and beside it"):
        made(art.TrainConfig(epsilon=0.1), epsilon=0.2)
    with pytest.raises(ConfigError, match=r"\['learning_rate'\] are in config and beside it"):
        made(art.TrainConfig(learning_rate=1e-4), learning_rate=1e-5)
    with pytest.raises(ConfigError, match=r"give \['loss_type'\] in config"):
        made(art.TrainConfig(), loss_type="cispo", epsilon_high=5.0)
    with pytest.raises(ConfigError, match=r"config must be an art\.TrainConfig, not dict"):
        experimental_config({"learning_rate": 1e-4}, {}, 0)  # type: ignore[arg-type]


def test_a_supervised_plan_is_the_local_one() -> None:
    config, order = sft_plan(art.TrainSFTConfig(batch_size=2, epochs=2, lr_schedule="linear", learning_rate=1e-4), 6)
    assert config["batch_size"] == 2 and config["assistant_turns"] == "all"
    assert sorted(order[:6]) == sorted(order[6:]) == list(range(6)) and order[:6] != order[6:]
    rates = config["learning_rate"]
    assert len(rates) == 6 and rates == sorted(rates, reverse=True) and rates[0] == 1e-4
    config, order = sft_plan(art.TrainSFTConfig(shuffle=False), 3)
    assert config == {"batch_size": 2, "learning_rate": 5e-5, "assistant_turns": "all"} and order == [0, 1, 2]
    assert sft_plan(art.TrainSFTConfig(learning_rate=[1e-4, 2e-4]), 3)[0]["learning_rate"] == [1e-4, 2e-4]


@pytest.mark.parametrize(
    "options, words",
    [
        ({"weight_decay": 0.1}, r"no field for TrainSFTConfig\(weight_decay=0\.1\)"),
        ({"max_grad_norm": 0.5}, "max_grad_norm"),
        ({"max_tokens_per_pack": 512}, "max_tokens_per_pack"),
        ({"epochs": 2}, "3 trajectories make no whole batches of 2"),
        ({"learning_rate": [1e-4]}, "1 learning rates for 2 batches"),
    ],
)
def test_what_a_supervised_plan_cannot_be(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        sft_plan(art.TrainSFTConfig(**options), 3)
