"""A stream of sampled ids as deltas of a message: text, reasoning, tool calls.

One mechanism for whole and streamed answers: a whole answer is a stream that came at once. transformers'
response parser finds the regions of an answer (reasoning, calls, text) and reads each call. A call that is
not well formed stays in the text, verbatim. Chooses no parser and renders nothing.
"""

from __future__ import annotations

import hashlib
import re
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .detokenize import Detokenizer, StopChecker, TokenBytes, decode
from .parsers import REASONING_FIELDS, TOOLS_FIELD, ParsedCall, ResponseFormat, parse_calls

HEADER_TOKENS = 256  # of the prompt's end, searched for the header of the answer


@dataclass(frozen=True)
class ToolCall:
    """A call that the model made; `arguments` is the JSON of an object."""

    id: str
    name: str
    arguments: str

    def to_openai(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass
class ParsedMessage:
    """An answer. `content` is None when there is reasoning or a tool call and no text."""

    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] = field(default_factory=list)


@dataclass(frozen=True)
class ToolCallDelta:
    """A tool call that came in, whole: `index` counts the calls of the answer."""

    index: int
    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Delta:
    """What was added to the message; exactly one of the three is set."""

    content: str | None = None
    reasoning_content: str | None = None
    tool_call: ToolCallDelta | None = None


def accumulate(deltas: Iterable[Delta]) -> ParsedMessage:
    """The message that deltas add up to."""
    content: list[str] = []
    reasoning: list[str] = []
    calls: list[ToolCall] = []
    for delta in deltas:
        if delta.content is not None:
            content.append(delta.content)
        if delta.reasoning_content is not None:
            reasoning.append(delta.reasoning_content)
        if (call := delta.tool_call) is not None:
            calls.append(ToolCall(call.id, call.name, call.arguments))
    text = "".join(content)
    return ParsedMessage(text if text or not (reasoning or calls) else None, "".join(reasoning) or None, calls)


def _pattern(spec: dict[str, Any], side: str) -> str | None:
    """The pattern of a field's "open" or "close", whichever way it is given, without an alternative "end of text".

    The end closes a region anyway, and with that alternative the parser (transformers 5.24) no longer waits for the
    rest of a marker that comes in pieces.
    """
    if (literal := spec.get(side)) is None:
        pattern = spec.get(f"{side}_pattern")
        return None if pattern is None else re.sub(r"\|(\$|\\Z)$", "", pattern)
    literals = [literal] if isinstance(literal, str) else literal
    return "|".join(re.escape(text) for text in sorted(literals, key=len, reverse=True))


def region_template(template: dict[str, Any]) -> dict[str, Any]:
    """A response template with the same regions, that keeps the text of each exactly and parses none.

    A region that is not text to show gets {"open", "body", "close"}: its whole source, for `parse_calls`.
    """
    fields: dict[str, Any] = {}
    for name, spec in template["fields"].items():
        shape: dict[str, Any] = {"content": "text", "content_args": {"strip": False}, "repeats": True}
        opening, closing = _pattern(spec, "open"), _pattern(spec, "close")
        plain = {key: spec[key] for key in ("open", "open_pattern", "close") if key in spec}
        if "close_pattern" in spec:
            plain["close_pattern"] = closing
        if opening is not None and not _is_text(name, spec):
            # The end of the answer closes a region too, without a match: the empty capture stands for that.
            plain = {"open_pattern": f"(?P<artnb_open>{opening})(?P<artnb_close>)"}
            if closing is not None:
                plain["close_pattern"] = f"(?P<artnb_close>{closing})"
            shape["transform"] = {"open": "{artnb_open}", "body": "{content}", "close": "{artnb_close}"}
        elif spec.get("transform") is not None:  # its captures need a transform, whose result is not used
            shape["transform"] = {"body": "{content}"}
        else:
            shape["join"] = ""
        fields[name] = plain | shape
    anchor = {key: value for key, value in template.items() if key.startswith("start_anchor")}
    return {"fields": fields, **anchor}


def _is_text(name: str, spec: dict[str, Any]) -> bool:
    return (name == "content" or name in REASONING_FIELDS) and spec.get("content", "text") == "text"


class Reader:
    """What all answers of one format share: the compiled regions, and which control tokens show nothing."""

    def __init__(self, form: ResponseFormat, table: TokenBytes) -> None:
        self.form = form
        self.table = table
        self.hidden = frozenset(i for i in table.special_ids if not form.reads_token(table.text(i)))
        self.regions: Any = None
        if form.template is not None:
            from transformers.utils.chat_parsing.response_templates import load_response_template

            self.regions = load_response_template(region_template(form.template))

    def parser(self, prompt_ids: Sequence[int], opening: str = "") -> Any:
        """A parser in the state that the prompt leaves it in: the chat template may have opened <think> already.

        `opening` is the beginning of the answer that the prompt ends with. None for plain text.
        """
        if self.regions is None:
            return None
        from transformers.utils.chat_parsing import ResponseParser

        prefix = decode(self.table.tokenizer, prompt_ids[-HEADER_TOKENS:])
        if self.regions.start_anchor_re.search(prefix) is None:  # else the conversation is taken for the answer
            prefix = opening
        # Its initial events are the prompt's own text, which the model did not write.
        return ResponseParser(self.regions, prefix=prefix)


