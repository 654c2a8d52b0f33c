"""The OpenAI-compatible endpoint over any engine: routes, key check, and errors in OpenAI's shape.

It knows text and names; it does not train, and holds no state of a conversation.
"""

from __future__ import annotations

import hmac
import json
import time
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.routing import Route

from ..capture import CaptureRegistry
from ..engines.base import Engine
from .answers import Service, TokenJson
from .chat import ChatFormat
from .completion import ChatCompletions, OnChoice, send_json
from .metrics import CONTENT_TYPE, EndpointMetrics
from .protocol import error_body
from .resolver import Resolver, Served, StaticResolver

__all__ = ["Resolver", "Served", "StaticResolver", "create_app"]


def create_app(
    engine: Engine,
    chat: ChatFormat,
    resolver: Resolver,
    *,
    api_key: str,
    on_choice: OnChoice | None = None,
    captures: CaptureRegistry | None = None,
) -> FastAPI:
    """The app. Every path but /health asks for `api_key` as a bearer token.

    `on_choice` is called with every choice that is sampled, in the thread that serves it; `captures` says
    which collector gets the trajectories that `art.trajectory()` scopes record here.

        app = create_app(ScriptedEngine("hi"), ChatFormat(ByteTokenizer()), StaticResolver("base"), api_key="key")
    """
    app = FastAPI(title="artnb", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(_KeyCheck, api_key=api_key)
    metrics = EndpointMetrics(engine)
    service = Service(engine, chat, resolver, TokenJson(chat))
    completions = ChatCompletions(service, captures or CaptureRegistry(), on_choice, metrics)
    started = int(time.time())

    def describe(name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": started, "owned_by": "artnb"}

    async def models(request: Request) -> JSONResponse:
        return JSONResponse({"object": "list", "data": [describe(name) for name in resolver.names()]})

    async def model(request: Request) -> JSONResponse:
        name, names = request.path_params["name"], resolver.names()
        if name in names:
            return JSONResponse(describe(name))
        text = f"no model is served as {name!r}; served are: {', '.join(names)}"
        return JSONResponse(error_body(text, "invalid_request_error", "model", "model_not_found"), 404)

    async def health(request: Request) -> JSONResponse:
        state = engine.state
        status = "unavailable" if state == "closed" else "ok"
        body = {"status": status, "phase": state, "engine": engine.description}
        return JSONResponse(body, 503 if state == "closed" else 200)

    async def prometheus(request: Request) -> Response:
        return Response(metrics.render(), media_type=CONTENT_TYPE)

    # Starlette's routes: FastAPI's own keep every endpoint function in caches of the process, and with it, through its
    # closure, engine and weights of a backend that was closed.
    app.router.routes.extend(
        [
            Route("/v1/chat/completions", completions, methods=["POST"]),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", model),
            Route("/health", health),
            Route("/metrics", prometheus),
        ]
    )

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        text = f"{request.method} {request.url.path}: {error.detail}"
        return JSONResponse(error_body(text, "invalid_request_error"), error.status_code, error.headers)

    return app


class _KeyCheck:
    """Middleware: 401 without the right key."""

    def __init__(self, app: Any, api_key: str) -> None:
        self._app = app
        self._key = api_key.encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["path"] == "/health" or self._admits(scope["headers"]):
            await self._app(scope, receive, send)
            return
        text = "wrong or missing API key; use model.inference_api_key, or take the client of model.openai_client()"
        await send_json(send, 401, json.dumps(error_body(text, "authentication_error", None, "invalid_api_key")))

    def _admits(self, headers: list[tuple[bytes, bytes]]) -> bool:
        for name, value in headers:
            if name == b"authorization":
                scheme, _, key = value.partition(b" ")
                return scheme.lower() == b"bearer" and hmac.compare_digest(key.strip(), self._key)
        return False
