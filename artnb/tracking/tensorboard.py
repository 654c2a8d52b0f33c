"""TensorBoard event files, by the tensorboard package alone: no torch, no TensorFlow.

`tensorboard --logdir .art` shows every model below it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .tracker import Logged, RunInfo, State


@dataclass(frozen=True)
class TensorBoardTracker:
    """Writes metrics as scalars, by step; late ones come at their own step.

    model = art.TrainableModel(..., report_metrics=[TensorBoardTracker(log_dir="runs/agent")])

    `log_dir`: None is `tensorboard` in the model's folder.
    """

    log_dir: str | Path | None = None
    name = "tensorboard"
    resumes = True

    def open(self, run: RunInfo, state: State) -> TensorBoardRun:
        return TensorBoardRun(Path(self.log_dir) if self.log_dir is not None else run.folder / "tensorboard")


class TensorBoardRun:
    """One event file."""

    def __init__(self, folder: Path) -> None:
        from tensorboard.summary import Writer  # type: ignore[import-untyped]

        folder.mkdir(parents=True, exist_ok=True)
        self._writer = Writer(str(folder))

    def log(self, logged: Logged) -> None:
        for name, value in logged.columns().items():
            self._writer.add_scalar(name, value, logged.step, wall_time=logged.time)
        self._writer.flush()

    def configure(self, config: Mapping[str, Any]) -> None:
        """TensorBoard keeps no config."""

    def close(self) -> None:
        self._writer.close()
