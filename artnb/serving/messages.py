"""OpenAI messages, in every shape that clients send, as the plain messages that chat templates expect.

Also writes tools and tool calls into the text of messages, Hermes style, for models whose chat template
does not take tools. Never touches the caller's objects; renders and tokenizes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import RenderError, RequestError

MEDIA_PARTS = frozenset(
    ("image_url", "image", "input_image", "input_audio", "audio", "audio_url", "video", "video_url", "file")
)
TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal", "thinking": "thinking"}

HERMES_TOOLS = """\
You may call one or more functions. Their signatures are JSON, one in each line between the <tools> tags:
<tools>
{tools}
</tools>

To call a function, answer with its name and its arguments as JSON between <tool_call> tags, one pair of tags per call:
<tool_call>
{{"name": "<function name>", "arguments": {{"<argument>": <value>}}}}
</tool_call>"""


class MalformedArguments(str):
    """The arguments of a tool call that are no JSON object: kept as they are."""


def to_json(value: Any) -> str:
    """JSON as people and models read it: no ASCII escapes unless the text cannot be UTF-8 otherwise."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate
        return json.dumps(value, default=str)
    return text


def normalize_messages(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """New messages with a role, text as content, and mappings as tool-call arguments.

    Content None becomes "", a number or mapping its JSON, a list of parts their joined text. Arguments that
    are no JSON object stay a string (`MalformedArguments`).

    Raises: RenderError with the message's index, for a missing role, an image, or a tool call without a name.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise RenderError(f"messages must be a list of messages, not {type(messages).__name__}")
    if not messages:
        raise RenderError("messages is empty; send at least one message")
    return [_normalize(index, message) for index, message in enumerate(messages)]


def _normalize(index: int, message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping) and callable(getattr(message, "model_dump", None)):
        message = message.model_dump()
    if not isinstance(message, Mapping):
        raise RenderError(f"messages[{index}] must be a mapping, not {type(message).__name__}", index=index)
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise RenderError(f"messages[{index}] has no role; give it one, such as 'user'", index=index)
    new = {key: value for key, value in message.items() if value is not None}
    content = message.get("content")
    if content is None:
        content = new.pop("refusal", None)
    new["content"] = content_text(index, role, content)
    calls = new.pop("tool_calls", None) or []
    legacy = new.pop("function_call", None)
    if not isinstance(calls, list | tuple):
        raise RenderError(f"messages[{index}].tool_calls must be a list, not {type(calls).__name__}", index=index)
    calls = [*calls, *([{"function": legacy}] if legacy else [])]
    if calls:
        new["tool_calls"] = [_normalize_call(index, position, call) for position, call in enumerate(calls)]
    return new


def content_text(index: int, role: str, content: Any) -> str:
    """The text of a message's content, whatever shape it came in; see `normalize_messages`."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    parts = [content] if _is_part(content) else content
    if isinstance(parts, list | tuple) and (not parts or all(_is_part(part) for part in parts)):
        unknown = [part for part in parts if part["type"] not in TEXT_PARTS]
        media = [part for part in unknown if part["type"] in MEDIA_PARTS]
        # A tool may well answer with JSON objects that have a "type" of their own.
        if unknown and (media or role != "tool"):
            kind = (media or unknown)[0]["type"]
            raise RenderError(f"messages[{index}] has a part of type {kind!r}; only text can be rendered", index=index)
        if not unknown:
            return "".join(str(part.get(TEXT_PARTS[part["type"]]) or "") for part in parts)
    return to_json(content)


def _is_part(value: Any) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("type"), str)


def _normalize_call(index: int, position: int, call: Any) -> dict[str, Any]:
    where = f"messages[{index}].tool_calls[{position}]"
    if not isinstance(call, Mapping):
        raise RenderError(f"{where} must be a mapping, not {type(call).__name__}", index=index)
    function = call.get("function", call)
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RenderError(f"{where} has no function name", index=index)
    function = {**function, "arguments": _arguments(function.get("arguments"))}
    kept = {key: value for key, value in call.items() if value is not None} if "function" in call else {}
    return {"type": "function", **kept, "function": function}


def _arguments(arguments: Any) -> Mapping[str, Any] | MalformedArguments:
    if arguments is None or arguments == "":
        return {}
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):
            return MalformedArguments(arguments)
        return parsed if isinstance(parsed, dict) else MalformedArguments(arguments)
    return dict(arguments) if isinstance(arguments, Mapping) else MalformedArguments(to_json(arguments))


def wrap_malformed(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]] | None:
    """The messages with each malformed arguments string inside a mapping; None where there is none.

    For templates that can only iterate over a mapping: {"arguments": "<the string>"}.
    """
    found = False
    wrapped = []
    for message in messages:
        calls = []
        for call in message.get("tool_calls", ()):
            function = call["function"]
            if isinstance(function["arguments"], MalformedArguments):
                found = True
                function = {**function, "arguments": {"arguments": str(function["arguments"])}}
            calls.append({**call, "function": function})
        wrapped.append({**message, "tool_calls": calls} if calls else dict(message))
    return wrapped if found else None


def check_tools(tools: Sequence[Any] | None) -> list[dict[str, Any]]:
    """The tools as plain dicts; [] for none. Raises RequestError(param="tools") naming the malformed one."""
    if tools is None:
        return []
    if isinstance(tools, str | Mapping) or not isinstance(tools, Sequence):
        raise RequestError(f"tools must be a list of functions, not {type(tools).__name__}", param="tools")
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
            shape = '{"type": "function", "function": {"name": ..., "parameters": {...}}}'
            raise RequestError(f"tools[{index}] must be {shape}", param="tools")
    return [dict(tool) for tool in tools]


def hermes_call(name: str, arguments: Any) -> str:
    """One tool call as Hermes models write it."""
    shown = str(arguments) if isinstance(arguments, MalformedArguments) else to_json(arguments)
    return f'<tool_call>\n{{"name": {to_json(name)}, "arguments": {shown}}}\n</tool_call>'


def tools_as_text(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], *, has_system: bool
) -> list[dict[str, Any]]:
    """Normalised messages for a template that knows no tools: everything about tools becomes text.

    The schemas go into the system message (or, without `has_system`, before the first user message), calls
    into the assistant's text, and tool results into a user message between <tool_response> tags.
    """
    texts: list[dict[str, Any]] = []
    after_tool = False
    for message in messages:
        new = {key: value for key, value in message.items() if key not in ("tool_calls", "tool_call_id")}
        calls = [hermes_call(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", ())]
        if calls:
            new["content"] = "\n".join([message["content"], *calls] if message["content"] else calls)
        is_tool = message["role"] == "tool"
        if is_tool:
            new = {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
        if is_tool and after_tool:  # results of parallel calls share one message
            texts[-1]["content"] += "\n" + new["content"]
        else:
            texts.append(new)
        after_tool = is_tool
    if not tools:
        return texts
    intro = HERMES_TOOLS.format(tools="\n".join(to_json(tool) for tool in tools))
    role = "system" if has_system else "user"
    first = texts[0]
    if first["role"] == role:
        content = f"{first['content']}\n\n{intro}" if has_system else f"{intro}\n\n{first['content']}"
        return [{**first, "content": content if first["content"] else intro}, *texts[1:]]
    return [{"role": role, "content": intro}, *texts]
