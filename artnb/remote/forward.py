"""The model's endpoint as an ASGI app of the client's process: each request goes on to `artnb serve`.

A request whose answer has not begun when the line is cut is sent again: nothing of it was seen. What is sampled is
captured where it leaves and arrives (capture.py). Does not look into messages.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

from ..serving.transport import client_library
from .connection import AGAIN, Connection

_DROPPED = (b"host", b"authorization", b"content-length", b"connection", b"accept-encoding", b"transfer-encoding")
_KEPT = ("content-type", "x-should-retry", "cache-control")


class Forward:
    """The app. `restore` registers the model with a server that does not know it (any more)."""

    def __init__(self, connection: Connection, restore: Callable[[], Awaitable[None]]) -> None:
        self._connection = connection
        self._restore = restore

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        body = b""
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            if not message.get("more_body", False):
                break
        answer = self._connection.iterate(lambda: self._exchange(scope, body))
        async with contextlib.aclosing(answer) as parts:
            async for part in parts:
                await send(part)

    async def _exchange(self, scope: Any, body: bytes) -> AsyncGenerator[dict[str, Any]]:
        """The answer as ASGI messages."""
        connection, patience = self._connection, self._connection.patience()
        path = scope["raw_path"].decode("ascii") + (
            "?" + scope["query_string"].decode() if scope["query_string"] else ""
        )
        headers = [(name, value) for name, value in scope["headers"] if name.lower() not in _DROPPED]
        options = {"content": body, "headers": headers}
        doing = f"{scope['method']} {scope['path']}"
        begun = asked_again = False
        while True:
            try:
                # No limit on time: waiting for a place in the engine is not a fault.
                silent = client_library().Timeout(None, connect=10.0)
                async with connection.client.stream(scope["method"], path, timeout=silent, **options) as response:
                    streamed = response.headers.get("content-type", "").startswith("text/event-stream")
                    whole = b"" if streamed else await response.aread()
                    if response.status_code in AGAIN:
                        refused = connection.refused(response, doing)
                        await patience.wait(refused, doing, response.headers.get("retry-after"))
                        continue
                    if response.status_code == 404 and not asked_again:
                        asked_again = True
                        await self._restore()
                        continue
                    patience.well()
                    begun = True
                    kept = [(n.encode(), response.headers[n].encode()) for n in _KEPT if n in response.headers]
                    yield {"type": "http.response.start", "status": response.status_code, "headers": kept}
                    if streamed:
                        async with contextlib.aclosing(response.aiter_bytes()) as parts:
                            async for part in parts:
                                yield {"type": "http.response.body", "body": part, "more_body": True}
                    yield {"type": "http.response.body", "body": whole, "more_body": False}
                    return
            except connection.cut as cut:
                if begun:
                    raise
                await patience.wait(cut, doing)
