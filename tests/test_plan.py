"""The memory plan. Expected numbers are published ones or worked out here from sizes, never by the code under test."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import peft
import pytest
import torch
import transformers
from huggingface_hub import constants
from tiny_models import ARCHITECTURES, make_model

from artnb.cli import main
from artnb.config import LoraConfig
from artnb.errors import ConfigError, ModelError
from artnb.local.cards import CARDS, Card, find_card, this_card
from artnb.local.plan import MemoryPlan, plan_memory
from artnb.local.shapes import ModelShape, known_shape, shape_of

GIB = 1 << 30
PUBLISHED = {  # parameters as the models' pages have them
    "HuggingFaceTB/SmolLM2-135M-Instruct": 134_515_008,
    "HuggingFaceTB/SmolLM2-360M": 361_821_120,
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": 1_711_376_384,
    "Qwen/Qwen2.5-0.5B-Instruct": 494_032_768,
    "Qwen/Qwen2.5-1.5B": 1_543_714_304,
    "Qwen/Qwen2.5-3B-Instruct": 3_085_938_688,
    "Qwen/Qwen2.5-7B-Instruct": 7_615_616_512,
    "Qwen/Qwen2.5-14B-Instruct": 14_770_033_664,
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-4B-Base": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-14B": 14_768_307_200,
    "meta-llama/Llama-3.2-1B-Instruct": 1_235_814_400,
    "unsloth/Llama-3.2-3B-Instruct": 3_212_749_824,
    "meta-llama/Meta-Llama-3.1-8B-Instruct": 8_030_261_248,
    "google/gemma-3-1b-it": 999_885_952,
}
QWEN_7B, LLAMA_1B, SMOL = "Qwen/Qwen2.5-7B-Instruct", "meta-llama/Llama-3.2-1B-Instruct", "HuggingFaceTB/SmolLM2-135M"


def known(name: str) -> ModelShape:
    shape = known_shape(name)
    assert shape is not None
    return shape


def planned(name: str, card: str, **options: Any) -> MemoryPlan:
    return plan_memory(known(name), find_card(card), **options)


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError("no network here\nsecond line")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", fail)


# Cards


@pytest.mark.parametrize(
    ("capability", "dtype", "fp8", "flex"),
    [
        ((7, 0), "float16", False, False),
        ((7, 5), "float16", False, False),
        ((8, 0), "bfloat16", False, True),
        ((8, 6), "bfloat16", False, True),
        ((8, 9), "bfloat16", True, True),
        ((9, 0), "bfloat16", True, True),
        ((10, 0), "bfloat16", True, True),
        ((12, 0), "bfloat16", True, True),
    ],
)
def test_what_a_card_can_do_follows_from_its_capability(
    capability: tuple[int, int], dtype: str, fp8: bool, flex: bool
) -> None:
    """user-reports #2 and #3."""
    card = Card("H100", 16 * GIB, capability)  # a misleading name changes nothing
    assert (card.dtype, card.fp8, card.flex_attention) == (dtype, fp8, flex)
    assert card.cuda_graphs == (capability >= (8, 0))


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("t4", "T4"),
        ("Tesla T4", "T4"),
        ("NVIDIA L40S", "L40S"),
        ("rtx-4090", "RTX 4090"),
        ("GeForce RTX 3090", "RTX 3090"),
        ("a100_80gb", "A100"),
        ("A100-40GB", "A100-40GB"),
        ("h200", "H200"),
    ],
)
def test_cards_are_found_however_they_are_spelled(spelling: str, name: str) -> None:
    assert find_card(spelling).name == name


def test_an_unknown_card_is_an_error_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"'h20x'.*did you mean 'H200'"):
        find_card("h20x")
    with pytest.raises(ConfigError, match=r"known: A100, .*T4"):
        find_card("abacus")
    with pytest.raises(ConfigError, match="known: "):
        find_card("")


