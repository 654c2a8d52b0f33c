"""The history of a model on disk: every metric and every trajectory, from which the whole run can be rebuilt.

`history/metrics.jsonl` grows by one line per call; `history/trajectories/<split>-0003.jsonl` holds a step's groups.
A kill at any instant costs at most the line being written. Does not decide what a step is, and keeps nothing in
memory: the files are the state. pandas is imported where a frame is asked for.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time as clock
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..durable import TEMPORARY, append_lines, free_space, is_full, read_lines, replace_file, sync_file, this_process
from ..errors import CheckpointError, ConfigError
from ..trajectories import Trajectory, TrajectoryGroup
from .frames import metrics_frame, metrics_long_frame, trajectory_frame
from .records import VERSION, from_line, group_record, to_group, to_line, to_trajectory, trajectory_line
from .stored import StoredStep

if TYPE_CHECKING:
    import pandas as pd

log = logging.getLogger(__name__)

KEPT_EXAMPLES = 1000
"""Trajectories of a supervised step that are kept: the data set is the user's own and stays where it is."""
_SPLIT = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_FILE = re.compile(r"(?P<split>.+)-(?P<step>\d{4,})\.jsonl")
_GROUP_HEAD = b'{"v":%d,"kind":"group"' % VERSION
_METRICS_HEAD = b'{"v":%d,"kind":"metrics"' % VERSION


