"""vLLM's GPU worker, with the weights outside the sleep pool. vLLM imports it by name (`worker_cls`).

The trainer computes with the same tensors while the engine sleeps, so they stay where they are; only the key/value
cache gives its memory away. Everything else is vLLM's.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from vllm.v1.worker.gpu_worker import Worker


class SharedWeightsWorker(Worker):  # type: ignore[misc]  # vLLM is an optional, untyped dependency
    """See the module docstring."""

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager[Any]:
        if tag == "weights":
            return nullcontext()
        pool: AbstractContextManager[Any] = super()._maybe_get_memory_pool_context(tag)
        return pool
