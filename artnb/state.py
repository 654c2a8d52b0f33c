"""A small JSON beside a model's history, for what a run has to remember: where it stands in a data set, for one.

Written as a whole or not at all, so a kill leaves the last one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .durable import replace_file
from .errors import CheckpointError, ConfigError

FILE = "state.json"


def read_state(folder: Path) -> dict[str, Any] | None:
    """What was written last; None if nothing was. Raises CheckpointError for a file that is no JSON object."""
    path = folder / FILE
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise CheckpointError(f"{path} is no JSON ({error}); move it away and write the state again") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} holds a {type(found).__name__}, not an object; move it away")
    return found


def write_state(folder: Path, state: Mapping[str, Any]) -> None:
    """Replace all of it. Raises ConfigError for a value that JSON has not."""
    try:
        text = json.dumps(dict(state), indent=2, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"a model's state is kept as JSON: {error}") from None
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / FILE, [text.encode()])


def merged(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """`new` laid over `old`; objects inside are laid over each other the same way."""
    both = dict(old)
    for name, value in new.items():
        before = both.get(name)
        both[name] = merged(before, value) if isinstance(before, Mapping) and isinstance(value, Mapping) else value
    return both
