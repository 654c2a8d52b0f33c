"""The models and jobs of `artnb serve`, over one LocalBackend.

A step names the step that it starts from, and one job at a time may change a model: who comes second, or late, is
refused and told why. A job's id is written down in the model's folder before the job begins, so that one sent again
after a crash of the server is not trained twice. Knows nothing of HTTP. Belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..backend import TrainResult
from ..config import LoraConfig, TrainConfig, TrainSFTConfig
from ..durable import replace_file
from ..errors import ArtnbError, CheckpointError, ModelError
from ..events import EVENTS
from ..local.backend import LocalBackend
from ..local.served import ServedBase
from ..local.trained import TrainedModel
from ..model import TrainableModel
from ..tracking.records import to_line
from . import schema
from .adopt import adopt_adapter
from .guard import RefusedError
from .jobs import CURRENT, Job, JobTable, tell_current
from .uploads import Uploads
from .wire import (
    NO_JOB,
    NOT_REGISTERED,
    error_json,
    read_groups,
    read_trajectories,
    result_json,
    turns_json,
)

log = logging.getLogger("artnb")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
JOURNAL = "remote-job.json"


class Journal:
    """The newest job that changed, or was to change, a model: on disk, beside its checkpoints."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / JOURNAL

    def read(self) -> dict[str, Any]:
        try:
            record = json.loads(self._path.read_bytes())
        except FileNotFoundError:
            return {}
        except ValueError as error:
            log.warning(
                "%s cannot be read (%s): a step that is sent again is known by its number only", self._path, error
            )
            return {}
        return record if isinstance(record, dict) else {}

    def write(self, job: Job, result: dict[str, Any] | None) -> None:
        record = {"job": job.id, "digest": job.digest, "kind": job.kind, "from_step": job.from_step, "result": result}
        try:
            replace_file(self._path, [to_line(record)])
        except OSError as error:
            raise CheckpointError(f"{self._path} cannot be written: {error}") from error


@dataclass(slots=True)
class Hosted:
    """A registered model."""

    model: TrainableModel  # this process's handle
    trained: TrainedModel
    journal: Journal
    changing: Job | None = None  # the job that makes its next step now


