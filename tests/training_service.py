"""A training service on a real socket: the table of calls that ServerlessBackend speaks, and faults on demand.

It checks what it is sent, lists everything in pages of two, and reveals a job's events one with each question.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import uvicorn
from openai.types.chat.chat_completion import Choice
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

import artnb as art
from artnb.serverless import ServerlessBackend

KEY = "key-0123456789abcdef"
PAGE = 2
ENTITY = "team"
_RL_KEYS = (
    "advantage_balance epsilon epsilon_high importance_sampling_level kl_penalty_coef kl_penalty_reference_step "
    "kl_penalty_source kl_penalty_step_lag learning_rate logprob_calculation_chunk_size loss_fn mask_prob_ratio "
    "max_negative_advantage_importance_sampling_weight normalize_advantages packed_sequence_length ppo "
    "precalculate_logprobs scale_learning_rate_by_reward_std_dev scale_rewards truncated_importance_sampling"
)
_TRAJECTORY_KEYS = (
    "messages_and_choices tools additional_histories reward initial_policy_version final_policy_version metrics "
    "metadata logs"
)
RL_KEYS, TRAJECTORY_KEYS = frozenset(_RL_KEYS.split()), frozenset(_TRAJECTORY_KEYS.split())


@dataclass
class Fault:
    """What the next call of a kind gets instead of its answer: a status, or a body that is cut off."""

    status: int = 500
    error: Any = "out of order"
    headers: dict[str, str] = field(default_factory=lambda: {"retry-after-ms": "1"})  # the client's pause, kept short
    cut: bool = False
    carried_out: bool = False  # the call is done, and only its answer is lost
    body: bytes | None = None


class CutError(Exception):
    """Raised inside an answer that has begun: the server closes the connection."""


class TrainingService:
    """State and app. Reveal a job's events with `jobs[id]["events"]`; put a Fault into `faults["GET /path"]`."""

    def __init__(self) -> None:
        self.models: dict[str, dict[str, Any]] = {}
        self.checkpoints: dict[str, list[dict[str, Any]]] = defaultdict(list)
        self.jobs: dict[str, dict[str, Any]] = {}
        self.logged: list[dict[str, Any]] = []
        self.calls: list[tuple[str, str, Any]] = []  # verb, path, body or query
        self.faults: dict[str, list[Fault]] = defaultdict(list)
        self.script: list[tuple[str, dict[str, Any]]] = [
            ("training_started", {"num_sequences": 2}),
            ("gradient_step", {"loss": 0.5, "policy_loss": 0.25, "grad_norm": 1.0}),
            ("gradient_step", {"loss": 1.5, "policy_loss": 0.75, "grad_norm": 3.0}),
            ("training_ended", {}),
        ]
        self.held = False  # jobs stand still before their last event
        self.answer = "left"
        self._number = itertools.count(1)
        self.url = ""

    # What tests ask for --------------------------------------------------------------------------

    def count(self, verb: str, path: str) -> int:
        return sum(v == verb and p.endswith(path) for v, p, _ in self.calls)

    def sent(self, verb: str, path: str) -> list[Any]:
        return [body for v, p, body in self.calls if v == verb and p.endswith(path)]

    def fail(self, call: str, *faults: Fault, times: int = 1) -> None:
        """`call`: verb and the path's end, e.g. 'GET /events'."""
        self.faults[call] += list(faults) * times

    # The table -----------------------------------------------------------------------------------

    def app(self) -> Starlette:
        root = "/v1/preview"
        return Starlette(
            routes=[
                Route(f"{root}/models", self._create, methods=["POST"]),
                Route(f"{root}/models/{{id}}", self._delete, methods=["DELETE"]),
                Route(f"{root}/models/{{id}}/log", self._log, methods=["POST"]),
                Route(f"{root}/models/{{id}}/checkpoints", self._checkpoints, methods=["GET", "DELETE"]),
                Route(f"{root}/training-jobs", self._train, methods=["POST"]),
                Route(f"{root}/training-jobs/{{id}}/events", self._events),
                Route(f"{root}/sft-training-jobs", self._train, methods=["POST"]),
                Route(f"{root}/sft-training-jobs/{{id}}/events", self._events),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
            ]
        )

    async def _asked(self, request: Request) -> tuple[Any, Response | None]:
        """The body or query, and what the call gets instead of its answer."""
        raw = await request.body()
        body = json.loads(raw) if raw else dict(request.query_params)
        self.calls.append((request.method, request.url.path, body))
        if request.headers.get("authorization") != f"Bearer {KEY}":
            return body, JSONResponse({"error": "invalid api key"}, 401)
        for call, waiting in self.faults.items():
            verb, _, path = call.partition(" ")
            if waiting and request.method == verb and request.url.path.endswith(path):
                fault = waiting.pop(0)
                if fault.carried_out:
                    await self._route(request)
                return body, _faulty(fault)
        return body, None

    async def _route(self, request: Request) -> None:
        assert request.url.path.endswith("training-jobs")
        self._start(await request.json(), request)

    async def _create(self, request: Request) -> Response:
        body, instead = await self._asked(request)
        if instead is not None:
            return instead
        assert body.keys() == {"entity", "project", "name", "base_model", "return_existing"}
        assert body["return_existing"] is True
        entity = body["entity"] or ENTITY
        for model in self.models.values():
            if (model["entity"], model["project"], model["name"]) == (entity, body["project"], body["name"]):
                return JSONResponse(model)
        model = {**body, "id": f"model-{next(self._number)}", "entity": entity, "run_id": "run-1"}
        del model["return_existing"]
        self.models[model["id"]] = model
        return JSONResponse(model)

    async def _delete(self, request: Request) -> Response:
        _, instead = await self._asked(request)
        if instead is not None:
            return instead
        if self.models.pop(request.path_params["id"], None) is None:
            return _missing("model")
        return Response(status_code=204)

    async def _log(self, request: Request) -> Response:
        body, instead = await self._asked(request)
        if instead is not None:
            return instead
        self.logged.append(body)
        return JSONResponse(None)

    async def _checkpoints(self, request: Request) -> Response:
        body, instead = await self._asked(request)
        if instead is not None:
            return instead
        model = request.path_params["id"]
        if model not in self.models:
            return _missing("model")
        kept = self.checkpoints[model]
        if request.method == "GET":
            return self._page(kept if request.query_params.get("order") != "desc" else kept[::-1], request)
        gone = [c for c in kept if c["step"] in body["steps"]]
        self.checkpoints[model] = [c for c in kept if c not in gone]
        missing = [step for step in body["steps"] if step not in {c["step"] for c in gone}]
        return JSONResponse({"deleted_count": len(gone), "not_found_steps": missing})

    def _page(self, items: list[dict[str, Any]], request: Request) -> Response:
        after, limit = request.query_params.get("after"), int(request.query_params.get("limit", PAGE))
        first = 0
        if after is not None:
            first = 1 + next(i for i, item in enumerate(items) if item["id"] == after)
        page = items[first : first + limit]
        return JSONResponse({"object": "list", "data": page, "has_more": first + limit < len(items)})

    async def _train(self, request: Request) -> Response:
        body, instead = await self._asked(request)
        if instead is not None:
            return instead
        if body["model_id"] not in self.models:
            return _missing("model")
        return JSONResponse({"id": self._start(body, request)})

    def _start(self, body: dict[str, Any], request: Request) -> str:
        sft = "sft" in request.url.path
        if sft:
            assert body.keys() == {"model_id", "training_data_url", "config"}
            assert body["config"].keys() <= {"batch_size", "learning_rate", "assistant_turns"}
        else:
            assert body.keys() == {"model_id", "trajectory_groups", "experimental_config"}
            assert body["experimental_config"].keys() <= RL_KEYS
            for group in body["trajectory_groups"]:
                assert group.keys() == {"trajectories", "exceptions", "metadata", "metrics", "logs"}
                for trajectory in group["trajectories"]:
                    assert trajectory.keys() == TRAJECTORY_KEYS
                    assert isinstance(trajectory["reward"], float)
        job = f"{'sft' if sft else 'job'}-{next(self._number)}"
        events = [{"id": f"{job}-{i}", "type": kind, "data": data} for i, (kind, data) in enumerate(self.script)]
        self.jobs[job] = {"model": body["model_id"], "events": events, "revealed": 0, "done": False}
        return job

    async def _events(self, request: Request) -> Response:
        _, instead = await self._asked(request)
        if instead is not None:
            return instead
        job = self.jobs.get(request.path_params["id"])
        if job is None:
            return _missing("job")
        last = len(job["events"]) - (1 if self.held else 0)
        job["revealed"] = min(job["revealed"] + 1, last)
        revealed = job["events"][: job["revealed"]]
        if not job["done"] and any(event["type"] == "training_ended" for event in revealed):
            job["done"] = True
            kept = self.checkpoints[job["model"]]
            step = 1 + max((c["step"] for c in kept), default=0)
            kept.append({"id": f"ckpt-{step}", "step": step, "metrics": {"reward": 0.5}})
        return self._page(revealed, request)

    # The endpoint --------------------------------------------------------------------------------

    async def _chat(self, request: Request) -> Response:
        body, instead = await self._asked(request)
        if instead is not None:
            return instead
        prefix = "wandb-artifact:///"
        known = {f"{prefix}{m['entity']}/{m['project']}/{m['name']}" for m in self.models.values()}
        if body["model"].partition(":step")[0] not in known:
            return _missing(f"model {body['model']}")
        words = f"{self.answer} {body.get('seed', 0)}".split(" ")
        whole = {
            "index": 0,
            "finish_reason": "stop",
            "message": {"role": "assistant", "content": " ".join(words)},
            "logprobs": {"content": [_entry(word) for word in words], "refusal": None} if body["logprobs"] else None,
        }
        head = {"id": "chatcmpl-1", "created": 1, "model": body["model"]}
        if not body.get("stream"):
            return JSONResponse({**head, "object": "chat.completion", "choices": [whole]})
        return StreamingResponse(self._chunks(head, words), media_type="text/event-stream")

    async def _chunks(self, head: dict[str, Any], words: list[str]) -> AsyncIterator[str]:
        frame = {**head, "object": "chat.completion.chunk"}
        for number, word in enumerate(words):
            if self.faults["stream"]:
                self.faults["stream"].pop()
                raise CutError
            last = number == len(words) - 1
            text = word if number == 0 else f" {word}"
            delta = {"role": "assistant", "content": text} if number == 0 else {"content": text}
            part = {
                "index": 0,
                "delta": delta,
                "logprobs": {"content": [_entry(word)], "refusal": None},
                "finish_reason": "stop" if last else None,
                "token_ids": [number],
            }
            event = f"data: {json.dumps({**frame, 'choices': [part]})}\r\n\r\n"
            yield event[:20]  # an event may come in pieces
            yield event[20:]
        yield "data: [DONE]\r\n\r\n"


