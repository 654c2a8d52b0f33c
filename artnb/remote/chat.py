"""The OpenAI endpoint of `artnb serve`: a request goes to the base model that serves the name which it asks for.

The endpoint itself is each base model's own (serving/app.py).
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from ..capture_http import TRAJECTORY_HEADER
from ..local.served import ServedBase
from . import schema
from .guard import RefusedError
from .routing import KEYED, MAX_DEPTH, TOO_DEEP, TheHub, depth_of, errors, sse_event

openai = APIRouter(prefix="/v1", dependencies=KEYED)
_CHAT = {
    "description": "OpenAI's request: see its reference. What is not supported is a 400 that names it.",
    "type": "object",
    "required": ["model", "messages"],
    "properties": {
        "model": {"type": "string"},
        "messages": {
            "type": "array",
            "minItems": 1,
            "items": {"type": "object", "required": ["role"], "properties": {"role": {"type": "string"}}},
        },
    },
}


class _Forwarded(Response):
    """The answer of a base model's own app."""

    def __init__(self, base: ServedBase, request: Request) -> None:
        super().__init__()
        kept = [(k, v) for k, v in request.scope["headers"] if k not in (b"authorization", TRAJECTORY_HEADER.encode())]
        self._app = base.app
        self._scope = {
            **request.scope,
            "headers": [*kept, (b"authorization", f"Bearer {base.api_key}".encode())],
        }
        self._request = request

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body: bytes | None = await self._request.body()

        async def next_message() -> Any:
            nonlocal body
            if body is None:
                return await receive()
            data, body = body, None
            return {"type": "http.request", "body": data, "more_body": False}

        # Only its own keys: those of the outer app's routing must not reach the inner one.
        plain = ("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path")
        inner = {key: self._scope[key] for key in (*plain, "headers", "client", "server") if key in self._scope}
        await self._app(inner, next_message, send)


@openai.get("/models", responses=errors())
async def served_models(hub: TheHub) -> schema.ModelList:
    """What can be asked: bases, models, and their checkpoints."""
    names = await asyncio.to_thread(lambda: [name for base in hub.bases() for name in base.names()])
    cards = [schema.ModelCard(id=name, object="model", created=0, owned_by="artnb") for name in names]
    return schema.ModelList(object="list", data=cards)


@openai.get("/models/{name:path}", responses=errors(404))
async def served_model(name: str, hub: TheHub) -> schema.ModelCard:
    """One of them."""
    for card in (await served_models(hub)).data:
        if card.id == name:
            return card
    raise RefusedError(404, "model_not_found", f"no model is served as {name!r}; GET /v1/models lists those that are")


@openai.post(
    "/chat/completions",
    response_class=JSONResponse,
    responses={
        200: {"model": schema.ChatCompletion, "content": {"text/event-stream": {"schema": sse_event(["data"])}}},
        **errors(404),
    },
    openapi_extra={"requestBody": {"required": True, "content": {"application/json": {"schema": _CHAT}}}},
)
async def chat_completions(request: Request, hub: TheHub) -> Response:
    """OpenAI's chat completions."""
    raw = await request.body()
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise RefusedError(400, "bad_json", f"the body is not valid JSON: {error}") from None
    if depth_of(body) > MAX_DEPTH:
        raise RefusedError(400, "too_deep", TOO_DEEP)
    name = body.get("model") if isinstance(body, dict) else None
    bases = hub.bases()
    stem = name.partition("@")[0] if isinstance(name, str) else None
    for base in bases:
        if name == base.name or stem in base.models:
            return _Forwarded(base, request)
    if bases and not isinstance(name, str):
        return _Forwarded(bases[0], request)  # which says what is wrong with the body
    served = ", ".join(served for base in bases for served in (base.name, *base.models)) or "none yet"
    raise RefusedError(404, "model_not_found", f"no model is served as {name!r}; served are: {served}")
