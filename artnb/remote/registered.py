"""A model of `artnb serve` as this process knows it: its step, its folder here, and how its history is kept in both.

The history on this disk is the one that is read. What the server made is copied to it; what is logged here is sent
there, too, after it is safe here. Needs the core install only.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ..capture import Collector
from ..config import LoraConfig
from ..errors import ConfigError
from ..local.lockfile import FolderLock
from ..local.run_file import REMOTE, write_run_file
from ..model import TrainableModel
from ..tracking.history import History
from ..tracking.stored import AnyTrajectory
from ..trajectories import TrajectoryGroup

MADE_THERE = ("train", "sft", "push")
"""Splits that the server writes when it makes a step."""
Mirror = Callable[[int, str, list[TrajectoryGroup], dict[str, Any]], None]


class MirroredHistory(History):
    """A history whose `log_…` calls tell `mirror`, once the disk has it. `keep` tells nobody."""

    def __init__(self, folder: Path, mirror: Mirror) -> None:
        super().__init__(folder)
        self._mirror = mirror

    def log_metrics(self, step: int, split: str, metrics: Mapping[str, Any], *, time: float | None = None) -> None:
        super().log_metrics(step, split, metrics, time=time)
        self._mirror(step, split, [], dict(metrics))

    def log_trajectories(
        self, step: int, split: str, groups: Iterable[TrajectoryGroup], *, replace: bool = False
    ) -> None:
        kept = list(groups)
        super().log_trajectories(step, split, kept, replace=replace)
        self._mirror(step, split, kept, {})

    def keep(
        self,
        step: int,
        split: str,
        groups: Iterable[TrajectoryGroup] | None = None,
        metrics: Mapping[str, Any] | None = None,
        *,
        time: float | None = None,
    ) -> None:
        """Keep what the server has already; groups replace what was there of this step and split."""
        if groups is not None:
            super().log_trajectories(step, split, groups, replace=True)
        if metrics is not None:
            super().log_metrics(step, split, metrics, time=time)


class Registered:
    """One registered model. `step` is the server's, as far as it is known here: the next step starts from it."""

    def __init__(self, model: TrainableModel, url: str, mirror: Mirror) -> None:
        self.name = model.name
        self.project = model.project
        self.base_model = model.base_model
        self.lora = model.lora
        self.folder = model.folder
        self.url = url
        self.step = 0
        self.context_tokens: int | None = None
        self.collector = Collector()
        self.history = MirroredHistory(model.folder, mirror)
        self._lock = FolderLock(model.folder)

    @property
    def key(self) -> str:
        return f"{self.project}/{self.name}"

    @property
    def path(self) -> str:
        """Below the API."""
        return f"/models/{_quoted(self.project)}/{_quoted(self.name)}"

    def of_model(self) -> dict[str, Any]:
        return {"project": self.project, "name": self.name}

    def shape(self) -> dict[str, Any]:
        """What it is made as."""
        return {"base_model": self.base_model, "lora": lora_json(self.lora)}

    def check_same(self, model: TrainableModel) -> None:
        """A second handle with the same name is the same model, or an error."""
        if (model.base_model, model.project, model.lora) != (self.base_model, self.project, self.lora):
            raise ConfigError(
                f"{self.name} is registered here with base_model={self.base_model!r}, project={self.project!r}, "
                f"{self.lora}; the new handle differs. Use another name= or backend.close() first"
            )

    def open(self) -> None:
        """Take the folder for this process. Raises CheckpointError (in use), ConfigError (it holds another run)."""
        self._lock.acquire()
        try:
            write_run_file(self.folder, self, **{REMOTE: self.url})
        except BaseException:
            self._lock.release()
            raise

    def close(self) -> None:
        self.history.close()
        self._lock.release()

    def take(self, state: Mapping[str, Any]) -> None:
        """What the server says of the model. Raises ConfigError where the history here goes on beyond it."""
        last = max(self.steps_here(), default=0)
        if last > state["step"]:
            raise ConfigError(
                f"the history in {self.folder} goes up to step {last}, and {self.name} is at step {state['step']} at "
                f"{self.url}: that is another server, or its folder was replaced. Take another name=, or move this "
                "folder away to begin anew"
            )
        self.step, self.context_tokens = state["step"], state["context_tokens"]

    def steps_here(self) -> set[int]:
        """Steps made at the server that the history here has."""
        return {step for step, split in self.history.saved() if split in MADE_THERE}

    def complete_until(self) -> int | None:
        """The step up to which the history here lacks none; -1 while it is empty, None if it lacks none at all."""
        if not self.history.saved() and not self.history.metric_records():
            return -1
        here = self.steps_here()
        return next((step - 1 for step in range(1, self.step + 1) if step not in here), None)

    def copy_metrics(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Keep the server's records of metrics, of those steps and splits of which there are none here."""
        here = {(record["step"], record["split"]) for record in self.history.metric_records()}
        for record in records:
            if (record["step"], record["split"]) not in here:
                self.history.keep(record["step"], record["split"], None, record["metrics"], time=record["time"])

    def copy_trajectories(self, step: int, split: str, lines: bytes) -> None:
        """Keep a step's trajectories as the server's file has them."""
        with tempfile.TemporaryDirectory() as name:
            there = History(name)
            path = there.trajectories_folder / "copied-0000.jsonl"  # not by the name that the server gave
            path.parent.mkdir(parents=True)
            path.write_bytes(lines)
            self.history.keep(step, split, there.load_groups(0, "copied", AnyTrajectory))


def lora_json(lora: LoraConfig) -> dict[str, Any]:
    targets = lora.target_modules
    return {
        "r": lora.r,
        "alpha": lora.alpha,
        "target_modules": targets if isinstance(targets, str) else list(targets),
        "seed": lora.seed,
    }


def _quoted(name: str) -> str:
    return quote(name, safe="")
