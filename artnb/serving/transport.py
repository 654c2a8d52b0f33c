"""OpenAI clients that talk to an ASGI app in this process, without a port, with true streaming.

The app runs as a task of the caller's loop and context (a thread of its own for the synchronous
client). Closing the response early ends that task. It knows nothing about chat completions.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
from collections.abc import AsyncIterator, Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

from ..backend import ASGIApp
from ..notebook.loop import LoopThread

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI

T = TypeVar("T")
IN_PROCESS_URL = "http://artnb.local/v1"
"""Base URL of in-process clients. It is never looked up."""
CANCELS = "artnb.cancels"
"""Extension in the ASGI scope: the app is cancelled when the client leaves, and need not watch for that."""
LOGPROB_SPANS = "artnb.logprob_spans"
"""In the start message and the response's extensions: where in the body each choice's `logprobs.content` is."""


def make_async_client(app: ASGIApp, api_key: str = "in-process", base_url: str = IN_PROCESS_URL) -> AsyncOpenAI:
    """An AsyncOpenAI on `app`. It holds nothing of a loop: use it under any number of asyncio.run calls."""
    from .client import InProcessOpenAI

    http = client_library().AsyncClient(transport=InProcessTransport(app), timeout=None, base_url=base_url)
    # No limit on time: waiting for a place in the engine is not a fault. No retries: nothing is ever dropped.
    return InProcessOpenAI(api_key=api_key, base_url=base_url, http_client=http, max_retries=0, timeout=None)


def make_client(
    app: ASGIApp, api_key: str = "in-process", base_url: str = IN_PROCESS_URL, *, thread: LoopThread | None = None
) -> OpenAI:
    """A synchronous OpenAI on `app`. The app runs in `thread`, or in one of the client's own that its `close` ends."""
    from openai import OpenAI

    http = client_library().Client(transport=InProcessSyncTransport(app, thread), timeout=None, base_url=base_url)
    return OpenAI(api_key=api_key, base_url=base_url, http_client=http, max_retries=0, timeout=None)


@functools.cache
def client_library() -> ModuleType:
    """httpx2 or httpx: the one that the installed openai derives its own client from."""
    from openai import DefaultAsyncHttpxClient

    for base in DefaultAsyncHttpxClient.__mro__:
        root = base.__module__.partition(".")[0]
        if root in ("httpx2", "httpx"):
            return importlib.import_module(root)
    raise ImportError("this openai is built on neither httpx nor httpx2; artnb needs openai>=2.0")


class InProcessTransport:
    """Async transport: what httpx asks of one, for whichever of the two libraries is in use."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def handle_async_request(self, request: Any) -> Any:
        exchange = _Exchange(self._app, _scope(request), await request.aread(), _read_timeout(request))
        start = await exchange.start()
        return _response(request, start, "AsyncByteStream", _AsyncBody, exchange)

    async def __aenter__(self) -> InProcessTransport:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Nothing to give back: each request owns its task."""


class InProcessSyncTransport:
    """Synchronous transport: the app runs in `thread`, which is not closed here; None is one of its own."""

    def __init__(self, app: ASGIApp, thread: LoopThread | None = None) -> None:
        self._app = app
        self._thread = LoopThread("artnb-in-process-client") if thread is None else thread
        self._owns_thread = thread is None

    def handle_request(self, request: Any) -> Any:
        exchange = _Exchange(self._app, _scope(request), request.read(), _read_timeout(request))
        start = self._thread.run(exchange.start())
        return _response(request, start, "SyncByteStream", _SyncBody, exchange, self._thread)

    def __enter__(self) -> InProcessSyncTransport:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._owns_thread:
            self._thread.close()


