"""Rewards that need no judge: exact match, number, JSON schema, pattern, tool calls that worked.

Each is a value that is made once, checked where it is made, and called with a trajectory; it returns a number from 0
to 1 and changes nothing. Several become one reward in combine.py. What "the answer" is, is in answer.py.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import pydantic

from ..config import check_number
from ..errors import ConfigError, nearest
from ..trajectories import Trajectory
from .answer import answer_of, json_value, last_number, tool_calls


@dataclass(frozen=True)
class _Expects:
    """`expected` is the right answer (or a list of right ones), or `metadata` names where each trajectory has it."""

    expected: Any = None
    _: KW_ONLY
    metadata: str | None = None
    extract: str | None = None

    def __post_init__(self) -> None:
        me = type(self).__name__
        if (self.expected is None) == (self.metadata is None):
            raise ConfigError(
                f"{me} needs either the expected answer or metadata=<the key that holds it>, and one only"
            )
        _compiled(me, "extract", self.extract)

    def accepted(self, trajectory: Trajectory) -> list[Any]:
        """The right answers for this trajectory."""
        value = self.expected
        if self.metadata is not None:
            if self.metadata not in trajectory.metadata:
                known = trajectory.metadata
                hint = nearest(self.metadata, known) if known else "; it has no metadata at all"
                raise ConfigError(f"{type(self).__name__}: the trajectory's metadata lacks {self.metadata!r}{hint}")
            value = trajectory.metadata[self.metadata]
        return list(value) if isinstance(value, list | tuple | set | frozenset) else [value]


@dataclass(frozen=True, kw_only=True)
class ExactMatch(_Expects):
    """1 if the last answer is the expected text, else 0. White space around it does not count.

        ExactMatch("Paris")
        ExactMatch(metadata="answer", ignore_case=True, extract=r"<answer>(.*?)</answer>")

    Args:
        expected: a text, or several of which one is enough. Anything else is compared as its text.
        extract: a pattern; its last match in the answer (its first group, if it has one) is compared instead of all.
        ignore_case: capitals do not count.
        ignore_punctuation: letters, digits and single spaces are compared, nothing else.
    """

    ignore_case: bool = False
    ignore_punctuation: bool = False

    def __call__(self, trajectory: Trajectory) -> float:
        answer = answer_of(trajectory, self.extract)
        if answer is None:
            return 0.0
        return float(self._plain(answer) in [self._plain(str(value)) for value in self.accepted(trajectory)])

    def _plain(self, text: str) -> str:
        text = text.casefold() if self.ignore_case else text
        if self.ignore_punctuation:
            text = " ".join(re.sub(r"[\W_]+", " ", text).split())
        return text.strip()


@dataclass(frozen=True, kw_only=True)
class Numeric(_Expects):
    """1 if the last number of the answer is the expected one, else 0.

        Numeric(metadata="answer", tolerance=0.01)

    Thousands may be marked by commas, and `3/4`, `1e-3`, `45 %` (0.45 or 45) and a minus of any kind are read.

    Args:
        tolerance: largest absolute difference.
        relative: largest difference as a share of the expected number; the larger of the two limits counts.
        extract: a pattern; the number is looked for in its last match only.
    """

    tolerance: float = 1e-6
    relative: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("Numeric", "tolerance", self.tolerance, low=0.0)
        check_number("Numeric", "relative", self.relative, low=0.0)
        if self.metadata is None:
            for value in self.accepted(Trajectory()):
                _number(value)

    def __call__(self, trajectory: Trajectory) -> float:
        wanted = [_number(value) for value in self.accepted(trajectory)]
        answer = answer_of(trajectory, self.extract)
        found = () if answer is None else last_number(answer)
        return float(any(self._close(value, right) for value in found for right in wanted))

    def _close(self, value: float, right: float) -> bool:
        return abs(value - right) <= max(self.tolerance, self.relative * abs(right))


@dataclass(frozen=True)
class JsonSchema:
    """1 if the answer is JSON that fits the schema, else 0.

        JsonSchema({"type": "object", "required": ["city"]})     # needs pip install "artnb[jsonschema]"
        JsonSchema(MyPydanticModel)                              # strict=False, as model_validate_json

    The answer is the JSON text alone, or holds it in one ``` block. `extract`: a pattern; its last match is read.
    """

    schema: Mapping[str, Any] | type[Any]
    _: KW_ONLY
    extract: str | None = None
    _fits: Callable[[Any], bool] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _compiled("JsonSchema", "extract", self.extract)
        fits = _schema_check(self.schema) if isinstance(self.schema, Mapping) else _type_check(self.schema)
        object.__setattr__(self, "_fits", fits)

    def __call__(self, trajectory: Trajectory) -> float:
        answer = answer_of(trajectory, self.extract)
        if answer is None:
            return 0.0
        try:
            value = json_value(answer)
        except ValueError:
            return 0.0
        return float(self._fits(value))


@dataclass(frozen=True)
class Regex:
    """1 if the pattern is found in the last answer, else 0; with `full` the whole answer must match it.

    Regex(r"<think>.+</think>\\s*<answer>.+</answer>", full=True)

    `.` matches line breaks, too. The text is the answer with its thoughts, as the model wrote it.
    """

    pattern: str
    _: KW_ONLY
    full: bool = False

    def __post_init__(self) -> None:
        _compiled("Regex", "pattern", self.pattern)

    def __call__(self, trajectory: Trajectory) -> float:
        answer = answer_of(trajectory, None, thoughts=True)
        compiled = re.compile(self.pattern, re.DOTALL)
        if answer is None:
            return 0.0
        return float((compiled.fullmatch(answer.strip()) if self.full else compiled.search(answer)) is not None)


@dataclass(frozen=True)
class ToolSuccess:
    """The share of tool calls that worked, from 0 to 1; `without_calls` where there were none.

        ToolSuccess()
        ToolSuccess("search", "read", is_error=lambda content: "not found" in content)

    A call worked if the trajectory offers such a tool, its arguments are a JSON object, and its result came and is no
    error. Without `is_error` a result is one if it is a JSON object with a true `error`, `isError` or `is_error`, or a
    text that begins with "Error" or "Traceback".

    Args:
        names: only calls of these tools count; none: all do.
        is_error: says of a result's text whether it is one.
    """

    names: tuple[str, ...]
    is_error: Callable[[str], bool] | None
    without_calls: float

    def __init__(self, *names: str, is_error: Callable[[str], bool] | None = None, without_calls: float = 0.0) -> None:
        check_number("ToolSuccess", "without_calls", without_calls)
        for name in names:
            if not isinstance(name, str):
                raise ConfigError(f"ToolSuccess takes names of tools, not a {type(name).__name__}")
        for attribute, value in (("names", names), ("is_error", is_error), ("without_calls", float(without_calls))):
            object.__setattr__(self, attribute, value)

    def __call__(self, trajectory: Trajectory) -> float:
        wanted = [call for call in tool_calls(trajectory) if not self.names or call.name in self.names]
        if not wanted:
            return self.without_calls
        worked = [
            call.offered and call.valid and call.result is not None and not self._failed(call.result) for call in wanted
        ]
        return sum(worked) / len(worked)

    def _failed(self, result: str) -> bool:
        return (self.is_error or looks_like_an_error)(result)


def looks_like_an_error(result: str) -> bool:
    """What ToolSuccess takes for an error of its own accord."""
    text = result.strip()
    if text.startswith("{"):
        try:
            value = json.loads(text)
        except ValueError:
            return False
        return any(bool(value.get(key)) for key in ("error", "isError", "is_error"))
    return text.lower().startswith(("error", "traceback"))


def _compiled(owner: str, option: str, pattern: str | None) -> None:
    """Raise ConfigError unless it is a pattern (or None)."""
    if pattern is None:
        return
    try:
        re.compile(pattern)
    except (re.error, TypeError) as error:
        raise ConfigError(f"{owner}: {option}={pattern!r} is no regular expression: {error}") from None


def _number(value: Any) -> float:
    """An expected answer as a number. Raises ConfigError."""
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    found = last_number(value) if isinstance(value, str) else ()
    if not found:
        raise ConfigError(f"Numeric: the expected answer {value!r} is no number")
    return found[0]


def _type_check(kind: Any) -> Callable[[Any], bool]:
    wrong = ConfigError(f"JsonSchema takes a JSON schema as a dict or a type that pydantic knows, not {kind!r}")
    try:
        adapter: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(kind)
    except pydantic.PydanticSchemaGenerationError as error:
        raise wrong from error
    if not adapter.pydantic_complete:  # a name that stands for nothing
        raise wrong

    def fits(value: Any) -> bool:
        try:
            adapter.validate_json(json.dumps(value))
        except pydantic.ValidationError:
            return False
        return True

    return fits


def _schema_check(schema: Mapping[str, Any]) -> Callable[[Any], bool]:
    try:
        import jsonschema
    except ImportError as error:
        raise ConfigError(
            'JsonSchema with a dict needs jsonschema: pip install "artnb[jsonschema]"; a pydantic model works without'
        ) from error
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        kind.check_schema(schema)
    except jsonschema.SchemaError as error:
        raise ConfigError(f"JsonSchema: the schema itself is wrong at {error.json_path}: {error.message}") from error
    validator = kind(schema)
    return lambda value: bool(validator.is_valid(value))
