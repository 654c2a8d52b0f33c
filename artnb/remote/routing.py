"""What the routes of `artnb serve` have in common: the errors they document, how they read JSON, and their hub."""

from __future__ import annotations

import asyncio
import json
from typing import Annotated, Any

from fastapi import Depends, Request, Response
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer
from starlette.exceptions import HTTPException

from . import schema
from .hub import Hub

MAX_DEPTH = 64
TOO_DEEP = f"the body is nested more than {MAX_DEPTH} levels deep"
_TEXT = {
    400: "The body or the request is malformed",
    401: "The key is missing or wrong",
    404: "There is no such thing (any more)",
    408: "The body came too slowly",
    409: "It contradicts what is there: the message says what to do",
    413: "The body is too large",
    415: "The body is of an unknown encoding",
    422: "A value is of the wrong type",
    429: "Too many large requests at once",
    500: "The server failed",
    503: "The server is closing",
}


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The `responses` of a route: what every route may answer, and these."""
    always = (400, 401, 408, 413, 415, 422, 429, 500, 503)
    return {s: {"model": schema.Error, "description": _TEXT[s]} for s in sorted({*always, *statuses})}


def sse_event(fields: list[str]) -> dict[str, Any]:
    """A server-sent event."""
    return {"type": "object", "properties": {f: {"type": "string"} for f in fields}, "required": fields}


class ThreadedRoute(APIRoute):
    """A route whose JSON is read in a thread: a step's rollouts are many megabytes, and others are being served."""

    def get_route_handler(self) -> Any:
        handle = super().get_route_handler()

        async def handler(request: Request) -> Response:
            answer: Response = await handle(_ThreadRequest(request.scope, request.receive))
            return answer

        return handler


class _ThreadRequest(Request):
    async def json(self) -> Any:
        if not hasattr(self, "_json"):
            body = await self.body()
            self._json, depth = await asyncio.to_thread(lambda: (value := json.loads(body), depth_of(value)))
            if depth > MAX_DEPTH:
                raise HTTPException(400, TOO_DEEP)
        return self._json


def _hub(request: Request) -> Hub:
    hub: Hub = request.app.state.hub
    return hub


TheHub = Annotated[Hub, Depends(_hub)]
KEYED = [Depends(HTTPBearer(auto_error=False))]  # for the document: guard.py looks at the key


def depth_of(value: Any) -> int:
    """How deep lists and objects are nested."""
    depth, level = 0, [value]
    while level:
        depth += 1
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer if isinstance(outer, list) else ())
            if isinstance(inner, dict | list)
        ]
    return depth
