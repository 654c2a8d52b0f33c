"""Checkpoints of one model on disk: `<model folder>/checkpoints/0003/`, a plain PEFT folder and `trainer_state.json`.

A checkpoint is written to a temporary folder, flushed, and renamed: a kill at any instant leaves the last complete
step. A folder that is half-written or not ours is neither loaded nor deleted. What goes into a checkpoint is the
caller's: this module loads no torch and knows no tensor.
"""

from __future__ import annotations

import base64
import json
import logging
import math
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from ..durable import (
    free_space,
    is_full,
    mark_alive,
    megabytes,
    no_space,
    remove_tree,
    replace_file,
    sync_folder,
    this_process,
)
from ..errors import CheckpointError, ConfigError, nearest
from .seal import Sealer, sha256_of

if TYPE_CHECKING:
    import pandas as pd

log = logging.getLogger(__name__)

MANIFEST = "trainer_state.json"
OPTIMIZER_FILE = "optimizer.safetensors"  # the trainer's own, beside the adapter
MARKER = "checkpoint"  # value of the manifest's "artnb" field
FORMAT = 1
OTHER_HOST_GRACE = 3600.0  # seconds without a change after which another machine's temporary folder counts as left over
_STEP = re.compile(r"\d{4,}")
_LEFTOVER = re.compile(r"\.(tmp|old|del)-(\d{4,})-([^-]+)-[0-9a-f]+")


def model_folder(root: Path | str, project: str, name: str) -> Path:
    """`<root>/<project>/models/<name>`. Raises ConfigError for a name that would lead elsewhere."""
    return Path(root) / check_name(project, "project") / "models" / check_name(name, "name")


def check_name(name: str, what: str = "name") -> str:
    """`name` if it can be one folder's name, else ConfigError."""
    if not isinstance(name, str) or not name.strip():
        raise ConfigError(f"{what}={name!r} must be a text with at least one visible character")
    if ".." in name or "/" in name or "\\" in name or name == "." or any(ord(c) < 32 or ord(c) == 127 for c in name):
        raise ConfigError(
            f"{what}={name!r} becomes a folder's name, so it must not hold '..', '/', '\\' or control characters"
        )
    if name != name.strip() or len(name.encode("utf-8", "surrogatepass")) > 200:
        raise ConfigError(f"{what}={name!r} must not begin or end with a space or be longer than 200 bytes")
    return name


