"""A step's trajectory file as a list: the head of each line is read at once, its messages when asked for.

A step of 2,000 long trajectories is 100 MB and more, of which a list shows a hundredth. The file is read, never
written; a file that was replaced meanwhile is noticed. See records.py for the lines and history.py for the folder.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pydantic

from ..errors import CheckpointError
from ..trajectories import Trajectory, TrajectoryGroup
from .frames import message_of
from .records import VERSION, from_line, summary, to_group, to_trajectory

_LONG_FIELDS = b',"messages_and_choices":['
"""Where a line's long part begins: a quote inside a JSON text is escaped, so these bytes are the key itself."""


_PLAIN = re.compile(r"[a-z0-9 _.-]+")


@dataclass(frozen=True, slots=True)
class Head:
    """What a list shows of a trajectory. `tokens` and `turns` are sampled ones; `last` is how the last text begins."""

    group: int
    index: int  # in the group
    reward: Any  # as it was saved: a number, None, or what the rollout assigned
    stop_reason: str | None
    metrics: Mapping[str, Any]
    metadata: Mapping[str, Any]
    turns: int
    tokens: int
    last: str


@dataclass(slots=True)
class GroupHead:
    """A group without its trajectories; `members` are their numbers in the list of heads."""

    metadata: Mapping[str, Any] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)  # 'ValueError: …' of each rollout that raised
    members: list[int] = field(default_factory=list)


class AnyTrajectory(Trajectory):
    """A trajectory of a class that is not known here: its further fields are kept as they were saved."""

    model_config = pydantic.ConfigDict(extra="allow")


class StoredStep:
    """The trajectories of one file, numbered from 0 in its order; `heads` and `groups` are read at once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.heads: list[Head] = []
        self.groups: list[GroupHead] = []
        self._spans: list[tuple[int, int]] = []  # offset and length of each trajectory's line
        self._records: list[dict[str, Any] | None] = []  # of each group
        numbers: dict[int, int] = {}  # a group's number in the file → in self.groups
        for offset, line in _lines(path):
            record = _read_head(line)
            if record is None:
                continue  # torn or foreign; History says so when it reads the whole file
            if record["group"] not in numbers:
                numbers[record["group"]] = len(self.groups)
                self.groups.append(GroupHead())
                self._records.append(None)
            group = numbers[record["group"]]
            if record["kind"] == "group":
                self._records[group] = record
                self.groups[group].metadata = record["metadata"]
                self.groups[group].failed = [f"{e['type']}: {e['message']}" for e in record["exceptions"]]
            else:
                self.groups[group].members.append(len(self.heads))
                self.heads.append(_head(record, group, len(self.groups[group].members) - 1))
                self._spans.append((offset, len(line)))

    def trajectory(self, number: int) -> Trajectory:
        """Trajectory `number`, exactly as it was logged. Raises CheckpointError if the file has changed."""
        record = self._record(number)
        known = record["fields"].keys() <= Trajectory.model_fields.keys()
        return to_trajectory(record, Trajectory if known else AnyTrajectory)

    def messages(self, number: int) -> list[dict[str, Any]]:
        """All messages as dicts, further histories after the main one: quicker than `trajectory`."""
        fields = self._record(number)["fields"]
        histories = [fields, *fields["additional_histories"]]
        return [message_of(item) for history in histories for item in history["messages_and_choices"]]

    def may_hold(self, number: int, text: str) -> bool:
        """False where it is certain that no message holds the casefolded text; costs a hundredth of `messages`.

        Looks at the line's bytes, so it is certain only of plain texts in plain lines: without escapes, without
        characters that casefolding turns into ASCII, and without contents in parts.
        """
        if not _PLAIN.fullmatch(text):
            return True
        line = self._line(number)
        return b"\\u" in line or b'"type":"text"' in line or not line.isascii() or text.encode() in line.lower()

    def group(self, number: int) -> TrajectoryGroup:
        """Group `number` with all its trajectories."""
        return to_group(self._records[number], [self.trajectory(n) for n in self.groups[number].members])

    def _line(self, number: int) -> bytes:
        offset, length = self._spans[number]
        try:
            with open(self.path, "rb") as file:
                file.seek(offset)
                return file.read(length)
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read ({error}); inspect the step again") from error

    def _record(self, number: int) -> dict[str, Any]:
        record = from_line(self._line(number))
        if record is None or record["kind"] != "trajectory" or not _same(record, self.heads[number]):
            raise CheckpointError(f"{self.path} was replaced since it was listed; inspect the step again")
        return record


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """(offset, line) of every whole line."""
    offset = 0
    with open(path, "rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield offset, line
            offset += len(line)


def _read_head(line: bytes) -> dict[str, Any] | None:
    """A group's record, or a trajectory's without its long fields; None for any other line."""
    end = line.find(_LONG_FIELDS)
    if end >= 0:
        try:
            record = json.loads(line[:end] + b"}}")
        except ValueError:
            record = None
        if isinstance(record, dict) and record.get("v") == VERSION and "summary" in record:
            return record
    # A group's line, or one written before the long fields came last.
    record = from_line(line)
    if record is None or record["kind"] not in ("group", "trajectory"):
        return None
    if record["kind"] == "trajectory" and "summary" not in record:
        record["summary"] = summary(record["fields"])
    return record


def _head(record: Mapping[str, Any], group: int, index: int) -> Head:
    fields, short = record["fields"], record["summary"]
    return Head(
        group=group,
        index=index,
        reward=fields["reward"],
        stop_reason=fields["stop_reason"],
        metrics=fields["metrics"],
        metadata=fields["metadata"],
        turns=short["turns"],
        tokens=short["tokens"],
        last=short["last"],
    )


def _same(record: Mapping[str, Any], head: Head) -> bool:
    # NaN is not equal to itself, so values are compared as their text.
    fields = record["fields"]
    return (repr(fields["reward"]), fields["stop_reason"]) == (repr(head.reward), head.stop_reason)
