"""The client's connection to `artnb serve`: one pool on a thread of its own, patience, and errors in words.

What is asked twice is done once (the server's jobs have ids), so everything here is tried again when the line is cut.
Used from any event loop, and after it has ended. Needs the core install only. Knows nothing of models or steps.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import ssl
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from ..errors import ArtnbError, ConfigError, ServiceError
from ..notebook.loop import LoopThread
from ..serving.transport import client_library
from ..whole import to_the_end
from .wire import API

T = TypeVar("T")
CONNECT_S = 10.0
READ_S = 60.0
"""Seconds of silence after which a connection counts as cut. The server's streams say something every 15 s."""
FIRST_CONTACT_S = 20.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 10.0
TELL_AFTER = 3
"""Failures in a row after which the user is told."""
AGAIN = (408, 425, 429, 502, 503, 504)
"""Statuses that say: later."""
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_LONGEST_DETAIL = 500


class Connection:
    """Requests to one server.

    connection = Connection("https://gpu.example:8765", api_key)
    state = await connection.json("GET", "/server")
    """

    def __init__(
        self,
        url: str,
        api_key: str,
        *,
        ca_file: str | Path | None = None,
        reconnect_s: float = 600.0,
        say: Callable[[str], None] = print,
    ) -> None:
        """`reconnect_s`: how long a server that cannot be reached is tried again, from its last sign of life on."""
        self.url, self.is_loopback = _check_url(url)
        self.api_key = api_key
        self._reconnect_s = reconnect_s
        self.reached = False  # whether it ever answered
        self.max_body: int | None = None  # bytes of a job's body that the server takes, once it has said so
        self._say = say
        self._verify = _verify(ca_file)
        self._thread = LoopThread("artnb-remote")
        self._client: Any = None
        self.closed = False

    # Between event loops ---------------------------------------------------------------------------

    async def run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run `work` on the connection's own loop."""
        async for result in self.iterate(lambda: _once(work)):
            return result
        raise ServiceError(f"the connection to {self.url} was closed while it was in use")

    async def iterate(self, make: Callable[[], AsyncGenerator[T]]) -> AsyncGenerator[T]:
        """The items of a generator that runs on the connection's own loop.

        Whoever stops early, or is cancelled, waits until the generator has cleaned up there.
        """
        if self.closed:
            raise ConfigError("this RemoteBackend is closed; make a new one")
        here = asyncio.get_running_loop()
        items: asyncio.Queue[T | _End] = asyncio.Queue()
        tasks: list[asyncio.Task[Any] | None] = []

        async def pump() -> None:
            tasks.append(asyncio.current_task())
            async with contextlib.aclosing(make()) as generator:
                async for item in generator:
                    here.call_soon_threadsafe(items.put_nowait, item)

        async def stop() -> None:
            # Its turn comes after pump's first one, so the task is known.
            if (task := tasks[0]) is not None and not task.done():
                task.cancel()
                await asyncio.wait([task])

        def ended(_: object) -> None:
            with contextlib.suppress(RuntimeError):  # that loop is closed: nobody waits
                here.call_soon_threadsafe(items.put_nowait, _End())

        future = self._thread.spawn(pump)
        future.add_done_callback(ended)
        try:
            while not isinstance(item := await items.get(), _End):
                yield item
            if future.cancelled():
                raise ServiceError(f"the connection to {self.url} was closed while it was in use")
            future.result()
        finally:
            if not future.done():
                await to_the_end(asyncio.wrap_future(self._thread.spawn(stop)))

    def spawn(self, work: Callable[[], Coroutine[Any, Any, T]]) -> Future[T]:
        """Start `work` on the connection's own loop, and do not wait for it."""
        return self._thread.spawn(work)

    def close(self) -> None:
        """End what runs, close the sockets, end the thread. May be called again. Blocks for a moment."""
        self.closed = True
        if self._client is not None and self._thread.running:
            client, self._client = self._client, None
            self._thread.run(client.aclose())
        self._thread.close()

    @property
    def limit_s(self) -> float:
        """How long it is tried again. One that never answered is most likely a wrong url."""
        return self._reconnect_s if self.reached else min(self._reconnect_s, FIRST_CONTACT_S)

    @property
    def cut(self) -> type[Exception]:
        """What the library raises when the line is cut."""
        error: type[Exception] = client_library().TransportError
        return error

    # On the connection's own loop -------------------------------------------------------------------

    @property
    def client(self) -> Any:
        """An AsyncClient of the library that openai uses; only for use on the connection's own loop."""
        if self._client is None:
            library = client_library()
            probes = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
            for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4)):
                if hasattr(socket, name):  # a line that is cut without a word is noticed while an answer is waited for
                    probes.append((socket.IPPROTO_TCP, getattr(socket, name), value))
            proxy = _proxy(self.url, self.is_loopback)
            transport = library.AsyncHTTPTransport(
                verify=self._verify,
                trust_env=False,
                limits=library.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=30.0),
                proxy=None if proxy is None else library.Proxy(proxy),
                socket_options=probes,
            )
            self._client = library.AsyncClient(
                base_url=self.url,
                headers={"authorization": f"Bearer {self.api_key}", "accept-encoding": "identity"},
                timeout=library.Timeout(READ_S, connect=CONNECT_S, pool=None),
                transport=transport,
                trust_env=False,
            )
        return self._client

    async def json(self, method: str, path: str, *, doing: str, **options: Any) -> Any:
        """The JSON that the server answers to `path` below its API. Raises ServiceError that says what to do."""
        patience = self.patience()
        while True:
            try:
                response = await self.client.request(method, API + path, **options)
                if response.status_code < 300:
                    patience.well()
                    return response.json()
            except self.cut as cut:
                await patience.wait(cut, doing)
                continue
            except ValueError as error:
                raise ServiceError(f"{doing}: {self.url} answered no JSON ({error}); is it an artnb server?") from None
            refused = self.refused(response, doing)
            if refused.status not in AGAIN:
                raise refused
            await patience.wait(refused, doing, response.headers.get("retry-after"))

    @contextlib.asynccontextmanager
    async def stream(self, path: str, *, doing: str, **options: Any) -> AsyncGenerator[Any]:
        """The response to a GET, to be read; not tried again. Raises ServiceError for a status that is none of 2xx."""
        async with self.client.stream("GET", API + path, **options) as response:
            if response.status_code >= 300:
                await response.aread()
                raise self.refused(response, doing)
            yield response

    async def content(self, path: str, *, doing: str) -> bytes:
        """The whole body of a GET."""
        patience = self.patience()
        while True:
            try:
                async with self.stream(path, doing=doing) as response:
                    return bytes(await response.aread())
            except self.cut as error:
                await patience.wait(error, doing)

    def patience(self) -> Patience:
        return Patience(self, self._say)

    def refused(self, response: Any, doing: str) -> StatusError:
        """What a status means, what the server said, and what to do."""
        status, (said, code) = response.status_code, _said(response)
        said = said.replace(self.api_key, "***")
        text = f"{doing}: {self.url} answered {status}{f': {said}' if said else ''}{_advice(status, code)}"
        return StatusError(text, status=status, code=code)


