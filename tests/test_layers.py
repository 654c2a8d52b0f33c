"""Layers that run compiled, or again in the backward pass: the same values and gradients, one compilation for all.

A GPU's kernels are not compiled here: the compiler traces the layers as it does there, and then runs what it traced
step by step ("aot_eager"). The marker `gpu` has the rest.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import branching_rows, make_model
from torch.nn.attention import flex_attention as torch_flex

import artnb as art
from artnb.config import LoraConfig
from artnb.errors import ConfigError
from artnb.training import layers, logprobs
from artnb.training import policy as policy_module
from artnb.training.pack import build_packs
from artnb.training.policy import Policy, load_policy

Grads = dict[str, torch.Tensor]

pytestmark = [
    # torch's compiler looks at `.grad` of what it traces.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:Guards may run slower on Python 3.13.0"),
]


@pytest.fixture
def policy(request: pytest.FixtureRequest, tmp_path: Path) -> Policy:
    kind = getattr(request, "param", "qwen2")
    made = load_policy(make_model(kind, tmp_path), lora=LoraConfig(r=4), device="cpu", dtype="float32")
    add_adapter(made, "agent", seed=0)
    return made


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """FlexAttention's masks on CPU, and the compiler with a backend that counts its graphs."""
    graphs: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(len(graph.graph.nodes))
        return torch._dynamo.lookup_backend("aot_eager_decomp_partition")(graph, inputs)

    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda work, **options: compile_(work, backend=backend, dynamic=True))
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *tensors: None)  # torch has no backward kernel for CPU
    logprobs._compiled_score.cache_clear()
    torch._dynamo.reset()
    yield graphs
    torch._dynamo.reset()
    logprobs._compiled_score.cache_clear()


def add_adapter(policy: Policy, name: str, *, seed: int) -> None:
    policy.add_adapter(name)
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in policy.adapter_parameters(name).values():
            weight.copy_(torch.randn(weight.shape, generator=rng) * 0.1)


def compile_layers(policy: Policy) -> None:
    """As on a GPU: layers compiled, and FlexAttention in them."""
    policy._layers.compile()
    policy._flex = True


def passed(policy: Policy, seed: int, adapter: str = "agent") -> tuple[torch.Tensor, Grads]:
    """Log-probs of a random pack, and the gradients of their sum."""
    (pack,) = build_packs(branching_rows(seed), 10_000)
    weights = policy.adapter_parameters(adapter)
    with policy.using(adapter, train=True):
        logp_RT, _ = policy.token_logprobs(pack, adapter=adapter, grad=True, entropy=True, entropy_grad=False)
        logp_RT.sum().backward()
    grads = {name: weight.grad.clone() for name, weight in weights.items() if weight.grad is not None}
    for weight in weights.values():
        weight.grad = None
    assert len(grads) == len(weights)
    return logp_RT.detach(), grads


@pytest.mark.parametrize("policy", ["qwen2", "gemma3"], indirect=True)
def test_all_layers_all_packs_and_all_adapters_share_one_compilation(policy: Policy, traced: list[int]) -> None:
    plain = [passed(policy, seed) for seed in range(3)]
    assert not traced
    compile_layers(policy)
    for seed in range(3):
        torch.testing.assert_close(passed(policy, seed), plain[seed], rtol=1e-3, atol=1e-4)
        if seed == 0:
            # Of each kind of layer (Gemma has two) and of the log-probs; each may be looked at twice.
            kinds = {getattr(m, "sliding_window", None) for m in policy._decoder.modules() if hasattr(m, "layer_idx")}
            assert len(traced) <= 2 * (len(kinds) + 1)
            first = len(traced)
    add_adapter(policy, "other", seed=1)
    passed(policy, 0, "other")
    assert len(traced) == first


