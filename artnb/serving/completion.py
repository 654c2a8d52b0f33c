"""POST /v1/chat/completions: from a request body to a whole or streamed response, and its errors.

A plain ASGI endpoint: it watches for the client's leaving itself, which cancels the request in the
engine, unless its server does. What a choice looks like is in answers.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..capture import CaptureRegistry, CaptureTicket, ChoiceRecord
from ..capture_http import TRAJECTORY_HEADER
from ..errors import (
    AdapterNotFoundError,
    ArtnbError,
    ContextLengthError,
    EngineClosedError,
    EngineError,
    ModelError,
    RenderError,
    RequestError,
)
from .answers import Answer, Service, usage
from .metrics import EndpointMetrics
from .protocol import ChatRequest, check_request, error_body, read_body
from .transport import CANCELS, LOGPROB_SPANS

log = logging.getLogger(__name__)
CLIENT_GONE = 499
"""The status that nginx logs for a client that left; only metrics see it."""

OnChoice = Callable[[ChoiceRecord], None]


class ChatCompletions:
    """The ASGI endpoint."""

    def __init__(
        self, service: Service, captures: CaptureRegistry, on_choice: OnChoice | None, metrics: EndpointMetrics
    ) -> None:
        self._service = service
        self._captures = captures
        self._on_choice = on_choice
        self._metrics = metrics

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        began = time.perf_counter()
        body = await _read(receive)
        if body is None:
            return
        reply = _Reply(send)
        answer = self._answer(_header(scope, TRAJECTORY_HEADER), body, reply)
        self._metrics.in_flight.inc()
        try:
            if CANCELS in scope.get("extensions", ()):
                await answer
            else:
                await _answer_until_gone(answer, receive, reply)
        except asyncio.CancelledError:
            if not reply.complete:
                reply.status = CLIENT_GONE
            raise
        finally:
            self._metrics.in_flight.dec()
            self._metrics.requests.labels(str(reply.status)).inc()
            self._metrics.seconds.observe(time.perf_counter() - began)

    async def _answer(self, trajectory_id: str | None, body: bytes, reply: _Reply) -> None:
        try:
            await self._complete(trajectory_id, body, reply)
        except Exception as error:
            status, payload = describe_error(error)
            if status >= 500 and not isinstance(error, ArtnbError):
                log.exception("a chat completion failed")
            await reply.fail(status, payload)

    async def _complete(self, trajectory_id: str | None, body: bytes, reply: _Reply) -> None:
        service = self._service
        request = check_request(read_body(body))
        served = await service.resolver.resolve(request.model)
        prompt_ids = self._render(request)
        room = service.engine.context_length - len(prompt_ids)
        if room < 1:
            self._captures.begin(trajectory_id, streamed=False).context_filled()
            raise ContextLengthError(
                f"the messages take {len(prompt_ids)} of the context's {service.engine.context_length} tokens: there "
                "is no room for an answer. Shorten the messages.",
                param="messages",
            )
        answers = [Answer(service, request, prompt_ids, served, room, index) for index in range(request.n)]
        head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time())}
        ticket = self._captures.begin(trajectory_id, streamed=request.stream)
        try:
            if request.stream:
                await self._stream(request, prompt_ids, answers, head, ticket, reply)
            else:
                await _gather(answers)
                for answer in answers:
                    self._record(answer, ticket)
                whole = head | {
                    "object": "chat.completion",
                    "model": answers[0].served.canonical,
                    "usage": usage(prompt_ids, answers),
                }
                await reply.send_choices(whole, [answer.choice_json() for answer in answers])
        finally:
            ticket.end()

    def _render(self, request: ChatRequest) -> list[int]:
        tools = request.tools if request.offer_tools else None
        try:
            chat = self._service.chat
            return chat.render(request.messages, tools, begin_call=request.begin_call, **request.template_kwargs)
        except UnicodeEncodeError as error:  # half of a surrogate pair: valid JSON, but no text
            raise RequestError(f"messages hold text that is no Unicode: {error}", param="messages") from None

    async def _stream(
        self,
        request: ChatRequest,
        prompt_ids: list[int],
        answers: list[Answer],
        head: dict[str, Any],
        ticket: CaptureTicket,
        reply: _Reply,
    ) -> None:
        open_answers = set(range(len(answers)))
        failed = False
        try:
            async with contextlib.aclosing(_merge(answers)) as progress:
                async for answer in progress:
                    events = answer.events_json()
                    if answer.finish_reason is not None:
                        # Before its last event: the client may leave its scope as soon as it has read that.
                        open_answers.discard(answer.index)
                        self._record(answer, ticket)
                    frame = json.dumps(head | {"object": "chat.completion.chunk", "model": answer.served.canonical})
                    await reply.send_events(f'{frame[:-1]}, "choices":[{event}]}}' for event in events)
            if request.include_usage:
                last = head | {"object": "chat.completion.chunk", "model": answers[0].served.canonical}
                await reply.send_events([json.dumps(last | {"choices": [], "usage": usage(prompt_ids, answers)})])
            await reply.end_events()
        except Exception:
            failed = True
            raise
        finally:
            for index in sorted(open_answers):
                # Cancelled: the client stopped reading. What it has read was sampled, so it is kept.
                if not failed and answers[index].token_ids:
                    answers[index].cut()
                    self._record(answers[index], ticket)

    def _record(self, answer: Answer, ticket: CaptureTicket) -> None:
        if ticket.wanted or self._on_choice is not None:
            record = answer.record(ticket.trajectory_id)
            ticket.add(record)
            if self._on_choice is not None:
                self._on_choice(record)


async def _gather(answers: list[Answer]) -> None:
    async def run(answer: Answer) -> None:
        async with contextlib.aclosing(answer.sample()) as progress:
            async for _ in progress:
                pass

    if len(answers) == 1:
        await run(answers[0])
        return
    with _first_error():
        async with asyncio.TaskGroup() as group:
            for answer in answers:
                group.create_task(run(answer))


async def _merge(answers: list[Answer]) -> AsyncGenerator[Answer]:
    """The answers, each as often as something new came in for it."""
    if len(answers) == 1:
        async with contextlib.aclosing(answers[0].sample()) as progress:
            async for _ in progress:
                yield answers[0]
        return
    # One place: an answer goes on when its last chunk was taken, so that events match the state.
    news: asyncio.Queue[tuple[Answer, asyncio.Event] | BaseException | None] = asyncio.Queue(maxsize=1)

    async def run(answer: Answer) -> None:
        try:
            async with contextlib.aclosing(answer.sample()) as progress:
                async for _ in progress:
                    taken = asyncio.Event()
                    await news.put((answer, taken))
                    await taken.wait()
            await news.put(None)
        except Exception as error:
            await news.put(error)

    tasks = [asyncio.create_task(run(answer)) for answer in answers]
    try:
        running = len(tasks)
        while running:
            item = await news.get()
            if item is None:
                running -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield item[0]
                item[1].set()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


@contextlib.contextmanager
def _first_error() -> Any:
    """A task group's first error instead of the group."""
    try:
        yield
    except* Exception as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None


