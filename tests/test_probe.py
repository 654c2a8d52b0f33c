"""The probe after a step: it holds where engine and trainer have the same weights, else it says which side is wrong."""

from __future__ import annotations

import copy
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_models import make_model

from artnb.config import LoraConfig
from artnb.engines.base import AdapterRef, SamplingParams, TokenChunk
from artnb.errors import TrainError
from artnb.local.probe import Probe
from artnb.training.policy import Policy, load_policy

REF = AdapterRef("agent", 1)


class OtherEngine:
    """Answers greedily from weights of its own, as an engine in another library does."""

    def __init__(self, policy: Policy) -> None:
        self.model = copy.deepcopy(policy.model)
        self.model.base_model.enable_adapter_layers()  # the policy leaves them off between its passes
        self.served = "agent"
        self._key = {name: policy.adapter_key(name) for name in policy.adapters()}

    async def generate(
        self, prompt_ids: Sequence[int], sampling: SamplingParams, adapter: AdapterRef | None = None
    ) -> AsyncGenerator[TokenChunk]:
        ids = list(prompt_ids)
        self.model.set_adapter(self._key[self.served])
        for count in range(sampling.max_tokens):
            with torch.no_grad():
                if adapter is None:
                    with self.model.disable_adapter():
                        logits = self.model(input_ids=torch.tensor([ids])).logits
                else:
                    logits = self.model(input_ids=torch.tensor([ids])).logits
            logp = logits[0, -1].float().log_softmax(-1)
            token = int(logp.argmax())
            ids.append(token)
            last = count + 1 == sampling.max_tokens
            yield TokenChunk([token], [float(logp[token])], "length" if last else None)


@pytest.fixture
def policy(tmp_path: Path) -> Policy:
    policy = load_policy(make_model("llama", tmp_path / "base"), lora=LoraConfig(r=4), device="cpu", dtype="float32")
    for seed, name in enumerate(("agent", "wrong")):
        policy.add_adapter(name)
        rng = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for weight in policy.adapter_parameters(name).values():
                weight.copy_(0.3 * torch.randn(weight.shape, generator=rng))
    return policy


def trained() -> Any:
    return SimpleNamespace(adapter="agent")


async def started(policy: Policy, *, served: str = "agent") -> tuple[Probe, OtherEngine]:
    engine = OtherEngine(policy)
    engine.served = served
    probe = Probe(engine, policy, limit=0.05)  # type: ignore[arg-type]
    await probe.start()
    return probe, engine


async def test_it_holds_where_both_have_the_same(policy: Policy) -> None:
    probe, _ = await started(policy)
    for _ in range(2):
        metrics = await probe.check(trained(), REF)
        assert metrics["probe_base"] < 1e-4 and metrics["probe_adapter"] < 1e-4


async def test_another_adapter_is_served_than_was_trained(policy: Policy) -> None:
    probe, _ = await started(policy, served="wrong")
    with pytest.raises(TrainError, match=r"adapter agent@1.*does not serve the adapter.*phase: probe"):
        await probe.check(trained(), REF)


async def test_the_engines_base_weights_have_changed(policy: Policy) -> None:
    probe, engine = await started(policy)
    with torch.no_grad():
        engine.model.get_output_embeddings().weight.mul_(1.5)
    with pytest.raises(TrainError, match=r"the base model.*so the engine is wrong"):
        await probe.check(trained(), REF)


async def test_the_trainers_base_weights_have_changed(policy: Policy) -> None:
    probe, _ = await started(policy)
    with torch.no_grad():
        policy.base.get_output_embeddings().weight.mul_(1.5)
    with pytest.raises(TrainError, match=r"trainer's base weights have changed"):
        await probe.check(trained(), REF)


async def test_two_that_never_agreed_are_refused_at_the_start(policy: Policy) -> None:
    engine = OtherEngine(policy)
    with torch.no_grad():
        engine.model.get_output_embeddings().weight.mul_(1.5)
    with pytest.raises(TrainError, match="Nothing was trained yet"):
        await Probe(engine, policy, limit=0.05).start()  # type: ignore[arg-type]
