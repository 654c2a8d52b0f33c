"""The HTTP interface of `artnb serve`: routes over a Hub, with an OpenAPI document at /openapi.json.

The OpenAI endpoint at /v1 is in chat.py. Keys, sizes and slow clients are guard.py's.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, Header, Path, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import compile_path

from .. import __version__
from ..errors import CheckpointError, ConfigError
from ..serving.protocol import error_body
from . import schema
from .chat import openai
from .guard import Guard, Limits, RefusedError
from .hub import Hub
from .routing import KEYED, TheHub, ThreadedRoute, errors, sse_event
from .safe_files import is_allowed
from .uploads import TooLargeError, Uploads, WrongContentError
from .wire import API

KEEP_ALIVE_S = 15.0
"""Seconds after which a silent stream of events sends a comment, so that nobody on the way takes it for dead."""
NAME = Annotated[str, Path(description="As it was registered")]
router = APIRouter()
api = APIRouter(prefix=API, route_class=ThreadedRoute, dependencies=KEYED)


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


@router.get("/health", responses={500: errors()[500]})
async def health() -> schema.Health:
    """Whether the server answers; needs no key."""
    return schema.Health(status="ok", version=__version__)


@api.get("/server", responses=errors())
async def server(request: Request, hub: TheHub) -> schema.ServerState:
    """What the server offers."""
    models = await asyncio.to_thread(lambda: [hub.describe(hosted) for hosted in hub.models()])
    return schema.ServerState(
        version=__version__,
        base_models=hub.base_models,
        max_body_bytes=request.app.state.limits.max_body,
        models=models,
    )


@api.get("/models/{project}/{name}", responses=errors(404))
async def model(project: NAME, name: NAME, hub: TheHub) -> schema.ModelState:
    """A registered model."""
    return await asyncio.to_thread(hub.describe, hub.hosted(project, name))


# Jobs -------------------------------------------------------------------------------------------------


@api.put("/jobs/{job_id}", responses={201: {"model": schema.JobState}, **errors(404, 409)})
async def put_job(
    job_id: schema.JobId, body: schema.JobRequest, request: Request, response: Response, hub: TheHub
) -> schema.JobState:
    """Start a job, or find the one that was started under this id with this very body: it is done once."""
    raw = await request.body()
    digest = await asyncio.to_thread(lambda: hashlib.sha256(raw).hexdigest())
    job, new = hub.submit(job_id, digest, body)
    response.status_code = 201 if new else 200
    return job.describe()


@api.get("/jobs/{job_id}", responses=errors(404))
async def get_job(job_id: schema.JobId, hub: TheHub) -> schema.JobState:
    return hub.job(job_id).describe()


@api.post("/jobs/{job_id}/cancel", responses=errors(404))
async def cancel_job(job_id: schema.JobId, hub: TheHub) -> schema.JobState:
    """End a job; the model stays at its last complete step, which the job's may be. Answers when the job has ended.

    One that has not arrived is refused when it does.
    """
    job = hub.withdraw(job_id)
    await hub.cancel(job)
    return job.describe()


@api.get(
    "/jobs/{job_id}/events",
    response_class=StreamingResponse,
    responses={200: {"content": {"text/event-stream": {"schema": sse_event(["id", "event", "data"])}}}, **errors(404)},
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


@api.get("/models/{project}/{name}/checkpoints/{step}", responses=errors(404))
async def checkpoint(project: NAME, name: NAME, step: StepPath, hub: TheHub) -> schema.Checkpoint:
    """The files of a checkpoint that can be fetched; the optimizer's state is not among them."""
    files = await asyncio.to_thread(_files, hub, project, name, step)
    listed = [schema.CheckpointFile(name=n, size=f["size"], sha256=f["sha256"]) for n, f in sorted(files.items())]
    return schema.Checkpoint(step=step, files=listed)


@api.get(
    "/models/{project}/{name}/checkpoints/{step}/files/{file}",
    response_class=FileResponse,
    responses={200: _BYTES, **errors(404)},
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
    responses=errors(404, 409),
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


@api.get("/models/{project}/{name}/history", responses=errors(404))
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
    responses={200: {"content": {"application/x-ndjson": {"schema": {"type": "string"}}}}, **errors(404)},
)
async def trajectories(project: NAME, name: NAME, split: str, step: StepPath, hub: TheHub) -> FileResponse:
    """The trajectories of a step, one JSON record a line."""
    kept = hub.hosted(project, name).trained.history
    try:
        path = (await asyncio.to_thread(kept.stored, step, split)).path
    except (CheckpointError, ConfigError) as error:
        raise RefusedError(404, "no_trajectories", str(error)) from None
    return FileResponse(path, media_type="application/x-ndjson")


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