def _entry(word: str) -> dict[str, Any]:
    return {"token": word, "logprob": -0.5, "bytes": None, "top_logprobs": []}


def _missing(what: str) -> Response:
    return JSONResponse({"error": {"message": f"{what} not found", "code": "not_found"}}, 404)


def _faulty(fault: Fault) -> Response:
    if fault.cut:

        async def half() -> AsyncIterator[bytes]:
            yield b'{"id": '
            raise CutError

        return StreamingResponse(half(), media_type="application/json", headers=fault.headers)
    if fault.body is not None:
        return Response(fault.body, fault.status, {"content-type": "application/json", **fault.headers})
    return JSONResponse({"error": fault.error}, fault.status, fault.headers)


@contextlib.contextmanager
def running() -> Iterator[TrainingService]:
    """A service that listens on a port of its own, in a thread of its own."""
    service = TrainingService()
    config = uvicorn.Config(service.app(), port=0, log_level="critical", lifespan="off", ws="none", access_log=False)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, name="training-service")
    thread.start()
    while not server.started:
        assert thread.is_alive()
        thread.join(0.005)
    service.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/v1"
    try:
        yield service
    finally:
        server.should_exit = True
        thread.join()


def rollouts(*rewards: float | None, groups: int = 1, **fields: Any) -> list[art.TrajectoryGroup]:
    """Groups whose choices carry log-probs, as the service's endpoint gives them."""

    def trajectory(group: int, index: int, reward: float | None) -> art.Trajectory:
        choice = Choice.model_validate(
            {
                "index": 0,
                "finish_reason": "stop",
                "message": {"role": "assistant", "content": f"answer {index}"},
                "logprobs": {"content": [_entry("answer"), _entry(str(index))], "refusal": None},
            }
        )
        asked = {"role": "user", "content": f"task {group}"}
        return art.Trajectory(messages_and_choices=[asked, choice], reward=reward, **fields)

    return [art.TrajectoryGroup([trajectory(g, i, r) for i, r in enumerate(rewards)]) for g in range(groups)]


def make_model(folder: Path, name: str = "agent", **options: Any) -> art.TrainableModel:
    return art.TrainableModel(name=name, project="demo", base_model="some/base", base_path=folder, **options)


def make_backend(service: TrainingService, **options: Any) -> ServerlessBackend:
    return ServerlessBackend(**{"api_key": KEY, "base_url": service.url, "poll_seconds": 0.005, **options})


@contextlib.asynccontextmanager
async def registered(service: TrainingService, folder: Path, **options: Any) -> AsyncIterator[Rented]:
    """A model that is registered at the service."""
    model = make_model(folder, **options)
    async with make_backend(service) as backend:
        await model.register(backend)
        yield Rented(model, backend)


class Rented(NamedTuple):
    model: art.TrainableModel
    backend: ServerlessBackend
