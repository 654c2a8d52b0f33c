"""What stands before the routes of `artnb serve`: the key, the size of bodies, and clients that are slow.

A request without the key is answered before its body is read. A body is read whole, within a size and a time, before
the app sees it; uploads of adapters pass through, with the same time limits. Plain ASGI; knows no route's meaning.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import re
import zlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from ..serving.completion import send_json
from ..serving.protocol import error_body
from .wire import API

log = logging.getLogger("artnb")

Receive = Callable[[], Awaitable[dict[str, Any]]]
OPEN_PATHS = ("/health",)
OPEN_BODY = 1024
"""Bytes of a body where no key is asked for."""
UNPACKED_FACTOR = 10
"""A packed body may unpack to this many times the limit: log-probs shrink to a quarter, a bomb to a thousandth."""
_JOB = re.compile(rf"{API}/jobs/[^/]+")
_UPLOAD = re.compile(rf"{API}/models/[^/]+/[^/]+/adapters/[^/]+")


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes in bytes, times in seconds."""

    max_body: int = 64 << 20  # of a step's rollouts, as sent
    max_chat: int = 16 << 20  # of any other request
    idle_s: float = 30.0  # without a byte of a body that was begun
    slowest: float = 16_384.0  # bytes a second below which, after `idle_s`, a body is not waited for
    send_s: float = 300.0  # that a client may leave an answer unread
    header_s: float = 20.0  # for a request's head
    linger_s: float = 2.0  # that is read on behind a refusal: a connection closed with bytes unread may lose the answer
    held_bodies: int = 2  # largest bodies, unpacked, that may be in memory at once; more are asked to come later

    def of(self, path: str) -> int:
        if path in OPEN_PATHS:
            return OPEN_BODY
        return self.max_body if _JOB.fullmatch(path) else self.max_chat

    @property
    def held(self) -> int:
        return self.held_bodies * UNPACKED_FACTOR * max(self.max_body, self.max_chat)


