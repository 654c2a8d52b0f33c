"""The messages of a trajectory as plain values for whoever shows them: role, text, reasoning, tool calls.

Texts come out as UTF-8 can hold them and, where asked for, cut. Knows no HTML, no widget, and not what was trained.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from openai.types.chat.chat_completion import Choice

from ..trajectories import MessageOrChoice, Trajectory

_THINK = re.compile(r"\s*<think>(?P<reasoning>.*?)</think>\s*(?P<rest>.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call as the model wrote it; `arguments` is JSON, indented where it parses."""

    name: str
    arguments: str
    id: str = ""


@dataclass(frozen=True, slots=True)
class ShownMessage:
    """One message. `sampled`: the engine's own answer, with its finish reason; otherwise it is context."""

    role: str
    text: str
    sampled: bool = False
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    name: str = ""  # of a tool's result: the tool, or the id of its call
    finish_reason: str = ""


def shown_messages(trajectory: Trajectory) -> list[list[ShownMessage]]:
    """The messages of every history, the main one first."""
    return [[shown_message(item) for item in items] for items, _ in trajectory.histories()]


def shown_message(item: MessageOrChoice) -> ShownMessage:
    if isinstance(item, Choice):
        message: Mapping[str, Any] = {"role": "assistant", **item.message.model_dump(mode="json", warnings=False)}
        finish: Any = item.finish_reason
    else:
        message, finish = item, None
    text = content_text(message.get("content"))
    reasoning = plain(message.get("reasoning_content") or message.get("reasoning") or "")
    if not reasoning and message.get("role") == "assistant" and (match := _THINK.fullmatch(text)):
        reasoning, text = match["reasoning"].strip(), match["rest"]
    calls = message.get("tool_calls")
    return ShownMessage(
        role=plain(message.get("role") or "?"),
        text=text,
        sampled=isinstance(item, Choice),
        reasoning=reasoning,
        tool_calls=[_call(call) for call in calls] if isinstance(calls, list) else [],
        name=plain(message.get("name") or message.get("tool_call_id") or ""),
        finish_reason=plain(finish or ""),
    )


def content_text(content: Any) -> str:
    """A message's content as text; of parts that are not text the kind is named."""
    if content is None:
        return ""
    if isinstance(content, str):
        return plain(content)
    if isinstance(content, list | tuple):
        return "".join(_part(part) for part in content)
    return _json(content)


def plain(value: Any) -> str:
    """Text that UTF-8 can hold: half of an emoji, split over two answers, becomes '?'."""
    return str(value).encode("utf-8", "replace").decode()


def cut(text: str, limit: int) -> str:
    """At most `limit` characters, saying how many are missing."""
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text) - limit:,} more characters)"


def number(value: Any, digits: int = 4) -> str:
    """A reward or metric for people: '0.5', '−1', 'NaN', '∞', 'unscored' for None, else its text."""
    if value is None:
        return "unscored"
    try:
        known = float(value)
    except (TypeError, ValueError):
        return cut(plain(repr(value)), 40)
    if math.isnan(known):
        return "NaN"
    if math.isinf(known):
        return "∞" if known > 0 else "−∞"
    return f"{known:.{digits}g}".replace("-", "−")


def finite(value: Any) -> float | None:
    """The number to sort and filter by; None for what is missing, NaN, or no number. Infinities stay."""
    try:
        known = float(value)
    except (TypeError, ValueError):
        return None
    return None if math.isnan(known) else known


def _part(part: Any) -> str:
    if isinstance(part, Mapping):
        if isinstance(part.get("text"), str):
            return plain(part["text"])
        return f"[{plain(part.get('type') or 'part')}]"  # an image's bytes are no text
    return plain(part)


def _call(call: Any) -> ToolCall:
    call = call if isinstance(call, Mapping) else {}
    function = call.get("function") or call.get("custom") or {}
    arguments = function.get("arguments", function.get("input", ""))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:  # as the model wrote it, wrong as it is
            return ToolCall(plain(function.get("name") or "?"), plain(arguments), plain(call.get("id") or ""))
    return ToolCall(plain(function.get("name") or "?"), _json(arguments), plain(call.get("id") or ""))


def _json(value: Any) -> str:
    return plain(json.dumps(value, ensure_ascii=False, indent=2, default=str))
