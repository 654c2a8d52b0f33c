"""vLLM's GPU worker, with the weights outside the sleep pool. vLLM imports it by name (`worker_cls`).

The trainer computes with the same tensors while the engine sleeps, so they stay where they are; only the key/value
cache gives its memory away. Everything else is vLLM's.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

from vllm.v1.worker.gpu_worker import Worker


class SharedWeightsWorker(Worker):  # type: ignore[misc]  # vLLM is an optional, untyped dependency
    """See the module docstring."""

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager[Any]:
        if tag == "weights":
            return nullcontext()
        pool: AbstractContextManager[Any] = super()._maybe_get_memory_pool_context(tag)
        return pool

    def sleep(self, level: int = 1) -> None:
        """As vLLM does it, but without collecting Python's garbage each time.

        With a step's rollouts in memory that takes longer than all else; `vllm_start.check_room` does it where memory
        is short.
        """
        from vllm.device_allocator import cumem

        collector = getattr(cumem, "gc", None)
        cumem.gc = SimpleNamespace(collect=lambda: 0)
        try:
            super().sleep(level)
        finally:
            cumem.gc = collector
