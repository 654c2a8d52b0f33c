"""`artnb serve`: the server's process, from its key and certificate to its end.

Listens on loopback unless told otherwise. The key comes from a file, from the environment, or is made and printed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import ssl
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..config import check_number
from ..errors import ConfigError
from ..local.backend import LocalBackend
from ..serving.server import BACKLOG, KEEP_ALIVE_SECONDS, listen
from .app import create_app
from .guard import Limits
from .hub import Hub

log = logging.getLogger("artnb")
KEY_VARIABLE = "ARTNB_API_KEY"
SHORTEST_KEY = 16
GRACE_S = 3
"""Seconds that requests which run at the end get before they are cut off. Jobs are ended by then."""


def find_key(file: Path | None) -> tuple[str, str]:
    """The key, and where it is from: `file`, else $ARTNB_API_KEY, else made now. Raises ConfigError for a weak one."""
    if file is not None:
        try:
            key = file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--api-key-file {file} cannot be read: {error}") from error
        if os.name == "posix" and file.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH):
            log.warning("%s can be read by others on this machine; chmod 600 it", file)
        source = str(file)
    elif KEY_VARIABLE in os.environ:
        key, source = os.environ[KEY_VARIABLE].strip(), f"${KEY_VARIABLE}"
    else:
        return secrets.token_urlsafe(32), ""
    if len(key) < SHORTEST_KEY or not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(
            f"the key in {source} must have at least {SHORTEST_KEY} characters, ASCII and without spaces; "
            'python -c "import secrets; print(secrets.token_urlsafe(32))" makes one'
        )
    return key, source


class RemoteServer:
    """Serves a hub over HTTP or HTTPS. `run` blocks; `should_exit` ends it from another thread.

    server = RemoteServer(hub, api_key, port=8765)
    await server.run()
    """

    def __init__(
        self,
        hub: Hub,
        api_key: str,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        tls_cert: Path | None = None,
        tls_key: Path | None = None,
        limits: Limits | None = None,
    ) -> None:
        """Listens already; raises ConfigError when the port is in use, or certificate and key do not fit."""
        check_number("artnb serve", "port", port, low=0, high=65535, whole=True)
        if (tls_cert is None) != (tls_key is None):
            raise ConfigError("TLS needs both --tls-cert and --tls-key (PEM files)")
        self.hub = hub
        limits = limits or Limits()
        self.guard = create_app(hub, api_key, limits)
        config = uvicorn.Config(
            self.guard,
            http=_protocol(limits.header_s),
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            lifespan="off",
            ws="none",
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=GRACE_S,
            ssl_certfile=tls_cert,
            ssl_keyfile=tls_key,
        )
        try:
            config.load()
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"--tls-cert {tls_cert} with --tls-key {tls_key}: {error}") from error
        self._listener = listen(host, port)
        self._server = _Uvicorn(config, hub)
        self.secure = tls_cert is not None

    @property
    def url(self) -> str:
        """Where clients find it; by this machine's name where it listens on every network."""
        address, port = self._listener.getsockname()[:2]
        address = socket.gethostname() if address in ("0.0.0.0", "::") else address
        return f"{'https' if self.secure else 'http'}://{f'[{address}]' if ':' in address else address}:{port}"

    async def run(self) -> None:
        """Serve until a signal or `stop`; then end jobs at their last complete step."""
        try:
            await self._server.serve(sockets=[self._listener])
        finally:
            self._listener.close()

    def stop(self) -> None:
        """Let `run` end. Any thread may call it."""
        self._server.should_exit = True


class _Uvicorn(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, hub: Hub) -> None:
        super().__init__(config)
        self._hub = hub

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._hub.begin_closing()  # before connections are waited for: streams of events end
        await super().shutdown(sockets)
        await self._hub.close()  # here, for uvicorn passes the signal on as soon as it has shut down


def _protocol(limit: float) -> type[asyncio.Protocol]:
    """uvicorn's protocol, which has no limit for the time that a request's head may take to arrive."""

    class Impatient(H11Protocol):
        _timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._watch(started=True)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._watch(started=True)

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            self._watch(started=False)

        def _watch(self, *, started: bool) -> None:
            # IDLE: no whole head has come. The timer runs from the first byte, however slowly more come.
            waits = started and self.conn.their_state is h11.IDLE and not self.transport.is_closing()
            if waits and self._timer is None:
                self._timer = self.loop.call_later(limit, self._give_up)
            elif not waits and self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _give_up(self) -> None:
            if self.transport.is_closing() or self.conn.our_state is not h11.IDLE:
                return
            text = b"the request's head came too slowly"
            headers = [("content-type", "text/plain"), ("content-length", str(len(text))), ("connection", "close")]
            for event in (
                h11.Response(status_code=408, headers=headers, reason=b"Request Timeout"),
                h11.Data(data=text),
                h11.EndOfMessage(),
            ):
                if (output := self.conn.send(event)) is not None:
                    self.transport.write(output)
            self.transport.close()

    return Impatient


def serve(
    *,
    host: str,
    port: int,
    api_key_file: Path | None,
    tls_cert: Path | None,
    tls_key: Path | None,
    max_body_mb: int,
    base_models: Sequence[str] | None,
    say: Callable[[str], None],
    **options: Any,
) -> None:
    """What `artnb serve` does, until it is interrupted. `options` are LocalBackend's."""
    check_number("artnb serve", "max_body_mb", max_body_mb, low=1, whole=True)
    key, source = find_key(api_key_file)
    offered = None if base_models is None else [_offered(base) for base in base_models]
    backend = LocalBackend(**options)
    limits = Limits(max_body=max_body_mb << 20)

    async def run() -> None:
        hub = Hub(backend, offered)
        server = RemoteServer(hub, key, host=host, port=port, tls_cert=tls_cert, tls_key=tls_key, limits=limits)
        say(f"serving at {server.url}, folder {backend.path.resolve()}")
        say(f"base models: {', '.join(offered) if offered is not None else 'any of the Hugging Face hub'}")
        if source:
            say(f"the key is the one in {source}")
        else:
            say(f"the key, made for this run (clients: export {KEY_VARIABLE}=...): {key}")
        if not server.secure and host not in ("127.0.0.1", "::1", "localhost"):
            say("without --tls-cert and --tls-key, key and rollouts go over the network in the clear")
        await server.run()

    asyncio.run(run())


def _offered(base: str) -> str:
    """A folder by its full path, as clients have to name it; anything else is a hub's name."""
    if not base.strip():
        raise ConfigError("--base-model must be a folder or a Hugging Face id")
    path = Path(base).expanduser()
    return str(path.resolve()) if path.is_dir() else base
