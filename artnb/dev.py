"""An import path that users of ART know: dicts of options by ART's names, for `_internal_config` and `_config`.

They are translated, or refused, where they are taken: artnb.compat.internal_config and artnb.compat.options.
"""

from __future__ import annotations

from typing import Any

__all__ = ["EngineArgs", "InitArgs", "InternalModelConfig", "LoRAConfig", "PeftArgs", "TrainConfig", "TrainerArgs"]


class InternalModelConfig(dict[str, Any]):
    """`TrainableModel(_internal_config=...)`: init_args, engine_args, peft_args. LocalBackend has its own."""


class InitArgs(dict[str, Any]):
    """How the base model is loaded: max_seq_length, dtype, load_in_4bit, gpu_memory_utilization, random_state."""


class EngineArgs(dict[str, Any]):
    """vLLM's own options."""


class PeftArgs(dict[str, Any]):
    """The LoRA: r, lora_alpha, target_modules, random_state. `art.LoraConfig` says the same."""


class LoRAConfig(dict[str, Any]):
    """`TrainableModel(lora_config=...)`: rank, alpha, target_modules, random_state. `art.LoraConfig` says the same."""


class TrainerArgs(dict[str, Any]):
    """Options of a step; artnb has them in `art.TrainConfig`."""


class TrainConfig(dict[str, Any]):
    """`model.train(..., _config=...)`: options of a step by ART's names."""