def test_memory_of_cards_is_a_little_less_than_on_the_label() -> None:
    label = {"T4": 16, "A10G": 24, "L4": 24, "RTX 4090": 24, "RTX 3090": 24, "A100-40GB": 40, "L40S": 48, "H100": 80}
    label |= {"A100": 80, "H200": 141, "B200": 192}
    assert {card.name for card in CARDS} == set(label)
    for card in CARDS:
        assert 0.88 < card.memory_bytes / (label[card.name] * GIB) < 1.0, card.name
    assert 0.99 < find_card("H200").memory_bytes / 150_754_820_096 < 1.0  # 143,771 MiB, as nvidia-smi counts them


def test_this_machines_card(monkeypatch: pytest.MonkeyPatch) -> None:
    found = SimpleNamespace(name="Some GPU", total_memory=12345, major=8, minor=9)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    assert this_card() == Card("Some GPU", 12345, (8, 9))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"no CUDA device; name a card: T4, .*H200"):
        this_card()


# Shapes


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_the_published_ones(name: str) -> None:
    assert known(name).parameters == PUBLISHED[name]


@pytest.mark.parametrize(
    ("name", "lora", "parameters"),
    [  # as PEFT's and Unsloth's notebooks print them
        (QWEN_7B, LoraConfig(r=16), 40_370_176),
        (LLAMA_1B, LoraConfig(r=16), 11_272_192),
        ("Qwen/Qwen3-4B", LoraConfig(r=32), 66_060_288),
        ("meta-llama/Llama-3.1-8B", LoraConfig(r=8, target_modules=("q_proj", "v_proj")), 3_407_872),
        ("meta-llama/Llama-3.1-8B", LoraConfig(r=8, target_modules=r".*\.(q|v)_proj"), 3_407_872),
    ],
)
def test_adapter_sizes_are_the_printed_ones(name: str, lora: LoraConfig, parameters: int) -> None:
    assert known(name).adapter_parameters(lora) == parameters


def test_target_modules_that_name_nothing_are_an_error() -> None:
    with pytest.raises(ConfigError, match=r"'q_project'.*down_proj.*q_proj"):
        known(QWEN_7B).adapter_parameters(LoraConfig(target_modules=("q_project",)))


@pytest.mark.parametrize("kind", ARCHITECTURES)
@pytest.mark.parametrize("targets", ["all-linear", ("q_proj", "down_proj")])
def test_a_folders_shape_is_that_of_the_loaded_model(kind: str, targets: Any, tmp_path: Path) -> None:
    make_model(kind, tmp_path, tokenizer=False)
    shape = shape_of(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    assert (shape.layers, shape.hidden, shape.heads, shape.kv_heads, shape.head_dim) == (3, 32, 4, 2, 16)
    assert (shape.inner, shape.vocab, shape.max_position_embeddings) == (64, 400, 512)
    assert shape.embedding_parameters == 400 * 32 * (1 if shape.tied else 2)
    assert shape.tied == (kind == "gemma3")
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(r=4, target_modules=targets if targets == "all-linear" else [*targets])
    )
    assert shape.adapter_parameters(LoraConfig(r=4, target_modules=targets)) == adapted.get_nb_trainable_parameters()[0]


@pytest.mark.parametrize(
    ("name", "config"),
    [
        (SMOL, transformers.LlamaConfig),
        ("Qwen/Qwen2.5-0.5B", transformers.Qwen2Config),
        ("Qwen/Qwen3-0.6B", transformers.Qwen3Config),
        ("google/gemma-3-1b-it", transformers.Gemma3TextConfig),
    ],
)
def test_the_table_agrees_with_the_model_on_the_meta_device(name: str, config: Any, tmp_path: Path) -> None:
    table = known(name)
    config(
        architectures=["unused"],
        vocab_size=table.vocab,
        hidden_size=table.hidden,
        intermediate_size=table.inner,
        num_hidden_layers=table.layers,
        num_attention_heads=table.heads,
        num_key_value_heads=table.kv_heads,
        head_dim=table.head_dim,
        tie_word_embeddings=table.tied,
        max_position_embeddings=table.max_position_embeddings,
    ).save_pretrained(tmp_path)
    read = shape_of(tmp_path)
    fields = set(ModelShape.__dataclass_fields__) - {"name", "source"}
    assert {f: getattr(read, f) for f in fields} == {f: getattr(table, f) for f in fields}


