"""ServerlessBackend: the W&B training service as a backend. Engine and trainer are there, the history is here.

Speaks what openpipe-art 0.5.23's client speaks; it has not been run against the live service. What is on disk here: the
history, and the record of a job whose end was not seen (jobs.py). Weights stay at the service.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..backend import ASGIApp, check_groups
from ..capture import CaptureRegistry, Collector
from ..compat.options import flat, without_nothing
from ..config import TrainConfig, TrainSFTConfig, check_number
from ..errors import CheckpointError, ConfigError, ModelError, ServiceError
from ..tracking.follow import TRACKING
from ..tracking.history import History
from ..tracking.summary import summarize
from ..trajectories import Trajectory, TrajectoryGroup, as_groups
from .client import DEFAULT_URL, ServiceModel, TrainingService
from .endpoint import ServiceEndpoint
from .jobs import Job, OpenJob
from .options import SERVICE_NAMES, experimental_config, sft_plan
from .payload import Payload, group_json, make_payload
from .registered import Registered, ServerlessTrainResult
from .upload import DATA_FILE, Destination, conversations, upload_to_wandb

if TYPE_CHECKING:
    from ..model import TrainableModel

Upload = Callable[[Path, Destination, str], str]


class ServerlessBackend:
    """Train and serve at the W&B training service; needs a key, and no GPU here.

    backend = ServerlessBackend(api_key="...")  # or WANDB_API_KEY in the environment
    await model.register(backend)
    """

    def __init__(
        self,
        *,
        api_key: str | None = None,
        base_url: str | None = None,
        poll_seconds: float = 1.0,
        upload: Upload | None = None,
        verbose: bool = True,
    ) -> None:
        """
        Args:
            api_key: of W&B; None: the environment's WANDB_API_KEY. It is sent to `base_url` only, and never logged.
            poll_seconds: between two questions about a job that runs.
            upload: `upload(file, destination, api_key)` puts the data of `train_sft` where the service can read it and
                returns the URL; None: an artifact at W&B, by wandb.

        Raises: ConfigError without a key.
        """
        key = (api_key or os.environ.get("WANDB_API_KEY") or "").strip()
        if not key:
            raise ConfigError(
                "ServerlessBackend needs a key: pass api_key=... or set WANDB_API_KEY to the one shown at "
                "https://wandb.ai/authorize"
            )
        check_number("ServerlessBackend", "poll_seconds", poll_seconds, above=0.0)
        self.poll_seconds = poll_seconds
        self.verbose = verbose
        self._upload: Upload = upload or upload_to_wandb
        self._service = TrainingService(key, base_url or DEFAULT_URL)
        self._captures = CaptureRegistry()
        self._models: dict[tuple[str, str], Registered] = {}

    # Registering ---------------------------------------------------------------------------------

    async def register(self, model: TrainableModel) -> None:
        """Make the model at the service, or find the one of this name. A second call changes nothing.

        The service's name is `model.run_name`. Raises: ServiceError, ConfigError (options that it has no field for),
        ModelError (a model of this name has another base).
        """
        if model.lora != type(model.lora)():
            raise ConfigError("the training service chooses the LoRA itself: leave out lora=LoraConfig(...)")
        there = await self._service.create_model(
            entity=model.entity, project=model.project, name=model.run_name, base_model=model.base_model
        )
        if there.base_model != model.base_model:
            raise ModelError(
                f"{there.entity}/{there.project}/{there.name} is at the service with base_model={there.base_model!r}, "
                f"not {model.base_model!r}: take another name, or that base_model"
            )
        model.entity, model.id, model.run_id = there.entity, there.id, there.run_id
        registered = self._models.get((model.project, model.name))
        if registered is None or registered.there.id != there.id:
            open_job, history = OpenJob(model.folder), History(model.folder)
            registered = Registered(
                model.name, model.project, there, open_job, history, self._service, self.poll_seconds, self.verbose
            )
            self._models[model.project, model.name] = registered
            self._captures.register_collector(model.name, registered.collector)
        model.serve_as(registered.inference_name, step_mark=":step")
        step = await registered.read_step()
        registered.say(f"{model.name} is {registered.full_name} at the service, at step {step}")
        if (job := registered.unfinished()) is not None:
            registered.say(
                f"job {job.id} of {model.name} was started earlier and its end not seen; the next step waits for it, "
                "and `await backend.resume(model)` follows it now"
            )

    def _registered(self, model: TrainableModel) -> Registered:
        registered = self._models.get((model.project, model.name))
        if registered is None:
            raise ConfigError(f"{model.name} is not registered here; call `await model.register(backend)` first")
        return registered

    async def delete(self, model: TrainableModel) -> None:
        """Delete the model at the service, checkpoints included. The history on this disk stays."""
        registered = self._registered(model)
        await self._service.delete_model(registered.there.id)
        self._captures.unregister_collector(model.name)
        await asyncio.to_thread(TRACKING.detach, f"{model.project}/{model.name}")
        del self._models[model.project, model.name]

    # Training ------------------------------------------------------------------------------------

    async def train(
        self,
        model: TrainableModel,
        trajectory_groups: Iterable[TrajectoryGroup],
        config: TrainConfig | None = None,
        **options: Any,
    ) -> ServerlessTrainResult:
        """One RL step at the service. `options` are the service's (options.py) or TrainConfig's, one by one.

        Called again for the same rollouts while their job runs, it follows that job. A batch without signal is not sent
        and is no step. Raises: ConfigError for what the service has no field for, ServiceError, TrainError when the job
        failed.
        """
        registered = self._registered(model)
        groups = check_groups(trajectory_groups)
        with registered.one_step():
            payload = await asyncio.to_thread(make_payload, groups)
            options = without_nothing(flat(options), kept=SERVICE_NAMES)
            experimental_config(config, options, step=0)  # a wrong option is told before anything is waited for
            job = await self._same_job(registered, payload.digest)
            if job is None and not payload.groups:
                return await self._without_signal(registered, groups, payload)
            if job is None:
                job = await self._start(
                    registered, groups, payload, lambda step: experimental_config(config, options, step)
                )
            reasons = map(str, payload.batch.group_reasons.values())
            return await registered.finish(
                job, groups=groups, metrics=payload.batch.metrics, reasons=reasons, notes=payload.batch.notes
            )

    async def _start(
        self,
        registered: Registered,
        groups: list[TrajectoryGroup],
        payload: Payload,
        settings: Callable[[int], dict[str, Any]],
    ) -> Job:
        """Start the job. The rollouts are kept first: a call may fail, and they are dear."""
        kept = registered.step
        await registered.log_rollouts(kept + 1, "train", groups)
        try:
            step = await registered.read_step()
            if step != kept:  # somebody else has trained it meanwhile
                await registered.log_rollouts(step + 1, "train", groups)
                kept = step
            if payload.batch.notes:
                registered.say(f"step {step + 1}: {payload.in_words()}")
            started = await self._service.start_training(registered.there.id, payload.groups, settings(step))
        except ServiceError as error:
            where = f"backend.history(model).load_groups({kept + 1}, 'train')"
            raise ServiceError(f"{error}. The rollouts are kept: {where}", status=error.status) from None
        job = Job(started.id, "train", registered.there.id, step, payload.digest)
        registered.open_job.write(job)
        return job

    async def train_sft(
        self, model: TrainableModel, trajectories: Iterable[Trajectory], config: TrainSFTConfig | None = None
    ) -> ServerlessTrainResult:
        """One supervised job over all `trajectories`: their conversations are uploaded as a file, then trained on.

        Order, epochs and learning rates are made here, as for a local model; the service takes the file as it is.
        """
        registered = self._registered(model)
        chosen = config or TrainSFTConfig()
        rows = list(trajectories)
        with registered.one_step():
            lines = conversations(rows)
            if not lines:
                raise ConfigError("train_sft: no trajectories were given")
            settings, order = sft_plan(chosen, len(lines))
            data = b"".join(lines[row] for row in order)
            digest = hashlib.sha256(data + repr(sorted(settings.items())).encode()).hexdigest()
            job = await self._same_job(registered, digest)
            if job is None:
                step = await registered.read_step()
                url = await asyncio.to_thread(self._uploaded, data, registered.there)
                started = await self._service.start_sft(registered.there.id, url, settings)
                job = Job(started.id, "sft", registered.there.id, step, digest)
                registered.open_job.write(job)
            groups = [TrajectoryGroup([row]) for row in rows]
            await registered.log_rollouts(job.step + 1, "sft", groups)
            metrics = {"trajectories_trained": float(len(rows)), **(chosen.extra_metrics or {})}
            return await registered.finish(job, groups=groups, metrics=metrics)

    async def resume(self, model: TrainableModel) -> ServerlessTrainResult | None:
        """Follow the job that an earlier call or kernel started and did not see end. None if there is none."""
        registered = self._registered(model)
        with registered.one_step():
            job = registered.unfinished()
            return None if job is None else await registered.finish(job)

    async def _same_job(self, registered: Registered, digest: str) -> Job | None:
        """The unfinished job, if it trains on the same; another one is waited for first."""
        job = registered.unfinished()
        if job is None:
            return None
        if job.digest == digest:
            registered.say(f"job {job.id} trains on the same already; it is followed")
            return job
        await registered.finish(job)
        return None

    def _uploaded(self, data: bytes, there: ServiceModel) -> str:
        with tempfile.TemporaryDirectory(prefix="artnb-sft-") as folder:
            path = Path(folder) / DATA_FILE
            path.write_bytes(data)
            return self._upload(
                path, Destination(there.entity, there.project, there.name, there.run_id), self._service.key
            )

    async def _without_signal(
        self, registered: Registered, groups: list[TrajectoryGroup], payload: Payload
    ) -> ServerlessTrainResult:
        """Nothing is sent. The rollouts are kept under a split of their own: the step that comes has its own."""
        words = payload.in_words()
        registered.say(f"step {registered.step + 1}: {words}")
        await asyncio.to_thread(registered.history.log_trajectories, registered.step + 1, "untrained", groups)
        await registered.read_step()
        result = ServerlessTrainResult(step=registered.step, metrics=summarize(groups), trained=False)
        result.reasons.update(map(str, payload.batch.group_reasons.values()))
        result.notes = [words, *payload.batch.notes]
        return result

    async def log(
        self, model: TrainableModel, groups: Iterable[Trajectory | TrajectoryGroup], split: str = "val"
    ) -> None:
        """`model.log`, and the service keeps the rollouts, too."""
        made = as_groups(groups)
        await model.log(made, split)
        await self._service.log(self._registered(model).there.id, [group_json(group) for group in made], split)

    # Checkpoints ---------------------------------------------------------------------------------

    async def get_step(self, model: TrainableModel) -> int:
        """The newest checkpoint's step at the service; 0 before the first."""
        return await self._registered(model).read_step()

    async def checkpoints(self, model: TrainableModel) -> list[int]:
        """Steps of the checkpoints that the service keeps, ascending."""
        return sorted({c.step for c in await self._service.checkpoints(self._registered(model).there.id)})

    async def delete_checkpoints(self, model: TrainableModel, steps: Sequence[int]) -> None:
        """Delete checkpoints at the service. Raises ConfigError for the newest, CheckpointError for unknown ones."""
        wanted = sorted(set(steps))
        if not wanted:
            return
        kept = await self.checkpoints(model)
        if kept and kept[-1] in wanted:
            raise ConfigError(f"checkpoint {kept[-1]} of {model.name} is the newest and is served; it stays")
        if unknown := [step for step in wanted if step not in kept]:
            raise CheckpointError(f"{model.name} has no checkpoints {unknown} at the service; there are: {kept}")
        await self._service.delete_checkpoints(self._registered(model).there.id, wanted)

    # Serving -------------------------------------------------------------------------------------

    def app(self, model: TrainableModel) -> ASGIApp:
        return ServiceEndpoint(self._service, self._registered(model), self._captures)

    def endpoint(self, model: TrainableModel) -> tuple[str, str]:
        """(base URL, API key) of the service's endpoint."""
        self._registered(model)
        return self._service.base_url, self._service.key

    def api_key(self, model: TrainableModel) -> str:
        return self._service.key

    def context_tokens(self, model: TrainableModel) -> int | None:
        """The service does not say."""
        return None

    def history(self, model: TrainableModel) -> History:
        registered = self._models.get((model.project, model.name))
        return registered.history if registered is not None else History(model.folder)

    def collector(self, model: TrainableModel) -> Collector:
        return self._registered(model).collector

    async def close(self) -> None:
        """End the following of the runs and close the connections. Jobs go on at the service. May be called again."""
        for project, name in self._models:
            await asyncio.to_thread(TRACKING.detach, f"{project}/{name}")
        await self._service.close()

    async def __aenter__(self) -> ServerlessBackend:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"ServerlessBackend({self._service.base_url!r}, models={sorted(name for _, name in self._models)})"
