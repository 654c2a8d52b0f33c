"""Weights & Biases: one run for a model's whole life, online or offline.

A model's run keeps its id, in the model's folder: a session that goes on with the model goes on with the run, and sends
what W&B missed. Metrics have `training_step` as their axis, so a late one (an evaluation of step 3 that ends after step
7) keeps its place. Never asks for a key, and never holds up a step: where W&B cannot be used, the same run is written
offline, to be sent later by `wandb sync`.
"""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Mapping
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
    settings: Mapping[str, Any] = field(default_factory=dict)
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
        directory = self.directory or os.environ.get("WANDB_DIR") or run.folder
        Path(directory).mkdir(parents=True, exist_ok=True)

        def start(mode: Mode) -> Run:
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

        mode = self._mode()
        why = why_not_online(self._settings()) if mode == "online" else None
        started = start("disabled") if mode == "disabled" else None
        if mode == "online" and why is None:
            try:
                started = start("online")
                print(f"artnb: {run.name} is reported to {started.url}", flush=True)
            except Exception as error:
                why = f"{type(error).__name__}: {error}".partition("\n")[0]
        if started is None:
            started = start("offline")
            folder = Path(started.dir).parent
            if why is None:
                print(
                    f"artnb: {run.name} is reported to W&B's files in {folder}; send: wandb sync {folder}", flush=True
                )
            else:
                logger.warning(
                    "%s is not reported to W&B online: %s. It is written to W&B's files; send them later with: "
                    "wandb sync %s",
                    *(run.name, why, folder),
                )
        return WandbRun(started, state, History(run.folder) if self.trajectories else None)

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
    """In words; None where there is a key and somebody answers. Takes REACH_S at most, asks nothing of the user."""
    import requests
    import wandb

    known = wandb.setup().settings
    try:
        if not (settings.api_key or known.api_key or wandb.login(prompt=False, verify=False)):
            return "no API key was found (set WANDB_API_KEY, or run `wandb login` once)"
    except wandb.Error as error:  # a key that is none
        return str(error).partition("\n")[0]
    url = settings.base_url if "base_url" in settings.model_fields_set else known.base_url
    proxies = {scheme: proxy for scheme, proxy in (("http", known.http_proxy), ("https", known.https_proxy)) if proxy}
    try:
        # Any answer will do. wandb.init itself would try for a minute and more.
        requests.get(
            url, timeout=REACH_S, proxies=proxies, verify=not known.insecure_disable_ssl, allow_redirects=False
        )
    except requests.RequestException as error:
        return f"{url} cannot be reached ({type(error).__name__})"
    return None


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
