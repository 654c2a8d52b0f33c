"""One run as plain data: every metric by step, from the history on disk or from events as they come.

Both ways lead to the same series. Knows no widget and no thread: its owner locks. Which phase the run is in is
phases.py's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ..tracking.frames import column
from ..training.types import SkipReason

if TYPE_CHECKING:
    from ..tracking.history import History

Block = dict[str, Any]
"""`{"steps": [...], "columns": {name: [value or None, ...]}}`: steps ascending, a value for each."""

BLOCK = 32
"""So many steps at most are sent again when one is added; older ones are sent again every so many steps."""
MAX_POINTS = 512
"""More steps than this are thinned to means: no chart has more pixels, and no notebook wants more bytes."""

_WORDS = {reason.name.lower(): reason.value for reason in SkipReason}
_GROUPS_LEFT_OUT, _LEFT_OUT = "/groups_left_out/", "/left_out/"


class RunView:
    """The metrics of one run. `name` is what a legend says.

    view = RunView("tests/agent")
    view.load(history)
    view.add(3, "train", {"reward": 0.4})
    past, recent = view.changes()
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.rows: dict[int, dict[str, float]] = {}
        self._names: dict[str, None] = {}  # of all metrics, so that a long run is not searched for them at each step
        self._trained = -1  # the newest step that trained
        self._past_step = -1  # the last step of the block that was handed out as past
        self._past_changed = self._recent_changed = True

    def load(self, history: History) -> None:
        """Take everything from disk; what was known before is dropped."""
        frame = history.metrics()
        names = [name for name in frame.columns if name != "step"]
        self.rows, self._names, self._trained = {}, {}, -1
        for step, *values in frame[["step", *names]].itertuples(index=False, name=None):
            row = {name: float(value) for name, value in zip(names, values, strict=True) if math.isfinite(value)}
            self.rows[int(step)] = row
            self._names.update(dict.fromkeys(row))
            self._note(int(step))
        self._past_changed = self._recent_changed = True

    def add(self, step: int, split: str, metrics: Mapping[str, Any]) -> None:
        """Metrics of a step, late ones too; a value that comes again replaces the older one."""
        row = self.rows.setdefault(step, {})
        for name, value in metrics.items():
            if value is None or not math.isfinite(value):
                row.pop(column(split, name), None)
            else:
                row[column(split, name)] = float(value)
        self._names.update(dict.fromkeys(row))
        self._note(step)
        if step <= self._past_step:
            self._past_changed = True
        else:
            self._recent_changed = True

    @property
    def last_step(self) -> int | None:
        """The newest step that trained, else the newest with any metric."""
        return self._trained if self._trained >= 0 else max(self.rows, default=None)

    def _note(self, step: int) -> None:
        if step > self._trained and ("train/trained" in self.rows[step] or "sft/trained" in self.rows[step]):
            self._trained = step

    def series(self) -> Block:
        """All steps in one block, not thinned."""
        return _block(self.rows, sorted(self.rows), 1)

    def changes(self) -> tuple[Block | None, Block | None]:
        """(past, recent): each a block if it changed since the last call, else None. Recent is at most BLOCK steps."""
        steps = sorted(self.rows)
        cut = max(0, len(steps) - 1) // BLOCK * BLOCK
        last = steps[cut - 1] if cut else -1
        if last != self._past_step:
            self._past_step, self._past_changed, self._recent_changed = last, True, True
        past = recent = None
        if self._past_changed:
            past = _block(self.rows, steps[:cut], -(-cut // MAX_POINTS) or 1)
        if self._recent_changed:
            recent = _block(self.rows, steps[cut:], 1)
        self._past_changed = self._recent_changed = False
        return past, recent

    def summary(self) -> dict[str, Any]:
        """What is counted over the run: steps, tokens, judge tokens and cost, and why groups did not train."""
        last = self.last_step
        newest = [self.rows[last]] if last is not None else []
        rows = self.rows.values()
        tokens = [row.get("train/generated_tokens", row.get("train/sampled_tokens", 0.0)) for row in rows]
        return {
            "step": last,
            "tokens": round(sum(tokens)),
            "judge_cost": _total(rows, self._names, ("judge", "ruler"), ("cost", "usd")),
            "judge_tokens": _total(rows, self._names, ("judge", "ruler"), ("tokens",)),
            "groups": _counted(rows, "groups"),
            "last_groups": _counted(newest, "groups"),
            "reasons": _reasons(rows, self._names, _GROUPS_LEFT_OUT, "groups"),
            "last_reasons": _reasons(newest, self._names, _GROUPS_LEFT_OUT, "groups"),
            "trajectory_reasons": _reasons(rows, self._names, _LEFT_OUT, "trajectories"),
        }


def _counted(rows: Iterable[Mapping[str, float]], unit: str) -> int:
    return round(sum(row.get(f"{split}/{unit}", 0.0) for row in rows for split in ("train", "sft")))


def _reasons(rows: Iterable[Mapping[str, float]], names: Iterable[str], mark: str, unit: str) -> dict[str, int]:
    """Reason in words → how many. The history holds shares of a step's groups, or trajectories."""
    counts: dict[str, float] = {}
    rows = list(rows)
    for name in names:
        split, found, key = name.partition(mark)
        if found and "/" not in split:
            words = _WORDS.get(key, key.replace("_", " "))
            total = sum(row[name] * row.get(f"{split}/{unit}", 0.0) for row in rows if name in row)
            counts[words] = counts.get(words, 0.0) + total
    return {words: round(n) for words, n in sorted(counts.items(), key=lambda item: -item[1]) if round(n)}


def _total(
    rows: Iterable[Mapping[str, float]], names: Iterable[str], who: tuple[str, ...], what: tuple[str, ...]
) -> float | None:
    """Sum of the metrics whose name holds one word of each; None if there is none."""
    own = [n for n in names if any(word in n.lower() for word in who) and any(word in n.lower() for word in what)]
    return compact(sum(row[name] for row in rows for name in own if name in row)) if own else None


def compact(value: float | None) -> float | int | None:
    """Five digits, and whole numbers without a point: half the bytes, and no pixel's difference."""
    if value is None or not math.isfinite(value):
        return None
    short = float(f"{value:.5g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short


def _block(rows: Mapping[int, Mapping[str, float]], steps: list[int], every: int) -> Block:
    """Steps and columns; with `every` > 1 the mean over each run of so many steps, at the last of them."""
    parts = [steps[i : i + every] for i in range(0, len(steps), every)]
    names = dict.fromkeys(name for step in steps for name in rows[step])
    columns = {name: [_mean([rows[s][name] for s in part if name in rows[s]]) for part in parts] for name in names}
    return {"steps": [part[-1] for part in parts], "columns": columns}


def _mean(values: list[float]) -> float | int | None:
    return compact(math.fsum(values) / len(values)) if values else None
