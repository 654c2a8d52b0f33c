"""What a chat completion request may say: every field is honoured, is harmless, or is refused by name.

Checks the body and turns it into a ChatRequest; and the shape of errors. It does not render or sample.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..engines.base import SamplingParams
from ..errors import RequestError, nearest

MAX_CHOICES = 128

# Accepted, and without effect here: who asks, where OpenAI would keep or bill it.
_HARMLESS = frozenset(
    (
        *("user", "store", "metadata", "service_tier", "prompt_cache_key", "prompt_cache_retention"),
        *("safety_identifier", "return_token_ids"),  # token ids are in every answer
    )
)
_HONOURED = frozenset(
    (
        *("model", "messages", "tools", "tool_choice", "parallel_tool_calls", "n", "stop", "seed", "max_tokens"),
        *("max_completion_tokens", "temperature", "top_p", "logprobs", "stream", "stream_options"),
        *("top_k", "min_p", "chat_template_kwargs", "stop_token_ids", "ignore_eos"),  # beyond OpenAI: extra_body
    )
)
# Known to OpenAI, not offered here, unless the value is one of these that ask for nothing.
_REFUSED: dict[str, tuple[Any, ...]] = {
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "frequency_penalty": (0, 0.0),
    "presence_penalty": (0, 0.0),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "functions": ([],),
    "function_call": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
    "moderation": (),
    "prompt_cache_options": (),
}
_INSTEAD = {
    "functions": "; use tools",
    "function_call": "; use tools",
    "top_logprobs": "; the sampled tokens' log-probs are in every answer",
    "reasoning_effort": "; use chat_template_kwargs for what the model's template offers",
    "response_format": "; only {'type': 'text'} is",
}
KNOWN_FIELDS = _HONOURED | _HARMLESS | frozenset(_REFUSED)


@dataclass(slots=True)
class ChatRequest:
    """A checked request."""

    model: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    offer_tools: bool = True  # False: tool_choice="none"
    begin_call: str | None = None  # tool_choice asks for a call: of this tool, "" of any
    parallel_tool_calls: bool = True
    n: int = 1
    stop: list[str] = field(default_factory=list)
    seed: int | None = None
    max_tokens: int | None = None  # None: the rest of the context
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    stream: bool = False
    include_usage: bool = False
    template_kwargs: dict[str, Any] = field(default_factory=dict)

    def sampling(self, room: int, index: int) -> SamplingParams:
        """Parameters of choice `index`, with `room` tokens left in the context."""
        return SamplingParams(
            max_tokens=room if self.max_tokens is None else min(room, self.max_tokens),
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            seed=None if self.seed is None else self.seed + index,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            stream=self.stream or bool(self.stop),  # the stop strings are looked for here
        )


def read_body(raw: bytes) -> dict[str, Any]:
    """The JSON object of a request body; RequestError when it is none."""
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is not valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise RequestError(f"the body must be a JSON object, not {type(body).__name__}")
    return body


def check_request(body: Mapping[str, Any]) -> ChatRequest:
    """A ChatRequest from a body; RequestError names the first field that is wrong or not supported."""
    given = {name: value for name, value in body.items() if value is not None}
    for name in body:
        if name not in KNOWN_FIELDS:
            raise RequestError(f"unknown parameter {name!r}{nearest(name, KNOWN_FIELDS)}", param=name)
    for name, empty in _REFUSED.items():
        if name in given and given[name] not in empty:
            raise RequestError(f"{name} is not supported{_INSTEAD.get(name, '')}", param=name)
    if not isinstance(given.get("model"), str):
        raise RequestError("model must be a string", param="model")
    request = ChatRequest(given["model"], _messages(given.get("messages")), _tools(given.get("tools")))
    request.offer_tools, request.begin_call = _tool_choice(given.get("tool_choice", "auto"), request.tools or [])
    request.parallel_tool_calls = _boolean(given, "parallel_tool_calls", True)
    request.n = _whole(given, "n", 1, low=1, high=MAX_CHOICES)
    request.stop = _stop(given.get("stop"))
    request.seed = _whole(given, "seed", None, low=-(2**63), high=2**63 - 1 - MAX_CHOICES)
    request.max_tokens = _max_tokens(given)
    request.temperature = _number(given, "temperature", 1.0)
    request.top_p = _number(given, "top_p", 1.0)
    request.top_k = max(0, _whole(given, "top_k", 0, low=-1))  # -1 is vLLM's spelling of off
    request.min_p = _number(given, "min_p", 0.0)
    request.stop_token_ids = _token_ids(given.get("stop_token_ids", []))
    request.ignore_eos = _boolean(given, "ignore_eos", False)
    _boolean(given, "logprobs", False)
    request.stream = _boolean(given, "stream", False)
    request.include_usage = _stream_options(given.get("stream_options"), request.stream)
    request.template_kwargs = _template_kwargs(given.get("chat_template_kwargs", {}))
    request.sampling(1, 0)  # SamplingParams checks the ranges
    return request


def error_body(message: str, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """OpenAI's error shape."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _messages(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise RequestError("messages must be a list with at least one message", param="messages")
    for index, message in enumerate(value):
        where = f"messages[{index}]"
        if not isinstance(message, dict):
            raise RequestError(f"{where} must be an object, not {type(message).__name__}", param=where)
        if not isinstance(message.get("role"), str):
            raise RequestError(f"{where} has no role", param=f"{where}.role")
    return value


