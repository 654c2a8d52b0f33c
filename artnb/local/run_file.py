"""run.json in a model's folder: what the model was made as. One base model and one LoRA shape for the folder's life."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from .. import __version__
from ..config import LoraConfig
from ..errors import CheckpointError, ConfigError

RUN_FILE = "run.json"
REMOTE = "remote"
"""Field of a folder that holds the history of a run on another machine: that machine's URL."""


class Described(Protocol):
    """What run.json says of a model: a handle, or a model that is loaded."""

    name: str
    project: str
    base_model: str
    lora: LoraConfig


def read_run_file(folder: Path) -> dict[str, Any] | None:
    """What the folder's run.json holds; None while there is none. Raises: CheckpointError."""
    path = folder / RUN_FILE
    if not path.exists():
        return None
    try:
        known = json.loads(path.read_text())
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON ({error}); the folder is not artnb's or is damaged") from error
    if not isinstance(known, dict):
        raise CheckpointError(f"{path} holds no JSON object; the folder is not artnb's or is damaged")
    return known


def check_run_file(folder: Path, model: Described, *, remote: bool = False) -> dict[str, Any] | None:
    """`read_run_file`, and sure that it says the model's base and LoRA, and that its run is on another machine or here.

    Raises: ConfigError, CheckpointError.
    """
    known = read_run_file(folder)
    if known is not None and remote != (REMOTE in known):
        where = f"a run at {known[REMOTE]}" if REMOTE in known else "a run of a LocalBackend"
        raise ConfigError(f"{folder} holds {where}, whose history would be mixed with this one's; use another name=")
    if known is not None:
        mine = _describe(model)
        for key in ("base_model", "lora"):
            if known.get(key) != mine[key]:
                raise ConfigError(
                    f"{folder} was made with {key}={known.get(key)!r}, now it is {mine[key]!r}; "
                    "use another name=, or delete the folder to start anew"
                )
    return known


def write_run_file(folder: Path, model: Described, **more: Any) -> None:
    """Write run.json where there is none, and add `more` to it. Raises as `check_run_file`."""
    known = check_run_file(folder, model, remote=REMOTE in more)
    if known is not None and not more:
        return
    made = known or {**_describe(model), "created": datetime.now(UTC).isoformat(), "artnb_version": __version__}
    path = folder / RUN_FILE
    fresh = path.with_suffix(f".tmp-{os.getpid()}")
    fresh.write_text(json.dumps({**made, **more}, indent=2))
    fresh.replace(path)


def _describe(model: Described) -> dict[str, Any]:
    lora = json.loads(json.dumps(asdict(model.lora)))  # as it is read back
    return {"project": model.project, "name": model.name, "base_model": model.base_model, "lora": lora}
