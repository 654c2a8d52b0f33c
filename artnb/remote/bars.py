"""The progress of a job at the server, shown here as that of a local step is."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from ..notebook.progress import Progress


class Bars:
    """A bar for each phase of a job."""

    def __init__(self, verbose: bool) -> None:
        self._verbose = verbose
        self._bars: dict[str, Progress] = {}

    def show(self, data: Mapping[str, Any]) -> None:
        """One progress event, as artnb.events has them."""
        phase = data["phase"]
        bar = self._bars.get(phase)
        if bar is None:
            desc = data["desc"] if self._verbose else None
            bar = self._bars[phase] = Progress(data["total"], desc, data["unit"], phase=phase)
        if bar.total != data["total"]:
            bar.set_total(data["total"])
        bar.update(data["done"] - bar.n, **data["shown"])
        if data["closed"]:
            self._bars.pop(phase).close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for bar in self._bars.values():
            bar.close()