def _tools(value: Any) -> list[dict[str, Any]] | None:
    if value is None or value == []:
        return None
    if not isinstance(value, list):
        raise RequestError("tools must be a list", param="tools")
    for index, tool in enumerate(value):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestError(
                f'tools[{index}] must be {{"type": "function", "function": {{"name": ...}}}}', param=f"tools[{index}]"
            )
    return value


def _tool_choice(value: Any, tools: list[dict[str, Any]]) -> tuple[bool, str | None]:
    """(whether tools are offered, the call that the answer has to begin with: see ChatRequest)."""
    if value in ("auto", "none"):
        return value == "auto", None
    names = [tool["function"]["name"] for tool in tools]
    if value == "required":
        name = names[0] if len(names) == 1 else ""
    elif isinstance(value, dict) and value.get("type") == "function" and isinstance(value.get("function"), dict):
        name = value["function"].get("name")
        if names and name not in names:
            raise RequestError(f"tool_choice names {name!r}{nearest(str(name), names)}", param="tool_choice")
    else:
        shape = '{"type": "function", "function": {"name": ...}}'
        raise RequestError(f"tool_choice must be 'auto', 'none', 'required' or {shape}", param="tool_choice")
    if not names:
        raise RequestError("tool_choice asks for a call, and there are no tools", param="tool_choice")
    return True, name


def _stop(value: Any) -> list[str]:
    texts = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(texts, list) or len(texts) > 64 or not all(isinstance(t, str) and t for t in texts):
        raise RequestError("stop must be a non-empty string or a list of up to 64 of them", param="stop")
    return texts


def _max_tokens(given: Mapping[str, Any]) -> int | None:
    limits = {name: _whole(given, name, 0, low=1) for name in ("max_completion_tokens", "max_tokens") if name in given}
    if len(set(limits.values())) > 1:
        raise RequestError("max_tokens and max_completion_tokens differ; give one of them", param="max_tokens")
    return next(iter(limits.values()), None)


def _stream_options(value: Any, stream: bool) -> bool:
    if value is None:
        return False
    if not stream:
        raise RequestError("stream_options needs stream=true", param="stream_options")
    if not isinstance(value, dict):
        raise RequestError("stream_options must be an object", param="stream_options")
    for name in value:
        if name not in ("include_usage", "include_obfuscation") or (name == "include_obfuscation" and value[name]):
            raise RequestError(f"stream_options.{name} is not supported", param=f"stream_options.{name}")
    return _boolean({k: v for k, v in value.items() if v is not None}, "include_usage", False)


def _template_kwargs(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RequestError("chat_template_kwargs must be an object", param="chat_template_kwargs")
    for name in ("messages", "conversation", "tools", "tokenize", "add_generation_prompt", "return_dict"):
        if name in value:
            raise RequestError(
                f"chat_template_kwargs may not set {name!r}: the endpoint does", param="chat_template_kwargs"
            )
    return value


def _token_ids(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(v) is int and v >= 0 for v in value):
        raise RequestError("stop_token_ids must be a list of token ids", param="stop_token_ids")
    return tuple(value)


def _boolean(given: Mapping[str, Any], name: str, default: bool) -> bool:
    value = given.get(name, default)
    if not isinstance(value, bool):
        raise RequestError(f"{name} must be true or false, not {value!r}", param=name)
    return value


def _whole(given: Mapping[str, Any], name: str, default: Any, *, low: int, high: int | None = None) -> Any:
    if name not in given:
        return default
    value = given[name]
    if type(value) is not int or value < low or (high is not None and value > high):
        bounds = f"of at least {low}" if high is None else f"from {low} to {high}"
        raise RequestError(f"{name} must be a whole number {bounds}, not {value!r:.80}", param=name)
    return value


def _number(given: Mapping[str, Any], name: str, default: float) -> float:
    value = given.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RequestError(f"{name} must be a number, not {value!r:.80}", param=name)
    try:
        return float(value)
    except OverflowError:
        raise RequestError(f"{name} is too large", param=name) from None
