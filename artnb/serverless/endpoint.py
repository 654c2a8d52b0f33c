"""The service's OpenAI-compatible endpoint as an ASGI app in this process.

It passes requests on, with the model's name as the service knows it and log-probs asked for, and writes what was
sampled on the trajectory whose scope asked. So `model.openai_client()`, `model.chat` and `art.trajectory()` work as
they do with a local engine. It samples nothing and keeps no conversation.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import AsyncIterator
from typing import Any, Protocol

from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletionChunk
from openai.types.chat.chat_completion import Choice

from ..capture import CaptureRegistry, CaptureTicket, ChoiceRecord
from ..capture_http import TRAJECTORY_HEADER
from ..serving.protocol import error_body
from ..serving.transport import client_library
from .client import CONNECT_S, TrainingService

logger = logging.getLogger("artnb")

PREFIX = "/v1"
PASSED_ON = ("content-type", "retry-after", "retry-after-ms", "x-request-id")
_EVENT_END = re.compile(rb"\r?\n\r?\n")


class Names(Protocol):
    """What a model is called, here and there."""

    @property
    def name(self) -> str:
        """Its name in this process."""
        ...

    def resolve(self, asked: str) -> tuple[str, int | None]:
        """(the service's name, the step that answers as far as it is known) of a name that a client asks for."""
        ...


class ServiceEndpoint:
    """The ASGI app of one model."""

    def __init__(self, service: TrainingService, names: Names, captures: CaptureRegistry) -> None:
        self._service = service
        self._names = names
        self._captures = captures

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"this endpoint speaks HTTP only, not {scope['type']}")
        body = await _read(receive)
        path = scope["path"].removeprefix(PREFIX)
        asked = _asked(body) if path == "/chat/completions" else None
        exchange = _Exchange(asked, self._names)
        if asked is not None:
            body = json.dumps(exchange.translated()).encode()
        given = next((v.decode("latin-1") for k, v in scope["headers"] if k == TRAJECTORY_HEADER.encode()), None)
        ticket = self._captures.begin(given, streamed=bool(asked and asked.get("stream")))
        try:
            await self._pass_on(scope, path, body, exchange, ticket, send)
        finally:
            ticket.end()

    async def _pass_on(
        self, scope: Any, path: str, body: bytes, exchange: _Exchange, ticket: CaptureTicket, send: Any
    ) -> None:
        library = client_library()
        http = (await self._service.connection()).http
        query = scope.get("query_string", b"").decode("latin-1")
        request = http.build_request(
            scope["method"],
            f"{self._service.base_url}{path}{'?' + query if query else ''}",
            content=body or None,
            headers={"authorization": f"Bearer {self._service.key}", "content-type": "application/json"},
            # Waiting for a place in the engine is no fault; a client that sets a limit keeps it itself.
            timeout=library.Timeout(None, connect=CONNECT_S),
        )
        started = False
        try:
            response = await http.send(request, stream=True)
            try:
                head = {"type": "http.response.start", "status": response.status_code, "headers": _headers(response)}
                if response.headers.get("content-type", "").startswith("text/event-stream"):
                    await send(head)
                    started = True
                    async for event in _events(response.aiter_bytes()):
                        exchange.heard(event, ticket)
                        await send({"type": "http.response.body", "body": event, "more_body": True})
                    await send({"type": "http.response.body", "body": b"", "more_body": False})
                else:
                    answer = await response.aread()
                    exchange.answered(response.status_code, answer, ticket)
                    await send(head)
                    await send({"type": "http.response.body", "body": answer, "more_body": False})
            finally:
                await response.aclose()
        except library.HTTPError as error:
            await _fail(send, started, f"the training service's endpoint gave no whole answer ({_why(error)})")


