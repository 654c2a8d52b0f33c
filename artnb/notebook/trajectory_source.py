"""Where an inspector's trajectories come from, and how each stands: its advantage, or why it did not train.

A source is a step on disk (tracking/stored.py) or groups in memory. Standings are computed by the same function as a
training step's rows, group by group and only when asked for. No widget, no JSON.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from openai.types.chat.chat_completion import Choice

from ..config import TrainConfig
from ..tracking.frames import text_of
from ..tracking.stored import GroupHead, Head
from ..training.rows import rows_from_groups
from ..training.types import RowBatch
from ..trajectories import Trajectory, TrajectoryGroup

LAST_CHARACTERS = 160


class Source(Protocol):
    """Trajectories numbered from 0, in groups numbered from 0. `tracking.stored.StoredStep` is one."""

    heads: list[Head]
    groups: list[GroupHead]

    def trajectory(self, number: int) -> Trajectory: ...
    def messages(self, number: int) -> Sequence[Any]: ...
    def may_hold(self, number: int, text: str) -> bool: ...
    def group(self, number: int) -> TrajectoryGroup: ...


class MemorySource:
    """Groups that are at hand; later changes to their rewards show in a new inspector, not in this one."""

    def __init__(self, groups: Sequence[TrajectoryGroup]) -> None:
        self.heads: list[Head] = []
        self.groups: list[GroupHead] = []
        self._groups = list(groups)
        self._trajectories: list[Trajectory] = []
        for number, group in enumerate(self._groups):
            failed = [f"{error.type}: {error.message}" for error in group.exceptions]
            first = len(self.heads)
            members = list(range(first, first + len(group.trajectories)))
            self.groups.append(GroupHead(dict(group.metadata), failed, members))
            for index, trajectory in enumerate(group.trajectories):
                self.heads.append(_head(trajectory, number, index))
                self._trajectories.append(trajectory)

    def trajectory(self, number: int) -> Trajectory:
        return self._trajectories[number]

    def messages(self, number: int) -> Sequence[Any]:
        trajectory = self._trajectories[number]
        return [*trajectory.messages(), *(m for h in trajectory.additional_histories for m in h.messages())]

    def may_hold(self, number: int, text: str) -> bool:
        """Nothing is known of a text before it is looked for."""
        return True

    def group(self, number: int) -> TrajectoryGroup:
        return self._groups[number]


@dataclass(frozen=True, slots=True)
class Standing:
    """How a trajectory took part: its advantage where it has one, its rows, and the reason where it did not train."""

    trained: bool
    advantage: float | None = None
    rows: int = 0
    reason: str = ""


class Standings:
    """The standing of every trajectory of a source, one group at a time, kept once known. Threads may share it.

    `split`: None for groups in memory and "train" for a step's own; others were not trained, whatever they hold.
    `config` and `max_row_tokens` as of the step (`rows_from_groups`).
    """

    def __init__(
        self, source: Source, config: TrainConfig, *, split: str | None = None, max_row_tokens: int | None = None
    ) -> None:
        self._source = source
        self._config = config
        self._split = split
        self._max_row_tokens = max_row_tokens
        self._known: dict[int, list[Standing]] = {}
        self._mutex = threading.Lock()

    def group(self, number: int) -> list[Standing]:
        """Of the group's trajectories, in their order."""
        with self._mutex:
            if number not in self._known:
                # Only the batch's own standard deviation needs all groups at once.
                together = range(len(self._source.groups)) if self._config.scale_rewards == "batch" else [number]
                groups = [self._source.group(n) for n in together]
                batch = rows_from_groups(groups, self._config, max_row_tokens=self._max_row_tokens)
                for at, (n, group) in enumerate(zip(together, groups, strict=True)):
                    self._known[n] = [self._for_split(s) for s in _standings(batch, at, len(group.trajectories))]
            return self._known[number]

    def of(self, number: int) -> Standing:
        """Of trajectory `number` of the source."""
        head = self._source.heads[number]
        return self.group(head.group)[head.index]

    def _for_split(self, standing: Standing) -> Standing:
        if self._split in (None, "train"):
            return standing
        if self._split == "sft":
            return Standing(True, reason="supervised: its assistant messages are the targets, without advantages")
        why = f"split {self._split!r} is looked at, not trained"
        return Standing(False, standing.advantage, standing.rows, why)


_NOTE = re.compile(r"group (?P<group>\d+)(?:, trajectory (?P<trajectory>\d+))?(?P<choice>, choice \d+)?: ")


def _standings(batch: RowBatch, group: int, size: int) -> list[Standing]:
    advantages: dict[int, float] = {}
    rows: dict[int, int] = {}
    for row in batch.rows:
        if row.group == group:
            advantages[row.trajectory] = row.advantage
            rows[row.trajectory] = rows.get(row.trajectory, 0) + 1
    own: dict[int, str] = {}
    whole = ""
    for note in batch.notes:
        match = _NOTE.match(note)
        if match is None or int(match["group"]) != group:
            continue
        sentence = note[match.end() :]
        if match["trajectory"] is not None:
            choice = match["choice"]
            own[int(match["trajectory"])] = f"{choice[2:]}: {sentence}" if choice else sentence
        elif group in batch.group_reasons:
            whole = sentence  # the last one is about the group; those before it are about rollouts that raised
    return [
        Standing(True, advantages[i], rows[i]) if i in advantages else Standing(False, reason=own.get(i) or whole)
        for i in range(size)
    ]


def _head(trajectory: Trajectory, group: int, index: int) -> Head:
    choices = trajectory.choices()
    items = trajectory.messages_and_choices
    last: Any = items[-1] if items else {}
    message = {"content": last.message.content} if isinstance(last, Choice) else last
    return Head(
        group=group,
        index=index,
        reward=trajectory.reward,
        stop_reason=None if trajectory.stop_reason is None else str(trajectory.stop_reason),
        metrics=trajectory.metrics,
        metadata=trajectory.metadata,
        turns=len(choices),
        tokens=sum(map(_token_count, choices)),
        last=text_of(message)[:LAST_CHARACTERS],
    )


def _token_count(choice: Any) -> int:
    ids = (choice.model_extra or {}).get("token_ids")
    if isinstance(ids, list):
        return len(ids)
    return len((choice.logprobs.content if choice.logprobs else None) or [])
