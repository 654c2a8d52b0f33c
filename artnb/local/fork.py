"""Start a model from a checkpoint that exists: another model's, an earlier one of a run, or a PEFT folder's.

What another model's checkpoint holds is taken over whole, optimizer and step number included: the fork goes on where
its origin was. A bare adapter becomes checkpoint 0. Files only: neither engine nor base weights are loaded.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import check_number
from ..errors import CheckpointError, ConfigError
from ..training.adapter_files import CONFIG_FILE, WEIGHTS_FILE
from ..training.adapter_shape import check_adapter
from ..training.checkpoints import MANIFEST, CheckpointStore, model_folder
from .lockfile import FolderLock
from .run_file import check_run_file, write_run_file

if TYPE_CHECKING:
    from ..model import TrainableModel

ORIGIN = "forked_from"
"""Where a fork came from: a field of its first checkpoint's state and of run.json."""


@dataclass(frozen=True, slots=True)
class Origin:
    """A checkpoint to start from: `folder` holds its files, `step` is where the fork begins."""

    folder: Path
    files: tuple[str, ...]
    step: int
    state: dict[str, Any]
    label: dict[str, Any]  # kept with the fork, and compared when the cell is run again


def start_from(
    root: Path,
    model: TrainableModel,
    from_model: str | None,
    from_project: str | None,
    from_path: str | Path | None,
    *,
    step: int | None,
    not_after_step: int | None,
) -> int:
    """`LocalBackend.fork_checkpoint`: the step at which the model is now."""
    if (from_model is None) == (from_path is None):
        raise ConfigError("fork_checkpoint: give either from_model=<name> or from_path=<PEFT folder>")
    if from_model is not None:
        project = model.project if from_project is None else from_project
        origin = origin_of_model(root, project, from_model, step=step, not_after_step=not_after_step)
        return fork(root, model, origin)
    if (from_project, step, not_after_step) != (None, None, None):
        raise ConfigError("fork_checkpoint: from_path is one folder; from_project and steps are for from_model")
    return fork(root, model, origin_of_folder(Path(str(from_path))))


def origin_of_model(
    root: Path, project: str, name: str, *, step: int | None = None, not_after_step: int | None = None
) -> Origin:
    """A checkpoint of another model: of `step`, or the newest one, or the newest one not after a step.

    Raises: ConfigError for names and steps; CheckpointError when there is no such checkpoint, or it is damaged.
    """
    for option, value in (("step", step), ("not_after_step", not_after_step)):
        if value is not None:
            check_number("fork_checkpoint", option, value, low=0, whole=True)
    if step is not None and not_after_step is not None:
        raise ConfigError("fork_checkpoint: give either step or not_after_step")
    folder = model_folder(root, project, name)
    if not folder.is_dir():
        raise CheckpointError(f"there is no model {name!r} of project {project!r} in {root}: {folder} does not exist")
    store = CheckpointStore(folder)
    kept = [at for at in store.steps() if not_after_step is None or at <= not_after_step]
    chosen = max(kept, default=None) if step is None else step
    if chosen is None:
        limit = "" if not_after_step is None else f" up to step {not_after_step}"
        raise CheckpointError(f"{folder} has no complete checkpoint{limit}; it has {store.steps() or 'none'}")
    path = store.path(chosen)
    store.verify(chosen)
    manifest = json.loads((path / MANIFEST).read_bytes())
    label = {"project": project, "name": name, "step": chosen}
    return Origin(path, tuple(sorted(manifest["files"])), chosen, store.load_state(chosen), label)


def origin_of_folder(path: str | Path) -> Origin:
    """A PEFT adapter folder, from anywhere. Raises: CheckpointError when it is none (in `fork`)."""
    folder = Path(path).expanduser().resolve()
    return Origin(folder, (CONFIG_FILE, WEIGHTS_FILE), 0, {}, {"path": str(folder)})


def fork(root: Path, model: TrainableModel, origin: Origin) -> int:
    """Make `origin` the first checkpoint of `model`, which must have none; returns its step.

    Done again with the same origin it changes nothing. Raises: ConfigError when base model or LoRA differ;
    CheckpointError when the model has checkpoints of its own.
    """
    folder = model_folder(root, model.project, model.name)
    with FolderLock(folder):
        store = CheckpointStore(folder)
        store.clean()
        known = check_run_file(folder, model) or {}
        steps = store.steps()
        if steps and origin.label in (known.get(ORIGIN), store.load_state(steps[0]).get(ORIGIN)):
            return steps[-1]
        if steps:
            raise CheckpointError(
                f"{model.name} has checkpoints of its own ({', '.join(map(str, steps))}) in {folder}; a fork begins a "
                "model, before it is registered: use another name="
            )
        base = origin.state.get("base_model")
        if base not in (None, model.base_model):
            raise ConfigError(
                f"{_said(origin)} was trained on base_model={base!r}, {model.name} has {model.base_model!r}. If both "
                f"are the same weights, give from_path={str(origin.folder)!r} instead"
            )
        check_adapter(origin.folder, model.base_model, model.lora)

        def write(into: Path) -> None:
            for file in origin.files:
                (into / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(origin.folder / file, into / file)

        state = {"metrics": origin.state.get("metrics", {}), "model": model.name, "base_model": model.base_model}
        store.save(origin.step, write, {**state, ORIGIN: origin.label})
        write_run_file(folder, model, **{ORIGIN: origin.label})
        return origin.step


def _said(origin: Origin) -> str:
    label = origin.label
    return str(origin.folder) if "path" in label else f"{label['project']}/{label['name']}@{label['step']}"
