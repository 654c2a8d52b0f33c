"""RemoteBackend: engine and trainer on another machine that runs `artnb serve`, seen from here as any backend.

Rollouts run here and sample there; a step sends its rollouts, goes on there whatever becomes of the connection, and its
result is fetched by whoever asks for it again. Needs the core install only: no torch, no server.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from ..backend import ASGIApp, TrainResult, check_groups, chosen_config
from ..capture import Collector
from ..config import TrainConfig, TrainSFTConfig, check_number
from ..errors import ConfigError, ServiceError
from ..events import EVENTS
from ..tracking.follow import TRACKING
from ..tracking.history import History
from ..tracking.summary import summarize
from ..trajectories import Trajectory, TrajectoryGroup
from . import capture
from .bars import Bars
from .checkpoints import fetch_checkpoint, read_adapter, send_adapter
from .connection import Connection, StatusError
from .follow import RemoteJob
from .forward import Forward
from .registered import Mirror, Registered, lora_json
from .wire import NOT_REGISTERED, groups_json, read_error, read_result, trajectories_json

if TYPE_CHECKING:
    from concurrent.futures import Future

    from ..model import TrainableModel

log = logging.getLogger("artnb")
KEY_VARIABLE = "ARTNB_API_KEY"
LOGS_S = 30.0
"""Seconds that closing waits for what was logged to reach the server; this disk has it in any case."""


class RemoteBackend:
    """Serve and train on the machine where `artnb serve` runs.

    backend = art.RemoteBackend("https://gpu.example:8765")  # the key from $ARTNB_API_KEY, or api_key=
    await model.register(backend)

    The history is kept here, in the model's folder (`model.folder`), and there. Checkpoints are there;
    `pull_checkpoint` fetches one.
    """

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        *,
        ca_file: str | Path | None = None,
        reconnect_seconds: float = 600.0,
        verbose: bool = True,
    ) -> None:
        """
        Args:
            url: as `artnb serve` prints it, without /v1.
            api_key: the server's key; None takes $ARTNB_API_KEY.
            ca_file: PEM file of the certificate, or of its authority, where the system does not know it.
            reconnect_seconds: how long a server that went away is tried again before a call fails.
        """
        me = "RemoteBackend"
        check_number(me, "reconnect_seconds", reconnect_seconds, low=0.0)
        key = api_key if api_key is not None else os.environ.get(KEY_VARIABLE, "")
        if not isinstance(key, str) or not key.strip() or not key.isascii():
            raise ConfigError(f"{me}: pass api_key= or set ${KEY_VARIABLE} to the key of `artnb serve`")
        self.verbose = verbose
        self._connection = Connection(url, key.strip(), ca_file=ca_file, reconnect_s=reconnect_seconds, say=self._say)
        self._captures = capture.join(self._connection.url)
        self._models: dict[str, Registered] = {}
        self._logs: set[Future[None]] = set()
        self._closed = False
        if not self._connection.is_loopback and self._connection.url.startswith("http://"):
            log.warning("%s is not encrypted: the key and all rollouts can be read on the way; use TLS", url)

    def _say(self, line: str) -> None:
        if self.verbose:
            print(f"artnb: {line}", flush=True)

    # Registering -----------------------------------------------------------------------------------

    async def register(self, model: TrainableModel) -> None:
        """Let the server load the base, resume or create the adapter, and serve it. A second call reads its step anew.

        Steps that the history here lacks are copied. Raises: ServiceError, with the status; ModelError (a base that is
        unknown there, or not offered), ConfigError (the folder here, or there, is of another run), CheckpointError.
        """
        if self._closed:
            raise ConfigError("this RemoteBackend is closed; make a new one with art.RemoteBackend(url)")
        known = self._models.get(model.name)
        if known is not None:
            known.check_same(model)
            await self._register(known)
            return
        registered = Registered(model, self._connection.url, self._mirror)
        await asyncio.to_thread(registered.open)
        try:
            await self._register(registered)
        except BaseException:
            registered.close()
            raise
        self._models[model.name] = registered
        self._captures.register_collector(model.name, registered.collector)
        state = f"resumes at step {registered.step}" if registered.step else "starts at step 0"
        self._say(f"{model.name} {state} at {self._connection.url}; history in {registered.folder}")

    async def _register(self, registered: Registered) -> None:
        job = self._job(registered, "register", lambda: self._registration(registered), restore=False)
        with Bars(self.verbose) as bars:
            async for kind, data in self._connection.iterate(job.events):
                if kind == "progress":
                    bars.show(data)
        await asyncio.to_thread(registered.take, self._outcome(job)["result"])
        await self._catch_up(registered)

    def _registration(self, registered: Registered) -> dict[str, Any]:
        lora = lora_json(registered.lora)
        return {**registered.of_model(), "base_model": registered.base_model, "lora": lora}

    async def _restore(self, registered: Registered) -> bool:
        """Register the model again if the server does not know it, e.g. since it was restarted; whether it had to be.

        On the connection's own loop.
        """
        try:
            await self._connection.json("GET", registered.path, doing=f"looking for {registered.name}")
        except StatusError as error:
            if error.code != NOT_REGISTERED:
                raise
        else:
            return False
        job = self._job(registered, "register", lambda: self._registration(registered), restore=False)
        async with contextlib.aclosing(job.events()) as events:
            async for _ in events:
                pass
        self._outcome(job)
        return True

    async def _catch_up(self, registered: Registered) -> None:
        """Copy what the server's history has of later steps: a kernel that was killed missed the end of its step."""
        last = await asyncio.to_thread(registered.last_step)
        if last >= registered.step > 0:
            return
        listed = await self._ask(
            "GET", f"{registered.path}/history", f"history of {registered.name}", params={"after": last}
        )
        here = await asyncio.to_thread(registered.history.saved)
        missing = [(step, split) for step, split in listed["trajectories"] if (step, split) not in here]
        for record in listed["metrics"]:
            step, split, metrics = record["step"], record["split"], record["metrics"]
            await asyncio.to_thread(registered.history.keep, step, split, None, metrics, time=record["time"])
        for step, split in missing:
            lines = await self._connection.run(functools.partial(self._lines, registered, step, split))
            await asyncio.to_thread(registered.copy_trajectories, step, split, lines)
        if missing:
            self._say(f"{registered.name}: the history of {len(missing)} step(s) was fetched from the server")

    async def _lines(self, registered: Registered, step: int, split: str) -> bytes:
        path = f"{registered.path}/history/{quote(split, safe='')}/{step}"
        patience = self._connection.patience()
        while True:
            try:
                async with self._connection.stream(path, doing=f"trajectories of step {step}") as response:
                    return bytes(await response.aread())
            except self._connection.cut as error:
                await patience.wait(error, f"trajectories of step {step}")

    def _registered(self, model: TrainableModel) -> Registered:
        registered = self._models.get(model.name)
        if registered is None or self._closed:
            state = "closed" if self._closed else "not registered here"
            raise ConfigError(f"{model.name} is {state}; call `await model.register(backend)` first")
        return registered

    # Training --------------------------------------------------------------------------------------

    async def train(
        self,
        model: TrainableModel,
        trajectory_groups: Iterable[TrajectoryGroup],
        config: TrainConfig | None = None,
        **options: Any,
    ) -> TrainResult:
        """One GRPO step; see `Backend.train`. A connection that is cut meanwhile changes nothing of it.

        Interrupting it ends the step at the server, which stays at its last complete one. Raises what a LocalBackend
        raises, and ServiceError: 409 when another client has trained the model, 413 when the rollouts are too large.
        """
        chosen = chosen_config(config, options)
        groups = check_groups(trajectory_groups)
        body = lambda: {"config": chosen.to_dict(), "groups": groups_json(groups)}  # noqa: E731
        return await self._step(self._registered(model), "train", body, groups, "train")

    async def train_sft(
        self, model: TrainableModel, trajectories: Iterable[Trajectory], config: TrainSFTConfig | None = None
    ) -> TrainResult:
        """One supervised step over all `trajectories`."""
        rows, chosen = list(trajectories), config or TrainSFTConfig()
        body = lambda: {"config": asdict(chosen), "trajectories": trajectories_json(rows)}  # noqa: E731
        return await self._step(self._registered(model), "train_sft", body, [], "sft")

    async def _step(
        self,
        registered: Registered,
        kind: str,
        body: Callable[[], Mapping[str, Any]],
        groups: list[TrajectoryGroup],
        split: str,
    ) -> TrainResult:
        job = self._job(registered, kind, lambda: {"from_step": registered.step, **registered.of_model(), **body()})

        async def in_turn() -> Any:
            async with registered.turn, contextlib.aclosing(job.events()) as events:
                try:
                    async for event in events:
                        yield event
                finally:
                    if job.outcome is not None and job.outcome["step"] is not None:
                        registered.step = job.outcome["step"]

        before = registered.step
        try:
            with Bars(self.verbose) as bars:
                async for event, data in self._connection.iterate(in_turn):
                    if event == "progress":
                        bars.show(data)
        except (asyncio.CancelledError, KeyboardInterrupt):
            if job.outcome is not None and job.outcome["state"] == "done":  # it was made before it could be stopped
                self._keep(registered, job.outcome["result"], groups, split)
            raise
        if job.outcome is not None and job.outcome["state"] == "failed" and registered.step > before:
            await self._catch_up(registered)  # e.g. a run that was stopped after a step that was kept
        return await asyncio.to_thread(self._keep, registered, self._outcome(job)["result"], groups, split)

    def _keep(
        self, registered: Registered, answer: Mapping[str, Any], groups: list[TrajectoryGroup], split: str
    ) -> TrainResult:
        """The step's result, in the history here."""
        result = read_result(answer, groups)
        logged = {**summarize(groups), **result.metrics}
        registered.history.keep(result.step, split, groups, logged)
        for group in groups:
            group._logged.add((registered.name, split))
        if result.reasons or not result.trained:
            self._say(str(result) if result.trained or not result.notes else f"step {result.step}: {result.notes[0]}")
        EVENTS.emit(
            "step",
            registered.key,
            step=result.step,
            split=split,
            metrics=logged,
            groups=groups,
            reasons=dict(result.reasons),
            notes=list(result.notes),
        )
        return result

    def _job(
        self, registered: Registered, kind: str, body: Callable[[], Mapping[str, Any]], *, restore: bool = True
    ) -> RemoteJob:
        return RemoteJob(
            self._connection,
            lambda: {"kind": kind, **body()},
            f"{kind} of {registered.name}",
            (lambda: self._restore(registered)) if restore else None,
        )

    def _outcome(self, job: RemoteJob) -> dict[str, Any]:
        """The outcome of a job that was done; raises what it raised there."""
        outcome = job.outcome
        assert outcome is not None
        if outcome["state"] == "failed":
            raise read_error(outcome["error"], self._connection.url)
        if outcome["state"] == "cancelled":
            raise ServiceError(f"{job.doing}: it was cancelled at {self._connection.url} by another client")
        return outcome

    async def _ask(self, method: str, path: str, doing: str, **options: Any) -> Any:
        return await self._connection.run(lambda: self._connection.json(method, path, doing=doing, **options))

    async def _state(self, registered: Registered) -> dict[str, Any]:
        async def ask() -> dict[str, Any]:
            doing = f"state of {registered.name}"
            try:
                found = await self._connection.json("GET", registered.path, doing=doing)
            except StatusError as error:
                if error.code != NOT_REGISTERED:
                    raise
                await self._restore(registered)
                found = await self._connection.json("GET", registered.path, doing=doing)
            state: dict[str, Any] = found
            if not registered.turn.locked():  # a step of ours knows better
                registered.step = state["step"]
            return state

        return await self._connection.run(ask)

    async def get_step(self, model: TrainableModel) -> int:
        """The newest step at the server; the next `train` starts from it."""
        step: int = (await self._state(self._registered(model)))["step"]
        return step

    # Logging ---------------------------------------------------------------------------------------

    async def log(
        self, model: TrainableModel, groups: Iterable[Trajectory | TrajectoryGroup], split: str = "val"
    ) -> None:
        """The same as `model.log`."""
        await model.log(groups, split)

    def _mirror(self, registered: Registered) -> Mirror:
        def mirror(step: int, split: str, groups: list[TrajectoryGroup], metrics: dict[str, Any]) -> None:
            body = {**registered.of_model(), "step": step, "split": split, "metrics": metrics}

            async def send() -> None:
                job = self._job(registered, "log", lambda: {**body, "groups": groups_json(groups)})
                try:
                    async with registered.log_turn, contextlib.aclosing(job.events()) as events:
                        async for _ in events:
                            pass
                    self._outcome(job)
                except Exception as error:
                    log.warning("%s of step %d are in the history here, but not at the server: %s", split, step, error)

            if not self._closed:
                future = self._connection.spawn(send)
                self._logs.add(future)
                future.add_done_callback(self._logs.discard)

        return mirror

    # Checkpoints -----------------------------------------------------------------------------------

    async def checkpoints(self, model: TrainableModel) -> list[int]:
        """Steps whose complete checkpoints the server keeps, ascending."""
        steps: list[int] = (await self._state(self._registered(model)))["checkpoints"]
        return steps

    async def delete_checkpoints(self, model: TrainableModel, steps: Sequence[int]) -> None:
        """Delete checkpoints at the server. Raises ConfigError for the newest, CheckpointError for unknown ones."""
        registered = self._registered(model)
        job = self._job(registered, "delete_checkpoints", lambda: {**registered.of_model(), "steps": list(steps)})
        async for _ in self._connection.iterate(job.events):
            pass
        self._outcome(job)

    async def pull_checkpoint(self, model: TrainableModel, step: int | None = None) -> Path:
        """Fetch a checkpoint's adapter, by default the newest: a PEFT folder below `model.folder`.

        Safetensors and JSON only, each checked against its SHA-256. The optimizer's state stays at the server.
        Raises: ServiceError (404: there is no such checkpoint), CheckpointError.
        """
        registered = self._registered(model)
        chosen = await self.get_step(model) if step is None else step
        return await self._connection.run(lambda: fetch_checkpoint(self._connection, registered, chosen))

    async def push_checkpoint(self, model: TrainableModel, folder: str | Path) -> TrainResult:
        """Make the PEFT adapter in `folder` the model's next step at the server, with a fresh optimizer.

        Raises: CheckpointError for a folder that is no adapter of this model's shape; ServiceError.
        """
        registered = self._registered(model)
        config, weights, sha256 = await asyncio.to_thread(read_adapter, Path(folder))
        await self._connection.run(
            lambda: send_adapter(self._connection, registered, weights, sha256, lambda: self._restore(registered))
        )
        body = lambda: {"adapter": sha256, "adapter_config": config}  # noqa: E731
        return await self._step(registered, "push", body, [], "push")

    # Serving ---------------------------------------------------------------------------------------

    def app(self, model: TrainableModel) -> ASGIApp:
        registered = self._registered(model)
        return Forward(self._connection, lambda: self._restore(registered))

    def endpoint(self, model: TrainableModel) -> tuple[str, str]:
        """(base URL, API key) of the server's own endpoint."""
        self._registered(model)
        return f"{self._connection.url}/v1", self._connection.api_key

    def api_key(self, model: TrainableModel) -> str:
        self._registered(model)
        return self._connection.api_key

    def context_tokens(self, model: TrainableModel) -> int | None:
        return self._registered(model).context_tokens

    def history(self, model: TrainableModel) -> History:
        registered = self._models.get(model.name)
        return History(model.folder) if registered is None else registered.history

    def collector(self, model: TrainableModel) -> Collector:
        return self._registered(model).collector

    # Closing ---------------------------------------------------------------------------------------

    async def flush(self) -> None:
        """Wait until what was logged has reached the server."""
        pending = [asyncio.wrap_future(future) for future in self._logs]
        if pending:
            await asyncio.wait(pending)

    async def close(self) -> None:
        """Give the folders here back and end the connection; models stay served at the server. May be called again."""
        if self._closed:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOGS_S):
                await self.flush()
        self._closed = True
        models, self._models = self._models, {}
        for registered in models.values():
            await asyncio.to_thread(TRACKING.detach, registered.key)
            if self._captures.collector(registered.name) is registered.collector:
                self._captures.unregister_collector(registered.name)
            registered.close()
        capture.leave(self._connection.url)
        await asyncio.to_thread(self._connection.close)

    async def __aenter__(self) -> RemoteBackend:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"RemoteBackend({self._connection.url!r}, models={sorted(self._models)})"