def test_a_pass_costs_what_the_policy_counts(tmp_path: Path) -> None:
    from artnb.training.policy import load_policy

    make_model("qwen3", tmp_path)
    policy = load_policy(tmp_path, lora=LoraConfig(r=2), device="cpu", dtype="bfloat16")
    assert shape_of(tmp_path).activation_bytes(2) == policy._layer_bytes() + policy._input_bytes()


@pytest.mark.usefixtures("offline")
def test_without_network_the_table_answers_and_says_so() -> None:
    shape = shape_of("unsloth/Qwen2.5-7B-Instruct")
    assert shape.parameters == PUBLISHED[QWEN_7B] and "did not answer" in shape.source
    assert "did not answer" in plan_memory(shape, find_card("H100")).table()
    with pytest.raises(ModelError, match=r"'someone/else-9B'.*no network here\. Without network.*Qwen2\.5-7B"):
        shape_of("someone/else-9B")


@pytest.mark.parametrize("answers", [True, False])
def test_the_hub_is_asked_only_where_it_answers(answers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def missing(name: str, local_files_only: bool = False) -> None:
        asked.append("cache" if local_files_only else "hub")
        raise OSError("not there")

    def head(*_: Any, **__: Any) -> None:
        if not answers:
            raise httpx.ConnectError("no route")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", missing)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(httpx, "head", head)
    assert "own table" in shape_of(QWEN_7B).source
    assert asked == (["cache", "hub"] if answers else ["cache"])


def test_folders_that_hold_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such folder"):
        shape_of(tmp_path / "none")
    with pytest.raises(ModelError, match="no such folder"):
        shape_of("./Qwen2.5-7B")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "abacus"}))
    with pytest.raises(ModelError, match="cannot be read"):
        shape_of(tmp_path)


def test_published_quantized_weights_are_seen(tmp_path: Path) -> None:
    make_model("llama", tmp_path, tokenizer=False)
    plain, file = shape_of(tmp_path), tmp_path / "config.json"
    config = json.loads(file.read_text())

    def stored_as(quantization: dict[str, Any]) -> ModelShape:
        file.write_text(json.dumps(config | {"quantization_config": quantization}))
        return shape_of(tmp_path)

    packed = stored_as({"quant_method": "bitsandbytes", "load_in_4bit": True})
    assert packed.stored == "4-bit" and packed.linears == plain.linears and packed.parameters == plain.parameters
    assert plan_memory(packed, find_card("T4")).precision == "4-bit"
    with pytest.raises(ConfigError, match="holds its weights in 4-bit"):
        plan_memory(packed, find_card("H100"), load_in_fp8=True)
    with pytest.raises(ConfigError, match="'gptq'"):
        stored_as({"quant_method": "gptq", "bits": 4})
    assert known("unsloth/Qwen2.5-7B-Instruct-bnb-4bit").stored == "4-bit"


# Plans


