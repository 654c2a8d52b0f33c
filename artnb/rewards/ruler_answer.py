"""A RULER judge's answer as scores, and what is wrong with it in words that the judge can use.

Reads JSON wherever it stands in the text. Makes no score up: what is missing, contradictory or out of range is left
out.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from .answer import without_thoughts

_ID = re.compile(r"\s*(?:trajectory|attempt|id)?[\s_#:]*(\d{1,6})\s*", re.IGNORECASE)
_OPENS = re.compile(r"[{\[]")
_NAMES = ("trajectory_id", "id", "trajectory", "attempt")


@dataclass(slots=True)
class Verdict:
    """`scores`: number as shown (from 1) → (score, explanation). `problems`: sentences; none: a whole answer."""

    scores: dict[int, tuple[float, str]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def read_answer(text: str, count: int, *, cut: bool = False) -> Verdict:
    """The scores for trajectories 1 to `count` in a judge's answer."""
    verdict = Verdict()
    entries = _entries(without_thoughts(text))
    if entries is None:
        verdict.problems.append("the answer was empty" if not text.strip() else "the answer held no JSON with scores")
    elif not entries:
        verdict.problems.append("the list of scores was empty")
    else:
        _take(entries, count, verdict)
        if missing := [str(n) for n in range(1, count + 1) if n not in verdict.scores]:
            verdict.problems.append(f"no usable score for {', '.join(missing)}")
    if verdict.problems and cut:
        verdict.problems.append("the answer was cut off by max_tokens")
    return verdict


def _take(entries: list[Any], count: int, verdict: Verdict) -> None:
    contradicted: set[int] = set()
    for entry in entries:
        if not isinstance(entry, Mapping):
            verdict.problems.append(f"an entry is no object: {entry!r:.40}")
            continue
        given = next((entry[name] for name in _NAMES if name in entry), None)
        number = _number(given)
        if number is None or not 1 <= number <= count:
            verdict.problems.append(f"there is no trajectory {given!r:.40} (the ids are 1 to {count})")
            continue
        score = _score(entry.get("score"))
        if score is None:
            verdict.problems.append(f"the score of {number} is {entry.get('score')!r:.40}, not a number from 0 to 1")
            continue
        if number in contradicted:
            continue
        known = verdict.scores.get(number)
        if known is not None and known[0] != score:
            verdict.problems.append(f"{number} was scored twice, {known[0]:g} and {score:g}")
            contradicted.add(number)
            del verdict.scores[number]
        elif known is None:
            explanation = entry.get("explanation", entry.get("reason", ""))
            verdict.scores[number] = (score, explanation if isinstance(explanation, str) else "")


def _number(given: Any) -> int | None:
    if isinstance(given, bool):
        return None
    if isinstance(given, int):
        return given
    match = _ID.fullmatch(given) if isinstance(given, str) else None
    return None if match is None else int(match[1])


def _score(given: Any) -> float | None:
    if isinstance(given, str):
        try:
            given = float(given)
        except ValueError:
            return None
    if isinstance(given, bool) or not isinstance(given, int | float):
        return None
    return float(given) if math.isfinite(given) and 0.0 <= given <= 1.0 else None


def _entries(text: str) -> list[Any] | None:
    """The list of entries; None if there is none. Of several the last: judges that think aloud end with the answer."""
    found: list[Any] | None = None
    loose: list[Any] = []  # entries that stand alone: one a line, or what is left of a list that was cut off
    for value in _json_values(text):
        entries = _as_entries(value)
        if isinstance(value, Mapping) and "score" in value:
            loose.append(value)
        elif entries is not None and (entries or found is None):
            found = entries
    return found or loose or found


def _as_entries(value: Any) -> list[Any] | None:
    if isinstance(value, Mapping):
        if isinstance(value.get("scores"), list | Mapping):
            return _as_entries(value["scores"])
        if "score" in value:
            return None
        if value and all(_number(key) is not None for key in value):  # {"1": 0.4, "2": {"score": 0.9}}
            return [
                {**(item if isinstance(item, Mapping) else {"score": item}), "trajectory_id": key}
                for key, item in value.items()
            ]
        return None
    if isinstance(value, list) and (not value or any(isinstance(item, Mapping) for item in value)):
        return value
    return None


def _json_values(text: str) -> Iterator[Any]:
    """Every JSON object or list in the text that is not inside another one."""
    decoder = json.JSONDecoder()
    position = 0
    while (match := _OPENS.search(text, position)) is not None:
        try:
            value, position = decoder.raw_decode(text, match.start())
        except RecursionError:
            return  # brackets without end are no answer
        except ValueError:
            position = match.start() + 1
        else:
            yield value
