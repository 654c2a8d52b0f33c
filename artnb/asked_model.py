"""Model: a model that is asked but not trained, and what every model handle has. Knows no backend.

`chat` is synchronous, for cells.
"""

from __future__ import annotations

from collections.abc import Awaitable, Generator, Iterable, Sequence
from pathlib import Path
from types import GenericAlias
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

from .config import TrainConfig
from .errors import ConfigError, nearest
from .events import EVENTS
from .notebook.loop import run_sync
from .state import merged, read_state, write_state
from .tracking.choose import check_report_metrics, configure, track
from .tracking.history import History
from .tracking.summary import summarize
from .training.checkpoints import check_name, model_folder
from .trajectories import Messages, Trajectory, TrajectoryGroup, as_groups

if TYPE_CHECKING:
    import pandas as pd
    from openai import AsyncOpenAI
    from openai.types.chat import ChatCompletion

    from .backend import Backend
    from .notebook.dashboard import Dashboard
    from .notebook.inspector import Inspector
    from .tracking.tracker import Tracker


class Model:
    """A model that is asked but not trained, e.g. a larger one to compare with.

    art.Model(name="gpt-4.1", project="demo", inference_base_url=..., inference_api_key=...)

    `report_metrics`: where metrics go besides the history on disk, e.g. ["wandb"]; [] is nowhere. None is W&B where
    WANDB_API_KEY is set. See docs/tracking.md.
    """

    trainable = False
    id: str | None = None  # at a service that has such
    run_id: str | None = None
    # Annotations such as Model[MyConfig] are for readers: `config` is whatever was given.
    __class_getitem__: ClassVar[Any] = classmethod(GenericAlias)

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
        report_metrics: Sequence[str | Tracker] | None = None,
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
        self.base_path = Path(base_path).expanduser().absolute()
        self.report_metrics = check_report_metrics(report_metrics)
        self._run_config: dict[str, Any] = {}
        self._base_url = inference_base_url
        self._api_key = inference_api_key
        self._inference_model_name = inference_model_name
        self._step_mark = "@"
        self._backend: Backend | None = None

    @classmethod
    def _options(cls) -> list[str]:
        own = ["name", "project", "run_name", "entity", "config", "base_path", "report_metrics"]
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
        name = self.inference_model_name
        return name if step is None else f"{name}{self._step_mark}{step}"

    @property
    def inference_model_name(self) -> str:
        """The name of the newest weights at the endpoint."""
        return self._inference_model_name or self.name

    def serve_as(self, name: str, *, step_mark: str) -> None:
        """For backends whose endpoint has names of its own: checkpoint 3 is `<name><step_mark>3` there."""
        self._inference_model_name, self._step_mark = name, step_mark

    def register(self, backend: Backend) -> Awaitable[None]:
        """Keep the history where `backend` keeps its models'. Nothing is loaded: a model of this kind is asked only."""
        self._backend = backend
        if (path := getattr(backend, "path", None)) is not None:
            self.base_path = Path(path)
        return _Done()

    def backend(self) -> Backend:
        """The backend; raises if the model was never registered."""
        if self._backend is None:
            raise ConfigError(f"{self.name} is not registered; call `await model.register(art.LocalBackend())` first")
        return self._backend

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

    def litellm_completion_params(self, step: int | None = None) -> dict[str, Any]:
        """What `litellm.acompletion(messages=..., **params)` needs to ask this model."""
        name = self.get_inference_name(step)
        return {
            "model": f"hosted_vllm/{name}" if self.trainable else name,
            "base_url": self.inference_base_url,
            "api_key": self.inference_api_key,
            "temperature": 1,
        }

    def read_state(self) -> dict[str, Any] | None:
        """What `overwrite_state` or `merge_state` kept last, also in an earlier kernel; None if nothing."""
        return read_state(self.folder)

    def overwrite_state(self, state: dict[str, Any]) -> None:
        """Keep a JSON object beside the history, in place of the one that is there."""
        write_state(self.folder, state)

    def merge_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """Lay `state` over what is kept, objects inside of it too; returns what is kept now."""
        both = merged(self.read_state() or {}, state)
        self.overwrite_state(both)
        return both

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
        track(self)
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
            EVENTS.emit("log", f"{self.project}/{self.name}", step=at, split=split, metrics=values, groups=fresh)

    def update_wandb_config(self, config: dict[str, Any]) -> None:
        """Further entries for the config of the run at W&B (JSON values), before or after it has started."""
        configure(self, config)

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


class _Done(Awaitable[None]):
    """What has happened already; may be awaited, or left."""

    def __await__(self) -> Generator[Any, None, None]:
        yield from ()


def check_model_name(name: str) -> None:
    """A name is a folder and, with "@step" behind it, a served model."""
    check_name(name)
    if "@" in name:
        raise ConfigError(f"name={name!r} must not hold '@': name@step asks for a checkpoint")