def test_qwen_7b_in_4_bit_on_a_t4() -> None:
    plan = planned(QWEN_7B, "T4", load_in_4bit=True)
    linear = 28 * (2 * 3584 * 3584 + 2 * 3584 * 512 + 3 * 3584 * 18944)
    packed = linear * (1 / 2 + 1 / 64 + 1 / 64 / 64)  # 4 bits, 8 bits per 64, 32 bits per 64 × 256
    assert plan.sampling["weights"] == pytest.approx(packed + 2 * (7_615_616_512 - linear), abs=1)
    assert plan.kv_tokens == plan.kv_cache_bytes / (2 * 28 * 4 * 128 * 2)
    adapter = 40_370_176
    assert plan.training["lora"] == 4 * adapter
    assert plan.training["gradients"] == 8 * adapter  # in fp32, and rounded to 16 bits with the adapter itself
    assert plan.training["optimizer"] == plan.sampling["optimizer"] == 8 * adapter
    assert 2 * 2 * adapter <= plan.sampling["engine_adapters"] < 1.15 * 2 * 2 * adapter  # embeddings may have slots too
    assert plan.training["logits"] == 256 * 152_064 * 4 * 3
    assert plan.sampling["graphs"] == 0 and plan.dtype == "float16"
    assert plan.context_length >= 4096 and plan.kv_tokens >= 8 * plan.context_length
    assert plan.tokens_per_pass >= plan.context_length
    assert max(plan.sampling_bytes, plan.training_bytes) <= 14.56 * GIB * 0.94 + 1
    assert plan.sleep and "kv_cache" not in plan.training


def test_qwen_7b_on_an_h200() -> None:
    plan = planned(QWEN_7B, "H200")
    assert plan.sampling["weights"] == plan.training["weights"] == 15_231_233_024
    assert plan.kv_cache_bytes > 100 * GIB and plan.kv_tokens > 1_800_000
    assert plan.sampling_bytes <= (139.8 - 4) * GIB + 1
    taken = plan.gpu_memory_utilization * 139.8 * GIB
    engine = 15_231_233_024 + plan.kv_cache_bytes + plan.sampling["graphs"] + plan.sampling["engine_adapters"]
    assert engine + plan.sampling["workspace"] < taken < engine + plan.sampling["workspace"] + 0.3 * GIB
    assert plan.sampling["graphs"] == 51 * 28 * 768 * 1024  # 51 batch sizes of 28 layers


@pytest.mark.parametrize("card", [card.name for card in CARDS])
@pytest.mark.parametrize("name", [SMOL, "Qwen/Qwen3-1.7B", QWEN_7B, "Qwen/Qwen2.5-14B", "google/gemma-3-4b-it"])
@pytest.mark.parametrize("options", [{}, {"load_in_4bit": True}, {"engine_shares_weights": False}, {"sleep": "never"}])
def test_every_plan_fits_and_every_refusal_names_a_way_out(card: str, name: str, options: dict[str, Any]) -> None:
    try:
        plan = planned(name, card, **options)
    except ConfigError as error:
        follow(str(error), name, card, options)
        return
    total = find_card(card).memory_bytes
    kept = min(0.06 * total, 4 * GIB)
    for phase in (plan.sampling, plan.training):
        assert sum(phase.values()) <= total - kept + 1
        assert all(amount >= 0 for amount in phase.values())
    assert plan.kv_tokens >= plan.context_length <= plan.tokens_per_pass
    assert 0 < plan.gpu_memory_utilization < 1
    assert plan.sleep == ("kv_cache" not in plan.training)
    if not plan.sleep:
        assert plan.training["kv_cache"] == plan.kv_cache_bytes


def follow(message: str, name: str, card: str, options: dict[str, Any]) -> None:
    """Take every way out that a refusal names."""
    if "float16's range" in message:
        assert "gemma" in name and find_card(card).capability < (8, 0)
        return
    assert re.search(r"needs [\d.]+ GiB at least; .* has [\d.]+ GiB", message), message
    ways = message.partition("; use ")[2].split(", or ")
    assert ways != [""], message
    for way in ways:
        changed, on = dict(options), card
        for part in way.split(" with "):
            if found := re.fullmatch(r"(\w+)<=(\d+)", part):
                changed[found[1]] = int(found[2])
            elif found := re.fullmatch(r"LoraConfig\(r=(\d+)\)", part):
                changed["lora"] = LoraConfig(r=int(found[1]))
            elif found := re.fullmatch(r"(\w+)='?(\w+)'?", part):
                changed[found[1]] = {"True": True}.get(found[2], found[2])
            elif found := re.fullmatch(r"a card like (.+)", part):
                on = found[1]
            else:
                raise AssertionError(f"cannot follow {part!r} of: {message}")
        planned(name, on, **changed)


