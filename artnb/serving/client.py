"""The AsyncOpenAI of this process: openai's own, except for what it does with plain JSON on the way out and in.

Out, openai walks through every message once for each type of message that there is, looking for names to rewrite and
objects to dump: more than 1 ms for six short messages, and most of what a short request costs. Plain JSON has neither.
In, it builds each token's log-prob in Python, unchecked; pydantic's own parser checks, in a tenth of the time, and the
log-probs stay text until they are read (token_logprobs.py).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from functools import cached_property
from types import FunctionType, NoneType
from typing import Any, cast

from openai import AsyncOpenAI, AsyncStream, NotGiven, Omit, RequestOptions
from openai.resources.chat import AsyncChat, AsyncCompletions
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.chat.completion_create_params import CompletionCreateParamsStreaming
from pydantic import ValidationError

from ..token_logprobs import TextLogprobs
from .transport import LOGPROB_SPANS, client_library

_PARAMETERS = CompletionCreateParamsStreaming.__required_keys__ | CompletionCreateParamsStreaming.__optional_keys__
# What create() takes beside the parameters, and what `post` calls it.
_OPTIONS = {"extra_headers": "headers", "extra_query": "params", "extra_body": "extra_json", "timeout": "timeout"}
_SCALARS = frozenset((str, int, float, bool, NoneType))


class InProcessOpenAI(AsyncOpenAI):
    """An AsyncOpenAI in every respect; copies (`with_options`) are of the same kind."""

    @cached_property
    def chat(self) -> AsyncChat:
        return _Chat(self)


class _Chat(AsyncChat):
    @cached_property
    def completions(self) -> AsyncCompletions:
        return _Completions(self._client)


class _Completions(AsyncCompletions):
    @functools.wraps(AsyncCompletions.create)
    async def create(self, **given: Any) -> Any:  # type: ignore[override]
        given = {name: value for name, value in given.items() if not isinstance(value, Omit | NotGiven)}
        body = {name: value for name, value in given.items() if name not in _OPTIONS}
        known = body.keys() <= _PARAMETERS and "messages" in body and "model" in body
        if not (known and is_plain(body) and _is_openais_own(AsyncCompletions.create)):
            return await super().create(**given)
        options: dict[str, Any] = {}
        for name, called in _OPTIONS.items():
            # Only a time limit of None says something.
            if name in given and (name == "timeout" or given[name] is not None):
                options[called] = given[name]
        stream = bool(body.get("stream"))
        # With headers it may be with_raw_response, whose user parses the answer.
        parse = not stream and "headers" not in options
        answer: Any = await self._client.post(
            "/chat/completions",
            body=body,
            options=cast(RequestOptions, options),
            cast_to=client_library().Response if parse else ChatCompletion,
            stream=stream,
            stream_cls=AsyncStream[ChatCompletionChunk],
        )
        return _parse(answer) if parse else answer


def _parse(response: Any) -> Any:
    """What openai makes of a response: a ChatCompletion, also of an answer that lacks what one has."""
    spans = response.extensions.get(LOGPROB_SPANS, ())
    try:
        completion = ChatCompletion.model_validate_json(_without(response.content, spans), strict=True)
        for choice, (start, stop) in zip(completion.choices, spans, strict=bool(spans)):
            choice.logprobs = TextLogprobs.of(response.content[start:stop])
    except ValidationError:
        try:
            value = response.json()
        except ValueError:
            if response.headers.get("content-type", "").split(";")[0].endswith("json"):
                raise
            return response.text
        if not isinstance(value, dict):
            return value
        completion = ChatCompletion.construct(**value)
    completion._request_id = response.headers.get("x-request-id")
    return completion


def _without(body: bytes, spans: Sequence[tuple[int, int]]) -> bytes:
    """JSON with `null` in place of the values that are there."""
    parts, at = [], 0
    for start, stop in spans:
        parts += [body[at:start], b"null"]
        at = stop
    return b"".join([*parts, body[at:]])


def is_plain(value: Any) -> bool:
    """Whether it is made of what JSON is made of, and of no subclass of that: then it is sent as it is."""
    kind = type(value)
    if kind in _SCALARS:
        return True
    if kind is dict:
        for key, item in value.items():
            if type(key) is not str or not (type(item) is str or is_plain(item)):
                return False
        return True
    if kind is list:
        for item in value:  # noqa: SIM110 - this is called for every message of every request
            if not is_plain(item):
                return False
        return True
    return False


def _is_openais_own(create: Any) -> bool:
    """False where a tracing library (weave, langfuse) has put its own in place: then that has to be called."""
    return type(create) is FunctionType and str(create.__globals__.get("__name__")).startswith("openai.")
