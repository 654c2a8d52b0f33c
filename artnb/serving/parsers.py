"""Which parser a model's answers need: response templates for the families, and the choice between them.

A response template is a value that transformers' response parser reads
(https://huggingface.co/docs/transformers/main/en/chat_response_parsing). A tokenizer's own one wins over those
written here. Parses nothing itself: see stream_parse.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import ConfigError, nearest

# What transformers calls a field → which part of the message it is.
REASONING_FIELDS = frozenset(("reasoning_content", "reasoning", "thinking"))
TOOLS_FIELD = "tool_calls"

_THINK = {"open": "<think>", "close_pattern": r"</think>\s*"}
_FUNCTION = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}

# One call per pair of tags: {"name": ..., "arguments": {...}}. Hermes, Qwen 2.5, Qwen 3.
_HERMES = {
    "open_pattern": "<tool_call>",
    "close_pattern": r"</tool_call>\s*",
    "repeats": True,
    "content": "json",
    "transform": {"type": "function", "function": "{content}"},
}


def _unless(tag: str) -> str:
    """A lookahead for text that is certainly not `tag`, nor a beginning of it, nor whitespace before it.

    The parser commits a match that is whole although a longer one is on its way, so what may follow is spelled out.
    """
    turns = [f"{re.escape(tag[:size])}[^{re.escape(tag[size])}]" for size in range(1, len(tag))]
    return f"(?=[^{re.escape(tag[0])}\\s]|{'|'.join(turns)})"


# <function=name><parameter=key>value</parameter></function>, values as text: Qwen 3 Coder, Qwen 3.5.
_XML_PARAMETER = r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"
_XML = {
    "open_pattern": r"(?:<tool_call>\s*)?<function=(?P<name>[^\n>]+)>",
    "close_pattern": rf"</function>\s*(?:</tool_call>\s*|{_unless('</tool_call>')})",
    "repeats": True,
    "content": "xml-inline",
    "content_args": {
        "tag_pattern": _XML_PARAMETER,
        "value_parser": {"name": "text", "args": {"strip": False}},
    },
    "transform": _FUNCTION,
}
_XML_FRAME = re.compile(r"(?:<tool_call>\s*)?<function=[^\n>]+>\s*</function>(?:\s*</tool_call>)?\s*")

# A whole answer {"name": ..., "parameters": {...}}; several are separated by ";" or a line. Llama 3.
_LLAMA3_NEXT = r'(?:<\|python_tag\|>)?\{\s*"name"\s*:'
_LLAMA3_START = _LLAMA3_NEXT + r'\s*"(?P<name>[^"\\]+)"\s*,\s*"(?:parameters|arguments)"\s*:\s*'
_LLAMA3 = {
    "open_pattern": _LLAMA3_START,
    "close_pattern": rf"\}}\s*;?\s*(?:(?={_LLAMA3_NEXT})|\Z)",
    "repeats": True,
    "content": "json",
    "transform": _FUNCTION,
}

# [TOOL_CALLS] and a JSON list of calls. Mistral, tokenizers v3 to v7.
_MISTRAL = {"open_pattern": r"\[TOOL_CALLS\]", "repeats": True, "content": "json"}

# [TOOL_CALLS]name[ARGS]{...} per call. Mistral, tokenizers from v11.
_MISTRAL_ARGS = {
    "open_pattern": r"\[TOOL_CALLS\](?P<name>[^\[{]+)(?:\[CALL_ID\][^\[{]*)?\[ARGS\]",
    "close_pattern": r"(?=\[TOOL_CALLS\])",
    "repeats": True,
    "content": "json",
    "transform": _FUNCTION,
}

# name → (how calls are written, whether <think> is always reasoning)
_FAMILIES: dict[str, tuple[dict[str, Any] | None, bool]] = {
    "plain": (None, False),
    "think": (None, True),
    "hermes": (_HERMES, False),
    "qwen3": (_HERMES, True),
    "qwen3_coder": (_XML, False),
    "llama3": (_LLAMA3, False),
    "mistral": (_MISTRAL, False),
    "mistral_args": (_MISTRAL_ARGS, False),
}
# How a call begins, up to its name and up to its arguments: what the answer goes on from when one is asked for. A space
# that belongs to the next token is left to the model.
_HERMES_OPENING = ('<tool_call>\n{"name":', '<tool_call>\n{{"name": {name}, "arguments":')
_OPENINGS = {
    "hermes": _HERMES_OPENING,
    "qwen3": _HERMES_OPENING,
    "qwen3_coder": ("<tool_call>\n<function=", "<tool_call>\n<function={bare}>\n"),
    "llama3": ('{"name":', '{{"name": {name}, "parameters":'),
    "mistral": ('[TOOL_CALLS] [{"name":', '[TOOL_CALLS] [{{"name": {name}, "arguments":'),
    "mistral_args": ("[TOOL_CALLS]", "[TOOL_CALLS]{bare}[ARGS]"),
}
PARSERS = tuple(_FAMILIES)
HERMES_PARSERS = frozenset(("hermes", "qwen3"))


@dataclass(frozen=True)
class ResponseFormat:
    """How to read a model's answers.

    `template` is the response template, None for plain text. `typed`: argument values are text, so the tools'
    schemas give them their types. `call_id_length`: 9 where the chat template accepts nothing else.
    """

    name: str
    template: dict[str, Any] | None
    typed: bool = False
    call_id_length: int = 24
    frame: re.Pattern[str] | None = None
    incremental: bool = (
        True  # False: the parser cannot tell in mid-stream where a region ends, so text comes at the end
    )
    patterns: tuple[str, ...] = field(init=False, repr=False, compare=False, default=())

    def __post_init__(self) -> None:
        keys = ("open", "open_pattern", "close", "close_pattern")
        fields = (self.template or {}).get("fields", {}).values()
        found = [spec[key] for spec in fields for key in keys if key in spec]
        flat = [text for value in found for text in (value if isinstance(value, list) else [value])]
        object.__setattr__(self, "patterns", tuple(flat))

    @property
    def reads_calls(self) -> bool:
        return self.template is not None and TOOLS_FIELD in self.template["fields"]

    def opening(self, name: str) -> str | None:
        """The text that a call of `name` begins with, with "" a call of any tool. None where artnb does not know it."""
        if self.name not in _OPENINGS:
            return None
        of_any, of_one = _OPENINGS[self.name]
        return of_one.format(name=json.dumps(name, ensure_ascii=False), bare=name) if name else of_any

    def reads_token(self, text: str) -> bool:
        """Whether a control token takes part in the markup, so that it must not be hidden from the parser."""
        return any(text in pattern or re.escape(text) in pattern for pattern in self.patterns)

    def is_complete(self, raw: str) -> bool:
        """Whether a call's text holds nothing that the parser would pass over in silence."""
        if self.frame is None:
            return True
        bare = re.sub(_XML_PARAMETER, "", raw, flags=re.DOTALL)
        return self.frame.fullmatch(bare) is not None


