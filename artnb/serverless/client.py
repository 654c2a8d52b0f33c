"""The W&B training service over HTTP: its calls, what they answer, and what their errors mean.

The protocol is the one that openpipe-art 0.5.23 speaks. POSTs are never sent twice; other calls are tried up to three
times more. Retries, pauses and `Retry-After` are the openai package's. Knows nothing of models, steps or history.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import openai
import pydantic

from ..errors import ServiceError
from ..serving.transport import client_library

DEFAULT_URL = "https://api.training.wandb.ai/v1"
RETRIES = 3
CONNECT_S = 10.0
ANSWER_S = 60.0
"""Seconds that an answer may keep silent, where nothing is uploaded and nothing is sampled."""
UPLOAD_S = 600.0
"""The same for a call that uploads a step's rollouts."""
LONGEST_DETAIL = 500

AnswerT = TypeVar("AnswerT", bound=pydantic.BaseModel)

# What to do, by status. Whether a POST was carried out is said apart.
_ADVICE = {
    400: "the request is not what the service expects; its words say which field",
    401: "the key was not accepted: pass ServerlessBackend(api_key=...) or set WANDB_API_KEY to the key shown at "
    "https://wandb.ai/authorize",
    403: "the key is valid but may not do this: check entity= and project= of the model, and that the account has "
    "access to W&B Training",
    404: "it is not there (any more): a model that was deleted has to be registered again, and base_url must be the "
    "training service's",
    409: "it conflicts with what the service has: a model of this name with another base_model, or a job that still "
    "runs; take another name or wait for the job",
    413: "the rollouts are too large for one call: train on fewer or shorter ones",
    422: "a value is not one that the service takes; its words say which",
    429: "too many requests or no quota left: wait, and ask with fewer at a time",
}


class ServiceModel(pydantic.BaseModel):
    """A model as the service keeps it."""

    id: str
    entity: str
    project: str
    name: str
    base_model: str
    run_id: str | None = None


class ServiceCheckpoint(pydantic.BaseModel):
    """One checkpoint: the step it is of, and the metrics that the service keeps with it."""

    id: str
    step: int
    metrics: dict[str, Any] | None = None


class ServiceJob(pydantic.BaseModel):
    """A training job that was started."""

    id: str


class JobEvent(pydantic.BaseModel):
    """Something that happened to a job: training_started, gradient_step, training_ended or training_failed."""

    id: str
    type: str
    data: dict[str, Any] = {}


class Deleted(pydantic.BaseModel):
    """What deleting checkpoints did."""

    deleted_count: int = 0
    not_found_steps: list[int] = []


class Connection(NamedTuple):
    """What one event loop talks to the service with: `calls` over `http`, an AsyncClient of httpx or httpx2."""

    calls: openai.AsyncOpenAI
    http: Any


