"""Weights & Biases: one run for a model's whole life, online or offline.

A model's run keeps its id, in the model's folder: a session that goes on with the model goes on with the run, and sends
what W&B missed. Metrics have `training_step` as their axis, so a late one (an evaluation of step 3 that ends after step
7) keeps its place. Never asks for a key, and never holds up a step: where W&B cannot be used, the same run is written
offline, to be sent later by `wandb sync`.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..config import check_choice, check_number
from .history import History
from .tracker import Logged, RunInfo, State, logger

if TYPE_CHECKING:
    from wandb import Run, Settings

AXIS = "training_step"
REACH_S = 5.0
"""Seconds within which W&B has to answer at all."""
INIT_S = 30.0
Mode = Literal["online", "offline", "disabled"]
_MODES: tuple[Mode, ...] = ("online", "offline", "disabled")
_DELETED = "previously created and deleted"
"""What W&B says of the id of a run that somebody deleted there: it cannot be used again."""


@dataclass(frozen=True)
class WandbTracker:
    """Where and how the run is kept at W&B.

    model = art.TrainableModel(..., report_metrics=[WandbTracker(mode="offline", tags=("baseline",))])

    Args:
        mode: None is WANDB_MODE or else "online". Without a key or a network an online run is written offline.
        project, entity: None are the model's.
        id: the run's id; None makes one, and keeps it in the model's folder.
        directory: where W&B's files go, in a folder `wandb`; None is WANDB_DIR or else the model's folder.
        trajectories: also a W&B table of each step's trajectories.
        finish_timeout: seconds that the end of the run waits for uploads; what is left can be sent by `wandb sync`.
        settings: further `wandb.Settings` by name.
    """

    mode: Mode | None = None
    project: str | None = None
    entity: str | None = None
    id: str | None = None
    group: str | None = None
    tags: tuple[str, ...] = ()
    notes: str | None = None
    directory: str | Path | None = None
    trajectories: bool = False
    finish_timeout: float = 30.0
    settings: Mapping[str, Any] = field(default_factory=dict, repr=False)  # may hold a key
    name = "wandb"
    resumes = True

    def __post_init__(self) -> None:
        if self.mode is not None:
            check_choice("WandbTracker", "mode", self.mode, _MODES)
        check_number("WandbTracker", "finish_timeout", self.finish_timeout, above=0.0)

    @property
    def disabled(self) -> bool:
        return (self.mode or os.environ.get("WANDB_MODE")) == "disabled"

    def open(self, run: RunInfo, state: State) -> WandbRun:
        import wandb

        project, entity = self.project or run.project, self.entity or run.entity
        if (state.values.get("project"), state.values.get("entity")) != (project, entity):
            state.values = {}  # ids are the project's: elsewhere it is another run, and gets the whole history
        run_id = self.id or state.values.get("id") or secrets.token_hex(4)
        state.update(id=run_id, project=project, entity=entity)
        # Absolute: W&B's service writes the files, and where a parent process started it, its folder is another.
        directory = Path(self.directory or os.environ.get("WANDB_DIR") or run.folder).expanduser().absolute()
        directory.mkdir(parents=True, exist_ok=True)
        asked = self._mode()
        why = why_not_online(self._settings()) if asked == "online" else None
        mode: Mode = "offline" if why else asked

        def start(run_id: str) -> Run:
            with contextlib.nullcontext() if mode == "online" else _quiet_weave():
                return wandb.init(
                    project=project,
                    entity=entity,
                    id=run_id,
                    name=run.run_name,
                    group=self.group,
                    tags=self.tags,
                    notes=self.notes,
                    config=run.config,
                    dir=directory,
                    mode=mode,
                    resume="allow",
                    reinit="create_new",  # beside a run of the user's own
                    settings=self._settings(),
                )

        try:
            started = start(run_id)
        except wandb.Error as error:
            if self.id or _DELETED not in str(error):
                raise
            run_id = secrets.token_hex(4)
            state.update(id=run_id, rows=0, until=0.0)
            started = start(run_id)
        self._say(run, mode, why, started)
        return WandbRun(started, state, History(run.folder) if self.trajectories else None)

    def _say(self, run: RunInfo, mode: Mode, why: str | None, started: Run) -> None:
        folder = Path(started.dir).parent
        if why:
            logger.warning(
                "%s is not reported to W&B online: %s. It is written to W&B's files instead; send them later with: "
                "wandb sync %s",
                *(run.name, why, folder),
            )
        elif mode == "online":
            print(f"artnb: {run.name} is reported to {started.url}", flush=True)
        elif mode == "offline":
            print(f"artnb: {run.name} is reported to W&B's files; send them with: wandb sync {folder}", flush=True)

    def _mode(self) -> Mode:
        import wandb

        # The environment first: wandb reads it once in a process.
        asked = self.mode or os.environ.get("WANDB_MODE") or wandb.setup().settings.mode
        return "disabled" if asked == "disabled" else "offline" if asked in ("offline", "dryrun") else "online"

    def _settings(self) -> Settings:
        import wandb

        ours: dict[str, Any] = {
            "console": "off",  # a library does not take the notebook's output
            "silent": True,
            "init_timeout": INIT_S,
            "finish_timeout": self.finish_timeout,
            "finish_timeout_raises": True,
        }
        return wandb.Settings(**(ours | dict(self.settings)))


def why_not_online(settings: Settings) -> str | None:
    """In words; None where W&B answers and knows the key. Asks nothing of the user."""
    import requests
    import wandb

    known = wandb.setup().settings
    url = settings.base_url if "base_url" in settings.model_fields_set else known.base_url
    proxies = {scheme: proxy for scheme, proxy in (("http", known.http_proxy), ("https", known.https_proxy)) if proxy}
    try:
        # Any answer will do. The library itself would try for a minute and more.
        requests.head(url, timeout=REACH_S, proxies=proxies, verify=not known.insecure_disable_ssl)
    except requests.RequestException as error:
        return f"{url} cannot be reached ({type(error).__name__})"
    if settings.api_key or wandb.run is not None:  # a run of the user's own: the session has its key
        return None
    try:
        found = wandb.login(prompt=False, verify=True)
    except wandb.Error as error:
        return str(error).partition("\n")[0]
    return None if found else "no API key was found (set WANDB_API_KEY, or run `wandb login` once)"


@contextlib.contextmanager
def _quiet_weave() -> Iterator[None]:
    """Where weave is imported, wandb.init (0.31) starts it with every run, also offline, and that asks for a key."""
    name = "WANDB_DISABLE_WEAVE"
    before = os.environ.get(name)
    os.environ[name] = "true"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


class WandbRun:
    """The run while it is open."""

    def __init__(self, run: Run, state: State, history: History | None) -> None:
        self._run = run
        self._state = state
        self._history = history
        # W&B numbers rows, not training steps, and takes no row below the last: the count goes on over sessions.
        self._rows = max(run.step, int(state.values.get("rows", 0)))
        self._splits: set[str] = set()
        self._newest: dict[str, int] = {}
        run.define_metric(AXIS, hidden=True, summary="none")

    def log(self, logged: Logged) -> None:
        if logged.split not in self._splits:
            self._splits.add(logged.split)
            # Without a summary of W&B's own: it would be the last value that came, also where that came late.
            self._run.define_metric(f"{logged.split}/*", step_metric=AXIS, summary="none")
        columns = logged.columns()
        row: dict[str, Any] = {AXIS: logged.step, **columns}
        if self._history is not None and logged.groups:
            row[f"{logged.split}/trajectories"] = self._table(logged.step, logged.split)
        self._run.log(row, step=self._rows, commit=True)
        self._rows += 1
        self._state.update(rows=self._rows)
        for name, value in columns.items():
            if logged.step >= self._newest.get(name, 0) and not math.isnan(value):
                self._newest[name] = logged.step
                self._run.summary[name] = value
        if logged.step >= self._newest.get(AXIS, 0):
            self._newest[AXIS] = logged.step
            self._run.summary[AXIS] = logged.step

    def _table(self, step: int, split: str) -> Any:
        import wandb

        assert self._history is not None
        frame = self._history.trajectories(step, split)
        shown = frame[["group", "trajectory", "reward", "stop_reason", "turns", "completion_tokens"]].copy()
        shown["messages"] = [
            "\n\n".join(f"{m.get('role')}: {m.get('content') or m.get('tool_calls') or ''}" for m in messages)
            for messages in frame["messages"]
        ]
        return wandb.Table(dataframe=shown)

    def configure(self, config: Mapping[str, Any]) -> None:
        self._run.config.update(dict(config), allow_val_change=True)  # type: ignore[no-untyped-call]

    def close(self) -> None:
        try:
            self._run.finish()
        except TimeoutError:
            logger.warning(
                "not all of the run was uploaded to W&B in time; send the rest with: wandb sync %s",
                Path(self._run.dir).parent,
            )
