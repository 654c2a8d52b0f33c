"""Model and TrainableModel: the user's handle. It forwards to a backend and holds no weights.

Async first. `register` starts at once and may be left without `await`; everything later waits for it.
`chat` is synchronous, for cells.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Generator, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from .capture import Collector
from .config import LoraConfig, TrainConfig, TrainSFTConfig
from .errors import ConfigError, nearest
from .events import EVENTS
from .notebook.loop import run_sync, spawn, ticking
from .tracking.history import History
from .tracking.summary import summarize
from .training.checkpoints import check_name, model_folder, steps_to_delete
from .trajectories import Messages, Trajectory, TrajectoryGroup, as_groups

if TYPE_CHECKING:
    import pandas as pd
    from openai import AsyncOpenAI
    from openai.types.chat import ChatCompletion

    from .autotrain import AutoTrainer
    from .backend import ASGIApp, Backend, TrainResult
    from .notebook.dashboard import Dashboard
    from .notebook.inspector import Inspector


class Registration:
    """A registration that has started. Await it, or go on: what needs it waits for it."""

    def __init__(self, future: concurrent.futures.Future[None]) -> None:
        self._future = future

    def __await__(self) -> Generator[Any, None, None]:
        return self.wait().__await__()

    async def wait(self) -> None:
        """Wait until it is done; being cancelled meanwhile does not stop it. Raises what it raised."""
        if not self._future.done():
            with ticking():
                await asyncio.shield(asyncio.wrap_future(self._future))
        self._future.result()

    def result(self, timeout: float | None = None) -> None:
        """Wait from synchronous code; raises what the registration raised."""
        self._future.result(timeout)

    @property
    def done(self) -> bool:
        return self._future.done()

    def __repr__(self) -> str:
        state = "running" if not self.done else "failed" if self._future.exception() else "done"
        return f"<registration {state}>"


class Model:
    """A model that is asked but not trained, e.g. a larger one to compare with.

    art.Model(name="gpt-4.1", project="demo", inference_base_url=..., inference_api_key=...)
    """

    trainable = False

    def __init__(
        self,
        name: str,
        project: str,
        *,
        run_name: str | None = None,
        entity: str | None = None,
        config: Any = None,
        inference_base_url: str | None = None,
        inference_api_key: str | None = None,
        inference_model_name: str | None = None,
        base_path: str | Path = ".art",
        **unknown: Any,
    ) -> None:
        for option in unknown:
            raise ConfigError(f"{type(self).__name__} has no option {option!r}{nearest(option, self._options())}")
        check_model_name(name)
        check_name(project, "project")
        self.name = name
        self.project = project
        self.run_name = run_name or name
        self.entity = entity
        self.config = config
        self.base_path = Path(base_path)
        self._base_url = inference_base_url
        self._api_key = inference_api_key
        self._inference_model_name = inference_model_name

    @classmethod
    def _options(cls) -> list[str]:
        own = ["name", "project", "run_name", "entity", "config", "base_path"]
        return [*own, "inference_base_url", "inference_api_key", "inference_model_name"]

    @property
    def folder(self) -> Path:
        """Where the model's history and checkpoints are: `<base path>/<project>/models/<name>`."""
        return model_folder(self.base_path, self.project, self.name)

    @property
    def inference_base_url(self) -> str | None:
        """Base URL of the OpenAI-compatible endpoint."""
        return self._base_url

    @property
    def inference_api_key(self) -> str | None:
        return self._api_key

    def get_inference_name(self, step: int | None = None) -> str:
        """The name to ask the endpoint for: the newest weights, or checkpoint `step`."""
        name = self._inference_model_name or self.name
        return name if step is None else f"{name}@{step}"

    def openai_client(self) -> AsyncOpenAI:
        """An `openai.AsyncOpenAI` for this model's endpoint."""
        from openai import AsyncOpenAI

        return AsyncOpenAI(base_url=self.inference_base_url, api_key=self.inference_api_key)

    def chat(self, messages: Messages | list[dict[str, Any]], **options: Any) -> ChatCompletion:
        """Ask once, synchronously; works in a cell, without `await`. `options` as in chat.completions.create."""
        step = options.pop("step", None)

        async def ask() -> Any:
            client = self.openai_client()
            return await client.chat.completions.create(
                model=self.get_inference_name(step), messages=cast(Any, messages), **options
            )

        return cast("ChatCompletion", run_sync(ask))

    def _history(self) -> History:
        return History(self.folder)

    async def log(
        self,
        trajectories: Iterable[Trajectory | TrajectoryGroup | BaseException] | None = None,
        split: str = "val",
        *,
        metrics: dict[str, float] | None = None,
        step: int | None = None,
    ) -> None:
        """Keep trajectories and metrics of `split` in the history. Groups logged before are not kept twice."""
        at = await self.get_step() if step is None else step
        history = self._history()
        groups = as_groups(trajectories or [])
        fresh = [g for g in groups if (self.name, split) not in g._logged]
        if fresh:
            history.log_trajectories(at, split, fresh)
            for group in fresh:
                group._logged.add((self.name, split))
        values = {**summarize(groups), **(metrics or {})}
        if values:
            history.log_metrics(at, split, values)
            EVENTS.emit("log", f"{self.project}/{self.name}", step=at, split=split, metrics=values)

    async def get_step(self) -> int:
        return 0

    def history(self) -> pd.DataFrame:
        """One row per step, a column per metric (`train/reward`, `val/reward`, `train/loss`, …), from disk."""
        return self._history().metrics()

    def trajectories(self, step: int | None = None, split: str | None = None) -> pd.DataFrame:
        """One row per trajectory, from disk."""
        return self._history().trajectories(step=step, split=split)

    def dashboard(
        self,
        *,
        compare: Sequence[Model | Path | str] = (),
        metrics: Sequence[str] = (),
        solved: str | None = None,
        steps: int | None = None,
        theme: Literal["auto", "light", "dark"] = "auto",
    ) -> Dashboard:
        """A live view of the run, before, during and after training; from disk, it needs no backend.

        model.dashboard(compare=[other_model, ".art/demo/models/agent-001"], solved="win", steps=20)

        Args:
            compare: other models, or folders of models, whose runs are laid over this one.
            metrics: metrics of yours that get a chart each; any other can be selected in the dashboard.
            solved: the metric that is the solve rate; None takes the first of the usual names that is logged.
            steps: how many steps are planned, for an estimate of when the run ends.

        A run has one dashboard: called again, it is the same one with the new options. `close()` ends it.
        """
        from .notebook.dashboard import open_dashboard

        return open_dashboard(self, compare=compare, metrics=metrics, solved=solved, steps=steps, theme=theme)

    def inspect(
        self,
        step: int | None = None,
        split: str | None = None,
        trajectories: Iterable[Trajectory] | None = None,
        groups: Iterable[TrajectoryGroup] | None = None,
        *,
        config: TrainConfig | None = None,
        max_row_tokens: int | None = None,
    ) -> Inspector:
        """Read trajectories in the notebook: `inspector = model.inspect()`, then `inspector.selection()`.

        Without arguments the newest step of the history, training rollouts before others; it needs no backend.
        `groups` are shown as they are, `trajectories` as one group. `config` and `max_row_tokens` (the model's context)
        are those of the step, where they were not the default: advantages and reasons come from them.
        """
        from .notebook.inspector import Inspector

        if trajectories is not None:
            if groups is not None:
                raise ConfigError("inspect: give either trajectories or groups")
            groups = [TrajectoryGroup(trajectories)]
        history = self._history() if groups is None else None
        return Inspector(
            None if groups is None else as_groups(groups),
            history=history,
            step=step,
            split=split,
            config=config,
            max_row_tokens=max_row_tokens,
            title=self.name,
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, project={self.project!r})"