@contextlib.contextmanager
def understood(doing: str, url: str) -> Iterator[None]:
    """What is read in the block came from the server: where it is not as expected, ServiceError says so."""
    try:
        yield
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        if isinstance(error, ArtnbError):
            raise
        raise ServiceError(
            f"{doing}: {url} answered something else than `artnb serve` of this version does "
            f"({type(error).__name__}: {error}); install the same version of artnb on both sides"
        ) from error


class StatusError(ServiceError):
    """The server answered with an error; `code` is its name for programs, None from others than `artnb serve`."""

    def __init__(self, message: str, *, status: int, code: str | None) -> None:
        super().__init__(message, status=status)
        self.code = code


class Patience:
    """How long one thing is tried again: pauses grow, and a sign of life begins the count anew."""

    def __init__(self, connection: Connection, say: Callable[[str], None]) -> None:
        self._connection = connection
        self._say = say
        self._since: float | None = None
        self._tries = 0

    def well(self) -> None:
        """The server answered."""
        self._connection.reached = True
        if self._tries >= TELL_AFTER:
            self._say(f"connected to {self._connection.url} again")
        self._since, self._tries = None, 0

    async def wait(self, error: Exception, doing: str, retry_after: str | None = None) -> None:
        """A pause; raises ServiceError instead when it has been too long, or when waiting cannot help."""
        url, limit = self._connection.url, self._connection.limit_s
        now = asyncio.get_running_loop().time()
        self._since = now if self._since is None else self._since
        self._tries += 1
        if isinstance(error, StatusError):
            status, why = error.status, str(error)
        else:
            status, why = None, f"{doing}: {url} cannot be reached ({type(error).__name__}: {error})"
        if (hint := _hopeless(error)) is not None:
            raise ServiceError(f"{why}. {hint}") from None
        if now - self._since >= limit:
            raise ServiceError(
                f"{why}. It was tried for {limit:g} s. Check the url, that `artnb serve` runs there, and what lies "
                "between; then call it again: a step that the server made meanwhile is not lost",
                status=status,
            ) from None
        if self._tries == TELL_AFTER:
            self._say(f"{why}; trying again for {limit:g} s")
        pause = min(FIRST_PAUSE_S * 2 ** (self._tries - 1), LONGEST_PAUSE_S) * (0.75 + 0.5 * random.random())
        if retry_after is not None and retry_after.isdigit():
            pause = max(pause, float(retry_after))
        await asyncio.sleep(min(pause, max(0.0, self._since + limit - now)))