class CheckpointStore:
    """The checkpoints below one model's folder. One process writes (see `FolderLock`), any may read.

    store = CheckpointStore(".art/games/models/agent")
    store.save(3, lambda folder: peft_model.save_pretrained(folder), {"metrics": {...}})
    store.path(store.latest())
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self.root = self.folder / "checkpoints"
        self._mutex = threading.RLock()
        self._sealer: Sealer | None = None  # of the checkpoint that is being written
        self._warned: set[tuple[str, str]] = set()

    # Reading -------------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, ascending. Others are skipped with one logged warning each."""
        with self._mutex:
            self._restore_replaced()
            steps = []
            for path in sorted(self.root.iterdir()) if self.root.is_dir() else []:
                if not _STEP.fullmatch(path.name) or path.name != _folder_name(int(path.name)):
                    continue
                if reason := self._problem(int(path.name)):
                    if (path.name, reason) not in self._warned:
                        self._warned.add((path.name, reason))
                        log.warning("%s is skipped: %s", path, reason)
                else:
                    steps.append(int(path.name))
            return sorted(steps)

    def latest(self) -> int | None:
        """The newest complete checkpoint's step, or None."""
        return max(self.steps(), default=None)

    def path(self, step: int) -> Path:
        """The PEFT folder of a complete checkpoint. Raises CheckpointError that says what is missing or wrong."""
        self._manifest(step)
        return self._folder_of(step)

    def load_state(self, step: int) -> dict[str, Any]:
        """The `state` given to `save`, and its "step". Raises CheckpointError."""
        manifest = self._manifest(step)
        return {**manifest["state"], "step": manifest["step"]}

    def files(self, step: int) -> dict[str, dict[str, Any]]:
        """Size and SHA-256 of the files of a complete checkpoint, by their names there. Raises CheckpointError."""
        return dict(self._manifest(step)["files"])

    def verify(self, step: int) -> None:
        """Read every file and compare its SHA-256. Raises CheckpointError that names the first wrong one."""
        folder = self._folder_of(step)
        for name, entry in self.files(step).items():
            if sha256_of(folder / name) != entry["sha256"]:
                raise CheckpointError(f"{folder} is damaged: {name} does not have the content that was saved (SHA-256)")

    def check_free(self, step: int) -> None:
        """Raise CheckpointError if `save(step)` would meet a folder that is incomplete or not ours."""
        folder = self._folder_of(step)
        if (folder.exists() or folder.is_symlink()) and (reason := self._problem(step)):
            raise CheckpointError(
                f"checkpoint {step} cannot be written: {folder} exists and is not a complete artnb checkpoint "
                f"({reason}). It is left as it is; move it away, or use another model name or backend path"
            )

    # Writing -------------------------------------------------------------------------------------

    def save(self, step: int, write: Callable[[Path], None], state: dict[str, Any]) -> Path:
        """Let `write(folder)` fill a checkpoint and keep it with `state` (JSON values and bytes) as step `step`.

        A complete checkpoint of the same step is replaced. When anything fails nothing of it stays, the checkpoints
        before are untouched, and CheckpointError says why; KeyboardInterrupt and the like pass through. `write` may
        tell of each file that is `finished`.
        """
        folder = self._folder_of(step)
        with self._mutex:
            self._restore_replaced()
            self.check_free(step)
            temporary = self.root / self._leftover_name("tmp", step)
            try:
                self.root.mkdir(parents=True, exist_ok=True)
                temporary.mkdir()
                with Sealer() as self._sealer:
                    write(temporary)
                    self._seal(temporary, step, state, self._sealer)
                self._put(temporary, folder, step)
            except BaseException as error:
                full = is_full(error) or no_space(self.root)
                space = f"{megabytes(_size(temporary))} could be written, then {free_space(self.root)}" if full else ""
                remove_tree(temporary)
                if isinstance(error, CheckpointError) or not isinstance(error, Exception):
                    raise
                raise CheckpointError(self._failure(step, error, space)) from error
            return folder

    def finished(self, path: Path) -> None:
        """While `save` writes: the file has its content. It is flushed and hashed beside what is still written."""
        if self._sealer is not None:
            self._sealer.begin(path)

    def delete(self, steps: Iterable[int]) -> None:
        """Delete complete checkpoints. One that is incomplete or not ours: CheckpointError before any is deleted."""
        with self._mutex:
            chosen = sorted(set(steps))
            for step in chosen:
                self._manifest(step)
            for step in chosen:
                # Renamed first, so that a kill in between leaves no half of a checkpoint under its name.
                going = self.root / self._leftover_name("del", step)
                try:
                    self._folder_of(step).rename(going)
                    sync_folder(self.root)
                except OSError as error:
                    raise CheckpointError(f"checkpoint {step} in {self.root} cannot be deleted: {error}") from error
                remove_tree(going)

    def keep(self, history: pd.DataFrame, best_checkpoint_metric: str = "val/reward", keep_last: int = 1) -> list[int]:
        """Delete all but the newest `keep_last` and the best; returns the deleted steps. See `steps_to_delete`."""
        gone = steps_to_delete(self.steps(), history, best_checkpoint_metric, keep_last)
        self.delete(gone)
        return gone

    def clean(self) -> list[Path]:
        """Remove what killed processes left half-written; returns it. A live process's folders stay."""
        with self._mutex:
            self._restore_replaced()
            removed = []
            for path in sorted(self.root.iterdir()) if self.root.is_dir() else []:
                if (match := _LEFTOVER.fullmatch(path.name)) and path.is_dir() and self._left_over(path, match[3]):
                    remove_tree(path)
                    removed.append(path)
            return removed

    # Inside --------------------------------------------------------------------------------------

    def _folder_of(self, step: int) -> Path:
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise ConfigError(f"a checkpoint's step must be a whole number from 0, not {step!r}")
        return self.root / _folder_name(step)

    def _leftover_name(self, kind: str, step: int) -> str:
        return f".{kind}-{_folder_name(step)}-{this_process().mark}-{secrets.token_hex(4)}"

    def _left_over(self, path: Path, mark: str) -> bool:
        alive = mark_alive(mark)
        if alive is not None:
            return not alive
        newest = max((p.stat().st_mtime for p in [path, *path.rglob("*")]), default=0.0)
        return time.time() - newest > OTHER_HOST_GRACE

    def _manifest(self, step: int) -> dict[str, Any]:
        folder = self._folder_of(step)
        self._restore_replaced()
        if not folder.exists():
            known = ", ".join(map(str, self.steps())) or "none"
            raise CheckpointError(f"there is no checkpoint {step} in {self.root}; complete ones: {known}")
        if reason := self._problem(step):
            raise CheckpointError(f"checkpoint {step} cannot be used: {folder}: {reason}")
        return _read_manifest(folder)

    def _problem(self, step: int) -> str | None:
        """What is missing or wrong in a step's folder, or None. Sizes are compared, content is not (see `verify`)."""
        folder = self._folder_of(step)
        if not folder.is_dir():
            return "it is not a folder"
        try:
            manifest = _read_manifest(folder)
        except FileNotFoundError:
            return f"{MANIFEST} is missing: half-written, or not written by artnb"
        except (ValueError, OSError) as error:
            return f"{MANIFEST} cannot be read ({error}): damaged, or not written by artnb"
        if manifest.get("artnb") != MARKER:
            return f"{MANIFEST} is not artnb's: another program wrote this folder"
        if manifest.get("format") != FORMAT:
            return f"{MANIFEST} has format {manifest.get('format')!r}; this artnb reads format {FORMAT}"
        files = manifest.get("files")
        if not isinstance(files, dict) or not files or not isinstance(manifest.get("state"), dict):
            return f"{MANIFEST} is incomplete"
        if manifest.get("step") != step:
            return f"{MANIFEST} is of step {manifest.get('step')!r}: the folder was renamed"
        for name, entry in files.items():
            parts = PurePosixPath(name)
            if parts.is_absolute() or ".." in parts.parts or "\\" in name:
                return f"{MANIFEST} names {name!r}, which is outside the folder"
            path = folder / name
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != entry.get("size"):
                return f"{name} has {path.stat().st_size} bytes, not {entry.get('size')}"
        return None

    def _seal(self, folder: Path, step: int, state: dict[str, Any], sealer: Sealer) -> None:
        """Flush what was written, and write the manifest last."""
        if (folder / MANIFEST).exists():
            raise CheckpointError(f"checkpoint {step}: the name {MANIFEST} is taken by artnb's own file")
        paths = sorted(p for p in folder.rglob("*") if p.is_file())
        for path in paths:
            sealer.begin(path)
        files = {
            path.relative_to(folder).as_posix(): {"size": path.stat().st_size, "sha256": sealer.sha256(path)}
            for path in paths
        }
        if not files:
            raise CheckpointError(f"checkpoint {step}: nothing was written into {folder}")
        for path in folder.rglob("*"):
            if path.is_dir():
                sync_folder(path)
        created = datetime.now(UTC).isoformat()
        manifest = {"artnb": MARKER, "format": FORMAT, "step": step, "created": created, "files": files, "state": state}
        text = json.dumps(manifest, indent=1, default=_encode, ensure_ascii=True)
        replace_file(folder / MANIFEST, [text.encode()])

    def _put(self, temporary: Path, folder: Path, step: int) -> None:
        """Rename into place. A rename cannot replace a full folder, so an older one steps aside first; a kill
        between the two renames is undone by `_restore_replaced`."""
        aside = self.root / self._leftover_name("old", step) if folder.exists() else None
        if aside is not None:
            folder.rename(aside)
        try:
            temporary.rename(folder)
            sync_folder(self.root)
        except BaseException:
            if not temporary.exists() and folder.exists():
                folder.rename(temporary)
            if aside is not None:
                aside.rename(folder)
            raise
        if aside is not None:
            remove_tree(aside)

    def _restore_replaced(self) -> None:
        """Put a checkpoint back whose replacement was killed between two renames."""
        for aside in self.root.glob(".old-*") if self.root.is_dir() else []:
            match = _LEFTOVER.fullmatch(aside.name)
            if match and not (self.root / match[2]).exists() and self._left_over(aside, match[3]):
                aside.rename(self.root / match[2])

    def _failure(self, step: int, error: Exception, space: str) -> str:
        """The sentence of a failed save; `space` describes the disk if it was full."""
        steps = [s for s in self.steps() if s != step]
        intact = f"checkpoint {steps[-1]} is intact" if steps else "there is no earlier checkpoint"
        if space:
            known = f", checkpoint {steps[-1]} takes {megabytes(_size(self._folder_of(steps[-1])))}" if steps else ""
            what = f"no space left ({space}{known}); free space and try again"
        else:
            what = f"{type(error).__name__}: {error}"
        return f"checkpoint {step} could not be written to {self.root}: {what}. Nothing of it was kept; {intact}"