def test_a_t4_refuses_7b_in_fp16_with_the_way_out() -> None:
    """user-reports #63."""
    with pytest.raises(ConfigError, match=r"needs 17\.\d GiB at least; T4 has 14\.6 GiB.*use load_in_4bit=True"):
        planned(QWEN_7B, "T4", context_length=2048)


def test_the_longest_context_is_found() -> None:
    options: dict[str, Any] = {"load_in_4bit": True}
    with pytest.raises(ConfigError) as refused:
        planned(QWEN_7B, "T4", context_length=32768, **options)
    found = re.search(r"context_length<=(\d+)", str(refused.value))
    assert found
    longest = int(found[1])
    planned(QWEN_7B, "T4", context_length=longest, **options)
    with pytest.raises(ConfigError, match="does not fit"):
        planned(QWEN_7B, "T4", context_length=longest + 256, **options)


def test_4_bit_is_offered_in_place_of_fp8() -> None:
    with pytest.raises(ConfigError, match=r"use load_in_4bit=True instead of load_in_fp8, or context_length<=\d+"):
        planned("Qwen/Qwen2.5-14B", "L4", load_in_fp8=True, context_length=8192)
    planned("Qwen/Qwen2.5-14B", "L4", load_in_4bit=True, context_length=8192)


def test_rank_and_requests_are_ways_out_too() -> None:
    with pytest.raises(ConfigError, match=r"LoraConfig\(r=\d+\)") as refused:
        planned("Qwen/Qwen2.5-1.5B", "T4", lora=LoraConfig(r=512), context_length=16384)
    found = re.search(r"LoraConfig\(r=(\d+)\)", str(refused.value))
    assert found
    planned("Qwen/Qwen2.5-1.5B", "T4", lora=LoraConfig(r=int(found[1])), context_length=16384)
    many: dict[str, Any] = {"max_running": 4096, "rollouts": 4096, "context_length": 1024}
    with pytest.raises(ConfigError, match=r"max_running<=(2048|1024|512|256)\b"):
        planned("Qwen/Qwen2.5-1.5B", "T4", **many)


def test_where_nothing_smaller_helps_a_larger_card_is_named() -> None:
    tiny = Card("toy", 2 * GIB, (8, 9))
    with pytest.raises(ConfigError, match="use a card like A10G"):
        plan_memory(known("Qwen/Qwen2.5-7B"), tiny)
    with pytest.raises(ConfigError, match="a card like T4"):
        plan_memory(known("Qwen/Qwen2.5-3B"), tiny, load_in_4bit=True)


@pytest.mark.parametrize("card", ["T4", "L4"])
def test_llama_1b_fits_small_cards_as_it_is(card: str) -> None:
    plan = planned(LLAMA_1B, card)
    assert plan.sampling["weights"] == 2 * 1_235_814_400 and plan.context_length >= 8192
    assert plan.dtype == ("float16" if card == "T4" else "bfloat16")


def test_sleep_only_where_both_do_not_fit() -> None:
    """user-reports #62."""
    both = planned(SMOL, "H200")
    assert not both.sleep and both.kv_tokens == 256 * 8192
    assert planned(SMOL, "H200", sleep="always").sleep
    assert not planned(SMOL, "T4", context_length=512, rollouts=16).sleep
    crowded = planned(SMOL, "T4", context_length=8192)
    assert crowded.sleep
    awake = planned(SMOL, "T4", context_length=8192, sleep="never")
    assert not awake.sleep and 8192 <= awake.kv_tokens < crowded.kv_tokens
    with pytest.raises(ConfigError, match="sleep='auto'"):
        planned(QWEN_7B, "L4", context_length=8192, sleep="never")


