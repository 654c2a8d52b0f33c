"""The two files of a PEFT adapter folder, and whether they are a LoRA of artnb's kind. Loads no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..errors import CheckpointError

WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"

_PLAIN: dict[str, tuple[Any, ...]] = {
    "bias": ("none", None),
    "use_dora": (False, None),
    "use_rslora": (False, None),
    "modules_to_save": (None, []),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "layer_replication": (None, []),
    "lora_bias": (False, None),
    "trainable_token_indices": (None, []),
    "fan_in_fan_out": (False, None),
}
"""Options of PEFT's LoRA that artnb's LoraConfig does not have, with the values that mean they are not used."""


def read_adapter_config(path: Path) -> dict[str, Any]:
    """A PEFT folder's adapter_config.json. Raises: CheckpointError for what is missing, or no LoRA of artnb's kind."""
    if not path.is_dir():
        raise CheckpointError(f"{path} is no folder; give a PEFT adapter folder, with {CONFIG_FILE} and {WEIGHTS_FILE}")
    for file in (CONFIG_FILE, WEIGHTS_FILE):
        if not (path / file).is_file():
            hint = ""
            if file == WEIGHTS_FILE and (path / "adapter_model.bin").is_file():
                hint = " (adapter_model.bin is a pickle, which can run code when it is read: save it as safetensors)"
            raise CheckpointError(f"{path} is not a complete PEFT adapter folder: it has no {file}{hint}")
    try:
        config = json.loads((path / CONFIG_FILE).read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path / CONFIG_FILE} cannot be read: {error}") from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else config
        raise CheckpointError(f"{path} is a {kind} adapter; only LoRA adapters are supported")
    for option, plain in _PLAIN.items():
        if config.get(option) not in plain:
            raise CheckpointError(
                f"{path} was made with {option}={config[option]!r}, which artnb's LoRA does not have; merge it into "
                "its base model with PEFT and use the result as base_model="
            )
    return config
