"""Which phase a run is in, for how long, and an estimate of what is left. Fed by progress events; plain data out.

The estimate is the rate so far where a total is known, else how long the phase took in the step before. While nothing
runs there is none, for who knows when it goes on. Keeps nothing on disk: a re-opened notebook shows no phase until
something runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from .run_view import compact

ORDER = ("gather", "judge", "train", "save", "swap")
"""The phases of a step, as they follow each other."""
REMEMBERED_STEPS = 5


@dataclass
class Phases:
    """`planned_steps`: how many steps the run will have, where it is known; with it the run's end is estimated."""

    planned_steps: int | None = None
    _open: dict[tuple[str, str | None], dict[str, Any]] = field(default_factory=dict)
    _spent: dict[str, float] = field(default_factory=dict)  # phase → seconds, closed ones of the step that runs
    _before: dict[str, float] = field(default_factory=dict)  # the same of the step before
    _worked: float = 0.0  # seconds of all closed phases since this was made
    _steps: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED_STEPS))  # seconds between steps
    _last_step: tuple[int, float] | None = None  # the newest step and when it was committed

    def progress(self, data: Mapping[str, Any], at: float) -> None:
        """Take a progress event's data; `at` in seconds since 1970."""
        key = (str(data["phase"]), data["desc"])
        self._open.pop(key, None)  # the newest is the last
        if not data["closed"]:
            self._open[key] = {**data, "at": at}
        elif key[0] != "work":
            self._spent[key[0]] = self._spent.get(key[0], 0.0) + float(data["seconds"])
            self._worked += float(data["seconds"])

    def step(self, step: int, at: float) -> None:
        """A step was committed."""
        if self._last_step is not None and step > self._last_step[0]:
            self._steps.append((at - self._last_step[1]) / (step - self._last_step[0]))
        self._last_step = (step, at)
        self._before, self._spent = self._spent, {}

    def head(self, now: float, last_step: int | None) -> dict[str, Any]:
        """What the bar shows: phase, words, done, total, seconds, left (or None), what each phase took, run_left.

        While nothing runs phase and run_left are None; `worked` is what all phases took since this was made.
        """
        shown = self._current()
        head: dict[str, Any] = {
            "phase": None,
            "spent": {k: compact(v) for k, v in self._spent.items()},
            "before": {k: compact(v) for k, v in self._before.items()},
            "worked": compact(round(self._worked, 1)),
            "run_left": None if shown is None else compact(self._run_left(now, last_step)),
            "planned": self._planned(),
        }
        if shown is not None:
            seconds = float(shown["seconds"]) + max(0.0, now - shown["at"])
            head |= {
                "phase": shown["phase"],
                "words": _cut(shown["desc"]),
                "done": shown["done"],
                "total": shown["total"],
                "unit": _cut(shown["unit"]),
                "seconds": compact(round(seconds, 1)),
                "left": compact(self._left(shown, seconds)),
                "shown": {_cut(k): compact(float(v)) for k, v in list(shown["shown"].items())[:8] if _is_number(v)},
            }
        return head

    def _current(self) -> dict[str, Any] | None:
        """The newest phase that is open. A loop over the steps is open all the time, so it comes last."""
        inner = [data for key, data in self._open.items() if key[0] != "work"]
        shown = inner or list(self._open.values())
        return shown[-1] if shown else None

    def _left(self, shown: Mapping[str, Any], seconds: float) -> float | None:
        if shown["total"] and shown["done"]:
            return seconds / float(shown["done"]) * max(0.0, float(shown["total"]) - float(shown["done"]))
        if (before := self._before.get(shown["phase"])) is not None:
            return max(0.0, before - seconds)
        return None

    def _planned(self) -> int | None:
        if self.planned_steps is not None:
            return self.planned_steps
        for (phase, _), data in self._open.items():
            if phase == "work" and data["unit"] == "step" and data["total"]:
                return int(data["total"])
        return None

    def _run_left(self, now: float, last_step: int | None) -> float | None:
        planned = self._planned()
        if planned is None or last_step is None or not self._steps or self._last_step is None:
            return None
        if (steps := planned - last_step) <= 0:
            return 0.0
        per_step = fmean(self._steps)
        return max(per_step * (steps - 1), per_step * steps - (now - self._last_step[1]))


def _cut(text: str | None) -> str | None:
    """A name of any length comes from the user's code; a line has room for so much."""
    return text if text is None or len(text) <= 60 else text[:59] + "…"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)
