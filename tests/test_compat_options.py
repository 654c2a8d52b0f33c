"""ART's options, in the call and in `_internal_config`: translated, dropped with a line, or refused; never ignored."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

import artnb as art
from artnb.compat.internal_config import translate
from artnb.compat.options import COMPUTED, NOTHING, TRANSLATED, flat, train_config, without_nothing
from artnb.config import asked_for
from artnb.errors import ConfigError
from artnb.serverless.options import SERVICE_NAMES, experimental_config

TABLE = json.loads((Path(__file__).parent / "art_signatures.json").read_text())


def made(config: art.TrainConfig | None = None, **options: Any) -> dict[str, Any]:
    chosen = train_config(config, options)
    return {name: getattr(chosen, name) for name in asked_for(chosen)}


@pytest.mark.parametrize(
    "options, ours",
    [
        ({}, {}),
        ({"learning_rate": 1e-6, "scale_rewards": True}, {"learning_rate": 1e-6, "scale_rewards": "group"}),
        ({"normalize_advantages": True}, {}),
        ({"normalize_advantages": False}, {"scale_rewards": "none"}),
        ({"scale_rewards": False}, {"scale_rewards": "none"}),
        ({"ppo": True, "epsilon": 0.1}, {"loss_type": "dapo", "epsilon": 0.1}),
        ({"loss_fn": "ppo", "epsilon": None, "epsilon_high": 0.3}, {"loss_type": "dapo", "epsilon_high": 0.3}),
        ({"loss_fn": "cispo"}, {"loss_type": "cispo", "epsilon_high": 5.0}),
        ({"ppo": False, "epsilon_high": 2.0, "epsilon": 1.0}, {"loss_type": "cispo", "epsilon_high": 3.0}),
        ({"importance_sampling_level": "sequence"}, {"importance_sampling_level": "sequence"}),
        (
            {"truncated_importance_sampling": 2.0},
            {"importance_correction": "token_truncate", "importance_cap": 2.0},
        ),
        ({"packed_sequence_length": 4096}, {"max_tokens_per_pack": 4096}),
        (
            {"_config": {"ppo": True, "epsilon": 0.3}, "learning_rate": 1e-4},
            {"loss_type": "dapo", "epsilon": 0.3, "learning_rate": 1e-4},
        ),
        ({"loss_type": "grpo", "beta": 0.1}, {"loss_type": "grpo", "beta": 0.1}),
    ],
)
def test_what_arts_options_become(options: dict[str, Any], ours: dict[str, Any]) -> None:
    assert made(**options) == ours


def test_private_options_beside_a_config() -> None:
    config = art.TrainConfig(learning_rate=3e-5)
    assert train_config(config, {"verbose": True}) is config
    both = train_config(config, {"_config": {"scale_rewards": False}})
    assert both.learning_rate == 3e-5 and both.scale_rewards == "none"
    with pytest.raises(ConfigError, match=r"either config=TrainConfig\(\.\.\.\) or single options.*\['epsilon'\]"):
        train_config(config, {"epsilon": 0.1})
    with pytest.raises(ConfigError, match=r"\['ppo'\] are in _config and beside it"):
        train_config(None, {"_config": {"ppo": True}, "ppo": False})
    with pytest.raises(ConfigError, match="must be a dict"):
        train_config(None, {"_config": "fast"})


@pytest.mark.parametrize("method", ["art.LocalBackend.train", "art.ServerlessBackend.train"])
@pytest.mark.parametrize("version", TABLE)
def test_a_call_with_all_of_arts_defaults_asks_for_nothing_odd(version: str, method: str) -> None:
    rows = TABLE[version]
    row = rows.get(method) or rows[method.replace("art.LocalBackend", "art.local.LocalBackend")]
    defaults = {name: _literal(default) for name, kind, default in row["parameters"] if kind == "keyword"}
    assert len(defaults) >= 13
    assert set(defaults) <= NOTHING.keys() | COMPUTED.keys() | TRANSLATED | {f for f in vars(art.TrainConfig())}
    wanted: dict[str, Any] = {"learning_rate": 5e-6, "scale_rewards": "group", "importance_sampling_level": "token"}
    if defaults.get("loss_fn") == "cispo" or defaults.get("ppo") is False:
        wanted |= {"loss_type": "cispo", "epsilon_high": 5.0}
    assert made(**defaults) == wanted | ({"beta": 0.0} if "beta" in defaults else {})
    service = experimental_config(None, without_nothing(flat(defaults), kept=SERVICE_NAMES), step=0)
    assert service["learning_rate"] == 5e-6 and "loss_type" not in service


def _literal(written: str | None) -> Any:
    assert written is not None
    return ast.literal_eval(written)


@pytest.mark.parametrize("name", NOTHING)
def test_what_artnb_has_not_is_refused_and_its_default_is_not(name: str) -> None:
    for value in NOTHING[name]:
        assert made(**{name: value}) == {}
    asking = False if name == "save_checkpoint" else 0.25
    with pytest.raises(ConfigError, match=rf"{name}={asking} is an option of ART's that artnb has not"):
        made(**{name: asking})


@pytest.mark.parametrize("name", COMPUTED)
def test_what_is_not_needed_is_said(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert made(**{name: 7}) == {}
    assert (f"{name} is not needed here" in capsys.readouterr().out) == (name != "verbose")


@pytest.mark.parametrize(
    "options, words",
    [
        ({"loss_fn": "grpo"}, "loss_fn='grpo' is unknown"),
        ({"loss_fn": "ppo", "ppo": False}, "contradict each other"),
        ({"loss_fn": "cispo", "epsilon": 0.2}, "clips the ratio above only"),
        ({"importance_sampling_level": "average"}, "it knows 'token' and 'sequence'"),
        ({"learning_rat": 1}, "did you mean 'learning_rate'"),
    ],
)
def test_wrong_options(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        made(**options)


# _internal_config ---------------------------------------------------------------------------------


def test_an_internal_config_becomes_options() -> None:
    asked = translate(
        art.dev.InternalModelConfig(
            init_args=art.dev.InitArgs(max_seq_length=8192, load_in_4bit=True, random_state=3, fast_inference=True),
            engine_args=art.dev.EngineArgs(
                enforce_eager=True, gpu_memory_utilization=0.8, max_num_seqs=32, swap_space=4
            ),
            peft_args=art.dev.PeftArgs(r=8, lora_alpha=16, target_modules=["q_proj"], lora_dropout=0, bias="none"),
            trainer_args=art.dev.TrainerArgs(),
            tinker_args=None,
            allow_unvalidated_arch=True,
        )
    )
    assert asked.backend == {
        "context_length": 8192,
        "load_in_4bit": True,
        "seed": 3,
        "enforce_eager": True,
        "gpu_memory_utilization": 0.8,
        "max_running": 32,
        "engine_options": {"swap_space": 4},
    }
    assert asked.lora == {"r": 8, "alpha": 16, "target_modules": ("q_proj",)}
    assert asked.dropped == ["fast_inference", "allow_unvalidated_arch"]


@pytest.mark.parametrize(
    "config, words",
    [
        (
            {"init_args": {"load_in_8bit": True}},
            r"init_args\.load_in_8bit=True cannot be honoured; LocalBackend\(load_in_4bit",
        ),
        ({"init_args": {"model_name": "other"}}, "base_model= names the model"),
        ({"init_args": {"max_seq_len": 5}}, r"init_args\.max_seq_len=5 cannot be honoured"),
        ({"peft_args": {"lora_dropout": 0.1}}, r"peft_args\.lora_dropout=0\.1 .*art\.LoraConfig has"),
        ({"trainer_args": {"max_grad_norm": 0.1}}, r"trainer_args\.max_grad_norm=0\.1 .*art\.TrainConfig"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "extra_body"),
        ({"trainer_gpu_ids": [0]}, "share one card"),
        ({"innit_args": {}}, "did you mean 'init_args'"),
        (
            {"init_args": {"max_seq_length": 5}, "engine_args": {"max_model_len": 6}},
            "gives context_length twice: 5 and 6",
        ),
    ],
)
def test_what_an_internal_config_cannot_ask(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        art.TrainableModel(name="m", project="p", base_model="b", _internal_config=config)


def test_every_key_of_art_is_known() -> None:
    """A key that ART has and artnb does not know would be refused as if it were a misspelling."""
    from artnb.compat import internal_config as known

    for rows in TABLE.values():
        for owner, names in (
            ("art.dev.InitArgs.", {*known._INIT, *known._INIT_NOT_NEEDED, *known._INIT_NOTHING}),
            ("art.dev.PeftArgs.", {*known._LORA, *known._LORA_NOT_NEEDED, *known._LORA_NOTHING}),
            ("art.LoRAConfig.", {*known._LORA, *known._LORA_NOT_NEEDED, *known._LORA_NOTHING}),
        ):
            theirs = {name.removeprefix(owner) for name in rows if name.startswith(owner)}
            assert theirs <= names


def test_the_backend_takes_what_a_model_asks_for_or_says_why_not(tmp_path: Path) -> None:
    config = {"init_args": {"max_seq_length": 128}, "engine_args": {"seed": 5}}
    backend = art.LocalBackend(path=tmp_path)
    backend.take_options(translate(config).backend)
    assert (backend.context_length, backend.seed) == (128, 5)
    backend.take_options(translate(config).backend)  # a cell that is run again
    with pytest.raises(ConfigError, match="context_length=256, but this LocalBackend was made with context_length=128"):
        backend.take_options({"context_length": 256})
    with pytest.raises(ConfigError, match="gpu_memory_utilization=2"):
        backend.take_options({"gpu_memory_utilization": 2})

    class Service:
        pass

    model = art.TrainableModel(name="m", project="p", base_model="b", _internal_config=config)
    with pytest.raises(ConfigError, match=r"Service has no options \['context_length', 'seed'\]"):
        model.register(Service())  # type: ignore[arg-type]


async def test_options_that_come_too_late(tiny_base: Path, tmp_path: Path) -> None:
    async with art.LocalBackend(path=tmp_path, device="cpu", verbose=False) as backend:
        first = art.TrainableModel(name="a", project="p", base_model=tiny_base, lora=art.LoraConfig(r=4))
        await first.register(backend)
        with pytest.raises(ConfigError, match="set it before"):
            first._internal_config = {"init_args": {"max_seq_length": 64}}
        second = art.TrainableModel(name="b", project="p", base_model=tiny_base, lora_config={"rank": 4, "alpha": 8})
        second._internal_config = {"init_args": {"max_seq_length": 64}}
        assert second.lora == art.LoraConfig(r=4, alpha=8)
        with pytest.raises(ConfigError, match="context_length=64, but this LocalBackend has loaded its base"):
            second.register(backend)
        with pytest.raises(ConfigError, match="the endpoint's options are LocalBackend's"):
            first.register(backend, _openai_client_config={"log_file": "x"})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="lora and lora_config say the same"):
        art.TrainableModel(name="c", project="p", base_model="b", lora=art.LoraConfig(), lora_config={"rank": 4})
