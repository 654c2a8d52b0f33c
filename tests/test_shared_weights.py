"""A policy around tensors that somebody else holds: views of fused weights, and packed ones."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from tiny_models import make_model
from transformers import AutoModelForCausalLM

from artnb.config import LoraConfig
from artnb.engines.vllm_weights import shared_weights
from artnb.errors import ModelError
from artnb.packed_linear import PackedWeight
from artnb.training.pack import build_packs
from artnb.training.policy import Policy, load_policy
from artnb.training.types import Row

Held = dict[str, torch.Tensor]


class Engine(torch.nn.Module):
    """Holds a model's weights as vLLM does: q, k, v and gate, up stacked, vocabulary padded, LoRA's wrapping."""

    packed_modules_mapping: ClassVar = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }

    def __init__(self, plain: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.held: Held = {}
        for name, weight in plain.items():
            head, _, kind = name.rpartition(".")
            prefix, _, part = head.rpartition(".")
            whole = next((w for w, parts in self.packed_modules_mapping.items() if part in parts), None)
            if whole is None:
                padding = torch.zeros(5 if "embed" in name else 0, *weight.shape[1:])
                self.held[name] = torch.cat([weight, padding])
            else:
                target = f"{prefix}.{whole}.base_layer.{kind}"
                self.held[target] = torch.cat([self.held[target], weight]) if target in self.held else weight.clone()

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        return iter(self.held.items())


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(request.param, tmp_path_factory.mktemp("base") / request.param)


def weights_of(base: Path) -> Held:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return {name: weight.detach() for name, weight in model.named_parameters()}


def measure(policy: Policy) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probs of a row, and the gradients of the adapter."""
    ids = np.arange(3, 23)
    rows = [Row(ids, np.arange(20) > 4, np.zeros(20, np.float32), np.ones(20, np.float32))]
    (pack,) = build_packs(rows, 64)
    policy.add_adapter("a")
    with torch.no_grad():
        for weight in policy.adapter_parameters("a").values():
            weight.copy_(torch.linspace(-0.1, 0.1, weight.numel()).view(weight.shape))
    with policy.using("a", train=True):
        logp_RT, _ = policy.token_logprobs(pack, adapter="a", grad=True)
        logp_RT.square().sum().backward()
    return logp_RT.detach(), {n: w.grad for n, w in policy.adapter_parameters("a").items() if w.grad is not None}


def same(one: Policy, other: Policy) -> None:
    (logp, grads), (logp_2, grads_2) = measure(one), measure(other)
    torch.testing.assert_close(logp_2, logp, rtol=1e-5, atol=1e-5)
    assert grads and grads.keys() == grads_2.keys()
    for name, grad in grads.items():
        torch.testing.assert_close(grads_2[name], grad, rtol=1e-4, atol=1e-5)


def test_views_of_fused_weights_give_the_same_policy_and_no_copy(base: Path) -> None:
    engine = Engine(weights_of(base))
    given: dict[str, Any] = {}

    def weights(shapes: Mapping[str, torch.Size]) -> Mapping[str, Any]:
        given.update(shared_weights(engine, shapes, torch.float32))
        return given

    options: dict[str, Any] = {"lora": LoraConfig(r=4), "device": "cpu", "dtype": "float32"}
    shared = load_policy(base, **options, weights=weights)
    same(load_policy(base, **options), shared)
    storages = {weight.untyped_storage().data_ptr() for weight in engine.held.values()}
    lora_free = [w for n, w in shared.base.named_parameters() if "lora_" not in n]
    assert lora_free and all(w.untyped_storage().data_ptr() in storages for w in lora_free)
    assert shared.eos_token_ids == load_policy(base, **options).eos_token_ids


def test_packed_weights_are_unpacked_for_the_product_and_its_gradient(base: Path) -> None:
    """Packed here: the fp32 bytes themselves, so that the figures must be equal."""
    plain = weights_of(base)
    unpacked = []

    def pack(weight: torch.Tensor) -> PackedWeight:
        data = weight.contiguous().view(torch.uint8)

        def unpack() -> torch.Tensor:
            unpacked.append(weight.shape)
            return data.view(torch.float32).view(weight.shape)

        return PackedWeight(data, unpack)

    def weights(shapes: Mapping[str, torch.Size]) -> Mapping[str, Any]:
        return {n: pack(w) if n.endswith("proj.weight") else w for n, w in plain.items()}

    options: dict[str, Any] = {"lora": LoraConfig(r=4), "device": "cpu", "dtype": "float32"}
    packed = load_policy(base, **options, weights=weights)
    unpacked.clear()
    same(load_policy(base, **options), packed)
    layers = sum(name.endswith("proj.weight") for name in plain)
    # Forward and backward; the first layer's input needs no gradient.
    assert 2 * layers - 3 <= len(unpacked) <= 2 * layers


def test_a_weight_that_cannot_be_shared_is_named(base: Path) -> None:
    plain = weights_of(base)
    shapes = {name: weight.shape for name, weight in plain.items()}
    engine = Engine(plain)
    del engine.held["model.layers.1.self_attn.qkv_proj.base_layer.weight"]
    with pytest.raises(ModelError, match=r"layers\.1\.self_attn\.q_proj\.weight"):
        shared_weights(engine, shapes, torch.float32)
    engine = Engine(plain)
    engine.held["model.norm.weight"] = engine.held["model.norm.weight"].bfloat16()
    with pytest.raises(ModelError, match=r"model\.norm\.weight.*bfloat16"):
        shared_weights(engine, shapes, torch.float32)


def test_one_scale_for_a_fused_fp8_weight() -> None:
    torch.manual_seed(0)
    whole = torch.randn(24, 16)
    scale = whole.abs().max() / 448
    kept = torch.nn.Parameter((whole / scale).to(torch.float8_e4m3fn).t(), requires_grad=False)
    name = "model.layers.0.mlp.{}.weight"
    engine = Engine({})
    engine.held = {name.format("gate_up_proj.base_layer"): kept, name.format("gate_up_proj") + "_scale": scale}
    shapes = {name.format("gate_proj"): torch.Size([12, 16]), name.format("up_proj"): torch.Size([12, 16])}
    shared: Any = shared_weights(engine, shapes, torch.bfloat16)
    got = torch.cat([shared[n].unpack() for n in shapes])
    assert got.dtype == torch.bfloat16 and float((got.float() - whole).norm() / whole.norm()) < 0.05
