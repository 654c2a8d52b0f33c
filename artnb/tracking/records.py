"""Trajectories and groups as JSON lines, and back exactly: token ids, log-probs, NaN, lone surrogates and all.

One line is one group's head or one trajectory. NaN and infinities are written as Python's json does (`NaN`,
`Infinity`). A value that JSON does not know is written as its text, with a warning. Does not touch files.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Callable, Mapping
from datetime import date, datetime
from pathlib import PurePath
from typing import Any, TypeVar

import pydantic
from openai.types.chat.chat_completion import Choice
from pydantic_core import PydanticSerializationError, to_json

from ..token_logprobs import unread_text
from ..trajectories import History, MessageOrChoice, Trajectory, TrajectoryGroup
from .frames import message_of, text_of, token_count

log = logging.getLogger(__name__)

TrajectoryT = TypeVar("TrajectoryT", bound=Trajectory)
VERSION = 1
_LONG = ("messages_and_choices", "additional_histories", "tools")
_LAST_CHARACTERS = 160
_HOLE = f"choice-{secrets.token_hex(16)}"
"""Stands for a choice while its line is made; nobody can have written it into a message."""


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


def trajectory_record(
    trajectory: Trajectory, group: int, index: int, *, kept: Callable[[Choice], Any] | None = None
) -> dict[str, Any]:
    """Every field of the trajectory, those of a subclass too; sampled choices are marked as such.

    The long fields come last: whoever lists a step reads the head of each line only (stored.py). `kept`: what stands
    for a choice; by default its fields.
    """
    kept = kept or _fields
    long: dict[str, Any] = {
        "messages_and_choices": [_item(item, kept) for item in trajectory.messages_and_choices],
        "additional_histories": [
            {"messages_and_choices": [_item(item, kept) for item in h.messages_and_choices], "tools": h.tools}
            for h in trajectory.additional_histories
        ],
        "tools": trajectory.tools,
    }
    fields = {name: getattr(trajectory, name) for name in type(trajectory).model_fields if name not in _LONG}
    fields |= trajectory.model_extra or {}
    where = {"v": VERSION, "kind": "trajectory", "group": group, "trajectory": index}
    histories = [[_item(item, _counted) for item in items] for items, _ in trajectory.histories()]
    short = summary(
        {
            "messages_and_choices": histories[0],
            "additional_histories": [{"messages_and_choices": items} for items in histories[1:]],
        }
    )
    return {**where, "summary": short, "fields": {**fields, **long}}


def trajectory_line(trajectory: Trajectory, group: int, index: int) -> bytes:
    """The line of `trajectory_record`, in half the time: a step's tokens need not become Python objects first."""
    choices: list[bytes] = []

    def hole(choice: Choice) -> str:
        text = unread_text(choice.logprobs)
        exclude = None if text is None else {"logprobs"}
        written = choice.__pydantic_serializer__.to_json(choice, exclude=exclude, exclude_unset=True, warnings=False)
        if b"null" in written:  # maybe a NaN, which pydantic writes so
            written = to_line(choice.model_dump(exclude=exclude, exclude_unset=True, warnings=False))[:-1]
        if text is not None:
            written = b'%b,"logprobs":{"content":%b}}' % (written[:-1], text)
        choices.append(written)
        return _HOLE

    try:
        parts = to_line(trajectory_record(trajectory, group, index, kept=hole)).split(f'"{_HOLE}"'.encode())
    except PydanticSerializationError:  # a choice that UTF-8 has no form for
        return to_line(trajectory_record(trajectory, group, index))
    return b"".join(piece for pair in zip(parts, [*choices, b""], strict=True) for piece in pair)


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


def _item(item: MessageOrChoice, kept: Callable[[Choice], Any]) -> dict[str, Any]:
    return {"choice": kept(item)} if isinstance(item, Choice) else {"message": item}


def _fields(choice: Choice) -> dict[str, Any]:
    # Unset fields are left out: what comes back has the same fields set, and the line is shorter.
    return choice.model_dump(exclude_unset=True, warnings=False)


def _counted(choice: Choice) -> dict[str, Any]:
    """What `summary` looks at."""
    message, token_ids = getattr(choice, "message", None), (choice.model_extra or {}).get("token_ids")
    if not (isinstance(message, pydantic.BaseModel) and isinstance(token_ids, list)):
        return _fields(choice)  # of another server, or accepted without validation
    return {"message": message.model_dump(exclude_unset=True, warnings=False), "token_ids": token_ids}


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
