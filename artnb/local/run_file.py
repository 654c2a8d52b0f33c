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


def write_run_file(folder: Path, model: Described, **more: Any) -> None:
    """Write run.json, or make sure that the folder's own says the same base and LoRA. `more` is added to it.

    Raises: ConfigError when it was made with others, or its run is on another machine; CheckpointError when it cannot
    be read.
    """
    known = read_run_file(folder)
    if known is not None and (REMOTE in known) != (REMOTE in more):
        where = f"a run at {known[REMOTE]}" if REMOTE in known else "a run of a LocalBackend"
        raise ConfigError(f"{folder} holds {where}, whose history would be mixed with this one's; use another name=")
    lora = json.loads(json.dumps(asdict(model.lora)))
    mine = {"project": model.project, "name": model.name, "base_model": model.base_model, "lora": lora}
    if known is None:
        known = {**mine, "created": datetime.now(UTC).isoformat(), "artnb_version": __version__}
    elif not more:
        return _check_same(folder, known, mine)
    _check_same(folder, known, mine)
    path = folder / RUN_FILE
    fresh = path.with_suffix(f".tmp-{os.getpid()}")
    fresh.write_text(json.dumps({**known, **more}, indent=2))
    fresh.replace(path)


def _check_same(folder: Path, known: dict[str, Any], mine: dict[str, Any]) -> None:
    for key in ("base_model", "lora"):
        if known.get(key) != mine[key]:
            raise ConfigError(
                f"{folder} was made with {key}={known.get(key)!r}, now it is {mine[key]!r}; "
                "use another name=, or delete the folder to start anew"
            )
