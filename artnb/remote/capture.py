"""Capture for a model on another machine: what `artnb serve` answers goes on the trajectory of the scope that asked.

While a trajectory scope is open, the httpx clients of this process pass their requests to that server through here
(capture_http.py). Answers pass on unchanged, streamed ones as they come. Does not send anything by itself.
"""

from __future__ import annotations

import functools
import inspect
import json
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from openai.types.chat.chat_completion import Choice

from ..capture import CaptureRegistry, CaptureTicket, ChoiceRecord, _process
from ..capture_http import Place

log = logging.getLogger("artnb")
_PATH = "/v1/chat/completions"
_PORTS = {"http": 80, "https": 443}


class RemoteCaptures(CaptureRegistry):
    """The collectors of the models on one server. One per server and process, whoever made the backends."""

    users = 0

    def __call__(
        self, send: Callable[..., Any], client: Any, request: Any, args: tuple[Any, ...], options: Mapping[str, Any]
    ) -> Any:
        """`send(client, request, …)`, observed. `send` is an httpx client's, of either kind."""
        asked = self._asked(request)
        if asked is None:
            return send(client, request, *args, **options)
        ticket = self.begin(None, streamed=False)
        request.headers["accept-encoding"] = "identity"  # the answer is read on its way
        watch = _Watch(self, ticket, asked)
        if inspect.iscoroutinefunction(send):

            async def observed() -> Any:
                return watch.attach(await send(client, request, *args, **options))

            return observed()
        return watch.attach(send(client, request, *args, **options))

    def _asked(self, request: Any) -> dict[str, Any] | None:
        if request.method != "POST" or not request.url.path.endswith(_PATH):
            return None
        try:
            asked = json.loads(request.content)
        except (ValueError, RuntimeError, RecursionError):  # RuntimeError: a body that is streamed out
            return None
        return asked if isinstance(asked, dict) and isinstance(asked.get("messages"), list) else None

    def served(self, policy: str) -> tuple[str, int | None]:
        """(name, step) of what sampled a choice; a base model has no step."""
        name, at, digits = policy.rpartition("@")
        if at and digits.isdigit() and self.collector(name) is not None:
            return name, int(digits)
        return policy, None


class _Watch:
    """One request and its answer."""

    def __init__(self, captures: RemoteCaptures, ticket: CaptureTicket, asked: dict[str, Any]) -> None:
        self._captures = captures
        self._ticket = ticket
        self._asked = asked
        self._body = b""  # of a whole answer; of a streamed one, the line that is not complete yet
        self._choices: dict[int, _Building] = {}
        self._streamed = False
        self._status = 0

    def attach(self, response: Any) -> Any:
        """The response, whose body is read here as its reader reads it."""
        self._status = response.status_code
        self._streamed = response.headers.get("content-type", "").startswith("text/event-stream")
        if response.headers.get("content-encoding", "identity") != "identity":
            log.warning("an answer came compressed, though that was not asked for: it is not captured")
        elif response.is_stream_consumed:
            self.feed(response.content)
            self.end()
        else:
            stream = response.stream
            kind = _AsyncTee if hasattr(stream, "__aiter__") else _Tee
            response.stream = _tee_type(kind, _base(type(stream)))(stream, self)
        return response

    def feed(self, part: bytes) -> None:
        """A part of the body. A streamed choice is recorded before its last event is passed on: who has read that may
        leave the scope."""
        self._body += part
        while self._streamed and b"\n" in self._body:
            line, _, self._body = self._body.partition(b"\n")
            if line.startswith(b"data: {"):
                for event in json.loads(line[6:]).get("choices", ()):
                    building = self._choices.setdefault(event["index"], _Building(event["index"]))
                    building.add(event)
                    if building.finish_reason is not None:
                        self._record(building.choice())

    def end(self) -> None:
        """The body is complete."""
        if self._streamed:
            return
        body, self._body = self._body, b""
        try:
            answer = json.loads(body)
        except ValueError:
            return  # cut off, or a proxy's page: the client says so
        if self._status == 200:
            for choice in answer.get("choices", ()):
                self._record(Choice.model_validate(choice))
        elif (answer.get("error") or {}).get("code") == "context_length_exceeded":
            self._ticket.context_filled()

    def broken(self) -> None:
        """The line was cut: nobody gets a whole answer, and who asks again gets another."""
        self._choices = {}

    def left(self) -> None:
        """The reader stopped early: what it has read was sampled, so it is kept, as one cut at max_tokens."""
        choices, self._choices = self._choices, {}
        for _, building in sorted(choices.items()):
            if building.finish_reason is None and building.extras.get("token_ids"):
                self._record(building.choice(cut=True))

    def _record(self, choice: Choice) -> None:
        extra = choice.model_extra or {}
        name, step = self._captures.served(str(extra.get("policy")))
        self._ticket.add(
            ChoiceRecord(
                messages=self._asked["messages"],
                tools=self._asked.get("tools") or None,
                choice=choice,
                name=name,
                step=step,
            )
        )


