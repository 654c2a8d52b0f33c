"""Conversations for supervised fine-tuning out of JSONL files, data sets and dicts, as trajectories.

A row is `{"messages": [...], "tools": [...]}` as OpenAI's fine-tuning files have it, or a saved trajectory. Every row
is looked at before any is trained; what is wrong is told with its file and line. Tokenizes nothing: that is sft.py.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, overload

import pydantic

from ..errors import ConfigError, DataError, RenderError, RequestError, nearest
from ..serving.messages import check_tools, normalize_messages
from ..trajectories import Trajectory, TrajectoryGroup

SFTRow: TypeAlias = Trajectory | TrajectoryGroup | Mapping[str, Any]
SFTData: TypeAlias = "str | Path | Iterable[SFTRow | str | Path]"
"""A JSONL file, or what holds rows: a list, a generator, a `datasets.Dataset`; files may be among them."""

SHOWN_PROBLEMS = 5
"""Rows that cannot be used and are told one by one; more are counted."""
ROW_SHAPE = '{"messages": [{"role": "user", "content": ...}, {"role": "assistant", "content": ...}], "tools": [...]}'


class JsonlFile(Sequence[Trajectory]):
    """The rows of a JSONL file, one trajectory a line; blank lines are passed over.

    rows = JsonlFile("train.jsonl"); rows[0]; len(rows)

    The whole file is read and checked once, here; of its rows only the places stay in memory, 16 bytes each, and a row
    is read again when it is asked for. A trajectory's metadata holds "source" (the file's name) and "line".

    Raises: DataError naming each wrong line, for no such file, and for a file without rows.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._places = array("Q")
        self._lines = array("Q")
        problems = _Problems(str(self.path), "line")
        digest = hashlib.sha256()
        at = 0
        try:
            with open(self.path, "rb") as file:
                for number, line in enumerate(file, start=1):
                    digest.update(line)
                    if line.strip():
                        if number == 1 and line.lstrip().startswith(b"["):
                            raise DataError(
                                f"{self.path} holds a JSON array; a JSONL file has one object a line: {ROW_SHAPE}"
                            )
                        self._places.append(at)
                        self._lines.append(number)
                        try:
                            self._read(line, number)
                        except _BadRow as error:
                            problems.add(number, str(error))
                    at += len(line)
        except OSError as error:
            raise DataError(f"{self.path} cannot be read: {error.strerror or error}") from error
        problems.check(len(self._places))
        if not self._places:
            raise DataError(f"{self.path} holds no rows; each line should be {ROW_SHAPE}")
        self.sha256 = digest.hexdigest()

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, index: int) -> Trajectory: ...
    @overload
    def __getitem__(self, index: slice) -> list[Trajectory]: ...
    def __getitem__(self, index: int | slice) -> Trajectory | list[Trajectory]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        with open(self.path, "rb") as file:
            file.seek(self._places[index])
            line, number = file.readline(), self._lines[index]
        try:
            return self._read(line, number)
        except _BadRow as error:
            raise DataError(f"{self.path} has changed since it was opened: line {number}: {error}") from error

    def _read(self, line: bytes, number: int) -> Trajectory:
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise _BadRow(f"is not UTF-8 at byte {error.start}") from error
        try:
            row = json.loads(text)
        except json.JSONDecodeError as error:
            raise _BadRow(f"is not JSON: {error.msg} at column {error.colno}: {_snippet(text, error.pos)}") from error
        except RecursionError as error:
            raise _BadRow("is nested too deeply to be read") from error
        return _to_trajectory(row, {"source": self.path.name, "line": number})