def _hopeless(error: BaseException) -> str | None:
    """What to do about an error that stays when it is tried again."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, ssl.SSLCertVerificationError):
            return "A certificate of your own needs ca_file=<its PEM file, or its authority's>"
        if isinstance(seen, ssl.SSLError) and "WRONG_VERSION" in str(seen):
            return "The server speaks no TLS there: the url begins with http://, not https://"
        seen = seen.__cause__ or seen.__context__
    return None


class _End:
    """Ends a queue."""


async def _once(work: Callable[[], Coroutine[Any, Any, T]]) -> AsyncGenerator[T]:
    yield await work()


def _check_url(url: str) -> tuple[str, bool]:
    """(the URL without a slash at its end, whether it is on this machine). Raises ConfigError."""
    parts = urlsplit(url if isinstance(url, str) else "")
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ConfigError(
            f"RemoteBackend: url={url!r} must be what `artnb serve` prints, e.g. https://gpu.example:8765"
        )
    if parts.username or parts.password:
        raise ConfigError("RemoteBackend: the url must hold no user or password; the key goes into api_key=")
    plain = url.rstrip("/")
    if parts.path.rstrip("/").endswith("/v1"):
        raise ConfigError(f"RemoteBackend: url={url!r} is the OpenAI endpoint's; leave out the /v1")
    return plain, parts.hostname in _LOOPBACK


def _verify(ca_file: str | Path | None) -> ssl.SSLContext | bool:
    if ca_file is None:
        return True
    try:
        return ssl.create_default_context(cafile=str(ca_file))
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"RemoteBackend: ca_file={str(ca_file)!r} cannot be used: {error}") from error


def _proxy(url: str, is_loopback: bool) -> str | None:
    """The proxy that the environment names for the url. None of them reaches this machine's loopback."""
    parts = urlsplit(url)
    if is_loopback or proxy_bypass(parts.hostname or ""):
        return None
    found = getproxies()
    return found.get(parts.scheme) or found.get("all")


def _said(response: Any) -> tuple[str, str | None]:
    """(the server's words, its code)."""
    try:
        body = response.json()
    except ValueError:
        return response.text.strip()[:_LONGEST_DETAIL], None
    error = body.get("error", body) if isinstance(body, Mapping) else body
    if isinstance(error, Mapping):
        code = error.get("code")
        return str(error.get("message", ""))[:_LONGEST_DETAIL], code if isinstance(code, str) else None
    return str(error)[:_LONGEST_DETAIL], None


def _advice(status: int, code: str | None) -> str:
    """A sentence to put behind the server's; its own messages to 4xx say what to do where it can know it."""
    if 300 <= status < 400:
        return ". Give the url that it leads to; redirects are not followed, for the key would be sent along"
    if status == 401:
        return ". Give RemoteBackend the server's key as api_key=, or set $ARTNB_API_KEY"
    if status == 404 and code is None:
        return ". Is the url the one that `artnb serve` printed?"
    if status == 500:
        return ". Its log has the traceback; the model is at its last complete step"
    return ""
