"""Trajectories and groups as JSON lines, and back exactly: token ids, log-probs, NaN, lone surrogates and all.

One line is one group's head or one trajectory. NaN and infinities are written as Python's json does (`NaN`,
`Infinity`). A value that JSON does not know is written as its text, with a warning. Does not touch files.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from datetime import date, datetime
from pathlib import PurePath
from typing import Any, TypeVar

import pydantic
from openai.types.chat.chat_completion import Choice
from pydantic_core import PydanticSerializationError, to_json

from ..trajectories import History, MessageOrChoice, Trajectory, TrajectoryGroup
from .frames import message_of, text_of, token_count

log = logging.getLogger(__name__)

TrajectoryT = TypeVar("TrajectoryT", bound=Trajectory)
VERSION = 1
_LONG = ("messages_and_choices", "additional_histories", "tools")
_LAST_CHARACTERS = 160


def to_line(record: Mapping[str, Any]) -> bytes:
    """One line of UTF-8 JSON with its line feed."""
    try:  # ten times as fast as json.dumps: a step's token ids and log-probs are millions of numbers
        return to_json(record, inf_nan_mode="constants", fallback=_plain) + b"\n"
    except PydanticSerializationError:
        # Half of an emoji that was split over tokens: UTF-8 has no form for it, JSON's escapes do.
        return json.dumps(record, ensure_ascii=True, default=_plain, separators=(",", ":")).encode() + b"\n"


def from_line(line: bytes) -> dict[str, Any] | None:
    """The record of a line; None if it is not one of artnb's."""
    try:
        record = json.loads(line)
    except ValueError:  # UnicodeDecodeError is one, too
        return None
    return record if isinstance(record, dict) and record.get("v") == VERSION and "kind" in record else None


def group_record(group: TrajectoryGroup, index: int) -> dict[str, Any]:
    return {
        "v": VERSION,
        "kind": "group",
        "group": index,
        "size": len(group),
        "metadata": group.metadata,
        "metrics": group.metrics,
        "logs": group.logs,
        "exceptions": [e.model_dump() for e in group.exceptions],
    }


def trajectory_record(trajectory: Trajectory, group: int, index: int) -> dict[str, Any]:
    """Every field of the trajectory, those of a subclass too; sampled choices are marked as such.

    The long fields come last: whoever lists a step reads the head of each line only (stored.py).
    """
    long: dict[str, Any] = {
        "messages_and_choices": [_item(item) for item in trajectory.messages_and_choices],
        "additional_histories": [
            {"messages_and_choices": [_item(item) for item in h.messages_and_choices], "tools": h.tools}
            for h in trajectory.additional_histories
        ],
        "tools": trajectory.tools,
    }
    fields = {name: getattr(trajectory, name) for name in type(trajectory).model_fields if name not in _LONG}
    fields |= trajectory.model_extra or {}
    where = {"v": VERSION, "kind": "trajectory", "group": group, "trajectory": index}
    return {**where, "summary": summary(long), "fields": {**fields, **long}}


def summary(fields: Mapping[str, Any]) -> dict[str, Any]:
    """What a list shows of the messages of a record: sampled turns and tokens, and how the last text begins."""
    items = fields["messages_and_choices"]
    histories = [items, *(h["messages_and_choices"] for h in fields["additional_histories"])]
    choices = [item["choice"] for history in histories for item in history if "choice" in item]
    last = text_of(message_of(items[-1]))[:_LAST_CHARACTERS] if items else ""
    return {"turns": len(choices), "tokens": sum(map(token_count, choices)), "last": last}


def to_group(record: Mapping[str, Any] | None, trajectories: list[Trajectory]) -> TrajectoryGroup:
    """A group from its head (None if it was lost) and its trajectories."""
    head = {k: record[k] for k in ("metadata", "metrics", "logs", "exceptions")} if record is not None else {}
    return TrajectoryGroup(trajectories, **head)


def to_trajectory(record: Mapping[str, Any], kind: type[TrajectoryT]) -> TrajectoryT:
    """The trajectory as an object of `kind`. Raises pydantic.ValidationError if `kind` lacks a field that was saved."""
    fields = dict(record["fields"])
    fields["messages_and_choices"] = [_to_item(item) for item in fields["messages_and_choices"]]
    fields["additional_histories"] = [
        History(messages_and_choices=[_to_item(item) for item in h["messages_and_choices"]], tools=h["tools"])
        for h in fields["additional_histories"]
    ]
    return kind(**fields)


def _item(item: MessageOrChoice) -> dict[str, Any]:
    if isinstance(item, Choice):
        # Unset fields are left out: what comes back has the same fields set, and the line is shorter.
        return {"choice": item.model_dump(exclude_unset=True, warnings=False)}
    return {"message": item}


def _to_item(item: Mapping[str, Any]) -> MessageOrChoice:
    if "choice" not in item:
        return item["message"]  # type: ignore[no-any-return]
    try:
        return Choice.model_validate(item["choice"])
    except pydantic.ValidationError:
        # A server's choice that the openai client, too, accepted without validation.
        return Choice.construct(**item["choice"])


def _plain(value: Any) -> Any:
    if isinstance(value, pydantic.BaseModel):
        return value.model_dump(exclude_unset=True, warnings=False)
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, datetime | date):
        return value.isoformat()
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, set | frozenset):
        return sorted(value, key=str)
    if hasattr(value, "tolist"):  # numpy and torch, without importing either
        return value.tolist()
    log.warning("a %s in a trajectory is kept as text: JSON has no form for it", type(value).__name__)
    return str(value)
