"""Options: an unknown one names the nearest, an impossible value is refused, and none is accepted and then ignored."""

from __future__ import annotations

import random
from dataclasses import fields
from typing import Any

import pytest
from tiny_models import make_model, make_row

import artnb as art
from artnb.config import LoraConfig, TrainConfig
from artnb.errors import ConfigError
from artnb.training.policy import Policy, load_policy
from artnb.training.trainer import Trainer
from artnb.training.types import RowBatch

LORA = LoraConfig(r=4)
# option → (a value, another, what else must be set): each pair must make two different steps.
CONFIG_PAIRS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "learning_rate": (1e-2, 1e-3, {}),
    "lr_schedule": ("constant", "linear", {"total_steps": 4}),
    "warmup_steps": (0, 4, {}),
    "total_steps": (3, 4, {"lr_schedule": "cosine"}),
    "loss_type": ("dapo", "dr_grpo", {}),
    "importance_sampling_level": ("token", "sequence", {"epsilon": 0.02, "num_iterations": 3}),
    "epsilon": (0.2, 1e-3, {"num_iterations": 3}),
    "epsilon_high": (0.2, 1e-3, {"num_iterations": 3}),
    "delta": (None, 1.001, {"num_iterations": 3}),
    "beta": (0.0, 0.5, {}),
    "entropy_coef": (0.0, 0.5, {}),
    "num_iterations": (1, 3, {}),
    "minibatches": (1, 2, {}),
    "max_grad_norm": (1e3, 1e-3, {}),
    "weight_decay": (0.0, 0.5, {}),
    "max_completion_length": (50, 500, {"loss_type": "dr_grpo"}),
    "importance_correction": ("none", "token_truncate", {"importance_cap": 1.01}),
    "importance_cap": (1.01, 3.0, {"importance_correction": "token_truncate"}),
    "max_tokens_per_pack": (10, 10_000, {}),
}
# These act outside of an ordinary step; test_rows, test_trainer and test_user_reports hold them.
ELSEWHERE = {"scale_rewards", "mask_truncated_completions", "max_nonfinite_steps", "max_mismatch_kl"}


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    folder = make_model("llama", tmp_path_factory.mktemp("small"), num_hidden_layers=1)
    return load_policy(folder, lora=LORA, device="cpu", dtype="float32")


def one_step(policy: Policy, config: TrainConfig) -> dict[str, float]:
    """Two steps of a fresh adapter: the norm of its weights after them, and how many packs there were."""
    rng = random.Random(0)
    rows = []
    for i in range(8):
        ids = [rng.randrange(400) for _ in range(10 + i)]
        row = make_row(ids, list(range(4, len(ids))), advantage=(-1.0) ** i * (1 + i), group=i // 4)
        row.logprobs[row.sampled] -= 5.0  # the sampler found its tokens less likely than the trainer does, or more
        rows.append(row)
    policy.add_adapter("probe", LORA)
    try:
        trainer = Trainer(policy, "probe", seed=0)
        metrics: dict[str, float] = {}
        for step in range(2):
            metrics = dict(trainer.step(RowBatch(rows=rows), config, step=step).metrics)
        weights = policy.adapter_parameters("probe").values()
        metrics["weights"] = float(sum(w.detach().double().abs().sum() for w in weights))
    finally:
        policy.drop_adapter("probe")
    return {key: metrics[key] for key in ("weights", "packs")}


def test_every_option_is_covered() -> None:
    assert {field.name for field in fields(TrainConfig)} == set(CONFIG_PAIRS) | ELSEWHERE


@pytest.mark.parametrize("option", CONFIG_PAIRS)
def test_every_option_changes_the_step(policy: Policy, option: str) -> None:
    """user-reports #21: no option is accepted and then ignored."""
    one, other, rest = CONFIG_PAIRS[option]
    base = {"learning_rate": 1e-2, "importance_correction": "none"} | rest
    first = one_step(policy, TrainConfig(**(base | {option: one})))
    assert first == one_step(policy, TrainConfig(**(base | {option: one}))), "the same options give the same step"
    assert first != one_step(policy, TrainConfig(**(base | {option: other})))


@pytest.mark.parametrize(
    ("make_it", "nearest"),
    [
        (lambda: art.TrainConfig(los_type="dr_grpo"), "loss_type"),  # type: ignore[call-arg]
        (lambda: art.TrainConfig(loss_type="dr_grp"), "dr_grpo"),  # type: ignore[arg-type]
        (lambda: art.TrainConfig(scale_rewards="groups"), "group"),  # type: ignore[arg-type]
        (lambda: art.TrainConfig(importance_correction="token_mas"), "token_mask"),  # type: ignore[arg-type]
        (lambda: art.TrainConfig(lr_schedule="cosin"), "cosine"),  # type: ignore[arg-type]
        (lambda: art.TrainSFTConfig(batchsize=2), "batch_size"),  # type: ignore[call-arg]
        (lambda: art.LoraConfig(alfa=3), "alpha"),  # type: ignore[call-arg]
        (lambda: art.TrainableModel(name="n", project="p", base_model="b", runname="x"), "run_name"),
        (lambda: art.Model(name="n", project="p", base_pth="x"), "base_path"),
        (lambda: art.trajectory(rewards=1.0), "reward"),
    ],
)
def test_unknown_options_name_the_nearest(make_it: Any, nearest: str) -> None:
    """user-reports #21."""
    with pytest.raises(ConfigError, match=f"'({nearest})'"):
        make_it()


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("learning_rate", float("nan")),
        ("learning_rate", "1e-5"),
        ("epsilon", -0.1),
        ("num_iterations", 1.5),
        ("beta", float("inf")),
        ("minibatches", True),
        ("max_grad_norm", 0),
        ("max_tokens_per_pack", 0),
    ],
)
def test_values_that_cannot_be_are_refused_by_name(option: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=option):
        art.TrainConfig(**{option: value})