def steps_to_delete(
    steps: Sequence[int],
    history: pd.DataFrame,
    best_checkpoint_metric: str = "val/reward",
    keep_last: int = 1,
    *,
    keep_best: int = 1,
    lower_is_better: bool = False,
) -> list[int]:
    """All of `steps` but the newest `keep_last` and the `keep_best` with the highest `best_checkpoint_metric`.

    `history` has a column "step" and one per metric (`History.metrics()`). Among equals the newest step is kept. NaN
    and infinite values do not count. While the metric has no value for any step, the best is unknown: nothing is
    deleted, and a warning says so. With `keep_best=0` the metric is not looked at.
    """
    if isinstance(keep_last, bool) or not isinstance(keep_last, int) or keep_last < 1:
        raise ConfigError(f"keep_last={keep_last!r} must be a whole number from 1: the newest checkpoint always stays")
    if isinstance(keep_best, bool) or not isinstance(keep_best, int) or keep_best < 0:
        raise ConfigError(f"keep_best={keep_best!r} must be a whole number from 0")
    ordered = sorted(set(steps))
    candidates = ordered[:-keep_last]
    if not candidates or keep_best == 0:
        return candidates
    values: dict[int, float] = {}
    if best_checkpoint_metric in history.columns:
        means = history.groupby("step")[best_checkpoint_metric].mean()
        known = {int(step): float(value) for step, value in means.items()}  # type: ignore[call-overload]
        values = {step: known[step] for step in ordered if math.isfinite(known.get(step, math.nan))}
    if not values:
        columns = [c for c in history.columns if c != "step"]
        hint = "" if best_checkpoint_metric in columns or not columns else nearest(best_checkpoint_metric, columns)
        log.warning(
            "no checkpoint was deleted: %r has no value in the history for steps %s%s",
            best_checkpoint_metric,
            ordered,
            hint,
        )
        return []
    sign = -1.0 if lower_is_better else 1.0
    best = sorted(values, key=lambda step: (sign * values[step], step))[-keep_best:]
    return [step for step in candidates if step not in best]


def _folder_name(step: int) -> str:
    return f"{step:04d}"


def _read_manifest(folder: Path) -> dict[str, Any]:
    manifest = json.loads((folder / MANIFEST).read_bytes(), object_hook=_decode)
    if not isinstance(manifest, dict):
        raise ValueError("it is not a JSON object")
    return manifest


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _encode(value: Any) -> Any:
    if isinstance(value, bytes):
        return {"__bytes__": base64.b64encode(value).decode()}
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # numpy's and torch's scalars
        return value.item()
    raise TypeError(f"state holds a {type(value).__name__}; make it a list, text, number or bytes")


def _decode(value: dict[str, Any]) -> Any:
    return base64.b64decode(value["__bytes__"]) if value.keys() == {"__bytes__"} else value