class History:
    """Metrics and trajectories below one model's folder. Threads of one process may share it.

    history = History(".art/games/models/agent")
    history.log_metrics(3, "train", {"reward": 0.4, "loss": 0.01})
    history.metrics()  # step, train/reward, train/loss
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self.metrics_file = self.folder / "history" / "metrics.jsonl"
        self.trajectories_folder = self.folder / "history" / "trajectories"
        self._mutex = threading.Lock()
        self._checked = False  # that metrics.jsonl, if there is one, is artnb's
        self._warned: set[Path] = set()

    # Writing -------------------------------------------------------------------------------------

    def log_metrics(self, step: int, split: str, metrics: Mapping[str, Any], *, time: float | None = None) -> None:
        """Keep numbers of `step` (any step, late ones too). A metric that is logged again replaces its older value.

        `time` is in seconds since 1970, by default now. Raises ConfigError (a value is no number) and CheckpointError
        (not written; what was logged before is unharmed).
        """
        _check_step(step)
        _check_split(split)
        values = {str(name): _number(name, value) for name, value in metrics.items()}
        at = clock.time() if time is None else float(time)
        record = {"v": VERSION, "kind": "metrics", "step": step, "split": split, "time": at, "metrics": values}
        with self._mutex:
            try:
                self._check_ours()
                self.metrics_file.parent.mkdir(parents=True, exist_ok=True)
                append_lines(self.metrics_file, to_line(record))
            except OSError as error:
                raise _not_written(f"metrics of step {step} ({split})", self.metrics_file, error) from error

    def log_trajectories(
        self, step: int, split: str, groups: Iterable[TrajectoryGroup], *, replace: bool = False
    ) -> None:
        """Keep groups of `step`. Further calls of this process for the same step and split add to them; what an
        earlier process logged there is replaced (a resumed run logs its step anew), as everything is with `replace`.

        Raises CheckpointError (not written; what was logged before is unharmed).
        """
        _check_step(step)
        path = self._file(step, _check_split(split))
        session = this_process().mark
        with self._mutex:
            try:
                head = self._head(path)
                if head is None or replace or head.get("session") != session:
                    head = {"v": VERSION, "kind": "file", "step": step, "split": split, "session": session}
                    head["made"] = datetime.now(UTC).isoformat()
                    path.parent.mkdir(parents=True, exist_ok=True)
                    lines = (line for i, group in enumerate(groups) for line in _group_lines(group, i))
                    replace_file(path, _chain(to_line(head), lines))
                else:
                    first = sum(line.startswith(_GROUP_HEAD) for _, line in read_lines(path))
                    for index, group in enumerate(groups, start=first):
                        append_lines(path, b"".join(_group_lines(group, index)))
            except OSError as error:
                raise _not_written(f"trajectories of step {step} ({split})", path, error) from error

    def truncate_after(self, step: int) -> None:
        """Drop everything of later steps: on resume at `step` these never completed."""
        _check_step(step, low=-1)
        with self._mutex:
            try:
                self._check_ours()
                for at, _, path in self._files():  # first, so that on a full disk there is space for the rest
                    if at > step:
                        path.unlink()
                self._cut_metrics(step)
                for folder in (self.metrics_file.parent, self.trajectories_folder):
                    # The folder lock keeps other writers out, so these are a killed process's.
                    for left in folder.glob(f"{TEMPORARY}*"):
                        left.unlink()
            except OSError as error:
                raise _not_written(f"history up to step {step}", self.metrics_file, error) from error

    def close(self) -> None:
        """Nothing is held open between calls; here so that owners can close what they own."""

    # Reading -------------------------------------------------------------------------------------

    def metrics(self) -> pd.DataFrame:
        """One row per step: `step`, then a float column per metric (`train/reward`, `val/reward`, `train/loss`, …)."""
        return metrics_frame(self._metric_records())

    def metrics_long(self) -> pd.DataFrame:
        """One row per value: step, split, name, value, time (UTC); in the order of step, then of logging."""
        return metrics_long_frame(self._metric_records())

    def metric_records(self, after: int = -1) -> list[dict[str, Any]]:
        """What `log_metrics` kept of the steps after `after`, call by call: step, split, time, metrics."""
        return [record for record in self._metric_records() if record["step"] > after]

    def trajectories(self, step: int | None = None, split: str | None = None) -> pd.DataFrame:
        """One row per trajectory, of one step or split or of all.

        Columns: step, split, group, trajectory, reward, stop_reason, turns, completion_tokens, first_text, last_text,
        messages, error, logs, then `metric/<name>`, `meta/<name>`, `group_meta/<name>`. `load_groups` gives objects.
        """
        return trajectory_frame(
            (at, name, head, record)
            for at, name, path in self._files()
            if (step is None or at == step) and (split is None or name == split)
            for head, record in self._trajectory_records(path)
            if record is not None
        )

    def load_groups(
        self, step: int, split: str, trajectory_type: type[Trajectory] = Trajectory
    ) -> list[TrajectoryGroup]:
        """The groups as they were logged: choices, token ids, log-probs, exceptions and all.

        `trajectory_type` is your subclass of Trajectory, if the rollouts returned one. Raises CheckpointError if there
        are none of this step and split.
        """
        path = self._existing(step, split)
        members: dict[int, list[Trajectory]] = {}
        heads: dict[int, dict[str, Any]] = {}
        for head, record in self._trajectory_records(path):
            if record is None and head is not None:
                heads[head["group"]] = head
                members.setdefault(head["group"], [])
            elif record is not None:
                members.setdefault(record["group"], []).append(to_trajectory(record, trajectory_type))
        return [to_group(heads.get(group), members[group]) for group in sorted(members)]

    def saved(self) -> list[tuple[int, str]]:
        """(step, split) of all trajectories that were kept, by step, then split."""
        return [(at, name) for at, name, _ in self._files()]

    def stored(self, step: int, split: str) -> StoredStep:
        """The step's trajectories as a list that reads messages when asked for them.

        Raises CheckpointError if there are none of this step and split.
        """
        return StoredStep(self._existing(step, split))

    # Inside --------------------------------------------------------------------------------------

    def _file(self, step: int, split: str) -> Path:
        return self.trajectories_folder / f"{split}-{step:04d}.jsonl"

    def _existing(self, step: int, split: str) -> Path:
        path = self._file(step, _check_split(split))
        if not path.exists():
            known = ", ".join(f"{name} {at}" for at, name, _ in self._files()) or "none"
            raise CheckpointError(
                f"no trajectories of split {split!r} at step {step} in {self.folder}; there are: {known}"
            )
        return path

    def _files(self) -> list[tuple[int, str, Path]]:
        """(step, split, file) of every trajectory file that is artnb's, by step, then split."""
        found = []
        for path in self.trajectories_folder.iterdir() if self.trajectories_folder.is_dir() else []:
            match = _FILE.fullmatch(path.name)
            if match and path.is_file():
                if next(self._records(path), {}).get("kind") == "file":
                    found.append((int(match["step"]), match["split"], path))
                else:
                    self._warn(path, "its first line is not artnb's; the file is left alone")
        return sorted(found)

    def _head(self, path: Path) -> dict[str, Any] | None:
        """The first record of a trajectory file, None if there is no file. Raises CheckpointError for a foreign one."""
        if not path.exists():
            return None
        first = next(read_lines(path), None)
        record = from_line(first[1]) if first else None
        if record is None or record["kind"] != "file":
            raise CheckpointError(_foreign(path))
        return record

    def _check_ours(self) -> None:
        if self._checked:
            return
        if self.metrics_file.exists():
            with open(self.metrics_file, "rb") as file:
                start = file.read(len(_METRICS_HEAD))
            # A torn first line is a part of ours (or zeros, after a power cut); anything else is somebody's data.
            if not start.startswith(_METRICS_HEAD) and not _METRICS_HEAD.startswith(start) and start.strip(b"\0"):
                raise CheckpointError(_foreign(self.metrics_file))
        self._checked = True

    def _cut_metrics(self, step: int) -> None:
        """Drop the metrics of later steps: by cutting the file where they are its end, which needs no space, else by
        replacing it. Lines that are not ours stay."""
        cut, offset, only_end = -1, 0, True
        for _, line in read_lines(self.metrics_file) if self.metrics_file.exists() else []:
            if _is_later(line, step):
                cut = offset if cut < 0 else cut
            elif cut >= 0:
                only_end = False
            offset += len(line) + 1
        if cut < 0:
            return
        if only_end:
            os.truncate(self.metrics_file, cut)
            sync_file(self.metrics_file)
        else:
            kept = (line + b"\n" for _, line in read_lines(self.metrics_file) if not _is_later(line, step))
            replace_file(self.metrics_file, kept)

    def _records(self, path: Path) -> Iterator[dict[str, Any]]:
        for number, line in read_lines(path):
            record = from_line(line)
            if record is None:
                self._warn(path, f"line {number} is not artnb's or is damaged; such lines are skipped")
            else:
                yield record

    def _metric_records(self) -> Iterator[dict[str, Any]]:
        if self.metrics_file.exists():
            yield from self._records(self.metrics_file)

    def _trajectory_records(self, path: Path) -> Iterator[tuple[dict[str, Any] | None, dict[str, Any] | None]]:
        """(head, None) for a group, then (head, trajectory) for each of its trajectories."""
        head: dict[str, Any] | None = None
        for record in self._records(path):
            if record["kind"] == "group":
                head = record
                yield head, None
            elif record["kind"] == "trajectory":
                yield (head if head is not None and head["group"] == record["group"] else None), record

    def _warn(self, path: Path, what: str) -> None:
        if path not in self._warned:
            self._warned.add(path)
            log.warning("%s: %s", path, what)


