"""RemoteBackend: engine and trainer on another machine that runs `artnb serve`, seen from here as any backend.

Rollouts run here and sample there; a step sends its rollouts, goes on there whatever becomes of the connection, and its
result is fetched by whoever asks for it again. Needs the core install only: no torch, no server.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..backend import ASGIApp, TrainResult, TurnLogprobs, check_groups
from ..capture import Collector
from ..compat.options import train_config
from ..config import TrainConfig, TrainSFTConfig, check_number
from ..errors import ConfigError
from ..tracking.follow import TRACKING
from ..tracking.history import KEPT_EXAMPLES, History
from ..trajectories import Trajectory, TrajectoryGroup
from . import capture
from .checkpoints import fetch_checkpoint, read_adapter, send_adapter
from .connection import Connection, understood
from .forward import Forward
from .link import Link
from .wire import groups_json, read_turns, trajectories_json

if TYPE_CHECKING:
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
        self._models: dict[str, Link] = {}
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
            await known.register()
            return
        link = Link(model, self._connection, verbose=self.verbose, say=self._say)
        await asyncio.to_thread(link.open)
        try:
            await link.register()
        except BaseException:
            link.close()
            raise
        self._models[model.name] = link
        self._captures.register_collector(model.name, link.collector)
        state = f"resumes at step {link.step}" if link.step else "starts at step 0"
        self._say(f"{model.name} {state} at {self._connection.url}; history in {link.folder}")

    def _link(self, model: TrainableModel) -> Link:
        link = self._models.get(model.name)
        if link is None or self._closed:
            state = "closed" if self._closed else "not registered here"
            raise ConfigError(f"{model.name} is {state}; call `await model.register(backend)` first")
        return link

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
        raises, and ServiceError: 409 when another client has trained the model, 413 when the rollouts are too large,
        none when the server could not be reached for `reconnect_seconds`: the same call then goes on where it was.
        """
        chosen = train_config(config, options)
        groups = check_groups(trajectory_groups)

        def body() -> dict[str, Any]:
            return {"config": chosen.to_dict(), "groups": groups_json(groups)}

        return await self._link(model).make_step("train", body, "train", trained=groups, kept=groups)

    async def train_sft(
        self, model: TrainableModel, trajectories: Iterable[Trajectory], config: TrainSFTConfig | None = None
    ) -> TrainResult:
        """One supervised step over all `trajectories`."""
        rows, chosen = list(trajectories), config or TrainSFTConfig()

        def body() -> dict[str, Any]:
            return {"config": asdict(chosen), "trajectories": trajectories_json(rows)}

        kept = [TrajectoryGroup([row]) for row in rows[:KEPT_EXAMPLES]]
        return await self._link(model).make_step("train_sft", body, "sft", kept=kept)

    async def get_step(self, model: TrainableModel) -> int:
        """The newest step at the server; the next `train` starts from it."""
        return (await self._link(model).state())[0]

    async def log(
        self, model: TrainableModel, groups: Iterable[Trajectory | TrajectoryGroup], split: str = "val"
    ) -> None:
        """The same as `model.log`: kept here, then sent to the server's history."""
        await model.log(groups, split)

    async def base_logprobs(
        self, model: TrainableModel, trajectories: Sequence[Trajectory]
    ) -> list[TurnLogprobs | None]:
        """How likely the base, every adapter off, finds the assistant turns of each trajectory; see HasBaseLogprobs."""
        rows = list(trajectories)
        link = self._link(model)
        answer = await link.run("base_logprobs", lambda: {"trajectories": trajectories_json(rows)})
        with understood(f"log-probs of {link.name}", link.url):
            return read_turns(answer["turns"])

    # Checkpoints -----------------------------------------------------------------------------------

    async def checkpoints(self, model: TrainableModel) -> list[int]:
        """Steps whose complete checkpoints the server keeps, ascending."""
        return (await self._link(model).state())[1]

    async def delete_checkpoints(self, model: TrainableModel, steps: Sequence[int]) -> None:
        """Delete checkpoints at the server. Raises ConfigError for the newest, CheckpointError for unknown ones."""
        await self._link(model).run("delete_checkpoints", lambda: {"steps": list(steps)})

    async def pull_checkpoint(self, model: TrainableModel, step: int | None = None) -> Path:
        """Fetch a checkpoint's adapter, by default the newest: a PEFT folder below `model.folder`.

        Safetensors and JSON only, each checked against its SHA-256. The optimizer's state stays at the server.
        Raises: ServiceError (404: there is no such checkpoint), CheckpointError.
        """
        link = self._link(model)
        chosen = await self.get_step(model) if step is None else step
        return await self._connection.run(lambda: fetch_checkpoint(self._connection, link, chosen))

    async def push_checkpoint(self, model: TrainableModel, folder: str | Path) -> TrainResult:
        """Make the PEFT adapter in `folder` the model's next step at the server, with a fresh optimizer.

        Raises: CheckpointError for a folder that is no adapter, ConfigError for one of another shape; ServiceError.
        """
        link = self._link(model)
        config, weights, sha256 = await asyncio.to_thread(read_adapter, Path(folder))
        await self._connection.run(lambda: send_adapter(self._connection, link, weights, sha256, link.restore))
        return await link.make_step("push", lambda: {"adapter": sha256, "adapter_config": config}, "push", kept=())

    async def fork_checkpoint(
        self,
        model: TrainableModel,
        from_model: str,
        from_project: str | None = None,
        *,
        step: int | None = None,
        not_after_step: int | None = None,
    ) -> int:
        """Start `model` from a checkpoint of another model at the server; see `LocalBackend.fork_checkpoint`.

        Before `register`. An adapter of this machine begins a model by `register`, then `push_checkpoint`.
        """
        for option, value in (("step", step), ("not_after_step", not_after_step)):
            if value is not None:
                check_number("fork_checkpoint", option, value, low=0, whole=True)
        link = Link(model, self._connection, verbose=self.verbose, say=self._say)
        origin = {"from_model": from_model, "from_project": from_project or model.project}
        which = {"step": step, "not_after_step": not_after_step}
        made = await link.run("fork", lambda: {**link.shape(), **origin, **which})
        with understood(f"fork of {from_model}", link.url):
            return int(made["step"])

    # Serving ---------------------------------------------------------------------------------------

    def app(self, model: TrainableModel) -> ASGIApp:
        return Forward(self._connection, self._link(model).restore)

    def endpoint(self, model: TrainableModel) -> tuple[str, str]:
        """(base URL, API key) of the server's own endpoint."""
        self._link(model)
        return f"{self._connection.url}/v1", self._connection.api_key

    def api_key(self, model: TrainableModel) -> str:
        self._link(model)
        return self._connection.api_key

    def context_tokens(self, model: TrainableModel) -> int | None:
        return self._link(model).context_tokens

    def history(self, model: TrainableModel) -> History:
        link = self._models.get(model.name)
        return History(model.folder) if link is None else link.history

    def collector(self, model: TrainableModel) -> Collector:
        return self._link(model).collector

    # Closing ---------------------------------------------------------------------------------------

    async def flush(self) -> None:
        """Wait until what was logged has reached the server's history."""
        for link in self._models.values():
            await link.flush()

    async def close(self) -> None:
        """Give the folders here back and end the connection; models stay served at the server. May be called again."""
        if self._closed:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOGS_S):
                await self.flush()
        self._closed = True
        models, self._models = self._models, {}
        for link in models.values():
            await asyncio.to_thread(TRACKING.detach, link.key)
            if self._captures.collector(link.name) is link.collector:
                self._captures.unregister_collector(link.name)
            link.close()
        capture.leave(self._connection.url)
        await asyncio.to_thread(self._connection.close)

    async def __aenter__(self) -> RemoteBackend:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"RemoteBackend({self._connection.url!r}, models={sorted(self._models)})"
