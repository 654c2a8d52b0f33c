"""An embedded engine over tiny random models, requests to it, and what a plain forward pass says instead."""

from __future__ import annotations

import contextlib
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import torch
from tiny_models import VOCAB, make_model

from artnb.config import LoraConfig
from artnb.engines.base import AdapterRef, SamplingParams
from artnb.engines.transformers import TransformersEngine
from artnb.training.policy import Policy, load_policy

ANSWER = 12
GREEDY = SamplingParams(max_tokens=ANSWER, temperature=0)
ONE, TWO = AdapterRef("agent", 1), AdapterRef("agent", 2)
Answer = tuple[list[int], list[float], str]


def load(kind: str, folder: Path) -> Policy:
    return load_policy(make_model(kind, folder), lora=LoraConfig(r=4), device="cpu", dtype="float32")


def make_adapters(policy: Policy, folder: Path) -> dict[AdapterRef, Path]:
    """Two adapter folders that differ clearly from the base and from each other."""
    for ref in (ONE, TWO):
        policy.add_adapter("made")
        rng = torch.Generator().manual_seed(ref.step)
        with torch.no_grad():
            for weight in policy.adapter_parameters("made").values():
                weight.copy_(torch.randn(weight.shape, generator=rng) * 0.3)
        policy.save_adapter("made", folder / str(ref))
        policy.drop_adapter("made")
    return {ref: folder / str(ref) for ref in (ONE, TWO)}


def make_engine(policy: Policy, **options: Any) -> TransformersEngine:
    return TransformersEngine(policy, **{"eos_token_ids": [], "context_length": 512, **options})


@contextlib.asynccontextmanager
async def running(policy: Policy, **options: Any) -> AsyncIterator[TransformersEngine]:
    engine = make_engine(policy, **options)
    try:
        yield engine
    finally:
        await engine.close()


async def ask(
    engine: TransformersEngine, prompt: list[int], params: SamplingParams = GREEDY, adapter: AdapterRef | None = None
) -> Answer:
    ids: list[int] = []
    logprobs: list[float] = []
    reason = ""
    async for chunk in engine.generate(prompt, params, adapter):
        assert not reason, "a chunk after the last one"
        ids += chunk.token_ids
        logprobs += chunk.logprobs
        reason = chunk.finish_reason or ""
    return ids, logprobs, reason


def make_prompts(count: int, seed: int = 0, shared: int = 60) -> list[list[int]]:
    """Half of them share a prefix."""
    rng = random.Random(seed)
    prefix = [rng.randrange(VOCAB) for _ in range(shared)]
    return [(prefix if i % 2 else []) + [rng.randrange(VOCAB) for _ in range(rng.randint(1, 40))] for i in range(count)]


def plain_logprobs(policy: Policy, prompt: list[int], answer: list[int], temperature: float = 1.0) -> list[float]:
    with policy.without_adapter(), torch.no_grad():
        logits = policy.base(input_ids=torch.tensor([prompt + answer]), use_cache=False).logits[0]
    logp = torch.log_softmax(logits / temperature, -1)[len(prompt) - 1 : -1]
    return logp[range(len(answer)), answer].tolist()


def greedy_alone(policy: Policy, prompt: list[int], tokens: int, adapter: str | None = None) -> list[int]:
    ids = torch.tensor([prompt])
    with policy.using(adapter), torch.no_grad():
        out = policy.base.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return out[0, len(prompt) :].tolist()
