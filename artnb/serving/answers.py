"""One choice from first token to JSON: its sampled ids and log-probs, its message, and OpenAI's shapes of it.

JSON is put together from text, token by token from a cache: this is where the endpoint's time goes.
It does not know HTTP.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from openai.types.chat.chat_completion import Choice

from ..capture import ChoiceRecord
from ..engines.base import Engine, SamplingParams
from ..errors import AdapterNotFoundError, EngineClosedError, EngineError
from ..token_logprobs import TextLogprobs
from .chat import ChatFormat, Delta, ParsedMessage, accumulate
from .protocol import ChatRequest
from .resolver import Resolver, Served

LOWEST_LOGPROB = -9999.0
"""What -inf becomes, which JSON has no word for; OpenAI's number for it."""
ADAPTER_TRIES = 3


class TokenJson:
    """Entries of `logprobs.content` as text. The part that depends on the token alone is made once."""

    def __init__(self, chat: ChatFormat) -> None:
        self._chat = chat
        self._heads: dict[int, str] = {}

    def content(self, token_ids: Sequence[int], logprobs: Sequence[float]) -> str:
        heads = self._heads
        entries = []
        for token, logprob in zip(token_ids, logprobs, strict=True):
            head = heads.get(token)
            if head is None:
                head = heads[token] = self._head(token)
            value = float(logprob)
            if not value > LOWEST_LOGPROB:
                if math.isnan(value):
                    raise EngineError(f"the engine reported NaN as the log-prob of token {token}")
                value = LOWEST_LOGPROB
            entries.append(f'{head}{value!r},"top_logprobs":[]}}')
        return f"[{','.join(entries)}]"

    def _head(self, token: int) -> str:
        entry = {"token": self._chat.token_text(token), "bytes": self._chat.token_bytes(token)}
        return f'{json.dumps(entry)[:-1]}, "logprob":'


@dataclass(frozen=True, slots=True)
class Service:
    """What answers are made with; one per app."""

    engine: Engine
    chat: ChatFormat
    resolver: Resolver
    tokens: TokenJson


