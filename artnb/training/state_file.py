"""A trainer's state in one safetensors file: its tensors, and the plain values as JSON in the header.

Not torch.save: its checksum takes as long as the disk, and reading what it writes means unpickling.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ..errors import CheckpointError

_PLAIN = "plain"


def write_state(state: dict[str, Any], path: Path) -> None:
    """Write `state`: nested dicts whose leaves are CPU tensors and JSON values, with no dot in their keys."""
    leaves = _leaves(state)
    tensors = {key: value for key, value in leaves.items() if isinstance(value, torch.Tensor)}
    plain = {key: value for key, value in leaves.items() if key not in tensors}
    save_file(tensors, path, metadata={_PLAIN: json.dumps(plain)})


def read_state(path: Path) -> dict[str, Any]:
    """What `write_state` was given. Raises: CheckpointError."""
    try:
        with safe_open(path, "pt") as file:
            leaves = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  # it is no mapping
            leaves |= json.loads(file.metadata()[_PLAIN])
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as a trainer's state: {error}") from error
    state: dict[str, Any] = {}
    for key, value in leaves.items():
        *parents, last = key.split(".")
        at = state
        for parent in parents:
            at = at.setdefault(parent, {})
        at[last] = value
    return state


def _leaves(state: dict[str, Any], above: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in state.items():
        found |= _leaves(value, f"{above}{key}.") if isinstance(value, dict) else {above + key: value}
    return found