def test_awake_and_crowded_cache_and_trainer_share_what_is_left() -> None:
    plan = planned(SMOL, "T4", context_length=8192, sleep="never")
    assert plan.kv_tokens > 20 * 8192 and plan.tokens_per_pass > 8192


def test_a_large_batch_to_sample_from_counts_against_the_cache() -> None:
    """The logits of 1,024 requests leave less room while sampling than the trainer does while training."""
    plan = planned("Qwen/Qwen2.5-0.5B", "T4", rollouts=1024, max_running=1024, context_length=768)
    assert (
        plan.sampling["workspace"] > 1024 * 151_936 * 24 > plan.training["activations"] + plan.training["logits"] - GIB
    )
    assert plan.sampling_bytes <= 14.56 * GIB * 0.94 + 1 and plan.kv_tokens < 1024 * 768 and plan.sleep


def test_a_pass_holds_a_whole_row_and_one_unpacked_layer() -> None:
    plan = planned(QWEN_7B, "T4", load_in_4bit=True, context_length=16_000)
    assert plan.tokens_per_pass == 16_000
    kept = 6 * 3584 + 3 * 28 * 128 + 2 * 2 * 4 * 128 + 4 * 18944 + 28 * 3584  # one layer, and the inputs of all
    assert plan.training["activations"] == 16_000 * kept * 2 + 3584 * 18944 * 2
    assert plan.activation_budget >= plan.training["activations"] + plan.training["logits"]


def test_the_optimizers_copy_of_a_huge_adapter_is_counted() -> None:
    """Rank 256 of a 7B model: 2.4 GiB each for weights, gradients, both rounded, two moments, and for a moment their
    quotient."""
    others = 10
    without = others + 0.6 + 14.2 + 2 * 1.2 + 5 * 2.4 + 1.0  # GiB; graphs are 1.0
    assert without < 44.39 * 0.94 < without + 2.4
    with pytest.raises(ConfigError, match=r"training needs 4[2-3]"):
        planned(QWEN_7B, "L40S", lora=LoraConfig(r=256), context_length=512, used_by_others=others << 30)


def test_while_the_engine_sleeps_its_copy_of_the_weights_makes_room() -> None:
    options: dict[str, Any] = {"context_length": 32768, "engine_shares_weights": False}
    plan = planned("meta-llama/Llama-3.2-3B", "L4", **options)
    assert plan.sleep and plan.training_bytes + 2 * 3_212_749_824 > 22.03 * GIB * 0.94
    with pytest.raises(ConfigError, match="sleep='auto'"):
        planned("meta-llama/Llama-3.2-3B", "L4", **options, sleep="never")


def test_weights_that_are_not_shared_are_held_twice_until_the_engine_sleeps() -> None:
    shared, twice = (planned(QWEN_7B, "H100", engine_shares_weights=share) for share in (True, False))
    assert twice.sampling["weights"] == 2 * shared.sampling["weights"] == 2 * 15_231_233_024
    assert twice.sleep and twice.training["weights"] == 15_231_233_024
    assert twice.gpu_memory_utilization < shared.gpu_memory_utilization, "the trainer's copy is outside the engine"
    with pytest.raises(ConfigError, match="engine_shares_weights=True"):
        planned(QWEN_7B, "L4", context_length=2048, engine_shares_weights=False)


def test_a_share_that_is_given_is_kept() -> None:
    plan = planned(SMOL, "H200", gpu_memory_utilization=0.5, rollouts=8)
    assert plan.gpu_memory_utilization == 0.5
    assert 0.47 * 139.8 * GIB < plan.kv_cache_bytes < 0.5 * 139.8 * GIB, "vLLM takes all of it, wanted or not"
    with pytest.raises(
        ConfigError, match=r"utilization=0\.1 gives 14\.0 GiB, needs 1\d\.\d GiB.*use no gpu_memory_util"
    ):
        planned(QWEN_7B, "H200", gpu_memory_utilization=0.1)
    with pytest.raises(ConfigError, match="use no gpu_memory_utilization"):
        planned(QWEN_7B, "L4", gpu_memory_utilization=1.0)


