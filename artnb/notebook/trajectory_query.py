"""Which trajectories of a source are shown, and in what order: the inspector's filters and its sorting.

Evaluated in Python alone, so that a cell (`inspector.find(...)`) and a click give the same list.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from ..errors import ConfigError, nearest
from .trajectory_source import Source, Standings
from .trajectory_text import content_text, finite

Bounds = tuple[float | None, float | None]
"""Lowest and highest value, both included; None is no bound."""
SORTS = ("group", "reward", "turns", "tokens", "stop")
NO_STOP_REASON = "none"


@dataclass(frozen=True)
class Query:
    """Every filter must hold. An unscored trajectory, or one without the metric, is within no bounds.

    Query(text="checkmate", reward=(0.5, None), stop=("finished",), sort="reward", descending=True)
    """

    text: str = ""  # in any message, reasoning, tool call or tool name; case does not matter
    reward: Bounds = (None, None)
    metrics: Mapping[str, Bounds] = field(default_factory=dict)
    stop: Sequence[str] = ()  # stop reasons, "none" for a trajectory without; () is any
    trained: bool | None = None
    group: int | None = None
    sort: str = "group"  # one of SORTS, or "metric/<name>"
    descending: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "reward", _bounds("reward", self.reward))
        object.__setattr__(self, "metrics", {k: _bounds(k, v) for k, v in dict(self.metrics).items()})
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(map(str, self.stop)))
        if self.sort not in SORTS and not self.sort.startswith("metric/"):
            raise ConfigError(f"sort={self.sort!r} is unknown{nearest(self.sort, [*SORTS, 'metric/<name>'])}")

    @classmethod
    def parse(cls, options: Mapping[str, Any]) -> Query:
        """From the browser's message or a cell's keywords. Raises ConfigError for an unknown one."""
        known = [f.name for f in fields(cls)]
        for name in options:
            if name not in known:
                raise ConfigError(f"the inspector has no filter {name!r}{nearest(name, known)}")
        return cls(**options)


class Finder:
    """Runs queries on a source; the texts it has searched are kept. Threads may share it."""

    def __init__(self, source: Source, standings: Standings) -> None:
        self._source = source
        self._standings = standings
        self._texts: dict[int, str] = {}
        self._mutex = threading.Lock()

    def run(self, query: Query) -> list[int]:
        """Numbers of the trajectories that pass, in order. What has no value to sort by comes last."""
        numbers: Iterable[int] = range(len(self._source.heads))
        if query.group is not None:
            groups = self._source.groups
            numbers = list(groups[query.group].members) if 0 <= query.group < len(groups) else []
        found = [n for n in numbers if self._passes(n, query)]
        if query.text:
            needle = query.text.casefold()
            found = [n for n in found if self._holds(n, needle)]
        if query.trained is not None:
            found = [n for n in found if self._standings.of(n).trained is query.trained]
        if query.sort == "group":
            return found[::-1] if query.descending else found
        keys = {n: self._key(n, query.sort) for n in found}
        known = [n for n in found if keys[n] is not None]
        known.sort(key=lambda n: keys[n], reverse=query.descending)  # type: ignore[arg-type, return-value]
        return known + [n for n in found if keys[n] is None]

    def _passes(self, number: int, query: Query) -> bool:
        head = self._source.heads[number]
        if not _within(head.reward, query.reward):
            return False
        if query.stop and (head.stop_reason or NO_STOP_REASON) not in query.stop:
            return False
        return all(_within(head.metrics.get(name), bounds) for name, bounds in query.metrics.items())

    def _key(self, number: int, sort: str) -> float | str | None:
        head = self._source.heads[number]
        if sort.startswith("metric/"):
            return finite(head.metrics.get(sort.removeprefix("metric/")))
        if sort == "reward":
            return finite(head.reward)
        return {"turns": float(head.turns), "tokens": float(head.tokens), "stop": head.stop_reason}[sort]

    def _holds(self, number: int, needle: str) -> bool:
        if number not in self._texts and not self._source.may_hold(number, needle):
            return False
        return needle in self._text(number)

    def _text(self, number: int) -> str:
        with self._mutex:
            if number not in self._texts:
                self._texts[number] = searchable(self._source.messages(number)).casefold()
            return self._texts[number]


def searchable(messages: Iterable[Any]) -> str:
    """All that a reader sees in the messages, as one text."""
    parts: list[str] = []
    for message in messages:
        parts.append(content_text(message.get("content")))
        parts += [str(message[key]) for key in ("reasoning_content", "reasoning", "name") if message.get(key)]
        for call in message.get("tool_calls") or []:
            function = (call.get("function") or call.get("custom") or {}) if isinstance(call, Mapping) else {}
            arguments = function.get("arguments") or function.get("input") or ""
            parts.append(str(function.get("name") or ""))
            parts.append(_readable(arguments))
    return "\n".join(parts)


def _readable(arguments: Any) -> str:
    """Arguments as written, and with JSON's escapes undone: 한글 may stand there as \\ud55c."""
    if not isinstance(arguments, str):
        return json.dumps(arguments, ensure_ascii=False, default=str)
    if "\\u" not in arguments:
        return arguments
    try:
        return f"{arguments}\n{json.dumps(json.loads(arguments), ensure_ascii=False)}"
    except ValueError:
        return arguments


def _within(value: Any, bounds: Bounds) -> bool:
    low, high = bounds
    if low is None and high is None:
        return True
    known = finite(value)
    return known is not None and (low is None or known >= low) and (high is None or known <= high)


def _bounds(name: str, value: Any) -> Bounds:
    pair = tuple(value) if isinstance(value, list | tuple) else ()
    if len(pair) != 2 or any(isinstance(v, bool) or not isinstance(v, int | float | None) for v in pair):
        raise ConfigError(f"{name}={value!r}: give the lowest and the highest value, e.g. (0.5, None)")
    return pair
