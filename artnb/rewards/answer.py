"""What a reward reads of a trajectory: the last answer's text, the number or JSON in it, and the tool calls.

Looks at the main conversation; the rewards themselves are in verifiable.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..trajectories import Trajectory, messages_of

_FENCE = re.compile(r"```[\w+-]*[ \t]*\n(.*?)```", re.DOTALL)
# A digit must open it, so that a sentence's full stop or a list's comma is no part of it.
_NUMBER = re.compile(
    r"(?P<sign>[-−–]?)\s?[$€£]?(?P<int>\d{1,3}(?:,\d{3})+|\d+)?(?P<rest>(?:\.\d+)?(?:[eE][-+]?\d+)?)"
    r"(?:\s?/\s?(?P<below>\d+(?:\.\d+)?))?(?P<percent>\s?%)?"
)


def text_of_content(content: Any) -> str:
    """A message's content as text: of a list of parts the text parts, of a dict its JSON."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        texts = [part.get("text") if isinstance(part, dict) else part for part in content]
        return "".join(text for text in texts if isinstance(text, str))
    return json.dumps(content, ensure_ascii=False, default=str)


def without_thoughts(text: str) -> str:
    """What follows the last </think>; the whole text where nothing was thought."""
    return text.rpartition("</think>")[2]


def answer_of(trajectory: Trajectory, extract: str | None, *, thoughts: bool = False) -> str | None:
    """The text of the last assistant message, or the last match of `extract` in it; None if there is no such thing."""
    for message in reversed(trajectory.messages()):
        if message.get("role") == "assistant":
            text = text_of_content(message.get("content"))
            break
    else:
        return None
    if not thoughts:
        text = without_thoughts(text)
    if extract is None:
        return text
    found = list(re.finditer(extract, text, re.DOTALL))
    if not found:
        return None
    return found[-1].group(1 if found[-1].re.groups else 0) or ""


def last_number(text: str) -> tuple[float, ...]:
    """The last number in the text: none, one, or two readings of it (45 % is 0.45, and 45)."""
    last: re.Match[str] | None = None
    for match in _NUMBER.finditer(text):
        if match["int"] is not None or match["rest"].startswith("."):
            last = match
    if last is None:
        return ()
    value = float((last["int"] or "0").replace(",", "") + last["rest"])
    # "5-3" and "pages 3–5" hold a dash between two things, not a minus.
    before = text[: last.start()]
    if last["sign"] and not re.search(r"[\w)]\s?$", before):
        value = -value
    if last["below"] is not None:
        below = float(last["below"])
        if below == 0:
            return ()
        value /= below
    return (value / 100, value) if last["percent"] else (value,)


def json_value(text: str) -> Any:
    """The JSON that the text is, or that its only ``` block holds. Raises ValueError."""
    blocks = _FENCE.findall(text)
    return json.loads(blocks[0] if len(blocks) == 1 else text, parse_constant=_no_constant)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call: whether such a tool was offered, whether its arguments are a JSON object, and its result's text."""

    name: str
    offered: bool
    valid: bool
    result: str | None


def tool_calls(trajectory: Trajectory) -> Iterator[ToolCall]:
    """Every call of the trajectory, further histories included, in order."""
    for items, tools in trajectory.histories():
        offered = {tool["function"]["name"] for tool in tools or () if tool.get("type") == "function"}
        messages: list[Any] = list(messages_of(items))
        results = {
            str(message["tool_call_id"]): text_of_content(message.get("content"))
            for message in messages
            if message.get("role") == "tool" and "tool_call_id" in message
        }
        for message in messages:
            for call in message.get("tool_calls") or () if message.get("role") == "assistant" else ():
                function: dict[str, Any] = call.get("function") or {}
                name = str(function.get("name"))
                yield ToolCall(
                    name=name,
                    offered=not offered or name in offered,  # a rollout may keep its tools to itself
                    valid=_is_object(function.get("arguments")),
                    result=results.get(str(call.get("id"))),
                )


def _is_object(arguments: Any) -> bool:
    if isinstance(arguments, dict):
        return True
    try:
        return isinstance(json.loads(arguments or "{}"), dict)
    except (ValueError, TypeError):
        return False