class RefusedError(Exception):
    """A request that is not carried out; `status` is HTTP's, `code` is for programs."""

    def __init__(self, status: int, code: str, message: str, *headers: tuple[bytes, bytes]) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.headers = headers

    def body(self) -> dict[str, Any]:
        """In OpenAI's shape."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return error_body(str(self), kind, None, self.code)


class _Gone(Exception):
    """The client left before its body was whole."""


class _Late(Exception):
    """The client does not read its answer."""


class Guard:
    """Middleware around the whole app."""

    def __init__(self, app: Any, api_key: str, limits: Limits) -> None:
        self._app = app
        self._key = api_key.encode()
        self._limits = limits
        self.held = 0  # bytes of bodies, unpacked, that are in memory now

    async def __call__(self, scope: Any, receive: Receive, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = _Body(scope, receive, self._limits)
        reply = _Reply(send, body, self._limits.send_s)
        try:
            if scope["path"] not in OPEN_PATHS and not self._admits(scope["headers"]):
                raise RefusedError(
                    401,
                    "invalid_api_key",
                    "wrong or missing API key; it was printed when `artnb serve` started, or is in its key file",
                    (b"www-authenticate", b"Bearer"),
                )
            if _UPLOAD.fullmatch(scope["path"]):
                await self._app(scope, body.next_message, reply.send)
            else:
                await self._buffered(scope, body, reply)
        except _Gone:
            return
        except _Late:
            log.warning("%s %s: the client left its answer unread; it is cut off", scope["method"], scope["path"])
        except RefusedError as refused:
            await reply.refuse(refused)
        except Exception:
            log.exception("%s %s failed", scope["method"], scope["path"])
            await reply.refuse(RefusedError(500, "internal_error", "the server failed; its log has the traceback"))

    async def _buffered(self, scope: Any, body: _Body, reply: _Reply) -> None:
        limit = self._limits.of(scope["path"])
        declared = body.declared()
        if declared is not None and declared > limit:
            raise _too_large(limit, scope["path"])
        # The budget is taken as bytes come: a client that declares much and sends nothing takes none.
        held = 0

        def take(count: int) -> None:
            nonlocal held
            if self.held + count > self._limits.held:
                raise RefusedError(
                    429, "too_many_bodies", "too many large requests at once; send it again", (b"retry-after", b"2")
                )
            held += count
            self.held += count

        try:
            await self._app(scope, _then(await body.read(limit, take), body.receive), reply.send)
        finally:
            self.held -= held

    def _admits(self, headers: list[tuple[bytes, bytes]]) -> bool:
        given = [value for name, value in headers if name == b"authorization"]
        if len(given) != 1:
            return False
        scheme, _, key = given[0].partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(key.strip(), self._key)


def _then(data: bytes, receive: Receive) -> Receive:
    given = False

    async def next_message() -> dict[str, Any]:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": data, "more_body": False}

    return next_message


def _too_large(limit: int, path: str) -> RefusedError:
    hint = (
        "; send fewer or shorter rollouts, or start the server with a larger --max-body-mb" if _JOB.match(path) else ""
    )
    return RefusedError(413, "body_too_large", f"the body is larger than {limit / (1 << 20):.0f} MiB{hint}")


class _Body:
    """A request's body, read within the limits of time."""

    def __init__(self, scope: Any, receive: Receive, limits: Limits) -> None:
        self.receive = receive
        self.whole = False
        self._path = scope["path"]
        self._headers = dict(scope["headers"])
        self._limits = limits
        self._begun: float | None = None
        self._size = 0

    def declared(self) -> int | None:
        value = self._headers.get(b"content-length", b"")
        return int(value) if value.isdigit() else None

    async def next_message(self) -> dict[str, Any]:
        """The next ASGI message. Raises RefusedError (408) for a body that comes too slowly."""
        if self.whole:
            return await self.receive()
        limits, loop = self._limits, asyncio.get_running_loop()
        if self._begun is None:
            self._begun = loop.time()
        patience = self._begun + limits.idle_s + self._size / limits.slowest - loop.time()
        try:
            async with asyncio.timeout(min(limits.idle_s, max(0.0, patience))):
                message = await self.receive()
        except TimeoutError:
            raise RefusedError(
                408, "body_too_slow", f"the body came too slowly ({self._size} bytes so far); send the request again"
            ) from None
        if message["type"] == "http.request":
            self._size += len(message.get("body", b""))
            self.whole = not message.get("more_body", False)
        return message

    async def discard(self) -> None:
        """Read on for a moment, before the connection is closed."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._limits.linger_s):
                while not self.whole and (message := await self.receive())["type"] == "http.request":
                    self.whole = not message.get("more_body", False)

    async def read(self, limit: int, take: Callable[[int], None]) -> bytes:
        """All of it, unpacked. `take` is told of the bytes that are held."""
        encoding = self._headers.get(b"content-encoding", b"identity").strip().lower()
        if encoding not in (b"identity", b"gzip"):
            raise RefusedError(415, "unknown_encoding", "content-encoding may be gzip, or left out")
        unpack = zlib.decompressobj(wbits=31) if encoding == b"gzip" else None
        ceiling = limit * UNPACKED_FACTOR if unpack is not None else limit
        parts: list[bytes] = []
        unpacked = 0
        while not self.whole:
            message = await self.next_message()
            if message["type"] == "http.disconnect":
                raise _Gone
            if self._size > limit:
                raise _too_large(limit, self._path)
            part = message.get("body", b"")
            while part:
                piece = part if unpack is None else self._piece(unpack, part)
                part = b"" if unpack is None else unpack.unconsumed_tail
                take(len(piece))
                parts.append(piece)
                unpacked += len(piece)
                if unpacked > ceiling:
                    raise _too_large(ceiling, self._path)
                if unpack is not None and unpack.eof:
                    part = b""
        if unpack is not None and self._size and not unpack.eof:
            raise RefusedError(400, "bad_encoding", "the body is not whole gzip")
        return b"".join(parts)

    def _piece(self, unpack: Any, part: bytes) -> bytes:
        try:
            return bytes(unpack.decompress(part, 1 << 20))
        except zlib.error as error:
            raise RefusedError(400, "bad_encoding", f"the body is not gzip: {error}") from None


class _Reply:
    """The answer; a client that does not read it is not waited for without end.

    Where the body was not read to its end, the connection is closed behind the answer: the rest would be taken for the
    next request.
    """

    def __init__(self, send: Any, body: _Body, limit: float) -> None:
        self._send = send
        self._body = body
        self._limit = limit
        self._begun = self._whole = False

    async def send(self, message: dict[str, Any]) -> None:
        self._begun = True
        last = message["type"] == "http.response.body" and not message.get("more_body", False)
        if message["type"] == "http.response.start" and not self._body.whole:
            message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
        elif last and not self._body.whole:
            await self._pass_on({**message, "more_body": True})
            await self._body.discard()
            message = {"type": "http.response.body", "body": b"", "more_body": False}
        self._whole = last
        await self._pass_on(message)

    async def _pass_on(self, message: dict[str, Any]) -> None:
        try:
            async with asyncio.timeout(self._limit):
                await self._send(message)
        except TimeoutError:
            raise _Late from None

    async def refuse(self, refused: RefusedError) -> None:
        if self._whole:
            return
        if self._begun:
            raise refused  # the server cuts the connection: the client sees that the answer is not whole

        async def send(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *refused.headers]}
            await self.send(message)

        await send_json(send, refused.status, json.dumps(refused.body()))