def family_format(name: str, *, header: str, thinks: bool) -> ResponseFormat:
    """The format of a family in PARSERS.

    `header` is what the chat template writes before an answer, "" if nothing; `thinks`: the model is known to
    put its reasoning into <think> tags. Raises: ConfigError with the nearest name for an unknown one.
    """
    if name not in _FAMILIES:
        raise ConfigError(f"parser={name!r} is unknown{nearest(str(name), PARSERS)}")
    calls, always_thinks = _FAMILIES[name]
    fields: dict[str, Any] = {}
    if thinks or always_thinks:
        fields["reasoning_content"] = _THINK
    if calls is not None:
        fields[TOOLS_FIELD] = calls
    if not fields:
        return ResponseFormat(name, None)
    template = {"start_anchor": header or "\0", "fields": {**fields, "content": {}}}
    xml = calls is _XML
    short = calls in (_MISTRAL, _MISTRAL_ARGS)
    return ResponseFormat(
        name, template, typed=xml, call_id_length=9 if short else 24, frame=_XML_FRAME if xml else None
    )


def own_format(template: Any) -> ResponseFormat:
    """The format that a tokenizer brings along. Raises: ConfigError if transformers does not accept it."""
    from transformers.utils.chat_parsing.response_templates import load_response_template

    try:
        load_response_template(template)
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"the tokenizer's response_template is not usable: {error}; or name one with parser=..."
        ) from error
    form = ResponseFormat("the tokenizer's response_template", template, typed=True)
    return replace(form, incremental=not any(_may_grow(pattern) for pattern in form.patterns))


def _may_grow(pattern: str) -> bool:
    """Whether a match may be the beginning of a longer one: an optional group, or a branch that begins another."""
    branches = re.split(r"(?<!\\)\|", pattern.replace("(?:", "").rstrip("$)"))
    return re.search(r"\)[?*{]", pattern) is not None or any(
        short and long != short and long.startswith(short) for short in branches for long in branches
    )


def choose_family(shown: str) -> str | None:
    """The family whose tool calls a chat template writes, from the template's text; None if no one knows it."""
    if "<function=" in shown and "<parameter=" in shown:
        return "qwen3_coder"
    if "[TOOL_CALLS]" in shown:
        return "mistral_args" if "[ARGS]" in shown else "mistral"
    if "<tool_call>" in shown and "arguments" in shown and "<arg_key>" not in shown:
        return "hermes"
    if "<|start_header_id|>" in shown and '"parameters": ' in shown:
        return "llama3"
    return None


@dataclass(frozen=True)
class ParsedCall:
    """A tool call as the model wrote it; `id` only where the model wrote one."""

    name: str
    arguments: str  # a JSON object
    id: str | None = None


def parse_calls(raw: str, form: ResponseFormat, tools: Sequence[dict[str, Any]]) -> list[ParsedCall] | None:
    """The calls in a piece of text that holds nothing else; None if it is malformed. Never raises."""
    from transformers.utils.chat_parsing import parse_response

    if form.template is None or not form.is_complete(raw):
        return None
    try:
        message = parse_response(raw, form.template, prefix="", tools=list(tools) if form.typed else None)
        found = message.pop(TOOLS_FIELD, [])
        if any(message.get(name) for name in ("content", *REASONING_FIELDS)):
            return None
        return [_read_call(call) for call in _flatten(found)] or None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None  # sampled text may be anything; the caller shows it as it is


def _flatten(value: Any) -> list[Any]:
    return [call for item in value for call in _flatten(item)] if isinstance(value, list) else [value]


def _read_call(call: Any) -> ParsedCall:
    """Raises ValueError or TypeError unless the call has a name and its arguments are a JSON object."""
    function = call.get("function", call)
    name = function["name"]
    arguments = function.get("arguments", function.get("parameters"))
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    arguments = {} if arguments is None else arguments
    if not isinstance(name, str) or not name.strip() or not isinstance(arguments, dict):
        raise ValueError("not a tool call")
    name.encode()  # a lone surrogate cannot be sent
    shown = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    try:
        shown.encode()
    except UnicodeEncodeError:
        shown = json.dumps(arguments, allow_nan=False)
    call_id = call.get("id")
    return ParsedCall(name.strip(), shown, call_id if isinstance(call_id, str) and call_id else None)
