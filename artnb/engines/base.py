"""The engine protocol: token ids and sampling parameters in; token ids and log-probs out, streamed.

An engine does not know text, chat templates, rewards or training. It may be driven from any
event loop and any thread. Implementations: transformers.py, scripted.py, vllm.py.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from ..errors import RequestError

FinishReason = Literal["stop", "length", "abort"]
EngineState = Literal["awake", "asleep", "closed"]


@dataclass(frozen=True, slots=True)
class AdapterRef:
    """One LoRA adapter: the model's name and the training step it comes from."""

    name: str
    step: int

    def __str__(self) -> str:
        return f"{self.name}@{self.step}"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample. Checked where it is built."""

    max_tokens: int = 16
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0  # nucleus mass, in (0, 1]
    top_k: int = 0  # keep the k most likely tokens; 0 keeps all
    min_p: float = 0.0  # keep tokens at least this share as likely as the likeliest
    seed: int | None = None  # same seed, prompt and weights give the same tokens
    stop_token_ids: tuple[int, ...] = ()  # end the answer, beside the engine's own end tokens
    ignore_eos: bool = False  # go on past the engine's end tokens
    stream: bool = True  # False: tokens are not looked at before the answer is whole, which may come as one chunk

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise RequestError(f"max_tokens is {self.max_tokens}; it must be at least 1", param="max_tokens")
        if not 0.0 <= self.temperature <= 100.0:
            raise RequestError(f"temperature is {self.temperature}; it must be between 0 and 100", param="temperature")
        if not 0.0 < self.top_p <= 1.0:
            raise RequestError(f"top_p is {self.top_p}; it must be in (0, 1]", param="top_p")
        if self.top_k < 0:
            raise RequestError(f"top_k is {self.top_k}; it must be 0 (off) or positive", param="top_k")
        if not 0.0 <= self.min_p <= 1.0:
            raise RequestError(f"min_p is {self.min_p}; it must be in [0, 1]", param="min_p")


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """What one request got since its last chunk.

    `token_ids` holds sampled ids only, a final end token included: it was sampled, so it is trained.
    `logprobs[i]` is log p(token_ids[i]) under softmax(logits / temperature), before top-p, top-k and
    min-p cut the tail, so that a trainer can recompute it (temperature 0 reports temperature 1).
    The last chunk of a request has a `finish_reason`: "stop" (end token), "length" (max_tokens or
    the context is used up), "abort" (cancelled or engine closed).
    """

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason | None = None


@dataclass(slots=True)
class EngineStats:
    """Counters since the engine started, and gauges of the moment."""

    running: int = 0
    waiting: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0  # of prompt_tokens, those whose prefill was skipped
    generated_tokens: int = 0
    requests: int = 0
    forward_seconds: float = 0.0
    extra: dict[str, float] = field(default_factory=dict)


class Engine(Protocol):
    """See the module docstring. All methods may be called again; sleep, wake and close are idempotent."""

    @property
    def description(self) -> str:
        """One line for people: library, device, dtype."""
        ...

    @property
    def state(self) -> EngineState: ...

    @property
    def context_length(self) -> int:
        """Prompt and answer together may hold this many tokens."""
        ...

    @property
    def eos_token_ids(self) -> frozenset[int]: ...

    def generate(
        self, prompt_ids: Sequence[int], sampling: SamplingParams, adapter: AdapterRef | None = None
    ) -> AsyncGenerator[TokenChunk]:
        """Sample one answer. Closing the generator cancels the request.

        `adapter=None` is the base model. A request that arrives while the engine sleeps waits.
        max_tokens beyond the context is clamped to it.

        Raises: ContextLengthError, AdapterNotFoundError, RequestError before the first chunk;
        EngineClosedError, EngineError later.
        """
        ...

    async def load_adapter(self, ref: AdapterRef, path: Path) -> None:
        """Load a PEFT adapter folder under `ref`; requests that run go on undisturbed.

        Of one that is held already only the folder is noted: it has moved there.
        """
        ...

    async def drop_adapter(self, ref: AdapterRef) -> None:
        """Forget an adapter once the last request that uses it has ended. Unknown refs are ignored."""
        ...

    def adapters(self) -> list[AdapterRef]: ...

    async def sleep(self) -> None:
        """Stop between two tokens; running requests keep their place, new ones wait."""
        ...

    async def wake(self) -> None: ...

    async def close(self) -> None:
        """End running requests with "abort" and give everything back."""
        ...

    def stats(self) -> EngineStats: ...


class SharedEngine(Engine, Protocol):
    """An engine in the trainer's process."""

    def hold(self) -> AbstractContextManager[None]:
        """The engine stands still between two forward passes while the block runs; requests keep their place.

        Entering blocks until it does.
        """
        ...
