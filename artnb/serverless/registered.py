"""A model at the service as this process knows it: its names, its step, and how a job of it is followed and kept."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from ..backend import TrainResult
from ..capture import Collector
from ..errors import ConfigError, ServiceError, TrainError
from ..events import EVENTS
from ..tracking.history import History
from ..tracking.summary import summarize
from ..trajectories import TrajectoryGroup
from ..whole import to_the_end
from .client import ServiceModel, TrainingService
from .jobs import Followed, Job, OpenJob, follow

logger = logging.getLogger("artnb")

SETTLE_READS = 5
"""How often the newest checkpoint is read after a job has ended, should the service list it a little later."""


@dataclass(slots=True)
class ServerlessTrainResult(TrainResult):
    """What one step at the service did. `artifact_name` is the checkpoint's at W&B; no file of it is here."""

    artifact_name: str | None = None


@dataclass(slots=True)
class Registered:
    """A model that is registered: who it is there, and what of it is here."""

    name: str
    project: str
    there: ServiceModel
    open_job: OpenJob
    history: History
    service: TrainingService
    poll_seconds: float
    verbose: bool
    collector: Collector = field(default_factory=Collector)
    step: int = 0  # the newest checkpoint, as far as it was looked at
    busy: bool = False

    # Names ---------------------------------------------------------------------------------------

    @property
    def full_name(self) -> str:
        return f"{self.there.entity}/{self.there.project}/{self.there.name}"

    @property
    def inference_name(self) -> str:
        return f"wandb-artifact:///{self.full_name}"

    def resolve(self, asked: str) -> tuple[str, int | None]:
        """The service's name of `name`, `name@step` or of its own names, and the step that answers."""
        base, at, tail = asked.rpartition("@")
        if base in (self.name, self.there.name) and at and tail.isdecimal():
            return f"{self.inference_name}:step{tail}", int(tail)
        if asked in (self.name, self.there.name, self.inference_name):
            return self.inference_name, self.step
        prefix = f"{self.inference_name}:step"
        if asked.startswith(prefix) and asked.removeprefix(prefix).isdecimal():
            return asked, int(asked.removeprefix(prefix))
        return asked, None  # a base model, or somebody else's

    def say(self, line: str) -> None:
        if self.verbose:
            print(f"artnb: {line}", flush=True)

    # Steps ---------------------------------------------------------------------------------------

    @contextmanager
    def one_step(self) -> Iterator[None]:
        """One step at a time: the service would not know which comes first."""
        if self.busy:
            raise ConfigError(f"a step of {self.name} runs already; await it before the next")
        self.busy = True
        try:
            yield
        finally:
            self.busy = False

    async def read_step(self) -> int:
        """The newest checkpoint's step at the service; 0 before the first."""
        newest = await self.service.newest_checkpoint(self.there.id)
        self.step = 0 if newest is None else newest.step
        return self.step

    def unfinished(self) -> Job | None:
        """The job of this model that was started and whose end nobody here has seen."""
        job = self.open_job.read()
        if job is not None and job.model_id != self.there.id:
            logger.warning("job %s was of a model that is not there any more; it is forgotten", job.id)
            self.open_job.clear()
            return None
        return job

    async def log_rollouts(self, step: int, split: str, groups: Sequence[TrajectoryGroup]) -> None:
        await asyncio.to_thread(self.history.log_trajectories, step, split, groups, replace=True)

    async def finish(
        self,
        job: Job,
        *,
        groups: Sequence[TrajectoryGroup] = (),
        metrics: Mapping[str, float] | None = None,
        reasons: Iterable[str] = (),
        notes: Iterable[str] = (),
    ) -> ServerlessTrainResult:
        """Follow a job to its end and keep what it did. A job that failed, or is not there, is no longer open.

        `groups` are those that it trains on, the rest is what is known of them. Raises: ServiceError when it cannot be
        followed, TrainError when it failed.
        """
        desc = f"{job.kind} step {job.step + 1}"
        try:
            seen = await follow(self.service, job, desc=desc, poll_seconds=self.poll_seconds)
        except ServiceError as error:
            if error.status == 404:
                self.open_job.clear()
                raise
            raise ServiceError(
                f"{error}. Job {job.id} of {self.name} goes on at the service and nothing is lost: run the same call "
                "again, or `await backend.resume(model)`, and it is followed from where it is",
                status=error.status,
            ) from None
        except TrainError:
            self.open_job.clear()
            raise
        except asyncio.CancelledError:
            self.say(f"job {job.id} of {self.name} goes on at the service; the same call, or resume, follows it again")
            raise
        result = ServerlessTrainResult(step=await self._step_after(job), metrics={**(metrics or {}), **seen.metrics()})
        result.reasons.update(reasons)
        result.notes += notes
        await to_the_end(self._keep(job, result, seen, groups))
        return result

    async def _step_after(self, job: Job) -> int:
        for read in range(SETTLE_READS):
            if read:
                await asyncio.sleep(self.poll_seconds)
            if await self.read_step() > job.step:
                break
        return self.step

    async def _keep(
        self, job: Job, result: ServerlessTrainResult, seen: Followed, groups: Sequence[TrajectoryGroup]
    ) -> None:
        result.trained = result.step > job.step
        if result.trained:
            result.artifact_name = f"{self.full_name}:step{result.step}"
        else:
            result.notes.append(f"job {job.id} ended without a new checkpoint; the step is still {result.step}")
            self.say(result.notes[-1])
        result.metrics |= {"trained": float(result.trained), "gradient_steps": float(seen.gradient_steps)}
        logged = {**summarize(groups), **result.metrics}
        at = result.step if result.trained else job.step + 1
        if groups and at != job.step + 1:
            await self.log_rollouts(at, job.kind, groups)
        await asyncio.to_thread(self.history.log_metrics, at, job.kind, logged)
        self.open_job.clear()
        for group in groups:
            group._logged.add((self.name, job.kind))
        EVENTS.emit(
            "step",
            f"{self.project}/{self.name}",
            step=at,
            split=job.kind,
            metrics=logged,
            groups=list(groups),
            reasons=dict(result.reasons),
            notes=list(result.notes),
        )