class StreamParser:
    """Deltas of one answer, token by token.

    The deltas added up (`accumulate`) are the same however the ids were cut into pushes. Text appears as
    soon as it cannot be the beginning of a marker; a tool call appears whole. Text that the model writes
    comes out unchanged, except for whitespace around reasoning and before a tool call. Tool calls are only
    read when the request has tools, and otherwise are text. With `stop`, `stopped` turns True when
    a stop string was hit, and everything from it on is dropped. `opening` is the beginning of the answer that the
    prompt ends with: a call that it began is one of the answer's.
    """

    def __init__(
        self,
        reader: Reader,
        prompt_ids: Sequence[int],
        tools: Sequence[dict[str, Any]] = (),
        stop: Sequence[str] = (),
        opening: str = "",
    ) -> None:
        self._form = reader.form
        self._tools = tools
        self._prompt_ids = prompt_ids
        self._detokenizer = Detokenizer(reader.table, reader.hidden)
        self._stop = StopChecker(stop)
        self._parser: Any = reader.parser(prompt_ids, opening)
        self._waiting: list[str] = []
        self._content = _Run()
        self._reasoning = _Run(skip_leading=True)
        self._ids: list[str] = []

    @property
    def stopped(self) -> bool:
        return self._stop.stopped

    def push(self, token_ids: Sequence[int]) -> list[Delta]:
        """The deltas that became certain with these ids."""
        return self._text(self._stop.push(self._detokenizer.push(token_ids))[0])

    def finish(self) -> list[Delta]:
        """The rest. The answer has ended; nothing may be pushed any more."""
        text, stopped = self._stop.push(self._detokenizer.finish())
        deltas = self._text(text if stopped else text + self._stop.finish())
        if self._parser is not None:
            deltas += self._events(self._parser.feed("".join(self._waiting)))
            deltas += self._events(self._parser.finalize()[1])
        if not self._ids and (rest := self._content.held):
            deltas.append(Delta(content=rest))
        return deltas

    def _text(self, text: str) -> list[Delta]:
        if not text:
            return []
        if self._parser is None:
            return [Delta(content=text)]
        if not self._form.incremental:
            self._waiting.append(text)
            return []
        return self._events(self._parser.feed(text))

    def _events(self, events: Iterable[dict[str, Any]]) -> list[Delta]:
        fields = (self._form.template or {})["fields"]
        deltas: list[Delta] = []
        for event in events:
            name = event["field"]
            reasoning = name in REASONING_FIELDS
            if event["type"] == "region_open" and reasoning:
                self._content.forget_blank()
                self._reasoning.separate()
            elif event["type"] == "region_chunk" and (name == "content" or _is_text(name, fields[name])):
                run = self._reasoning if reasoning else self._content
                if shown := run.add(event["text"]):
                    deltas.append(Delta(reasoning_content=shown) if reasoning else Delta(content=shown))
            elif event["type"] == "region_close" and isinstance(event["value"], dict) and "close" in event["value"]:
                deltas += self._region(name, "".join(event["value"][key] for key in ("open", "body", "close")))
        return deltas

    def _region(self, name: str, raw: str) -> list[Delta]:
        calls = parse_calls(raw, self._form, self._tools) if name == TOOLS_FIELD and self._tools else None
        if calls is None:
            shown = self._content.add(raw)
            return [Delta(content=shown)] if shown else []
        return [Delta(tool_call=self._number(call, raw)) for call in calls]

    def _number(self, call: ParsedCall, raw: str) -> ToolCallDelta:
        """Ids follow from prompt, position and text, so that a streamed and a whole answer have the same."""
        index = len(self._ids)
        call_id = call.id
        if call_id is None or call_id in self._ids:
            seed = hashlib.blake2b(array("q", self._prompt_ids).tobytes(), digest_size=20)
            seed.update(f"{index}:{raw}".encode("utf-8", errors="surrogatepass"))
            size = self._form.call_id_length
            call_id = seed.hexdigest()[:size] if size < 24 else f"call_{seed.hexdigest()[:size]}"
        self._ids.append(call_id)
        return ToolCallDelta(index, call_id, call.name, call.arguments)


class _Run:
    """Text that is shown up to its last visible character; the whitespace after it waits for what follows."""

    def __init__(self, *, skip_leading: bool = False) -> None:
        self.held = ""
        self._skip_leading = skip_leading
        self._begun = False

    def add(self, text: str) -> str:
        text = self.held + text
        if self._skip_leading and not self._begun:
            text = text.lstrip()
        shown = text.rstrip()
        self.held = text[len(shown) :]
        self._begun = self._begun or bool(shown)
        return shown

    def forget_blank(self) -> None:
        """Whitespace before anything else was shown means nothing."""
        if not self._begun:
            self.held = ""

    def separate(self) -> None:
        """A further region of the same kind begins on a new line."""
        if self._begun and not self.held:
            self.held = "\n"
