"""Does the engine serve the weights that the trainer trains? A fixed prompt, answered greedily, tells after each step.

Both sides give the log-probs of the same tokens, with the adapter off and on. Where they differ, what each said of the
base at the start tells which of the two has changed. A wrong weight shows in nats, rounding in hundredths.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..engines.base import AdapterRef, SamplingParams, SharedEngine
from ..errors import TrainError
from ..training.pack import build_packs
from ..training.policy import Policy
from ..training.types import Row

if TYPE_CHECKING:
    from .trained import TrainedModel

TEXT = "The capital of France is Paris. One, two, three, four, five. To be or not to be, that is the"
TOKENS = 8
"""Sampled in a probe: enough that a wrong weight shows, few enough that nobody notices the time."""


@dataclass(frozen=True, slots=True)
class _Answer:
    token_ids: list[int]
    sampler: np.ndarray  # log-probs by the engine, nats
    trainer: np.ndarray  # of the same tokens, by the trainer


class Probe:
    """`limit`: mean absolute difference of the log-probs, in nats, above which a run stops."""

    def __init__(self, engine: SharedEngine, policy: Policy, *, limit: float) -> None:
        self._engine = engine
        self._policy = policy
        self._limit = limit
        self._prompt: list[int] = policy.tokenizer(TEXT, add_special_tokens=True)["input_ids"]
        self._first: _Answer | None = None  # of the base, when nothing had been trained

    async def start(self) -> None:
        """Remember what both sides say of the base. Raises: TrainError when they differ already."""
        answer = await self._answer(*await self._sample(None), None)
        self._judge("the base model", answer)
        self._first = answer

    async def check(self, trained: TrainedModel, ref: AdapterRef) -> dict[str, float]:
        """Ask the base and the adapter. Returns as metrics how far the engine moved on the base since the start, and
        how far it is from the trainer on the adapter.

        Raises: TrainError that says which side is wrong.
        """
        (token_ids, sampler), asked = await asyncio.gather(self._sample(None), self._sample(ref))
        moved = math.inf
        if self._first is not None and token_ids == self._first.token_ids:
            moved = float(np.abs(sampler - self._first.sampler).mean())
        if moved > self._limit:  # nearly equal tokens may change places: what the trainer says of them decides
            base = await self._answer(token_ids, sampler, None)
            self._judge("the base model", base)
            moved = _difference(base)
        adapter = await self._answer(*asked, trained.adapter)
        self._judge(f"adapter {ref}", adapter, base_held=True)
        return {"probe_base": moved, "probe_adapter": _difference(adapter)}

    async def _answer(self, token_ids: list[int], sampler: np.ndarray, adapter: str | None) -> _Answer:
        return _Answer(token_ids, sampler, await asyncio.to_thread(self._score, token_ids, adapter))

    async def _sample(self, ref: AdapterRef | None) -> tuple[list[int], np.ndarray]:
        sampling = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
        token_ids: list[int] = []
        sampler: list[float] = []
        async with contextlib.aclosing(self._engine.generate(self._prompt, sampling, ref)) as chunks:
            async for chunk in chunks:
                token_ids += chunk.token_ids
                sampler += chunk.logprobs
        return token_ids, np.array(sampler, np.float32)

    def _score(self, token_ids: list[int], adapter: str | None) -> np.ndarray:
        ids_S = np.array([*self._prompt, *token_ids], np.int64)
        sampled_S = np.arange(len(ids_S)) >= len(self._prompt)
        ones_S = np.ones(len(ids_S), np.float32)
        (pack,) = build_packs([Row(ids_S, sampled_S, 0 * ones_S, ones_S)], len(ids_S))
        logp_RT, _ = self._policy.token_logprobs(pack, adapter=adapter)
        scored: np.ndarray = logp_RT[0].float().cpu().numpy()
        return scored

    def _judge(self, what: str, answer: _Answer, *, base_held: bool = False) -> None:
        difference = _difference(answer)
        if difference <= self._limit:
            return
        raise TrainError(
            f"the probe failed: of {what} the engine and the trainer give log-probs that differ by "
            f"{difference:.3g} nats a token, more than max_probe_difference={self._limit}. "
            f"{self._whose_fault(base_held)}",
            phase="probe",
        )

    def _whose_fault(self, base_held: bool) -> str:
        first = self._first
        if first is None:
            return (
                "Nothing was trained yet, so they compute the model differently: another dtype, quantization or "
                "attention. Choose the same for both, or engine='transformers'"
            )
        now = self._score(first.token_ids, None)
        moved = float(np.abs(now - first.trainer).mean())
        if moved > self._limit:
            return f"The trainer's base weights have changed ({moved:.3g} nats from what it said at the start)"
        if base_held:
            return "Both still agree on the base, so the engine does not serve the adapter that was trained"
        return "The trainer still says of the base what it said at the start, so the engine is wrong"


def _difference(answer: _Answer) -> float:
    return float(np.abs(answer.sampler - answer.trainer).mean())
