"""How a request that leaves this process's HTTP clients says which trajectory it belongs to.

While a trajectory scope is open, `send` of the httpx and httpx2 client classes is wrapped so that
requests to our own servers, and only those, carry one header; those to `artnb serve` on another machine go through
their observer (remote/capture.py). The last scope to close puts the original back. Nothing is wrapped at import.
It does not read requests or answers.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any, Generic, TypeVar

TRAJECTORY_HEADER = "x-artnb-trajectory"
_CLIENTS = (("httpx2", "AsyncClient"), ("httpx2", "Client"), ("httpx", "AsyncClient"), ("httpx", "Client"))
_LOOPBACK = ("127.0.0.1", "localhost", "::1")

ScopeT = TypeVar("ScopeT")
Place = tuple[str, str, int | None]
"""Scheme, host and port of a URL; None is the scheme's own port."""
Observer = Callable[[Callable[..., Any], Any, Any, tuple[Any, ...], dict[str, Any]], Any]
"""Called as `observer(send, client, request, args, options)` in place of `send(client, request, *args, **options)`."""


class ProcessScopes(Generic[ScopeT]):
    """The open scopes by id, the addresses of our own servers, and the wrapped client classes.

    These belong to the process: a header comes back over a socket, and a class is patched for everyone.
    """

    def __init__(self, current_id: Callable[[], str | None]) -> None:
        self._current_id = current_id
        self._lock = threading.Lock()
        self._scopes: dict[str, ScopeT] = {}
        self._servers: Counter[tuple[str, int]] = Counter()
        self._remotes: dict[Place, Observer] = {}
        self._wrapped: dict[type, tuple[Any, Any]] = {}  # class → (its own send, our wrapper)

    def open(self, scope_id: str, scope: ScopeT) -> None:
        with self._lock:
            self._scopes[scope_id] = scope
            # Looked at on every entry: a client library may have been imported since the last one.
            for module, name in _CLIENTS:
                client = getattr(sys.modules.get(module), name, None)
                if isinstance(client, type) and client not in self._wrapped:
                    self._wrap(client)

    def close(self, scope_id: str) -> None:
        with self._lock:
            self._scopes.pop(scope_id, None)
            if not self._scopes:
                for client, (original, wrapper) in list(self._wrapped.items()):
                    # Somebody who wrapped ours meanwhile still calls it: then it stays, and adds nothing.
                    if client.__dict__.get("send") is wrapper:
                        setattr(client, "send", original)  # noqa: B010
                        del self._wrapped[client]

    def find(self, scope_id: str) -> ScopeT | None:
        with self._lock:
            return self._scopes.get(scope_id)

    def add_server(self, host: str, port: int) -> None:
        """Requests to this address may carry the header."""
        with self._lock:
            self._servers.update(self._addresses(host, port))

    def remove_server(self, host: str, port: int) -> None:
        with self._lock:
            self._servers.subtract(self._addresses(host, port))
            self._servers = +self._servers

    def add_remote(self, place: Place, observer: Observer) -> None:
        """Requests to this server on another machine go through `observer`."""
        with self._lock:
            self._remotes[place] = observer

    def remove_remote(self, place: Place) -> None:
        with self._lock:
            self._remotes.pop(place, None)

    @staticmethod
    def _addresses(host: str, port: int) -> list[tuple[str, int]]:
        local = host in (*_LOOPBACK, "0.0.0.0", "::")
        return [(name, port) for name in {host.lower(), *(_LOOPBACK if local else ())}]

    def _wrap(self, client: type) -> None:
        original = client.__dict__["send"]

        @functools.wraps(original)
        def send(this: Any, request: Any, *args: Any, **options: Any) -> Any:
            # A plain function for both kinds of client: the async one returns original's coroutine.
            scope_id = self._current_id()
            if scope_id is not None:
                host, port = request.url.host.lower(), request.url.port
                if (host, port) in self._servers:
                    request.headers.setdefault(TRAJECTORY_HEADER, scope_id)
                elif (observer := self._remotes.get((request.url.scheme, host, port))) is not None:
                    return observer(original, this, request, args, options)
            return original(this, request, *args, **options)

        setattr(client, "send", send)  # noqa: B010
        self._wrapped[client] = (original, send)
