"""Reads the files that W&B wrote, with W&B's own reader (`wandb leet inspect`)."""

from __future__ import annotations

import functools
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def run_folders(folder: Path) -> list[Path]:
    """The folders of W&B's runs below `folder`, oldest first."""
    files = (folder / "wandb").glob("*run-*/run-*.wandb")
    return [path.parent for path in sorted(files, key=lambda path: path.stat().st_mtime_ns)]


def run_id(folder: Path) -> str:
    """The id of the run that the folder is of."""
    return str(records(folder, "run")[0]["run_id"])


def records(folder: Path, kind: str) -> list[dict[str, Any]]:
    """Every record of a kind (`history`, `run`, `config`, `metric`, …) in the order in which they were written."""
    lines = _inspect(folder, "--json").splitlines()
    found = [json.loads(line) for line in lines if line.startswith("{")]
    return [record[kind] for record in found if record["type"] == kind]


def rows(folder: Path) -> list[dict[str, Any]]:
    """What was logged, row by row; without what W&B adds. NaN is written as a text there."""
    return [
        {k: math.nan if v == "NaN" else v for k, v in record["item"].items() if k == "_step" or not k.startswith("_")}
        for record in records(folder, "history")
    ]


def summary(folder: Path) -> dict[str, Any]:
    """State, config and summary of the run as they stand at its end."""
    found: dict[str, Any] = json.loads(_inspect(folder, "--summary", "--json"))
    return found


def _inspect(folder: Path, *options: str) -> str:
    (written,) = folder.glob("run-*.wandb")
    return _inspect_once(folder, written.stat().st_mtime_ns, options)


@functools.cache
def _inspect_once(folder: Path, _: int, options: tuple[str, ...]) -> str:
    quiet = {**os.environ, "WANDB_MODE": "offline"}
    command = [sys.executable, "-m", "wandb", "leet", "inspect", *options, str(folder)]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=quiet, timeout=60).stdout