def test_memory_of_other_programs_is_left_alone() -> None:
    alone, beside = (planned(QWEN_7B, "H100", used_by_others=held) for held in (0, 20 * GIB))
    assert 19.9 * GIB < alone.kv_cache_bytes - beside.kv_cache_bytes < 20.1 * GIB
    with pytest.raises(ConfigError, match=r"5\.00 held by other programs"):
        planned("Qwen/Qwen2.5-3B", "T4", used_by_others=5 * GIB, context_length=32768)


def test_fp8_halves_the_linear_layers() -> None:
    plan = planned(QWEN_7B, "L4", load_in_fp8=True)
    linear = 28 * (2 * 3584 * 3584 + 2 * 3584 * 512 + 3 * 3584 * 18944)
    assert plan.sampling["weights"] == pytest.approx(linear + 2 * (7_615_616_512 - linear), rel=1e-3)


@pytest.mark.parametrize(
    ("name", "card", "options", "message"),
    [
        (QWEN_7B, "A100", {"load_in_fp8": True}, r"8\.9 or newer.*A100 has 8\.0; use load_in_4bit=True"),
        (QWEN_7B, "T4", {"dtype": "bfloat16"}, r"8\.0 or newer.*T4 has 7\.5; use dtype='float16'"),
        (QWEN_7B, "H100", {"load_in_4bit": True, "load_in_fp8": True}, "exclude each other"),
        ("google/gemma-3-1b-it", "T4", {}, "float16's range; use dtype='float32'"),
        (SMOL, "T4", {"context_length": 8193}, "longer than the 8192 tokens"),
        (SMOL, "T4", {"context_length": 1}, "context_length=1 must be >= 2"),
        (SMOL, "T4", {"sleep": "alway"}, "did you mean 'always'"),
        (SMOL, "T4", {"dtype": "bf16"}, "did you mean 'bfloat16'"),
        (SMOL, "T4", {"rollouts": 0}, "rollouts=0 must be >= 1"),
        (SMOL, "T4", {"max_running": 2.5}, "whole number"),
        (SMOL, "T4", {"chunk": 0}, "chunk=0"),
        (SMOL, "T4", {"batched_tokens": 100}, "batched_tokens=100 must be >= 256"),
        (SMOL, "T4", {"gpu_memory_utilization": 1.2}, "gpu_memory_utilization=1.2"),
        (SMOL, "T4", {"lora": LoraConfig(r=1024)}, "r=1024 must be .*<= 512"),
    ],
)
def test_what_cannot_be_honoured_is_refused(name: str, card: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        planned(name, card, **options)


def test_gemma_in_float32_is_planned_on_a_t4() -> None:
    assert planned("google/gemma-3-1b-it", "T4", dtype="float32").sampling["weights"] == 4 * 999_885_952


def test_settings_that_are_given_are_kept() -> None:
    options = {"context_length": 3000, "max_running": 48, "dtype": "float16", "cuda_graphs": False}
    plan = planned(LLAMA_1B, "H100", **options, batched_tokens=1000, lora=LoraConfig(r=24), max_loras=3, chunk=100)
    assert {name: getattr(plan, name) for name in options} == options and plan.batched_tokens == 1000
    assert plan.kv_tokens == 48 * 3008, "48 rollouts in blocks of 16 tokens"
    assert plan.training["logits"] == 100 * 128_256 * 4 * 3 and plan.sampling["graphs"] == 0
    assert plan.training["lora"] == 11_272_192 // 16 * 24 * 4
    assert plan.sampling["engine_adapters"] >= 3 * 11_272_192 // 16 * 32 * 2, "vLLM's slots have rank 32"
    assert planned(LLAMA_1B, "H100", rollouts=7).max_running == 7


def test_the_table() -> None:
    lines = planned(QWEN_7B, "L4").table().splitlines()
    assert lines[0] == "Qwen/Qwen2.5-7B-Instruct on L4, 22.0 GiB: bfloat16"
    grid = lines[1 : 1 + next(i for i, line in enumerate(lines[1:]) if line.startswith("context_length"))]
    assert len({len(line) for line in grid}) == 1 and len(grid) >= 12
    columns: dict[str, list[str]] = {re.split(r"\s{2,}", line)[0]: re.split(r"\s{2,}", line)[1:] for line in grid}
    assert columns["base weights"] == ["14.2", "14.2"] and columns["KV cache"][1] == "–"
    for column in (0, 1):
        parts = [values[column] for label, values in columns.items() if label not in ("GiB", "together", "free")]
        total = sum(float(part) for part in parts if part != "–")
        assert float(columns["together"][column]) == pytest.approx(total, abs=0.15)


def test_compare_says_what_took_more_than_planned() -> None:
    plan = planned(QWEN_7B, "H200")
    used = {"weights": 15_231_233_024, "kv_cache": plan.kv_cache_bytes, "sampling": plan.sampling_bytes - GIB}
    quiet = plan.compare(used)
    assert "More than planned" not in quiet and "-1.00" in quiet and quiet.count("+0.00") == 2
    loud = plan.compare({**used, "graphs": plan.sampling["graphs"] + 2 * GIB})
    assert "+2.00" in loud and re.search(
        r"More than planned: CUDA graphs took 3\.05 GiB where 1\.05 were planned", loud
    )
    with pytest.raises(ConfigError, match="did you mean 'kv_cache'"):
        plan.compare({"kv_cach": 1})


def test_planning_loads_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; from artnb.local.plan import plan_memory; from artnb.local.cards import find_card\n"
        "from artnb.local.shapes import known_shape\n"
        "plan_memory(known_shape('Qwen2.5-7B'), find_card('H100')).table()\n"
        "sys.exit(any(m in sys.modules for m in ('torch', 'transformers', 'vllm', 'unsloth')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# The command


@pytest.mark.usefixtures("offline")
def test_the_command_needs_no_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", QWEN_7B, "--gpu", "t4", "--load-in-4bit", "--rank", "8", "--rollouts", "64"]) == 0
    printed = capsys.readouterr().out
    assert "on T4" in printed and "4-bit NF4" in printed and "LoRA rank 8" in printed and "max_running=64" in printed
    assert main(["plan", "--model", QWEN_7B, "--gpu", "H100", "--context-length", "4096", "--max-running", "32"]) == 0
    assert "context_length=4096, max_running=32" in capsys.readouterr().out
    assert main(["plan", "--model", SMOL, "--gpu", "H100", "--sleep", "always", "--dtype", "float16"]) == 0
    printed = capsys.readouterr().out
    assert "asleep while training" in printed and "float16" in printed
    assert main(["plan", "--model", QWEN_7B, "--gpu", "L4", "--load-in-fp8"]) == 0
    assert "FP8" in capsys.readouterr().out


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", QWEN_7B, "--gpu", "T4"], "use load_in_4bit=True"),
        (["--model", QWEN_7B, "--gpu", "T44"], "did you mean 'T4'"),
        (["--model", QWEN_7B], "name a card: T4"),
        (["--model", "someone/else", "--gpu", "T4"], "no network here"),
        (["--model", QWEN_7B, "--gpu", "H100", "--rank", "0"], "r=0 must be >= 1"),
    ],
)
def test_the_command_fails_in_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["plan", *arguments]) == 1
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("artnb: ") and message in printed.err
    assert printed.err.count("\n") == 1