class _Exchange:
    """One request and what is sampled for it. `asked` is a chat completion's body, None for anything else."""

    def __init__(self, asked: dict[str, Any] | None, names: Names) -> None:
        self._asked = asked
        self._names = names
        self._step: int | None = None
        self._state = ChatCompletionStreamState[Any]()
        self._recorded: set[int] = set()

    def translated(self) -> dict[str, Any]:
        """The body for the service. Log-probs are asked for: without them a choice cannot be trained on."""
        assert self._asked is not None
        name, self._step = self._names.resolve(str(self._asked.get("model", "")))
        return {"logprobs": True, **self._asked, "model": name}

    def answered(self, status: int, answer: bytes, ticket: CaptureTicket) -> None:
        """A whole answer: its choices go on the trajectory."""
        if self._asked is None:
            return
        try:
            found = json.loads(answer)
            if status == 200:
                for choice in found["choices"]:
                    self._record(choice, ticket)
            elif _context_is_full(found):
                ticket.context_filled()
        except (ValueError, KeyError, TypeError) as error:
            logger.warning("an answer of the training service was not recorded: it is no chat completion (%r)", error)

    def heard(self, event: bytes, ticket: CaptureTicket) -> None:
        """One event of a stream. A choice is recorded before its last event is passed on: the client may leave then."""
        data = b"\n".join(line[5:].strip() for line in event.splitlines() if line.startswith(b"data:"))
        if self._asked is None or not data or data == b"[DONE]":
            return
        try:
            chunk = ChatCompletionChunk.construct(**json.loads(data))
            if not chunk.choices:
                return
            self._state.handle_chunk(chunk)
            for part in chunk.choices:
                if part.finish_reason is not None and part.index not in self._recorded:
                    self._recorded.add(part.index)
                    whole = self._state.current_completion_snapshot.choices[part.index]
                    # What else a chunk's choice has (its tokens, for one) is that chunk's, not the whole answer's.
                    kept = {"index", "finish_reason", "message", "logprobs"}
                    self._record(whole.model_dump(include=kept, exclude_none=True), ticket)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            logger.warning("a stream of the training service was not recorded: an event is no chunk (%r)", error)

    def _record(self, choice: dict[str, Any], ticket: CaptureTicket) -> None:
        if not ticket.wanted:
            return
        assert self._asked is not None
        ticket.add(
            ChoiceRecord(
                messages=self._asked.get("messages", []),
                tools=self._asked.get("tools") or None,
                choice=Choice.model_validate(choice),
                name=self._names.name,
                step=self._step,
                trajectory_id=ticket.trajectory_id,
            )
        )


def _asked(body: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(body)
    except ValueError:
        return None  # the service says what is wrong with it
    return found if isinstance(found, dict) else None


def _context_is_full(answer: Any) -> bool:
    """As OpenAI says it, and as vLLM does."""
    error = answer.get("error", answer) if isinstance(answer, dict) else {}
    if not isinstance(error, dict):
        return "maximum context length" in str(error)
    return error.get("code") == "context_length_exceeded" or "maximum context length" in str(error.get("message"))


async def _read(receive: Any) -> bytes:
    parts: list[bytes] = []
    while True:
        message = await receive()
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


async def _events(parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Whole server-sent events, each with the blank line that ends it."""
    waiting = b""
    async for part in parts:
        waiting += part
        while (end := _EVENT_END.search(waiting)) is not None:
            yield waiting[: end.end()]
            waiting = waiting[end.end() :]
    if waiting:
        yield waiting


def _headers(response: Any) -> list[tuple[bytes, bytes]]:
    kept = [(name.encode(), response.headers[name].encode()) for name in PASSED_ON if name in response.headers]
    # OpenAI clients would ask again: a completion is a POST, and what it sampled is lost to them either way.
    return [*kept, (b"x-should-retry", b"false")] if response.status_code >= 500 else kept


def _why(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


async def _fail(send: Any, started: bool, text: str) -> None:
    """An error as the response, or as the last event of one that has begun."""
    body = json.dumps(error_body(text, "server_error", None, "service_unreachable")).encode()
    if started:
        await send({"type": "http.response.body", "body": b"data: " + body + b"\n\n", "more_body": False})
        return
    headers = [(b"content-type", b"application/json"), (b"x-should-retry", b"false")]
    await send({"type": "http.response.start", "status": 502, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})