class Answer:
    """Choice `index` of a request. `sample` fills it; then `finish_reason` is set."""

    def __init__(
        self, service: Service, request: ChatRequest, prompt_ids: list[int], served: Served, room: int, index: int
    ) -> None:
        self.index = index
        self.served = served
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.finish_reason: str | None = None
        self.cut_by_client = False
        self._service = service
        self._request = request
        self._prompt_ids = prompt_ids
        self._sampling: SamplingParams = request.sampling(room, index)
        self._clamped = room if request.max_tokens is not None and request.max_tokens > room else None
        tools = request.tools if request.offer_tools else None
        self._parser = service.chat.stream(prompt_ids, tools, stop=request.stop, begin_call=request.begin_call)
        self._deltas: list[Delta] = []
        self._sent = 0  # tokens that went out in stream events
        self._taken = 0  # deltas that did
        self._began = False
        self._json: tuple[str, str] | None = None

    async def sample(self) -> AsyncGenerator[None]:
        """Run the request in the engine; yields after each chunk that came in. Closing it cancels.

        The newest adapter may be replaced between finding its name and starting: then the name is looked up again.
        """
        service = self._service
        for attempt in range(ADAPTER_TRIES):
            generator = service.engine.generate(self._prompt_ids, self._sampling, self.served.adapter)
            try:
                async with contextlib.aclosing(generator):
                    async for chunk in generator:
                        if chunk.finish_reason == "abort":
                            raise EngineClosedError("the engine was closed while the request ran")
                        self.token_ids += chunk.token_ids
                        self.logprobs += chunk.logprobs
                        self.finish_reason = chunk.finish_reason
                        if self._request.stream or self._request.stop:
                            self._deltas += self._parser.push(chunk.token_ids)
                            if self._parser.stopped:
                                self.finish_reason = "stop"
                        if self.finish_reason is not None:
                            break
                        yield
                break
            except AdapterNotFoundError:
                if self.token_ids or attempt == ADAPTER_TRIES - 1:
                    raise
                self.served = await service.resolver.resolve(self._request.model)
        if self.finish_reason is None:
            raise EngineError("the engine ended the answer without a finish reason")
        self.finish()
        yield

    def finish(self) -> None:
        """No more tokens come: the rest of the message becomes certain."""
        if not (self._request.stream or self._request.stop):
            self._deltas += self._parser.push(self.token_ids)
        self._deltas += self._parser.finish()

    def cut(self) -> None:
        """The client stopped reading: keep what was sampled. Like one at max_tokens, the answer has no end."""
        if self.finish_reason is None:
            self.finish_reason = "length"
            self.cut_by_client = True
            self.finish()

    def _kept(self, deltas: list[Delta]) -> list[Delta]:
        if self._request.parallel_tool_calls:
            return deltas
        return [delta for delta in deltas if delta.tool_call is None or delta.tool_call.index == 0]

    def message(self) -> ParsedMessage:
        return accumulate(self._kept(self._deltas))

    def _reported_reason(self, message: ParsedMessage) -> str:
        # An answer that was cut says so even when it holds a call: it must count as truncated.
        return "tool_calls" if message.tool_calls and self.finish_reason == "stop" else str(self.finish_reason)

    def _extras(self) -> dict[str, Any]:
        extras: dict[str, Any] = {
            "prompt_token_ids": self._prompt_ids,
            "temperature": self._sampling.temperature,
            "policy": self.served.canonical,
        }
        if self._clamped is not None:
            extras["max_tokens_clamped"] = self._clamped
        return extras

    def choice_json(self) -> tuple[str, str]:
        """The choice of a whole answer without its log-probs, and the array `logprobs.content`.

        Made once, for the client and for capture.
        """
        if self._json is None:
            self._json = self._make_choice_json()
        return self._json

    def _make_choice_json(self) -> tuple[str, str]:
        parsed = self.message()
        message: dict[str, Any] = {"role": "assistant", "content": parsed.content}
        if parsed.reasoning_content is not None:
            message["reasoning_content"] = parsed.reasoning_content
        if parsed.tool_calls:
            message["tool_calls"] = [call.to_openai() for call in parsed.tool_calls]
        choice: dict[str, Any] = {
            "index": self.index,
            "message": message,
            "finish_reason": self._reported_reason(parsed),
            **self._extras(),
            "token_ids": self.token_ids,
        }
        if self.cut_by_client:
            choice["cut_by_client"] = True
        return json.dumps(choice), self._service.tokens.content(self.token_ids, self.logprobs)

    def events_json(self) -> list[str]:
        """Choices of stream events for what came in since the last call; the last one has the finish reason.

        The first event carries what is known about the request, and the first event of each chunk its tokens.
        """
        fresh = self._kept(self._deltas[self._taken :])
        self._taken = len(self._deltas)
        events = []
        for delta in [_delta_json(delta) for delta in fresh] or [{}]:
            if self._began:
                events.append(self._event_json(delta, {}))
            else:
                self._began = True
                events.append(self._event_json({"role": "assistant", **delta}, self._extras()))
        if self.finish_reason is not None:
            parsed = self.message()
            # An empty text is said once, so that the pieces add up to what a whole answer says.
            events.append(
                self._event_json({"content": ""} if parsed.content == "" else {}, {}, self._reported_reason(parsed))
            )
        return events

    def _event_json(self, delta: dict[str, Any], extras: dict[str, Any], reason: str | None = None) -> str:
        ids, logprobs = self.token_ids[self._sent :], self.logprobs[self._sent :]
        self._sent = len(self.token_ids)
        event = {"index": self.index, "delta": delta, "finish_reason": reason, **extras, "token_ids": ids}
        content = self._service.tokens.content(ids, logprobs)
        return f'{json.dumps(event)[:-1]}, "logprobs":{{"content":{content}}}}}'

    def record(self, trajectory_id: str | None) -> ChoiceRecord:
        """The choice as the client gets it, for capture."""
        request, adapter = self._request, self.served.adapter
        plain, content = self.choice_json()
        choice = Choice.model_validate_json(plain)
        choice.logprobs = TextLogprobs.of(content.encode())
        return ChoiceRecord(
            messages=request.messages,
            tools=request.tools,
            choice=choice,
            name=self.served.canonical if adapter is None else adapter.name,
            step=None if adapter is None else adapter.step,
            trajectory_id=trajectory_id,
        )


def _delta_json(delta: Delta) -> dict[str, Any]:
    if delta.tool_call is not None:
        call = delta.tool_call
        function = {"name": call.name, "arguments": call.arguments}
        return {"tool_calls": [{"index": call.index, "id": call.id, "type": "function", "function": function}]}
    if delta.reasoning_content is not None:
        return {"reasoning_content": delta.reasoning_content}
    return {"content": delta.content}


def usage(prompt_ids: Sequence[int], answers: Iterable[Answer]) -> dict[str, int]:
    """OpenAI's token counts of a request."""
    sampled = sum(len(answer.token_ids) for answer in answers)
    return {
        "prompt_tokens": len(prompt_ids),
        "completion_tokens": sampled,
        "total_tokens": len(prompt_ids) + sampled,
    }
