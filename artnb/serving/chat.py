"""Text ↔ token ids for the endpoint: messages to a prompt, sampled ids to a message.

The prompt is what the model's chat template makes of the messages; the answer is read by transformers'
response parser. Model output is never tokenized here. Knows nothing about HTTP, engines or training.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..errors import ConfigError, RenderError, RequestError
from .detokenize import ChatTokenizer, Detokenizer, StopChecker, TokenBytes, decode
from .messages import check_tools, normalize_messages, tools_as_text, wrap_malformed
from .parsers import HERMES_PARSERS, ResponseFormat, choose_family, family_format, own_format
from .prompt_tokens import PromptTokens
from .stream_parse import HEADER_TOKENS, Delta, ParsedMessage, Reader, StreamParser, ToolCall, ToolCallDelta, accumulate

__all__ = [
    "ChatFormat", "Delta", "ParsedMessage", "StopChecker", "StreamParser", "ToolCall", "ToolCallDelta", "accumulate",
    "normalize_messages",
]  # fmt: skip

log = logging.getLogger(__name__)

_PROBE = [{"role": "user", "content": "artnb probe"}]
_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "artnb_probe_tool",
        "description": "A probe.",
        "parameters": {"type": "object", "properties": {"x": {"type": "string", "description": "A probe."}}},
    },
}
# Arguments of apply_chat_template that decide what comes out of it; the rest are the template's own variables.
_RESERVED = frozenset(
    (
        "conversation", "messages", "tools", "chat_template", "add_generation_prompt", "continue_final_message",
        "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict",
        "return_assistant_tokens_mask", "tokenizer_kwargs",
    )
)  # fmt: skip


class ChatFormat:
    """Renders conversations and reads answers for one tokenizer.

    The parser of tool calls and reasoning is, in this order: the one named by `parser` (see
    parsers.PARSERS), the tokenizer's own `response_template`, the one of the family that the chat
    template's text belongs to. A template that renders tools in a format that no parser knows gives a warning here
    and RequestError(param="tools") for each request with tools.

    A chat template that ignores tools (SmolLM2, Gemma) does not keep a model from using them: their
    schemas and the Hermes call format are written into the system message (or before the first user
    message), calls and results of the history become text, and calls are read by the Hermes parser.

        chat = ChatFormat(AutoTokenizer.from_pretrained(...))
        prompt_ids = chat.render([{"role": "user", "content": "hi"}])
        chat.parse(sampled_ids, prompt_ids=prompt_ids, tools=None).content

    Raises: ConfigError for an unknown parser, an unusable response template, or no chat template at all.
    """

    def __init__(
        self, tokenizer: ChatTokenizer, *, chat_template: str | None = None, parser: str | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self._template = chat_template
        source = chat_template or getattr(tokenizer, "chat_template", None)
        if source is None and hasattr(tokenizer, "backend_tokenizer"):
            raise ConfigError("the tokenizer has no chat template (a base model?); pass chat_template=...")
        self._table = TokenBytes(tokenizer)
        self._prompt_tokens = PromptTokens(tokenizer)
        bare = self._try(_PROBE)
        with_tools = self._try(_PROBE, tools=[_PROBE_TOOL])
        self.takes_tools = with_tools is not None and "artnb_probe_tool" in with_tools
        system = self._try([{"role": "system", "content": "artnb system probe"}, *_PROBE])
        self._has_system = system is not None and "artnb system probe" in system
        shown = "\n".join(source.values() if isinstance(source, Mapping) else [source or ""])
        self._knows_developer = "developer" in shown
        shown += with_tools or ""
        header = self._header(bare or with_tools)
        thinks = "<think>" in shown or "<think>" in self._added_tokens()
        self._no_tools_reason = ""
        form, tools_form = self._formats(shown, header, thinks, parser)
        # Made here, since it imports the parser: no request waits for that.
        self._reader = Reader(form, self._table)
        self._tools_reader = self._reader
        if tools_form is None:
            log.warning("%s Requests without tools work.", self._no_tools_reason)
        elif tools_form is not form:
            self._tools_reader = Reader(tools_form, self._table)

    @property
    def parser(self) -> str:
        """Name of the parser that reads the answers to requests with tools, or to any if tools do not work."""
        return self._tools_reader.form.name

    def _formats(
        self, shown: str, header: str, thinks: bool, parser: str | None
    ) -> tuple[ResponseFormat, ResponseFormat | None]:
        """(for requests without tools, for requests with tools or None if those cannot be served)."""

        def make(name: str) -> ResponseFormat:
            return family_format(name, header=header, thinks=thinks)

        own = getattr(self.tokenizer, "response_template", None)
        if parser is not None:
            form = make(parser)
            if self.takes_tools or parser in HERMES_PARSERS:
                return form, form
            self._no_tools_reason = (
                f"The model's chat template does not take tools, and artnb then writes them in Hermes style, which "
                f"parser={parser!r} does not read; use parser='hermes'."
            )
            return form, None
        form = own_format(own) if own is not None else make("plain")
        if not self.takes_tools:
            return form, make("hermes")
        if own is None and (family := choose_family(shown)) is not None:
            form = make(family)
        if form.reads_calls:
            return form, form
        self._no_tools_reason = (
            "The model's chat template renders tools, but no parser knows how this model writes tool calls; "
            "name one with parser=... or give the tokenizer a response_template."
        )
        return form, None

    def _added_tokens(self) -> Mapping[str, int]:
        names = ("get_added_vocab", "get_vocab")
        get: Any = next((method for name in names if (method := getattr(self.tokenizer, name, None))), dict)
        return dict(get())

    def _header(self, bare: str | None) -> str:
        """What the template writes before an answer, up to an opened <think>; "" if it writes nothing."""
        without = self._try(_PROBE, add_generation_prompt=False)
        if bare is None or without is None or not bare.startswith(without):
            return ""
        return bare[len(without) :].split("<think>")[0]

    def _apply(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] = (), **options: Any) -> Any:
        if self._template is not None:
            options["chat_template"] = self._template
        options = {"add_generation_prompt": True, **options}
        return self.tokenizer.apply_chat_template(
            [dict(message) for message in messages], tools=list(tools) or None, return_dict=False, **options
        )

    def _ids(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] = (), opening: str = "", **options: Any
    ) -> list[int]:
        if self._prompt_tokens.usable or opening:
            text = self._apply(messages, tools, tokenize=False, **options) + opening
            if (ids := self._prompt_tokens.of(text)) is not None:
                return ids
            if opening:
                return list(self.tokenizer.encode(text, add_special_tokens=False))
        return list(self._apply(messages, tools, **options))

    def _try(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str | None:
        """The rendered text of a probe; None where the template refuses it."""
        try:
            return str(self._apply(messages, tokenize=False, **options))
        except Exception as error:  # a template is a program of its author: it may raise anything
            log.debug("The chat template refused a probe: %s", error)
            return None

    def render(
        self,
        messages: Sequence[Any],
        tools: Sequence[Any] | None = None,
        *,
        add_generation_prompt: bool = True,
        begin_call: str | None = None,
        **template_kwargs: Any,
    ) -> list[int]:
        """Token ids of the conversation. `template_kwargs` are variables of the chat template (enable_thinking=False).

        With `begin_call` they end with the beginning of a call of that tool ("": of any), which the model goes on from.

        Raises: RenderError with the index of the message at fault, if one is; RequestError for tools that are
        malformed or that this model cannot use, and for a template variable that is none.
        """
        if wrong := sorted(_RESERVED & template_kwargs.keys()):
            raise RequestError(f"chat_template_kwargs may not set {wrong[0]!r}", param="chat_template_kwargs")
        checked = check_tools(tools)
        if checked and self._no_tools_reason:
            raise RequestError(self._no_tools_reason, param="tools")
        plain = normalize_messages(messages)
        if not self._knows_developer:
            plain = [{**m, "role": "system"} if m["role"] == "developer" else m for m in plain]

        opening = self._opening(begin_call)

        def apply(shown: Sequence[Mapping[str, Any]]) -> list[int]:
            options = {"add_generation_prompt": add_generation_prompt, **template_kwargs}
            if not self.takes_tools:
                return self._ids(tools_as_text(shown, checked, has_system=self._has_system), (), opening, **options)
            return self._ids(shown, checked, opening, **options)

        try:
            ids = apply(plain)
        except Exception as error:  # a template is a program of its author: it may raise anything
            wrapped = wrap_malformed(plain)
            if wrapped is None:
                raise _render_error(apply, plain, error) from error
            try:
                ids = apply(wrapped)
            except Exception as second:
                raise _render_error(apply, wrapped, second) from second
        if opening and decode(self.tokenizer, ids[-HEADER_TOKENS:])[: -len(opening)].rstrip().endswith("<think>"):
            raise RequestError(
                "the chat template opens <think> before the answer, so tool_choice cannot begin it with a call; leave "
                "it at 'auto', or turn thinking off with chat_template_kwargs if the template can",
                param="tool_choice",
            )
        return ids

    def parse(
        self,
        token_ids: Sequence[int],
        *,
        prompt_ids: Sequence[int],
        tools: Sequence[Any] | None = None,
        stop: Sequence[str] = (),
    ) -> ParsedMessage:
        """The message in sampled ids, an end token included or not. A malformed tool call is text, verbatim."""
        stream = self.stream(prompt_ids, tools, stop=stop)
        return accumulate([*stream.push(token_ids), *stream.finish()])

    def stream(
        self,
        prompt_ids: Sequence[int],
        tools: Sequence[Any] | None = None,
        *,
        stop: Sequence[str] = (),
        begin_call: str | None = None,
    ) -> StreamParser:
        """A parser for one answer as it is sampled; its deltas add up to what `parse` returns.

        `begin_call` as in `render`: the call that the prompt began is the answer's first one.
        """
        checked = check_tools(tools)
        reader = self._tools_reader if checked else self._reader
        return StreamParser(reader, prompt_ids, checked, stop, self._opening(begin_call))

    def _opening(self, begin_call: str | None) -> str:
        if begin_call is None:
            return ""
        opening = self._tools_reader.form.opening(begin_call)
        if opening is None:
            raise RequestError(
                f"artnb does not know how this model begins a call (its answers are read by {self.parser}), so "
                "tool_choice can be 'auto' or 'none' only",
                param="tool_choice",
            )
        return opening

    def detokenizer(self) -> Detokenizer:
        """The raw text of a stream of ids, without control tokens."""
        return Detokenizer(self._table, self._table.special_ids)

    def token_text(self, token_id: int) -> str:
        """A token as text, for log-probs; a part of a character shows as U+FFFD."""
        return self._table.text(token_id)

    def token_bytes(self, token_id: int) -> list[int] | None:
        """A token's raw bytes, for log-probs; None where the tokenizer does not define them."""
        raw = self._table.of(token_id)
        return None if raw is None else list(raw)


def _render_error(
    apply: Callable[[Sequence[Mapping[str, Any]]], Any], messages: Sequence[Mapping[str, Any]], error: Exception
) -> RenderError:
    """The template's own message, with the first message from which on every longer prefix fails the same way."""
    index = len(messages) - 1
    while index > 0:
        try:
            apply(messages[:index])
            break
        except Exception as other:
            if (type(other), str(other)) != (type(error), str(error)):
                break
        index -= 1
    role = messages[index]["role"]
    reason = str(error) or type(error).__name__
    return RenderError(f"the chat template cannot render messages[{index}] (role {role!r}): {reason}", index=index)
