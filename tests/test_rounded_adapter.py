"""In 16 bits an adapter's weights are rounded once for a training pass: nobody may see what they were before."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import branching_rows, make_model

from artnb.config import LoraConfig
from artnb.training.lora_forward import PlainLoraLinear
from artnb.training.pack import build_packs
from artnb.training.policy import Policy, load_policy

LORA = LoraConfig(r=4, alpha=6.0)  # a scale of 1.5, which bf16 does not round away


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("llama"))


def policy_of(folder: Path, dtype: str) -> Policy:
    policy = load_policy(folder, lora=LORA, device="cpu", dtype=dtype)
    policy.add_adapter("agent")
    shift(policy, 0)
    return policy


def shift(policy: Policy, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in policy.adapter_parameters("agent").values():
            weight.add_(torch.randn(weight.shape, generator=rng) * 0.1)


def logprobs(policy: Policy, *, grad: bool) -> torch.Tensor:
    (pack,) = build_packs(branching_rows(0), 10_000)
    logp_RT, _ = policy.token_logprobs(pack, adapter="agent", grad=grad)
    return logp_RT


def gradients(policy: Policy) -> np.ndarray:
    weights = list(policy.adapter_parameters("agent").values())
    with policy.using("agent", train=True):
        found = torch.autograd.grad(logprobs(policy, grad=True).sum(), weights)
    assert all(grad.dtype == torch.float32 for grad in found)
    return torch.cat([grad.reshape(-1) for grad in found]).numpy()


def test_the_gradients_are_those_of_the_weights(folder: Path) -> None:
    exact, rounded = (gradients(policy_of(folder, dtype)) for dtype in ("float32", "bfloat16"))
    apart = np.linalg.norm(exact - rounded) / np.linalg.norm(exact)
    assert 0.0 < apart < 0.05


def test_every_pass_sees_the_weights_as_they_are(folder: Path) -> None:
    policy = policy_of(folder, "bfloat16")
    seen = []
    with policy.using("agent", train=True):
        for seed in range(1, 4):
            trained, plain = logprobs(policy, grad=True).detach(), logprobs(policy, grad=False)
            torch.testing.assert_close(trained, plain, rtol=0.02, atol=0.05)
            seen.append(plain)
            shift(policy, seed)
        logprobs(policy, grad=True)
        shift(policy, 4)
        seen.append(logprobs(policy, grad=False))
        logprobs(policy, grad=True)
    shift(policy, 5)
    seen.append(logprobs(policy, grad=False))
    for before, after in itertools.pairwise(seen):
        assert float((before - after).abs().max()) > 0.2
    layers = [m for m in policy.base.modules() if isinstance(m, PlainLoraLinear)]
    assert layers and all(isinstance(layer.added[0], torch.nn.Parameter) for layer in layers if layer.added)


def test_an_adapter_that_is_loaded_again_is_the_one_that_trains(folder: Path, tmp_path: Path) -> None:
    policy = policy_of(folder, "bfloat16")
    policy.save_adapter("agent", tmp_path)
    first = gradients(policy)
    shift(policy, 1)
    assert not np.allclose(gradients(policy), first, rtol=0.1)
    policy.load_adapter("agent", tmp_path)
    np.testing.assert_allclose(gradients(policy), first, rtol=1e-5, atol=1e-6)
    policy.drop_adapter("agent")
    policy.load_adapter("agent", tmp_path)
    np.testing.assert_allclose(gradients(policy), first, rtol=1e-5, atol=1e-6)