class Hub:
    """What the server does.

    hub = Hub(LocalBackend(path="models"), base_models=["Qwen/Qwen3-0.6B"])
    job, new = hub.submit(job_id, digest, request)
    """

    def __init__(self, backend: LocalBackend, base_models: Sequence[str] | None = None) -> None:
        """`base_models`: those that clients may register; None: any of the Hugging Face hub, no folder."""
        self.backend = backend
        self.base_models = None if base_models is None else list(base_models)
        self.jobs = JobTable()
        self.closing = False
        self._hosted: dict[tuple[str, str], Hosted] = {}
        self._unsubscribe = EVENTS.subscribe(tell_current)

    # Models ----------------------------------------------------------------------------------------

    def hosted(self, project: str, name: str) -> Hosted:
        """Raises RefusedError (404) for a model that is not registered, e.g. since the server was restarted."""
        found = self._hosted.get((project, name))
        if found is None or found.trained.base is None:
            known = ", ".join(f"{p}/{n}" for p, n in self._hosted) or "none"
            raise RefusedError(
                404, NOT_REGISTERED, f"no model {project}/{name} is registered on this server; registered: {known}"
            )
        return found

    def describe(self, hosted: Hosted) -> schema.ModelState:
        """Reads the disk: not for the event loop."""
        trained = hosted.trained
        return schema.ModelState(
            project=trained.project,
            name=trained.name,
            base_model=trained.base_model,
            step=trained.step,
            checkpoints=trained.store.steps(),
            context_tokens=None if trained.base is None else trained.base.engine.context_length,
            training=None if hosted.changing is None else hosted.changing.id,
        )

    def models(self) -> list[Hosted]:
        return [hosted for hosted in self._hosted.values() if hosted.trained.base is not None]

    def bases(self) -> list[ServedBase]:
        return list({id(h.trained.base): h.trained.base for h in self.models() if h.trained.base is not None}.values())

    # Jobs ------------------------------------------------------------------------------------------

    def job(self, job_id: str) -> Job:
        """Raises RefusedError (404) for a job that is not known (any more)."""
        job = self.jobs.get(job_id)
        if job is None:
            raise RefusedError(404, NO_JOB, f"no job {job_id} is known here; the server may have been restarted")
        return job

    def withdraw(self, job_id: str) -> Job:
        """The job, which its client no longer wants. Raises RefusedError (404) as `job`; it may then not come later."""
        if self.jobs.get(job_id) is None:
            self.jobs.withdraw(job_id)
        return self.job(job_id)

    def submit(self, job_id: str, digest: str, request: Any) -> tuple[Job, bool]:
        """Start a job, or find the one that was started under this id; the second value says whether it is new.

        Raises RefusedError: 404 (the model is not registered), 409 (the model is at another step, or is changed now;
        the id belongs to another request, or was cancelled).
        """
        known = self.jobs.get(job_id)
        if known is not None:
            self._check_same(job_id, known.digest, digest)
            return known, False
        if self.jobs.is_withdrawn(job_id):
            raise RefusedError(409, "job_cancelled", f"job {job_id} was cancelled before it came")
        if self.closing:
            raise RefusedError(503, "closing", "the server is closing; ask again when it has been restarted")
        from_step = getattr(request, "from_step", None)
        job = Job(job_id, digest, request.kind, request.project, request.name, from_step)
        if not isinstance(request, schema.Register | schema.Fork):
            hosted = self.hosted(request.project, request.name)
            if from_step is not None:
                if self._recall(job, hosted):
                    return job, False
                self._check_turn(hosted, from_step)
                for earlier in self.jobs.of_model(job.project, job.name):
                    earlier.slim()
                hosted.changing = job
        self.jobs.add(job)
        job.task = asyncio.create_task(self._run(job, request))
        return job, True

    def _check_same(self, job_id: str, digest: str, other: str) -> None:
        if digest != other:
            raise RefusedError(
                409, "job_differs", f"job {job_id} was another request; each job needs an id of its own (a random UUID)"
            )

    def _check_turn(self, hosted: Hosted, from_step: int) -> None:
        trained, other = hosted.trained, hosted.changing
        if other is not None:
            raise RefusedError(
                409,
                "model_is_training",
                f"step {trained.step + 1} of {trained.name} is being made by another call or client (job {other.id}); "
                "wait for it, then gather rollouts of the new weights",
            )
        if trained.step != from_step:
            raise RefusedError(
                409,
                "stale_step",
                f"{trained.name} is at step {trained.step} here, and this step starts from {from_step}: another "
                "client has trained it meanwhile. `await model.get_step()` goes on from the server's step; gather anew",
            )

    def _recall(self, job: Job, hosted: Hosted) -> bool:
        """Whether an earlier server, of the same folder, has done this very job: then it has ended with its result."""
        record, trained = hosted.journal.read(), hosted.trained
        if record.get("job") != job.id:
            return False
        self._check_same(job.id, str(record.get("digest")), job.digest)
        result = record.get("result")
        if result is None and trained.step == job.from_step:
            return False  # it was not finished
        if result is None:  # the step was kept, and the server ended before it could say so
            step = int(record["from_step"]) + 1
            kept = trained.store.load_state(step) if step in trained.store.steps() else {}
            note = "the server was restarted during this step: its metrics are the checkpoint's, reasons are lost"
            metrics = dict(kept.get("metrics", {}))
            result = result_json(TrainResult(step=step, metrics=metrics, notes=[note]))
        job.end("done", trained.step, result)
        self.jobs.add(job)
        return True

    async def cancel(self, job: Job) -> None:
        """End a job that runs; the model stays at its last complete step. Returns when it has ended.

        A step that is past the trainer's work is kept, and the job done.
        """
        if job.task is not None and not job.task.done():
            hosted = self._hosted.get((job.project, job.name))
            made = hosted is not None and job.from_step is not None and hosted.trained.step > job.from_step
            if not made:  # else it is about to say so
                job.task.cancel()
            await asyncio.wait([job.task])

    async def _run(self, job: Job, request: Any) -> None:
        CURRENT.set(job)  # of this task only
        try:
            result = await self._work(job, request)
        except asyncio.CancelledError:
            self._end(job, "cancelled")
        except Exception as error:
            if not isinstance(error, ArtnbError):
                log.exception("job %s (%s of %s) failed", job.id, job.kind, job.name)
            self._end(job, "failed", error=error_json(error))
        else:
            self._end(job, "done", result=result)

    def _end(self, job: Job, state: str, **outcome: Any) -> None:
        hosted = self._hosted.get((job.project, job.name))
        if hosted is not None and hosted.changing is job:
            hosted.changing = None
        if self.closing and state != "done":
            job.forsake()  # it was ended with the server, and is asked for again when that has been restarted
        else:
            job.end(state, None if hosted is None else hosted.trained.step, **outcome)

    async def _work(self, job: Job, request: Any) -> dict[str, Any] | None:
        if isinstance(request, schema.Register):
            return await self._register(request)
        if isinstance(request, schema.Fork):
            origin = request.model_dump(include={"from_model", "from_project", "step", "not_after_step"})
            return {"step": await self.backend.fork_checkpoint(self._handle(request), **origin)}
        hosted = self.hosted(job.project, job.name)
        backend, model = self.backend, hosted.model
        if isinstance(request, schema.Log):
            await asyncio.to_thread(self._log, hosted, request)
            return None
        if isinstance(request, schema.DeleteCheckpoints):
            await backend.delete_checkpoints(model, request.steps)
            return None
        if isinstance(request, schema.BaseLogprobs):
            asked = await asyncio.to_thread(read_trajectories, request.trajectories)
            return {"turns": turns_json(await backend.base_logprobs(model, asked))}
        if isinstance(request, schema.Train):
            config = TrainConfig(**request.config)
            groups = await asyncio.to_thread(read_groups, [g.model_dump() for g in request.groups])
            request.groups.clear()  # they are large, and the step is long
            await asyncio.to_thread(hosted.journal.write, job, None)
            result = result_json(await _kept(hosted.trained, backend.train(model, groups, config)), groups)
        elif isinstance(request, schema.TrainSFT):
            sft = TrainSFTConfig(**request.config)
            trajectories = await asyncio.to_thread(read_trajectories, request.trajectories)
            request.trajectories.clear()
            await asyncio.to_thread(hosted.journal.write, job, None)
            result = result_json(await _kept(hosted.trained, backend.train_sft(model, trajectories, sft)))
        else:
            assert isinstance(request, schema.Push)
            await asyncio.to_thread(hosted.journal.write, job, None)
            adopting = adopt_adapter(hosted.trained, request.adapter, request.adapter_config)
            result = result_json(await _kept(hosted.trained, adopting))
        try:
            await asyncio.to_thread(hosted.journal.write, job, result)
        except CheckpointError as error:  # the step is complete: only a server that is restarted would miss this
            log.warning("what step %d answered is not kept for a restart: %s", result["step"], error)
        return result

    def _handle(self, request: schema.Register | schema.Fork) -> TrainableModel:
        self._check_offered(request.base_model)
        options = request.lora.model_dump()
        if isinstance(options["target_modules"], list):
            options["target_modules"] = tuple(options["target_modules"])
        lora = LoraConfig(**options)
        # Reports nowhere: the client's own handle does.
        return TrainableModel(request.name, request.project, request.base_model, lora=lora, report_metrics=[])

    async def _register(self, request: schema.Register) -> dict[str, Any]:
        model = self._handle(request)
        await self.backend.register(model)
        trained = self.backend._trained(model)
        key = (request.project, request.name)
        known = self._hosted.get(key)
        if known is None or known.trained is not trained:
            await asyncio.to_thread(Uploads(trained.folder).tidy)
            self._hosted[key] = Hosted(model, trained, Journal(trained.folder))
        return (await asyncio.to_thread(self.describe, self._hosted[key])).model_dump()

    def _check_offered(self, base_model: str) -> None:
        if self.base_models is not None:
            if base_model not in self.base_models:
                raise ModelError(
                    f"base_model={base_model!r} is not offered by this server; offered: {', '.join(self.base_models)}"
                )
        elif not _HUB_ID.fullmatch(base_model) or ".." in base_model or Path(base_model).exists():
            raise ModelError(
                f"base_model={base_model!r} is not a name on the Hugging Face hub (owner/name); a folder of the server "
                f"has to be offered by whoever starts it: artnb serve --base-model {base_model!r}"
            )

    def _log(self, hosted: Hosted, request: schema.Log) -> None:
        history = hosted.trained.history
        if request.groups:
            groups = read_groups([group.model_dump() for group in request.groups])
            history.log_trajectories(request.step, request.split, groups)
        if request.metrics:
            history.log_metrics(request.step, request.split, request.metrics)

    # Closing ---------------------------------------------------------------------------------------

    def begin_closing(self) -> None:
        """Cut followers off, so that connections can end; refuse new jobs."""
        self.closing = True
        for job in self.jobs.running():
            job.forsake()

    async def close(self) -> None:
        """End jobs at the last complete step, and the backend. May be called again."""
        self.begin_closing()
        for job in self.jobs.running():
            await self.cancel(job)
        self._unsubscribe()
        await self.backend.close()


async def _kept(trained: TrainedModel, step: Awaitable[TrainResult]) -> TrainResult:
    """The result of a step, also when it was cancelled too late: it is kept then."""
    before = trained.step
    try:
        return await step
    except asyncio.CancelledError:
        if trained.newest is None or trained.newest.step == before:
            raise
        return trained.newest