@dataclass
class _Reply:
    """The response, sent as it becomes known."""

    send: Any
    status: int = 0
    streaming: bool = False
    complete: bool = False

    async def send_json(self, status: int, text: str) -> None:
        self.status, self.complete = status, True
        await send_json(self.send, status, text)

    async def send_choices(self, whole: dict[str, Any], choices: Sequence[tuple[str, str]]) -> None:
        """A chat completion. A client in this process is told where the log-probs are, and may leave them text."""
        text, spans = f'{json.dumps(whole)[:-1]}, "choices":[', []
        for number, (plain, content) in enumerate(choices):
            text += f'{"," if number else ""}{plain[:-1]}, "logprobs":{{"content":'
            spans.append((len(text), len(text) + len(content)))  # of bytes, too: JSON as it is made here is ASCII
            text += content + "}}"
        self.status, self.complete = 200, True
        await send_json(self.send, 200, text + "]}", {LOGPROB_SPANS: spans})

    async def send_events(self, events: Any) -> None:
        if not self.streaming:
            self.streaming, self.status = True, 200
            headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
            await self.send({"type": "http.response.start", "status": 200, "headers": headers})
        body = "".join(f"data: {event}\n\n" for event in events).encode()
        await self.send({"type": "http.response.body", "body": body, "more_body": True})

    async def end_events(self) -> None:
        self.complete = True
        await self.send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})

    async def fail(self, status: int, payload: dict[str, Any]) -> None:
        """An error as the response, or as the last event of one that has begun."""
        if self.streaming:
            self.status = status
            await self.send_events([json.dumps(payload)])
            await self.end_events()
        else:
            await self.send_json(status, json.dumps(payload))


async def send_json(send: Any, status: int, text: str, more: Mapping[str, Any] | None = None) -> None:
    """A JSON response, straight over ASGI. `more`: for the start message; servers take what they know of it."""
    body = text.encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if status >= 500:
        headers.append((b"x-should-retry", b"false"))  # OpenAI clients ask no second time
    await send({"type": "http.response.start", "status": status, "headers": headers, **(more or {})})
    await send({"type": "http.response.body", "body": body, "more_body": False})


def describe_error(error: Exception) -> tuple[int, dict[str, Any]]:
    """(HTTP status, OpenAI's error body)."""
    text = str(error)
    if isinstance(error, RequestError):
        code = "context_length_exceeded" if isinstance(error, ContextLengthError) else None
        return 400, error_body(text, "invalid_request_error", error.param, code)
    if isinstance(error, RenderError):
        where = "messages" if error.index is None else f"messages[{error.index}]"
        return 400, error_body(text, "invalid_request_error", where)
    if isinstance(error, ModelError | AdapterNotFoundError):
        return 404, error_body(text, "invalid_request_error", "model", "model_not_found")
    if isinstance(error, EngineClosedError):
        return 503, error_body(text, "server_error", None, "engine_closed")
    kind = "engine_error" if isinstance(error, EngineError) else "internal_error"
    return 500, error_body(f"{type(error).__name__}: {text}", "server_error", None, kind)


async def _read(receive: Any) -> bytes | None:
    """The body; None when the client left before it was whole."""
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


async def _answer_until_gone(answer: Coroutine[Any, Any, None], receive: Any, reply: _Reply) -> None:
    work = asyncio.create_task(answer)
    gone = asyncio.create_task(_wait_until_gone(receive))
    try:
        await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
    finally:
        gone.cancel()
        # Servers report a disconnect after a complete response, too.
        if not work.done() and not reply.complete:
            work.cancel()
            reply.status = CLIENT_GONE
        await asyncio.wait((work, gone))
    if not work.cancelled():
        work.result()


async def _wait_until_gone(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _header(scope: Any, name: str) -> str | None:
    wanted = name.encode()
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == wanted), None)
