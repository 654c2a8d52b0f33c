"""The HTTP interface of `artnb serve`: routes over a Hub, with an OpenAPI document at /openapi.json.

The OpenAI endpoint at /v1 is each base model's own (serving/app.py); here a request finds its base by the model that it
names. Keys, sizes and slow clients are guard.py's.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Header, Path, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, StreamingResponse
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import compile_path

from .. import __version__
from ..capture_http import TRAJECTORY_HEADER
from ..errors import CheckpointError, ConfigError
from ..local.served import ServedBase
from ..serving.protocol import error_body
from . import schema
from .guard import Guard, Limits, RefusedError
from .hub import Hub
from .safe_files import is_allowed
from .uploads import TooLargeError, Uploads, WrongContentError
from .wire import API

KEEP_ALIVE_S = 15.0
"""Seconds after which a silent stream of events sends a comment, so that nobody on the way takes it for dead."""
MAX_DEPTH = 64
_TOO_DEEP = f"the body is nested more than {MAX_DEPTH} levels deep"
NAME = Annotated[str, Path(description="As it was registered")]
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


def _errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    always = (400, 401, 408, 413, 415, 422, 429, 500, 503)
    return {s: {"model": schema.Error, "description": _TEXT[s]} for s in sorted({*always, *statuses})}


def _sse(fields: list[str]) -> dict[str, Any]:
    """A server-sent event."""
    return {"type": "object", "properties": {f: {"type": "string"} for f in fields}, "required": fields}


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


class _Route(APIRoute):
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
            self._json, depth = await asyncio.to_thread(lambda: (value := json.loads(body), _depth(value)))
            if depth > MAX_DEPTH:
                raise HTTPException(400, _TOO_DEEP)
        return self._json


def _hub(request: Request) -> Hub:
    hub: Hub = request.app.state.hub
    return hub


TheHub = Annotated[Hub, Depends(_hub)]
_bearer = HTTPBearer(auto_error=False)  # for the document: guard.py looks at the key
router = APIRouter(route_class=_Route)
api = APIRouter(prefix=API, route_class=_Route, dependencies=[Depends(_bearer)])
openai = APIRouter(prefix="/v1", dependencies=[Depends(_bearer)])


def create_app(hub: Hub, api_key: str, limits: Limits | None = None) -> Guard:
    """The whole app, guarded. Every path but /health asks for the key.

    app = create_app(Hub(LocalBackend(path="models")), api_key)
    """
    limits = limits or Limits()
    app = FastAPI(title="artnb serve", version=__version__, docs_url=None, redoc_url=None)
    app.state.hub, app.state.limits = hub, limits
    for part in (router, api, openai):
        app.include_router(part)
    app.add_exception_handler(RefusedError, _refused)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(Exception, _failed)  # which goes on to the guard, to be logged
    app.state.methods = [
        (compile_path(path)[0], [method.upper() for method in methods])
        for path, methods in app.openapi()["paths"].items()
    ]
    return Guard(app, api_key, limits)


# Server and models ------------------------------------------------------------------------------------


@router.get("/health", responses={500: _errors()[500]})
async def health() -> schema.Health:
    """Whether the server answers; needs no key."""
    return schema.Health(status="ok", version=__version__)


@api.get("/server", responses=_errors())
async def server(request: Request, hub: TheHub) -> schema.ServerState:
    """What the server offers."""
    models = await asyncio.to_thread(lambda: [hub.describe(hosted) for hosted in hub.models()])
    return schema.ServerState(
        version=__version__,
        base_models=hub.base_models,
        max_body_bytes=request.app.state.limits.max_body,
        models=models,
    )


@api.get("/models/{project}/{name}", responses=_errors(404))
async def model(project: NAME, name: NAME, hub: TheHub) -> schema.ModelState:
    """A registered model."""
    return await asyncio.to_thread(hub.describe, hub.hosted(project, name))


# Jobs -------------------------------------------------------------------------------------------------


@api.put("/jobs/{job_id}", responses={201: {"model": schema.JobState}, **_errors(404, 409)})
async def put_job(
    job_id: schema.JobId, body: schema.JobRequest, request: Request, response: Response, hub: TheHub
) -> schema.JobState:
    """Start a job, or find the one that was started under this id with this very body: it is done once."""
    raw = await request.body()
    digest = await asyncio.to_thread(lambda: hashlib.sha256(raw).hexdigest())
    job, new = hub.submit(job_id, digest, body)
    response.status_code = 201 if new else 200
    return job.describe()


@api.get("/jobs/{job_id}", responses=_errors(404))
async def get_job(job_id: schema.JobId, hub: TheHub) -> schema.JobState:
    return hub.job(job_id).describe()


@api.post("/jobs/{job_id}/cancel", responses=_errors(404))
async def cancel_job(job_id: schema.JobId, hub: TheHub) -> schema.JobState:
    """End a job; the model stays at its last complete step. Answers when the job has ended."""
    job = hub.job(job_id)
    await hub.cancel(job)
    return job.describe()


@api.get(
    "/jobs/{job_id}/events",
    response_class=StreamingResponse,
    responses={200: {"content": {"text/event-stream": {"schema": _sse(["id", "event", "data"])}}}, **_errors(404)},
)
async def events(
    job_id: schema.JobId, hub: TheHub, last_event_id: Annotated[int, Header(ge=0, le=2**53)] = 0
) -> StreamingResponse:
    """Server-sent events of a job, those after `Last-Event-ID`; the last one is done, failed or cancelled.

    A stream that ends without it was cut off: ask again.
    """
    job = hub.job(job_id)

    async def stream() -> AsyncIterator[bytes]:
        async for event in job.follow(last_event_id, KEEP_ALIVE_S):
            yield b": still running\n\n" if event is None else event.sse()

    return StreamingResponse(stream(), media_type="text/event-stream", headers={"cache-control": "no-cache"})


# Checkpoints ------------------------------------------------------------------------------------------

StepPath = Annotated[int, Path(ge=0, le=2**53)]
_BYTES = {"content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}}


@api.get("/models/{project}/{name}/checkpoints/{step}", responses=_errors(404))
async def checkpoint(project: NAME, name: NAME, step: StepPath, hub: TheHub) -> schema.Checkpoint:
    """The files of a checkpoint that can be fetched; the optimizer's state, a pickle, is not among them."""
    files = await asyncio.to_thread(_files, hub, project, name, step)
    listed = [schema.CheckpointFile(name=n, size=f["size"], sha256=f["sha256"]) for n, f in sorted(files.items())]
    return schema.Checkpoint(step=step, files=listed)


