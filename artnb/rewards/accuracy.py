"""How often a judge is right: pairs of answers of which one is clearly better, and the share that it ranks so.

`judge_pairs.jsonl` has 96 pairs of six kinds in English, written for artnb. The prompt and the formula of
LikelihoodJudge were chosen on the half called "tuning"; "held_out" was looked at only when they were fixed. About half
of the better answers are the longer ones.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from ..config import check_choice, check_number
from ..errors import ConfigError, JudgeError
from .report import wilson
from .ruler import JudgeModel, ruler

Half = Literal["all", "tuning", "held_out"]
Outcome = Literal["right", "wrong", "tied", "unscored"]


@dataclass(frozen=True, slots=True)
class JudgePair:
    """Two answers to one task. `kind` says what is wrong with the worse one."""

    kind: str
    task: str
    better: str
    worse: str
    half: str = ""

    def conversations(self) -> list[list[dict[str, Any]]]:
        """The better one first, as `ruler` takes them."""
        task = {"role": "user", "content": self.task}
        return [[task, {"role": "assistant", "content": answer}] for answer in (self.better, self.worse)]


@dataclass(slots=True)
class JudgeAccuracy:
    """What came of each pair. A tie and a missing score are not right."""

    judge: str
    outcomes: list[tuple[JudgePair, Outcome]] = field(default_factory=list)

    @property
    def right(self) -> int:
        return sum(outcome == "right" for _, outcome in self.outcomes)

    @property
    def share(self) -> float:
        """Pairs that were ranked rightly, as a share of all. Chance is one half."""
        return self.right / len(self.outcomes)

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval of the share."""
        return wilson(self.right, len(self.outcomes))

    def by_kind(self) -> dict[str, tuple[int, int]]:
        """Kind → (right, pairs)."""
        counts: dict[str, tuple[int, int]] = {}
        for pair, outcome in self.outcomes:
            right, total = counts.get(pair.kind, (0, 0))
            counts[pair.kind] = (right + (outcome == "right"), total + 1)
        return counts

    def __str__(self) -> str:
        low, high = self.interval
        kinds = ", ".join(f"{kind} {right}/{total}" for kind, (right, total) in self.by_kind().items())
        more = {name: sum(outcome == name for _, outcome in self.outcomes) for name in ("tied", "unscored")}
        rest = "".join(f", {count} {name}" for name, count in more.items() if count)
        return (
            f"{self.judge}: {self.share:.1%} of {len(self.outcomes)} pairs right (95 % interval {low:.0%}–{high:.0%})"
            f"{rest}; {kinds}"
        )


def judge_pairs(half: Half = "all", path: Path | str | None = None) -> list[JudgePair]:
    """The pairs that come with artnb, or those of a JSON-lines file: task, better, worse and, if you like, kind.

    Raises: ConfigError that names the line.
    """
    check_choice("judge_pairs", "half", half, ("all", "tuning", "held_out"))
    file = resources.files(__package__) / "judge_pairs.jsonl" if path is None else Path(path)
    pairs: list[JudgePair] = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            texts = {name: record[name] for name in ("task", "better", "worse")}
            if not all(isinstance(text, str) for text in texts.values()):
                raise TypeError("task, better and worse must be texts")
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{file}, line {number}: no pair of answers ({type(error).__name__}: {error})") from error
        pair = JudgePair(kind=str(record.get("kind", "pairs")), half=str(record.get("half", "")), **texts)
        if half in ("all", pair.half):
            pairs.append(pair)
    return pairs


async def judge_accuracy(
    judge_model: JudgeModel, pairs: Sequence[JudgePair] | None = None, *, max_concurrency: int = 4, **options: Any
) -> JudgeAccuracy:
    """Ask the judge about each pair, in two orders unless `orders` says otherwise. `options` are those of `ruler`.

        print(await judge_accuracy(LikelihoodJudge(model)))

    Raises: what `ruler` raises for wrong options. A judge that gives no usable answer about a pair has not ranked it.
    """
    check_number("judge_accuracy", "max_concurrency", max_concurrency, low=1, whole=True)
    chosen = judge_pairs() if pairs is None else list(pairs)
    if not chosen:
        raise ConfigError("judge_accuracy: there are no pairs")
    slots = asyncio.Semaphore(max_concurrency)

    async def ask(pair: JudgePair) -> Outcome:
        async with slots:
            try:
                found = await ruler(pair.conversations(), judge_model, **{"orders": "two", **options})
            except JudgeError:
                return "unscored"
        better, worse = found[0].score, found[1].score
        if better is None or worse is None:
            return "unscored"
        return "right" if better > worse else "tied" if better == worse else "wrong"

    outcomes = await asyncio.gather(*map(ask, chosen))
    return JudgeAccuracy(_name(judge_model), list(zip(chosen, outcomes, strict=True)))


def longer_wins(pairs: Iterable[JudgePair]) -> JudgeAccuracy:
    """A judge that only looks at the length: what any other has to beat on the same pairs."""

    def outcome(pair: JudgePair) -> Outcome:
        difference = len(pair.better) - len(pair.worse)
        return "right" if difference > 0 else "tied" if difference == 0 else "wrong"

    return JudgeAccuracy("the longer answer wins", [(pair, outcome(pair)) for pair in pairs])


def _name(judge_model: Any) -> str:
    return str(getattr(judge_model, "name", judge_model))