def read_trajectories(data: SFTData) -> list[Trajectory]:
    """All rows of `data` as trajectories, in their order. Trajectories are taken as they are.

    Raises: DataError naming each row that cannot be used, and for files as `JsonlFile`; ConfigError for what is no
    data.
    """
    if isinstance(data, str | Path):
        return JsonlFile(data)[:]
    if isinstance(data, Mapping):
        raise ConfigError(_mapping_given(data))
    given: Any = data
    if isinstance(given, Trajectory) or not isinstance(given, Iterable):
        raise ConfigError(
            f"train_sft: give a list of trajectories or rows, a data set, or the path of a JSONL file, not a "
            f"{type(data).__name__}"
        )
    found: list[Trajectory] = []
    # Arrow gives every row of a data set the keys of all of them, with None in those that it did not have.
    filled = type(data).__module__.partition(".")[0] == "datasets"
    problems = _Problems("the data", "row")
    index = -1
    for index, row in enumerate(data):
        if isinstance(row, TrajectoryGroup):
            found += row.trajectories
        elif isinstance(row, str | Path):
            found += JsonlFile(row)[:]
        else:
            try:
                found.append(row if isinstance(row, Trajectory) else _to_trajectory(row, {"row": index}, filled=filled))
            except _BadRow as error:
                problems.add(index, str(error))
    problems.check(index + 1)
    return found


class _BadRow(Exception):
    """What is wrong with a row, as the end of a sentence that begins with its place."""


class _Problems:
    """The rows that cannot be used: the first ones in words, the others counted."""

    def __init__(self, source: str, unit: str) -> None:
        self._source = source
        self._unit = unit
        self._told: list[str] = []
        self._count = 0

    def add(self, place: int, problem: str) -> None:
        self._count += 1
        if len(self._told) < SHOWN_PROBLEMS:
            self._told.append(f"{self._unit} {place} {problem}")

    def check(self, rows: int) -> None:
        if not self._count:
            return
        more = f"; {self._count - len(self._told)} more" if self._count > len(self._told) else ""
        raise DataError(
            f"{self._source}: {self._count} of {rows} rows cannot be used: {'; '.join(self._told)}{more}. "
            "Nothing was trained"
        )


def _to_trajectory(row: Any, place: dict[str, Any], *, filled: bool = False) -> Trajectory:
    if not isinstance(row, Mapping):
        raise _BadRow(f"is a {type(row).__name__}, not an object like {ROW_SHAPE}")
    if "messages_and_choices" in row:
        try:
            saved = Trajectory.model_validate(dict(row))
        except pydantic.ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise _BadRow(f"is not a saved trajectory: {where}: {first['msg']}") from error
        saved.metadata |= place
        return saved
    if "messages" not in row:
        raise _BadRow(f'has no "messages"{nearest("messages", [str(key) for key in row])}; it should be {ROW_SHAPE}')
    messages, tools = row["messages"], row.get("tools")
    if isinstance(tools, str):  # as data sets keep them, since schemas differ from tool to tool
        try:
            tools = json.loads(tools) if tools.strip() else None
        except ValueError as error:
            raise _BadRow(f'has "tools" that are text but not JSON: {error}') from error
    if filled:
        messages, tools = _without_none(messages), _without_none(tools)
    try:
        normalize_messages(messages)
        check_tools(tools)
    except (RenderError, RequestError) as error:
        raise _BadRow(f"cannot be used: {error}") from error
    for index, message in enumerate(messages):
        if message.get("weight") not in (None, 0, 1):
            raise _BadRow(f"has messages[{index}] with weight={message['weight']!r}; it can be 0 (context only) or 1")
    kept = [{k: v for k, v in message.items() if v is not None or k == "content"} for message in messages]
    return Trajectory.model_validate(
        {"messages_and_choices": kept, "tools": list(tools) if tools else None, "reward": None, "metadata": place}
    )


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, list | tuple) else value


def _mapping_given(data: Mapping[Any, Any]) -> str:
    if "messages" in data:
        return "train_sft: one row was given; give a list of rows, [row]"
    splits = ", ".join(map(str, data))
    return (
        f"train_sft: a mapping with {splits} was given; give one of its parts, such as data[{next(iter(data), '')!r}]"
    )


def _snippet(text: str, at: int) -> str:
    start, end = max(0, at - 20), at + 20
    return repr(("…" if start else "") + text[start:end].rstrip("\n") + ("…" if end < len(text.rstrip()) else ""))
