"""Which LoRA adapters vLLM holds, and which requests use them: one that was dropped goes when its last user has.

Bookkeeping alone: the engine calls it under its lock, and tells vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import AdapterNotFoundError, nearest
from .base import AdapterRef


@dataclass(eq=False, slots=True)
class Adapter:
    request: Any  # vLLM's LoRARequest
    users: int = 0
    retired: bool = False

    @property
    def unused(self) -> bool:
        return self.retired and not self.users


class Adapters:
    """See the module docstring."""

    def __init__(self) -> None:
        self._by_ref: dict[AdapterRef, Adapter] = {}

    def __contains__(self, ref: AdapterRef) -> bool:
        return ref in self._by_ref

    def refs(self) -> list[AdapterRef]:
        return list(self._by_ref)

    def add(self, ref: AdapterRef, request: Any) -> None:
        self._by_ref[ref] = Adapter(request)

    def moved(self, ref: AdapterRef, path: Path) -> None:
        """Its files are at `path` now: where vLLM would read them again, had it to make room for others meanwhile."""
        self._by_ref[ref].request.lora_path = str(path)

    def use(self, ref: AdapterRef) -> Adapter:
        """Count one more user. Raises: AdapterNotFoundError."""
        adapter = self._by_ref.get(ref)
        if adapter is None:
            held = nearest(str(ref), map(str, self._by_ref)) if self._by_ref else "; it holds none"
            raise AdapterNotFoundError(f"the engine holds no adapter {str(ref)!r}{held}")
        adapter.users += 1
        return adapter

    def retire(self, ref: AdapterRef) -> Adapter | None:
        """Let nobody else use it. None when it is unknown."""
        adapter = self._by_ref.pop(ref, None)
        if adapter is not None:
            adapter.retired = True
        return adapter

    def clear(self) -> None:
        self._by_ref.clear()


def lora_request(ref: AdapterRef, number: int, path: Path) -> Any:
    """vLLM's LoRARequest. Its name is new for every load, because vLLM's prefix cache is keyed by it."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(f"{ref}#{number}", number, str(path))
