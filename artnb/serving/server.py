"""The endpoint over HTTP: uvicorn in a thread of its own, with its own event loop.

It takes no signals and configures no logging, so it starts under any stdout that a notebook has.
"""

from __future__ import annotations

import asyncio
import contextvars
import errno
import json
import socket
import threading
from typing import Any

import uvicorn

from ..backend import ASGIApp
from ..capture import add_server, remove_server
from ..errors import ConfigError
from .completion import send_json
from .protocol import error_body

BACKLOG = 4096
"""Connections that may wait to be accepted; 2,000 rollouts open theirs at once."""
KEEP_ALIVE_SECONDS = 60
"""How long an idle connection stays open. Longer than clients keep theirs (5 s in httpx), so that no request
meets a connection that the server is closing."""


class Server:
    """Serves `app` on `host`:`port`; port 0 takes a free one. Start and close may be called again.

    server = Server(app)
    server.start()
    print(server.url)  # http://127.0.0.1:43121
    server.close()
    """

    def __init__(self, app: ASGIApp, host: str = "127.0.0.1", port: int = 0, *, grace: int = 2) -> None:
        """`grace`: seconds that requests which run at `close` get to end before they are cancelled."""
        self._app = app
        self._host = host
        self._port = port
        self._grace = grace
        self._lock = threading.Lock()
        self._uvicorn: _Uvicorn | None = None
        self._thread: threading.Thread | None = None
        self._address: tuple[str, int] | None = None

    @property
    def url(self) -> str:
        """`http://host:port`, without a path."""
        if self._address is None:
            raise ConfigError("the server is not running; call start() first")
        host, port = self._address
        shown = "127.0.0.1" if host in ("0.0.0.0", "::") else host
        return f"http://[{shown}]:{port}" if ":" in shown else f"http://{shown}:{port}"

    def start(self) -> None:
        """Listen. Raises ConfigError when the port is in use or the host is not ours."""
        with self._lock:
            if self._thread is not None:
                return
            listener = listen(self._host, self._port)
            config = uvicorn.Config(
                _until_closed(self._app),
                log_config=None,
                proxy_headers=False,
                access_log=False,
                loop="asyncio",
                lifespan="off",
                ws="none",
                backlog=BACKLOG,
                timeout_graceful_shutdown=self._grace,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                server_header=False,
            )
            server = _Uvicorn(config)
            thread = threading.Thread(
                # An empty context: the thread must not inherit the trajectory of whoever starts it.
                target=contextvars.Context().run,
                args=(server.run_on, listener),
                name="artnb-server",
                daemon=True,
            )
            thread.start()
            server.ready.wait()
            if server.error is not None:
                thread.join()
                listener.close()
                raise ConfigError(f"the endpoint could not start: {server.error}") from server.error
            host, port = listener.getsockname()[:2]
            self._uvicorn, self._thread, self._address = server, thread, (str(host), int(port))
            add_server(*self._address)

    def close(self) -> None:
        """Stop listening, end what runs, and wait for the thread."""
        with self._lock:
            server, thread, address = self._uvicorn, self._thread, self._address
            self._uvicorn = self._thread = self._address = None
            if address is not None:
                remove_server(*address)
            if server is not None and thread is not None:
                server.should_exit = True
                thread.join()

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Server {self.url}>" if self._address is not None else "<Server, not running>"


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens. Raises ConfigError when the port is in use or the host is not ours."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns Nagle's algorithm off, which holds answers back for 40 ms, on sockets that say they are TCP.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        # A port that a closed server left in TIME_WAIT can be taken at once; one that is in use cannot.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)  # a port that is bound but not listened to fails here
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {port} on {host} is in use; close the backend or program that holds it, or pass "
                "port=0 for any free port"
            ) from error
        raise ConfigError(f"cannot listen on {host}:{port}: {error}") from error
    listener.setblocking(False)
    return listener


def _until_closed(app: ASGIApp) -> ASGIApp:
    """The app, whose requests end with an error that says why when the closing server cancels them."""

    async def guarded(scope: Any, receive: Any, send: Any) -> None:
        started = False

        async def sending(message: Any) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await app(scope, receive, sending)
        except asyncio.CancelledError:
            # Nobody but uvicorn cancels here, in a task of its own that ends with this.
            if not started:
                text = "the endpoint was closed while the request ran"
                await send_json(send, 503, json.dumps(error_body(text, "server_error", None, "endpoint_closed")))

    return guarded


class _Uvicorn(uvicorn.Server):
    """uvicorn's server, which says when it listens and what kept it from that."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = threading.Event()
        self.error: BaseException | None = None

    def run_on(self, listener: socket.socket) -> None:
        try:
            # Runner, not asyncio.run: notebooks may have patched that one.
            with asyncio.Runner() as runner:
                runner.run(self.serve(sockets=[listener]))
        except BaseException as error:
            self.error = error
        finally:
            self.ready.set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()