class TrainableModel(Model):
    """The model that learns: a LoRA adapter on `base_model` (a Hugging Face id or a folder).

    model = art.TrainableModel(name="agent-001", project="demo", base_model="Qwen/Qwen2.5-0.5B-Instruct")
    await model.register(art.LocalBackend())
    """

    trainable = True

    def __init__(
        self,
        name: str,
        project: str,
        base_model: str | Path,
        *,
        lora: LoraConfig | None = None,
        **options: Any,
    ) -> None:
        for option in ("inference_base_url", "inference_api_key"):
            if option in options:
                raise ConfigError(f"TrainableModel: {option} comes from the backend; leave it out")
        super().__init__(name, project, **options)
        self.base_model = str(base_model)
        self.lora = lora or LoraConfig()
        self._backend: Backend | None = None
        self._registration: Registration | None = None
        self._client: AsyncOpenAI | None = None

    @classmethod
    def _options(cls) -> list[str]:
        return [*super()._options(), "base_model", "lora"]

    def register(self, backend: Backend) -> Registration:
        """Start serving and training this model on `backend`. Starts at once, with or without `await`."""
        running = self._registration
        failed = running is not None and running.done and running._future.exception() is not None
        if self._backend is not backend or running is None or failed:
            self._backend = backend
            self._client = None
            self._registration = Registration(spawn(backend.register(self)))
        assert self._registration is not None
        return self._registration

    def backend(self) -> Backend:
        """The backend; raises if the model was never registered."""
        if self._backend is None:
            raise ConfigError(f"{self.name} is not registered; call `await model.register(art.LocalBackend())` first")
        return self._backend

    async def ready(self) -> Backend:
        """Wait for the registration; returns the backend."""
        backend = self.backend()
        assert self._registration is not None
        await self._registration.wait()
        return backend

    def _ready_sync(self) -> Backend:
        backend = self.backend()
        assert self._registration is not None
        self._registration.result()
        return backend

    @property
    def inference_base_url(self) -> str:
        """Base URL of the endpoint over HTTP; the first use starts the server on 127.0.0.1."""
        return self._ready_sync().endpoint(self)[0]

    @property
    def inference_api_key(self) -> str:
        return self._ready_sync().api_key(self)

    def openai_client(self) -> AsyncOpenAI:
        """An `openai.AsyncOpenAI` that goes straight to the endpoint in this process; it needs no port."""
        from .serving.transport import make_async_client

        if self._client is None or self._client.is_closed():
            self._client = make_async_client(self._app())
        return self._client

    def _app(self) -> ASGIApp:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            backend = await self.ready()
            if scope["type"] == "http":
                # The client is made before the registration, and so the key, is there.
                headers = [(k, v) for k, v in scope["headers"] if k.lower() != b"authorization"]
                bearer = f"Bearer {backend.api_key(self)}".encode()
                scope = {**scope, "headers": [*headers, (b"authorization", bearer)]}
            await backend.app(self)(scope, receive, send)

        return app

    def _history(self) -> History:
        return self._backend.history(self) if self._backend is not None else super()._history()

    async def train(
        self,
        trajectory_groups: Iterable[TrajectoryGroup] | None = None,
        config: TrainConfig | None = None,
        **options: Any,
    ) -> TrainResult:
        """One step: train on `trajectory_groups`, save the checkpoint, serve it, keep it all in the history.

        Without groups it trains on what `art.trajectory()` scopes captured and scored since the last call.
        """
        backend = await self.ready()
        if trajectory_groups is None:
            trajectory_groups = backend.collector(self).pop_all(min_size=2)
            if not trajectory_groups:
                raise ConfigError(
                    "model.train() found nothing collected: run rollouts inside `async with art.trajectory(group=...) "
                    "as t:` and set t.reward in at least two of a group, or pass trajectory_groups"
                )
        return await backend.train(self, trajectory_groups, config, **options)

    def auto_train(
        self,
        *,
        groups_per_step: int,
        group_size: int,
        config: TrainConfig | None = None,
        on_step: Any = None,
    ) -> AutoTrainer:
        """Train by itself whenever `groups_per_step` groups of `group_size` scored trajectories are collected."""
        from .autotrain import AutoTrainer

        return AutoTrainer(self, groups_per_step=groups_per_step, group_size=group_size, config=config, on_step=on_step)

    async def train_sft(
        self,
        trajectories: Iterable[Trajectory],
        config: TrainSFTConfig | None = None,
    ) -> TrainResult:
        """One supervised step on the assistant turns of `trajectories`."""
        backend = await self.ready()
        return await backend.train_sft(self, trajectories, config)

    async def get_step(self) -> int:
        """The newest checkpoint's step."""
        backend = await self.ready()
        return await backend.get_step(self)

    async def delete_checkpoints(self, best_checkpoint_metric: str = "val/reward", *, keep_last: int = 1) -> list[int]:
        """Delete all checkpoints but the newest `keep_last` and the best by a metric of the history."""
        backend = await self.ready()
        steps = await backend.checkpoints(self)
        gone = steps_to_delete(steps, self.history(), best_checkpoint_metric, keep_last)
        await backend.delete_checkpoints(self, gone)
        return gone

    def collector(self) -> Collector:
        """Captured and scored trajectories that wait for `train()`."""
        return self._ready_sync().collector(self)

    def __repr__(self) -> str:
        return f"TrainableModel({self.name!r}, project={self.project!r}, base_model={self.base_model!r})"


def check_model_name(name: str) -> None:
    """A name is a folder and, with "@step" behind it, a served model."""
    check_name(name)
    if "@" in name:
        raise ConfigError(f"name={name!r} must not hold '@': name@step asks for a checkpoint")
