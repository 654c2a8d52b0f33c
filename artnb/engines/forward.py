"""One forward pass of the shared model over a flat batch, down to one sampled token for each sequence that is due.

Looks at the model once, at the start: whether its attention can be run this way, and what a token's keys and
values take. Decides nothing about who runs.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch

from .. import attention
from ..errors import EngineError, ModelError
from .flat_attention import FlatAttend
from .kv_pool import KVPool
from .sampling import sample, uniform
from .scheduler import Work

LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})


class Policy(Protocol):
    """The weights and their adapters, shared with a trainer (training/policy.py)."""

    @property
    def model(self) -> Any:
        """A causal LM, PEFT-wrapped or plain."""
        ...

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """Re-entrant; held by whoever computes with the model or changes its adapters."""
        ...

    def load_adapter(self, name: str, path: Path) -> Any:
        """Read a PEFT folder as a frozen adapter. Takes the lock itself, as the next one does."""
        ...

    def drop_adapter(self, name: str) -> Any: ...

    def using(self, name: str | None) -> AbstractContextManager[Any]:
        """The model computes with this adapter (None: with none), and as before afterwards. Entered with the lock."""
        ...


class Forward:
    """Raises ModelError for a model whose layers do not all take an `Attend`."""

    def __init__(self, policy: Policy) -> None:
        model = policy.model
        self._wrapped = model
        self._model = model.get_base_model() if hasattr(model, "get_base_model") else model
        name = type(self._model).__name__
        config = self._model.config.get_text_config()
        unknown = set(getattr(config, "layer_types", None) or ()) - LAYER_TYPES
        if unknown:
            raise ModelError(f"{name} has {', '.join(sorted(unknown))} layers, which this engine cannot run")
        if "logits_to_keep" not in inspect.signature(self._model.forward).parameters:
            raise ModelError(f"{name}.forward has no logits_to_keep, which this engine needs")
        if getattr(self._model.config, "_attn_implementation", None) != attention.NAME:
            attention.use(self._model)
        embeddings = self._model.get_input_embeddings()
        self.vocabulary = int(embeddings.weight.shape[0])
        self.device: torch.device = embeddings.weight.device
        self.dtype: torch.dtype = embeddings.weight.dtype
        probe = _Probe()
        token = torch.zeros(1, dtype=torch.long, device=self.device)
        with policy.lock, torch.no_grad(), evaluating(self._wrapped):
            self._model(**attention.flat_inputs(token, token, probe), logits_to_keep=1)
        if len(probe.layers) != config.num_hidden_layers:
            raise ModelError(
                f"{name}: {len(probe.layers)} of {config.num_hidden_layers} layers take their attention from outside; "
                "this engine needs all of them"
            )
        self.bytes_per_token = sum(probe.layers.values())

    def run(self, batch: Sequence[Work], pool: KVPool) -> list[tuple[int, float]]:
        """Compute the batch; returns token and log-prob for each work that samples.

        Call with the lock held and the adapter on.
        """
        tokens: list[int] = []
        positions: list[int] = []
        last: list[int] = []
        due: list[Work] = []
        for work in batch:
            done, end = work.sequence.done, work.sequence.done + work.new
            tokens += work.sequence.tokens[done:end]
            positions += range(done, end)
            if work.samples:
                last.append(len(tokens) - 1)
                due.append(work)
        attend = FlatAttend(pool, [work.row for work in batch], self.device)
        token_S = torch.tensor(tokens, device=self.device)
        position_S = torch.tensor(positions, device=self.device)
        keep = torch.tensor(last or [0], device=self.device)
        with torch.no_grad(), evaluating(self._wrapped):
            inputs = attention.flat_inputs(token_S, position_S, attend)
            logits_RV = self._model(**inputs, logits_to_keep=keep).logits[0]
            if not due:
                return []
            sequences = [work.sequence for work in due]
            uniforms = [uniform(sequence.seed, sequence.sampled) for sequence in sequences]
            token_ids, logprobs = sample(logits_RV, [sequence.sampling for sequence in sequences], uniforms)
        return list(zip(token_ids, logprobs, strict=True))


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Dropout off, and afterwards as it was: the trainer may have left the model in training mode."""
    if not model.training:
        yield
        return
    model.eval()
    try:
        yield
    finally:
        model.train()


class _Probe:
    """Sees the shapes of each layer's keys and values."""

    def __init__(self) -> None:
        self.layers: dict[int, int] = {}  # layer → bytes that one token takes

    def __call__(
        self,
        layer: int,
        query_HSD: torch.Tensor,
        key_KSD: torch.Tensor,
        value_KSD: torch.Tensor,
        *,
        scaling: float,
        sliding_window: int | None,
    ) -> torch.Tensor:
        self.layers[layer] = sum(t.numel() * t.element_size() for t in (key_KSD, value_KSD))
        heads, tokens, _ = query_HSD.shape
        return value_KSD.new_zeros(tokens, heads, value_KSD.shape[2])


def engine_error(what: str, error: Exception) -> EngineError:
    """The cause is quoted and chained, but its frames let go of their tensors."""
    traceback.clear_frames(error.__traceback__)
    failure = EngineError(f"{what} failed: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure


def out_of_memory(error: Exception) -> bool:
    # Only CUDA has a class for it; MPS and the CPU allocator raise a RuntimeError.
    text = str(error).lower()
    known = "out of memory" in text or "can't allocate memory" in text
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (isinstance(error, RuntimeError) and known)