def _is_later(line: bytes, step: int) -> bool:
    record = from_line(line)
    return record is not None and record["kind"] == "metrics" and bool(record["step"] > step)


def _group_lines(group: TrajectoryGroup, index: int) -> Iterator[bytes]:
    yield to_line(group_record(group, index))
    for number, trajectory in enumerate(group.trajectories):
        yield trajectory_line(trajectory, index, number)


def _chain(first: bytes, rest: Iterable[bytes]) -> Iterator[bytes]:
    yield first
    yield from rest


def _foreign(path: Path) -> str:
    return f"{path} was not written by artnb, so it is left as it is; move it away and log again"


def _check_step(step: int, low: int = 0) -> None:
    if isinstance(step, bool) or not isinstance(step, int) or step < low:
        raise ConfigError(f"a step must be a whole number from {low}, not {step!r}")


def _check_split(split: str) -> str:
    if not isinstance(split, str) or not _SPLIT.fullmatch(split) or ".." in split or len(split) > 100:
        raise ConfigError(
            f"split={split!r} becomes part of a file's name: letters, digits, '_', '-' and single '.' only, e.g. 'val'"
        )
    return split


def _number(name: str, value: Any) -> float | int | bool | None:
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # numpy's and torch's scalars
        value = value.item()
    if value is None or isinstance(value, bool | int | float):
        return value
    raise ConfigError(f"the metric {name!r} is a {type(value).__name__}; metrics are numbers (keep texts in metadata)")


def _not_written(what: str, path: Path, error: OSError) -> CheckpointError:
    if is_full(error):
        why = f"no space left ({free_space(path.parent)}); free space and log again"
    else:
        why = f"{type(error).__name__}: {error}"
    return CheckpointError(f"the {what} could not be written to {path}: {why}. What was logged before is intact")
