"""Adapter files that came over the network: which names and contents are let in.

safetensors and JSON only: neither can run code when it is read, as a pickle can. Needs the core install only.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from ..errors import CheckpointError
from ..training.checkpoints import OPTIMIZER_FILE

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}\.(safetensors|json)")
_HEADER_LIMIT = 100 << 20


def is_allowed(name: str) -> bool:
    """Whether a file of this name may be sent or fetched: one folder's name, and no format that holds code.

    The optimizer's state stays where it is: it is twice as large as the adapter, and nobody else can go on with it.
    """
    return _NAME.fullmatch(name) is not None and ".." not in name and name != OPTIMIZER_FILE


def check_safetensors(path: Path) -> None:
    """Raise CheckpointError unless the file is built as safetensors are: header in JSON, then exactly its tensors.

    https://github.com/huggingface/safetensors#format
    """
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(_HEADER_LIMIT, size - 8):
            raise CheckpointError(f"{path.name} is not a safetensors file: its header does not fit into {size} bytes")
        raw = file.read(length)
    try:
        header = json.loads(raw)
        spans = sorted(
            (int(entry["data_offsets"][0]), int(entry["data_offsets"][1]))
            for name, entry in header.items()
            if name != "__metadata__"
        )
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise CheckpointError(
            f"{path.name} is not a safetensors file: its header is damaged ({error!r:.200})"
        ) from None
    end = 0
    for begin, stop in spans:
        if begin != end or stop < begin:
            raise CheckpointError(f"{path.name} is damaged: its tensors leave a gap, or overlap, at byte {end}")
        end = stop
    if not spans or end != size - 8 - length:
        raise CheckpointError(f"{path.name} is damaged: its tensors take {end} bytes, there are {size - 8 - length}")
