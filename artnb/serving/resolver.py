"""Which adapter a served name stands for.

NAME is the newest adapter, NAME@N checkpoint N, the base model's own name the model with the adapter
off. The backend has its own resolver, which loads older checkpoints; StaticResolver is for tests.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Protocol

from ..engines.base import AdapterRef
from ..errors import ModelError


@dataclass(frozen=True, slots=True)
class Served:
    """What answers a request: an adapter, or None for the base model; `canonical` is its full name (`name@3`)."""

    adapter: AdapterRef | None
    canonical: str


class Resolver(Protocol):
    """Names the endpoint knows."""

    async def resolve(self, model: str) -> Served:
        """Raises ModelError or AdapterNotFoundError, listing the names, when nothing is served as `model`."""
        ...

    def names(self) -> list[str]: ...


class StaticResolver:
    """Names kept in a table: the base, and for each model its steps. The engine must hold the adapters.

    resolver = StaticResolver("base"); resolver.set_latest("agent", 3)
    """

    def __init__(self, base: str) -> None:
        self.base = base
        self._lock = threading.Lock()
        self._steps: dict[str, list[int]] = {}  # in the order they were served; the last is the newest

    def set_latest(self, name: str, step: int) -> None:
        """Serve `name@step`, and make it what `name` stands for. Requests that run keep theirs."""
        with self._lock:
            steps = self._steps.setdefault(name, [])
            if step in steps:
                steps.remove(step)
            steps.append(step)

    def names(self) -> list[str]:
        with self._lock:
            models = [(name, sorted(steps)) for name, steps in self._steps.items()]
        return [self.base] + [n for name, steps in models for n in (name, *(f"{name}@{step}" for step in steps))]

    async def resolve(self, model: str) -> Served:
        if model == self.base:
            return Served(None, self.base)
        name, at, digits = model.rpartition("@")
        with self._lock:
            steps = list(self._steps.get(name if at else model, ()))
        step = int(digits) if at and digits.isascii() and digits.isdigit() else None if at else steps and steps[-1]
        if not steps or step not in steps:
            raise ModelError(f"no model is served as {model!r}; served are: {', '.join(self.names())}")
        ref = AdapterRef(name if at else model, int(step))
        return Served(ref, str(ref))
