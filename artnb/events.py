"""What happens in this process, as it happens: phases with their progress, and metrics of finished steps.

A dashboard subscribes; without a subscriber an event costs a comparison. Kept here is only the newest
progress of each phase: what lasts is the history on disk.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

logger = logging.getLogger("artnb")

Kind = Literal["progress", "step", "log"]
Phase = Literal["load", "gather", "judge", "train", "save", "swap", "work"]


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened.

    `progress`: `data` has phase, desc, done, total (or None), unit, seconds, closed, and what the line shows.
    `step`: a step was committed; `data` has step, split, metrics, groups, reasons (a group's reason → count), notes.
    `log`: metrics were logged; `data` has step, split, metrics, groups (those that were not logged before).
    """

    kind: Kind
    model: str | None  # "project/name", where it is known
    data: Mapping[str, Any]
    time: float = field(default_factory=time.time)


Listener = Callable[[Event], None]


class Events:
    """Hands each event to every listener, in the thread in which it happened. A listener must be quick."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: dict[int, Listener] = {}
        self._next = 0

    def __bool__(self) -> bool:
        """Whether anybody listens: callers skip the work of making an event where nobody does."""
        return bool(self._listeners)

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Call `listener` with every event from now on; returns a function that ends it (and may be called again)."""
        with self._lock:
            key, self._next = self._next, self._next + 1
            self._listeners[key] = listener
        return lambda: self._drop(key)

    def _drop(self, key: int) -> None:
        with self._lock:
            self._listeners.pop(key, None)

    def emit(self, kind: Kind, model: str | None = None, **data: Any) -> None:
        """Tell the listeners. One that raises is logged and dropped: a display never stops the work."""
        with self._lock:
            listeners = list(self._listeners.items())
        if not listeners:
            return
        event = Event(kind, model, data)
        for key, listener in listeners:
            try:
                listener(event)
            except Exception:
                logger.exception("a listener of artnb.events failed and is dropped: %r", listener)
                self._drop(key)


EVENTS = Events()
"""This process's events. Gather does not know which model its rollouts ask, so there is one stream, not one a model."""
