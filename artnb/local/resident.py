"""What the LocalBackends of this process hold in memory: a cell that is run again finds it instead of loading it twice.

Backends with the same path and options share one Resident: bases, models, captures. It ends when one of them closes.
Does not load or train anything.
"""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from collections.abc import Hashable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..capture import CaptureRegistry
from ..memory import give_back
from ..whole import to_the_end

if TYPE_CHECKING:
    from .served import ServedBase
    from .trained import TrainedModel

POLL_S = 0.02


class Turn:
    """A lock for `async with` in any event loop; an asyncio.Lock belongs to one loop only."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    async def __aenter__(self) -> None:
        while not self._lock.acquire(blocking=False):
            await asyncio.sleep(POLL_S)

    async def __aexit__(self, *exc: object) -> None:
        self._lock.release()


class Resident:
    """The bases and models that are loaded for one path and one set of options."""

    def __init__(self) -> None:
        self.bases: dict[str, ServedBase] = {}
        self.models: dict[str, TrainedModel] = {}
        self.captures = CaptureRegistry()
        self.closed = False

    def add(self, trained: TrainedModel) -> None:
        self.models[trained.name] = trained
        self.captures.register_collector(trained.name, trained.collector)

    async def drop(self, trained: TrainedModel) -> None:
        """Forget one model, its adapters too; the base stays."""
        self.models.pop(trained.name, None)
        self.captures.unregister_collector(trained.name)
        base = trained.base
        await trained.detach()
        if base is not None:
            await base.remove(trained)

    async def close(self) -> None:
        """End requests and steps, stop the servers, give memory and folders back. May be called again."""
        self.closed = True
        models, self.models = self.models, {}
        bases, self.bases = self.bases, {}
        await self._end(models, bases)
        del models, bases
        gc.collect()  # no frame holds them any more, but weights, engine and app refer to each other
        give_back(torch.device("cpu"))
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    async def _end(self, models: dict[str, TrainedModel], bases: dict[str, ServedBase]) -> None:
        for trained in models.values():
            self.captures.unregister_collector(trained.name)
            await trained.end_step()
        for base in bases.values():
            await base.close()
        for trained in models.values():
            await trained.detach()


class Residents:
    """All of this process. Registering and closing take turns: nothing is loaded while memory is being given back."""

    def __init__(self) -> None:
        self.turn = Turn()
        self._by_key: dict[tuple[int, Hashable], Resident] = {}

    def join(self, key: Hashable) -> Resident:
        """The Resident of this key; a new one where there is none or it has closed. Call it inside `turn`."""
        full = (os.getpid(), key)  # a fork inherits this table, but none of the threads that do the work
        resident = self._by_key.get(full)
        if resident is None or resident.closed:
            resident = self._by_key[full] = Resident()
        return resident

    def holder(self, folder: Path) -> Resident | None:
        """Which Resident of this process holds the model whose folder this is. Call it inside `turn`."""
        for (pid, _), resident in self._by_key.items():
            if pid == os.getpid() and any(same_folder(m.folder, folder) for m in resident.models.values()):
                return resident
        return None

    async def close_unused(self, but: Resident) -> None:
        """Close the others that hold a base and no model: registering failed or was interrupted after the base was
        loaded, and then other options were chosen. Call it inside `turn`."""
        for other in list(self._by_key.values()):
            if other is not but and other.bases and not other.models:
                await self.close(other)

    async def close(self, resident: Resident) -> None:
        """Close it and forget it. Call it inside `turn`."""
        await to_the_end(resident.close())
        self._by_key = {key: held for key, held in self._by_key.items() if held is not resident}


def same_folder(a: Path, b: Path) -> bool:
    return a.resolve() == b.resolve()


RESIDENTS = Residents()
"""Memory belongs to the process, not to a backend object, so the table of what it holds is the process's, too."""