class TrainingService:
    """Calls of the service. Usable under any event loop, one after the other or in several threads.

    service = TrainingService(api_key=key, base_url=DEFAULT_URL)
    job = await service.start_training(model.id, groups, {"learning_rate": 1e-5})
    """

    def __init__(self, api_key: str, base_url: str) -> None:
        self.key = api_key
        self.base_url = base_url.rstrip("/")
        self._held: dict[asyncio.AbstractEventLoop, tuple[Connection, AsyncGenerator[None]]] = {}

    def __repr__(self) -> str:
        return f"TrainingService({self.base_url!r})"

    # Calls ---------------------------------------------------------------------------------------

    async def create_model(self, *, entity: str | None, project: str, name: str, base_model: str) -> ServiceModel:
        """The model of this name, made if there is none."""
        body = {"entity": entity, "project": project, "name": name, "base_model": base_model, "return_existing": True}
        return await self._ask(ServiceModel, "POST", "/preview/models", f"registering {project}/{name}", body)

    async def delete_model(self, model_id: str) -> None:
        """Delete the model with all its checkpoints."""
        await self._send("DELETE", f"/preview/models/{model_id}", f"deleting model {model_id}")

    async def log(self, model_id: str, groups: Sequence[Mapping[str, Any]], split: str) -> None:
        """Send rollouts to be kept, not trained on."""
        body = {"model_id": model_id, "trajectory_groups": groups, "split": split}
        await self._send("POST", f"/preview/models/{model_id}/log", f"logging {len(groups)} groups", body, UPLOAD_S)

    async def newest_checkpoint(self, model_id: str) -> ServiceCheckpoint | None:
        """The checkpoint with the highest step; None before the first step."""
        query: dict[str, str | int] = {"limit": 1, "order": "desc"}
        path = f"/preview/models/{model_id}/checkpoints"
        found, _ = await self._page(ServiceCheckpoint, path, "reading the newest checkpoint", query)
        return found[0] if found else None

    async def checkpoints(self, model_id: str) -> list[ServiceCheckpoint]:
        """All checkpoints, oldest first."""
        path, query = f"/preview/models/{model_id}/checkpoints", {"order": "asc"}
        return [c async for c in self._pages(ServiceCheckpoint, path, "listing checkpoints", query)]

    async def delete_checkpoints(self, model_id: str, steps: Sequence[int]) -> Deleted:
        """Delete the checkpoints of these steps."""
        path, body = f"/preview/models/{model_id}/checkpoints", {"steps": list(steps)}
        return await self._ask(Deleted, "DELETE", path, f"deleting checkpoints {list(steps)}", body)

    async def start_training(
        self, model_id: str, groups: Sequence[Mapping[str, Any]], config: Mapping[str, Any]
    ) -> ServiceJob:
        """Start one RL step."""
        body = {"model_id": model_id, "trajectory_groups": groups, "experimental_config": config}
        return await self._ask(ServiceJob, "POST", "/preview/training-jobs", "starting a training job", body, UPLOAD_S)

    async def start_sft(self, model_id: str, training_data_url: str, config: Mapping[str, Any]) -> ServiceJob:
        """Start supervised training on a JSONL file that the service can read."""
        body = {"model_id": model_id, "training_data_url": training_data_url, "config": config}
        return await self._ask(ServiceJob, "POST", "/preview/sft-training-jobs", "starting an SFT job", body)

    async def events(self, job_id: str, after: str | None, *, sft: bool = False) -> list[JobEvent]:
        """What happened to a job after the event `after`; None: from its beginning."""
        path = f"/preview/{'sft-training-jobs' if sft else 'training-jobs'}/{job_id}/events"
        query = {} if after is None else {"after": after}
        return [event async for event in self._pages(JobEvent, path, f"following job {job_id}", query)]

    # Connections ---------------------------------------------------------------------------------

    async def connection(self) -> Connection:
        """The clients of the running loop; their sockets belong to that loop and are closed with it."""
        loop = asyncio.get_running_loop()
        if loop not in self._held:
            library = client_library()
            http = library.AsyncClient(
                timeout=library.Timeout(UPLOAD_S, connect=CONNECT_S, pool=None),
                limits=library.Limits(max_connections=None, max_keepalive_connections=100),
                follow_redirects=True,
            )
            client = openai.AsyncOpenAI(
                api_key=self.key, base_url=self.base_url, http_client=http, max_retries=RETRIES, timeout=UPLOAD_S
            )
            holder = self._hold(loop, client)
            self._held[loop] = Connection(client, http), holder
            await anext(holder)
        return self._held[loop][0]

    async def _hold(self, loop: asyncio.AbstractEventLoop, client: openai.AsyncOpenAI) -> AsyncGenerator[None]:
        # A loop that ends closes the generators that were started in it (asyncio.run does): so the sockets are closed
        # by the loop they belong to, and nobody has to remember it.
        try:
            yield
        finally:
            self._held.pop(loop, None)
            await client.close()

    async def close(self) -> None:
        """Close the connections. May be called again; a later call opens new ones."""
        here = asyncio.get_running_loop()
        for loop, (_, holder) in list(self._held.items()):
            if loop is here:
                await holder.aclose()
            elif loop.is_running():
                await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(_end(holder), loop))

    # Inside --------------------------------------------------------------------------------------

    async def _pages(
        self, kind: type[AnswerT], path: str, doing: str, query: Mapping[str, str | int]
    ) -> AsyncIterator[AnswerT]:
        """Every item of a list that comes in pages; a cursor that does not move ends it."""
        asked = dict(query)
        while True:
            items, more = await self._page(kind, path, doing, asked)
            for item in items:
                yield item
            last = getattr(items[-1], "id", None) if items else None
            if not more or last is None or asked.get("after") == last:
                return
            asked["after"] = last

    async def _page(
        self, kind: type[AnswerT], path: str, doing: str, query: Mapping[str, str | int]
    ) -> tuple[list[AnswerT], bool]:
        """The items of one page, and whether there may be another."""
        answer = await self._send("GET", path, doing, query=query)
        items = answer.get("data") if isinstance(answer, dict) else None
        if not isinstance(items, list):
            raise ServiceError(f"{doing}: the service's answer is no page of a list: {self._short(answer)}")
        return [self._read(kind, item, doing) for item in items], answer.get("has_more") is not False

    async def _ask(
        self, kind: type[AnswerT], method: str, path: str, doing: str, body: Any = None, silence: float = ANSWER_S
    ) -> AnswerT:
        return self._read(kind, await self._send(method, path, doing, body, silence), doing)

    def _read(self, kind: type[AnswerT], answer: Any, doing: str) -> AnswerT:
        try:
            return kind.model_validate(answer)
        except pydantic.ValidationError as error:
            fields = ", ".join(".".join(map(str, e["loc"])) or "all of it" for e in error.errors())
            raise ServiceError(
                f"{doing}: the service's answer is not what it was when this was written ({fields}): "
                f"{self._short(answer)}. Is base_url={self.base_url!r} the training service's?"
            ) from None

    async def _send(
        self,
        method: str,
        path: str,
        doing: str,
        body: Any = None,
        silence: float = ANSWER_S,
        query: Mapping[str, str | int] | None = None,
    ) -> Any:
        """The answer's JSON. Raises ServiceError, never openai's errors."""
        client = (await self.connection()).calls
        options = openai.RequestOptions(
            timeout=client_library().Timeout(silence, connect=CONNECT_S, pool=None), params=dict(query or {})
        )
        try:
            if method == "POST":
                options["max_retries"] = 0
                return await client.post(path, cast_to=object, body=body, options=options)
            if method == "DELETE":
                return await client.delete(path, cast_to=object, body=body, options=options)
            return await client.get(path, cast_to=object, options=options)
        except openai.APIStatusError as error:
            raise self._refused(error, method, doing) from None
        except openai.APIConnectionError as error:
            raise self._unreached(error, method, doing) from None
        except ValueError as error:  # JSON that was cut off, or none
            raise ServiceError(f"{doing}: the service's answer is no JSON ({error}){_perhaps(method)}") from None

    def _refused(self, error: openai.APIStatusError, method: str, doing: str) -> ServiceError:
        status, words = error.status_code, self._words(error.body)
        advice = _ADVICE.get(status, "the service failed" if status >= 500 else "the service refused it")
        wait = error.response.headers.get("retry-after")
        if status == 429 and wait:
            advice += f" (it asks for {wait} s)"
        tried = f", {1 + RETRIES} times" if method != "POST" and (status >= 500 or status in (408, 409, 429)) else ""
        perhaps = _perhaps(method) if status >= 500 else ""
        said = f": {words}" if words else ""
        return ServiceError(f"{doing}: HTTP {status}{tried}{said}; {advice}{perhaps}", status=status)

    def _unreached(self, error: openai.APIConnectionError, method: str, doing: str) -> ServiceError:
        cause = error.__cause__ or error
        why = self._hide(f"{type(cause).__name__}: {cause}" if str(cause) else type(cause).__name__)
        tried = f", {1 + RETRIES} times" if method != "POST" else ""
        never = isinstance(cause, client_library().ConnectError | client_library().ConnectTimeout)
        perhaps = "" if never else _perhaps(method)
        return ServiceError(f"{doing}: no answer from {self.base_url}{tried} ({why}); check the network{perhaps}")

    def _words(self, body: object) -> str:
        """What an error's body says: `{"error": …}` is a text, or an object with a message."""
        if isinstance(body, dict):
            body = body.get("error", body)
        if isinstance(body, dict):
            body = body.get("message", body)
        return "" if body is None else self._short(body)

    def _short(self, value: object) -> str:
        text = self._hide(value if isinstance(value, str) else repr(value))
        return text if len(text) <= LONGEST_DETAIL else f"{text[:LONGEST_DETAIL]}…"

    def _hide(self, text: str) -> str:
        """Without the key: a server may send back what it was sent."""
        return text.replace(self.key, "***")


async def _end(holder: AsyncGenerator[None]) -> None:
    await holder.aclose()


def _perhaps(method: str) -> str:
    """What is unknown when a call's answer did not come. Only a POST is not simply asked again."""
    if method != "POST":
        return ""
    return (
        ". It was sent once and may have been carried out: before you do it again, look whether `await "
        "model.get_step()` goes up by itself, or at the run's page"
    )