def test_rounded_adapters_share_it_too(traced: list[int], tmp_path: Path) -> None:
    made = load_policy(make_model("qwen2", tmp_path), lora=LoraConfig(r=4), device="cpu", dtype="bfloat16")
    add_adapter(made, "agent", seed=0)
    plain_RT, plain = passed(made, 0)
    compile_layers(made)
    logp_RT, grads = passed(made, 0)
    torch.testing.assert_close(logp_RT, plain_RT, rtol=0.05, atol=0.1)
    for name, grad in grads.items():
        assert float((grad - plain[name]).norm()) < 0.1 * float(plain[name].norm()) + 1e-3, name
    first = len(traced)
    passed(made, 1)
    add_adapter(made, "other", seed=1)
    passed(made, 0, "other")
    assert len(traced) == first


def test_recomputed_layers_give_the_same_compiled(policy: Policy, traced: list[int]) -> None:
    plain = passed(policy, 0)
    compile_layers(policy)
    for recomputed in (1, 3):
        policy.recomputed_layers = lambda tokens, n=recomputed: n  # type: ignore[method-assign,misc]
        torch.testing.assert_close(passed(policy, 0), plain, rtol=1e-3, atol=1e-4)
    assert traced


def test_passes_without_gradients_run_as_they_are(policy: Policy, traced: list[int]) -> None:
    policy._layers.compiled = True
    (pack,) = build_packs(branching_rows(0), 10_000)
    policy.token_logprobs(pack, adapter="agent")
    policy.token_logprobs(pack, adapter=None)
    assert not traced


def test_a_compiler_that_fails_is_given_up_with_its_reason(
    policy: Policy, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain = passed(policy, 0)
    policy._layers.compiled = True

    def broken(work: Any, **options: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            raise RuntimeError("Failed to find C compiler\nPlease specify via CC environment variable")

        return run

    monkeypatch.setattr(layers.torch, "compile", broken)
    monkeypatch.setattr(policy_module, "start_workers", lambda *, wait: None)
    logprobs._compiled_score.cache_clear()
    with caplog.at_level(logging.WARNING, "artnb"):
        policy.warm_up("agent")
    logprobs._compiled_score.cache_clear()
    assert "cannot be compiled here" in caplog.text and "Failed to find C compiler" in caplog.text
    assert not policy._layers.compiled
    torch.testing.assert_close(passed(policy, 0), plain)


def test_compiling_where_it_cannot_be_is_refused(tmp_path: Path) -> None:
    folder = make_model("llama", tmp_path)
    with pytest.raises(ConfigError, match=r"compile_layers=True needs a CUDA device.*8\.0"):
        load_policy(folder, lora=LoraConfig(r=4), device="cpu", compile_layers=True)
    assert not load_policy(folder, lora=LoraConfig(r=4), device="cpu")._layers.compiled
    with pytest.raises(ConfigError, match=r"did you mean 'auto'"):
        art.LocalBackend(compile_layers="atuo")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="activation_gib"):
        art.LocalBackend(activation_gib=0)


def kept_bytes(policy: Policy) -> int:
    """Of the activations that a pass keeps for its backward pass."""
    held: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, torch.nn.Parameter):
            held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    (packed,) = build_packs(branching_rows(0), 10_000)
    with policy.using("agent", train=True), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        logp_RT, _ = policy.token_logprobs(packed, adapter="agent", grad=True)
        assert logp_RT.requires_grad  # what was kept is alive, so that its addresses are its own
    return sum(held.values())


def test_compiled_layers_keep_nothing_of_their_mlps(policy: Policy, traced: list[int]) -> None:
    tokens = policy.attend(build_packs(branching_rows(0), 10_000)[0]).size
    policy._flex, policy._layers._recompute_mlp = True, False
    policy._layers.compile()
    all_kept = kept_bytes(policy)
    torch._dynamo.reset()
    policy._layers._recompute_mlp = True
    compile_layers(policy)
    config = policy._text_config
    gate_and_up = 2 * config.intermediate_size * 4 * tokens * config.num_hidden_layers
    assert kept_bytes(policy) <= all_kept - gate_and_up


def test_a_step_keeps_what_it_is_given(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    one = policy._layer_bytes() * len(policy._layers)
    policy._activation_bytes = 2048 * one
    assert policy.recomputed_layers(2048) == 0 < policy.recomputed_layers(4096)
    policy._activation_bytes = 2 * policy._activation_bytes
    assert policy.recomputed_layers(4096) == 0