class _Building:
    """A choice that is put together from stream events."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.finish_reason: str | None = None
        self.extras: dict[str, Any] = {"token_ids": []}
        self._message: dict[str, Any] = {"role": "assistant", "content": None}
        self._logprobs: list[Any] = []

    def add(self, event: Mapping[str, Any]) -> None:
        delta = event.get("delta") or {}
        for name in ("content", "reasoning_content"):
            if delta.get(name) is not None:
                self._message[name] = (self._message.get(name) or "") + delta[name]
        for call in delta.get("tool_calls") or ():
            # artnb sends each call whole, in one event.
            self._message.setdefault("tool_calls", []).append({k: v for k, v in call.items() if k != "index"})
        self._logprobs += (event.get("logprobs") or {}).get("content") or []
        for name, value in event.items():
            if name == "token_ids":
                self.extras[name] += value
            elif name not in ("index", "delta", "logprobs", "finish_reason"):
                self.extras[name] = value
        self.finish_reason = event.get("finish_reason") or self.finish_reason

    def choice(self, *, cut: bool = False) -> Choice:
        made = {
            "index": self.index,
            "message": self._message,
            "finish_reason": "length" if cut else self.finish_reason,
            "logprobs": {"content": self._logprobs},
            **self.extras,
        }
        return Choice.model_validate(made | ({"cut_by_client": True} if cut else {}))


class _AsyncTee:
    """A response's stream, seen by a watch on its way."""

    def __init__(self, stream: Any, watch: _Watch) -> None:
        self._stream = stream
        self._watch = watch

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async for part in self._stream:
                self._watch.feed(part)
                yield part
        except Exception:
            self._watch.broken()
            raise
        self._watch.end()

    async def aclose(self) -> None:
        self._watch.left()
        await self._stream.aclose()


class _Tee:
    def __init__(self, stream: Any, watch: _Watch) -> None:
        self._stream = stream
        self._watch = watch

    def __iter__(self) -> Iterator[bytes]:
        try:
            for part in self._stream:
                self._watch.feed(part)
                yield part
        except Exception:
            self._watch.broken()
            raise
        self._watch.end()

    def close(self) -> None:
        self._watch.left()
        self._stream.close()


def _base(stream: type) -> type:
    """httpx insists that a response's stream is of its own base class."""
    return next(kind for kind in stream.__mro__ if kind.__name__ in ("AsyncByteStream", "SyncByteStream"))


@functools.cache
def _tee_type(tee: Callable[..., Any], base: Callable[..., Any]) -> Callable[..., Any]:
    assert isinstance(tee, type) and isinstance(base, type)
    return type(tee.__name__, (tee, base), {})


# One per server and process ---------------------------------------------------------------------------

_lock = threading.Lock()
_by_place: dict[Place, RemoteCaptures] = {}


def join(url: str) -> RemoteCaptures:
    """The captures of the server at `url`; `leave` as often as this is called."""
    with _lock:
        place = _place(url)
        if place not in _by_place:
            _by_place[place] = RemoteCaptures()
            _process.add_remote(place, _by_place[place])
        captures = _by_place[place]
        captures.users += 1
        return captures


def leave(url: str) -> None:
    with _lock:
        place = _place(url)
        captures = _by_place[place]
        captures.users -= 1
        if not captures.users:
            del _by_place[place]
            _process.remove_remote(place)


def _place(url: str) -> Place:
    parts = urlsplit(url)
    port = None if parts.port == _PORTS[parts.scheme] else parts.port
    return parts.scheme, (parts.hostname or "").lower(), port