@api.get(
    "/models/{project}/{name}/checkpoints/{step}/files/{file}",
    response_class=FileResponse,
    responses={200: _BYTES, **_errors(404)},
)
async def checkpoint_file(project: NAME, name: NAME, step: StepPath, file: str, hub: TheHub) -> FileResponse:
    """One file of a checkpoint."""
    # Looked up in the manifest, never joined to a path before: there is no name that leads elsewhere.
    files = await asyncio.to_thread(_files, hub, project, name, step)
    if file not in files:
        raise RefusedError(404, "no_such_file", f"checkpoint {step} has no file {file!r}; it has: {', '.join(files)}")
    path = hub.hosted(project, name).trained.store.path(step) / file
    return FileResponse(path, media_type="application/octet-stream")


def _files(hub: Hub, project: str, name: str, step: int) -> dict[str, Any]:
    store = hub.hosted(project, name).trained.store
    try:
        return {file: entry for file, entry in store.files(step).items() if is_allowed(file)}
    except CheckpointError as error:
        raise RefusedError(404, "no_such_checkpoint", str(error)) from None


@api.put(
    "/models/{project}/{name}/adapters/{sha256}",
    responses=_errors(404, 409),
    openapi_extra={"requestBody": {"required": True, **_BYTES}},
)
async def put_adapter(
    project: NAME, name: NAME, sha256: schema.Sha256, request: Request, hub: TheHub
) -> schema.Adapter:
    """Send an adapter's safetensors file, for a job of kind `push`."""
    trained = hub.hosted(project, name).trained
    uploads = Uploads(trained.folder)
    limit = await asyncio.to_thread(uploads.limit, trained.store)
    try:
        size = await uploads.receive(sha256, request.stream(), limit)
    except TooLargeError as error:
        raise RefusedError(413, "body_too_large", str(error)) from None
    except WrongContentError as error:
        raise RefusedError(409, "wrong_sha256", f"{error}; send it again") from None
    except CheckpointError as error:
        raise RefusedError(409, "bad_adapter", str(error)) from None
    except ClientDisconnect:
        return schema.Adapter(sha256=sha256, size=0)  # nobody reads it
    return schema.Adapter(sha256=sha256, size=size)