class _Exchange:
    """One request and its answer: the app's task, and the parts of the body that the client has not read."""

    def __init__(self, app: ASGIApp, scope: dict[str, Any], body: bytes, read_timeout: float | None) -> None:
        self._app = app
        self._scope = scope
        self._body: bytes | None = body
        self._read_timeout = read_timeout
        self._complete = False

    async def start(self) -> dict[str, Any]:
        """Run the app until it sends the status; returns that message."""
        self._disconnected = asyncio.Event()
        self._started: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._parts: asyncio.Queue[bytes | BaseException | None] = asyncio.Queue()
        self._task = asyncio.create_task(self._run())
        try:
            async with asyncio.timeout(self._read_timeout):
                return await self._started
        except BaseException as error:
            await self.aclose()
            raise _as_read_timeout(error, self._read_timeout) from None

    async def _run(self) -> None:
        try:
            await self._app(self._scope, self._receive, self._send)
            if not self._complete:
                raise RuntimeError("the app ended before its response did")
        except asyncio.CancelledError:
            self._fail(ConnectionAbortedError("the app's task was cancelled"))
            raise
        except BaseException as error:
            self._fail(error)
            if not isinstance(error, Exception):
                raise

    def _fail(self, error: BaseException) -> None:
        if self._started.done():
            self._parts.put_nowait(error)
        else:
            self._started.set_exception(error)
            self._started.exception()  # seen: whoever waits gets it all the same

    async def _receive(self) -> dict[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._disconnected.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            if not self._started.done():
                self._started.set_result(message)
        elif message["type"] == "http.response.body":
            if part := message.get("body", b""):
                self._parts.put_nowait(bytes(part))
            if not message.get("more_body", False):
                self._complete = True
                self._parts.put_nowait(None)

    async def next_part(self) -> bytes | None:
        """The next part of the body; None at its end."""
        try:
            async with asyncio.timeout(self._read_timeout):
                part = await self._parts.get()
        except TimeoutError as error:
            raise _as_read_timeout(error, self._read_timeout) from None
        if isinstance(part, BaseException):
            raise part
        return part

    async def aclose(self) -> None:
        """Tell the app that the client is gone, and wait until its task has ended. May be called again."""
        self._disconnected.set()
        if not self._complete:
            self._task.cancel()
        if not self._task.done():
            await asyncio.wait([self._task])


class _AsyncBody:
    def __init__(self, exchange: _Exchange) -> None:
        self._exchange = exchange

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while (part := await self._exchange.next_part()) is not None:
            yield part

    async def aclose(self) -> None:
        await self._exchange.aclose()


class _SyncBody:
    def __init__(self, exchange: _Exchange, thread: LoopThread) -> None:
        self._exchange = exchange
        self._thread = thread

    def __iter__(self) -> Iterator[bytes]:
        while (part := self._thread.run(self._exchange.next_part())) is not None:
            yield part

    def close(self) -> None:
        self._thread.run(self._exchange.aclose())


def _scope(request: Any) -> dict[str, Any]:
    url = request.url
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": url.scheme,
        "path": url.path,
        "raw_path": url.raw_path.partition(b"?")[0],
        "query_string": url.query,
        "root_path": "",
        "headers": [(name.lower(), value) for name, value in request.headers.raw],
        "server": (url.host, url.port),
        "client": ("in-process", 0),
        "extensions": {CANCELS: {}},
    }


def _read_timeout(request: Any) -> float | None:
    """A limit that the caller asked for itself, with `timeout=`, is kept."""
    limit = request.extensions.get("timeout", {}).get("read")
    return None if limit is None else float(limit)


def _as_read_timeout(error: BaseException, limit: float | None) -> BaseException:
    if limit is not None and isinstance(error, TimeoutError):
        timeout: BaseException = client_library().ReadTimeout(f"no answer within {limit} s")
        return timeout
    return error


def _response(request: Any, start: dict[str, Any], stream: str, body: type, *parts: Any) -> Any:
    library = client_library()
    # httpx insists that the stream is an instance of its own base class.
    base = getattr(library, stream)
    return library.Response(
        start["status"],
        headers=list(start.get("headers", ())),
        request=request,
        stream=_body_type(body, base)(*parts),
        extensions={name: start[name] for name in (LOGPROB_SPANS,) if name in start},
    )


@functools.cache
def _body_type(body: type, base: type) -> type:
    return type(body.__name__, (body, base), {})