# History ----------------------------------------------------------------------------------------------


@api.get("/models/{project}/{name}/history", responses=_errors(404))
async def history(
    project: NAME, name: NAME, hub: TheHub, after: Annotated[int, Query(ge=-1, le=2**53)] = -1
) -> schema.HistoryList:
    """Metrics of the steps after `after`, and which trajectories are kept of them."""
    kept = hub.hosted(project, name).trained.history
    metrics, saved = await asyncio.to_thread(lambda: (kept.metric_records(after), kept.saved()))
    kept_of = [schema.Saved(step=step, split=split) for step, split in saved if step > after]
    return schema.HistoryList(metrics=metrics, trajectories=kept_of)


@api.get(
    "/models/{project}/{name}/history/{split}/{step}",
    response_class=FileResponse,
    responses={200: {"content": {"application/x-ndjson": {"schema": {"type": "string"}}}}, **_errors(404)},
)
async def trajectories(project: NAME, name: NAME, split: str, step: StepPath, hub: TheHub) -> FileResponse:
    """The trajectories of a step, one JSON record a line."""
    kept = hub.hosted(project, name).trained.history
    try:
        path = (await asyncio.to_thread(kept.stored, step, split)).path
    except (CheckpointError, ConfigError) as error:
        raise RefusedError(404, "no_trajectories", str(error)) from None
    return FileResponse(path, media_type="application/x-ndjson")


# The OpenAI endpoint ----------------------------------------------------------------------------------


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


@openai.get("/models", responses=_errors())
async def served_models(hub: TheHub) -> schema.ModelList:
    """What can be asked: bases, models, and their checkpoints."""
    names = await asyncio.to_thread(lambda: [name for base in hub.bases() for name in base.names()])
    cards = [schema.ModelCard(id=name, object="model", created=0, owned_by="artnb") for name in names]
    return schema.ModelList(object="list", data=cards)


@openai.get("/models/{name:path}", responses=_errors(404))
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
        200: {"model": schema.ChatCompletion, "content": {"text/event-stream": {"schema": _sse(["data"])}}},
        **_errors(404),
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
    if _depth(body) > MAX_DEPTH:
        raise RefusedError(400, "too_deep", _TOO_DEEP)
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


def _depth(value: Any) -> int:
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


# Errors -----------------------------------------------------------------------------------------------


async def _refused(request: Request, error: Any) -> JSONResponse:
    headers = {name.decode(): value.decode() for name, value in error.headers}
    return JSONResponse(error.body(), error.status, headers)


async def _failed(request: Request, error: Exception) -> JSONResponse:
    return JSONResponse(RefusedError(500, "internal_error", "the server failed; its log has the traceback").body(), 500)


async def _http_error(request: Request, error: Any) -> JSONResponse:
    text, headers = f"{request.method} {request.url.path}: {error.detail}", dict(error.headers or {})
    if error.status_code == 405:  # each route knows its own method only
        known = [
            m for pattern, methods in request.app.state.methods if pattern.match(request.url.path) for m in methods
        ]
        headers["allow"] = ", ".join(sorted(known))
    if error.status_code == 404:
        text += f"; the paths of `artnb serve` begin with {API} and /v1, see /openapi.json"
    return JSONResponse(error_body(text, "invalid_request_error"), error.status_code, headers)


async def _invalid(request: Request, error: Any) -> JSONResponse:
    first = error.errors()[0]
    where = ".".join(map(str, first["loc"]))
    return JSONResponse(error_body(f"{where}: {first['msg']}", "invalid_request_error", where, "invalid_value"), 422)
