"""ART's `_internal_config` and `lora_config` of a model, in artnb's terms: options of the backend, and the LoRA.

ART's notebooks set them to fit a small card. Each key is translated, dropped with a line that says so where artnb needs
no such thing, or refused with what to do instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import ConfigError, nearest


@dataclass(slots=True)
class Translated:
    """What a model asks of its backend and of its adapter, by artnb's names."""

    backend: dict[str, Any] = field(default_factory=dict)
    lora: dict[str, Any] = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)

    def put(self, where: dict[str, Any], name: str, value: Any) -> None:
        if name in where and where[name] != value:
            raise ConfigError(f"_internal_config gives {name} twice: {where[name]!r} and {value!r}")
        where[name] = value


# init_args: for the loading of the base model.
_INIT = {
    "max_seq_length": "context_length",
    "dtype": "dtype",
    "load_in_4bit": "load_in_4bit",
    "gpu_memory_utilization": "gpu_memory_utilization",
    "random_state": "seed",
}
_INIT_NOT_NEEDED = (
    *("device_map", "disable_log_stats", "enable_prefix_caching", "fast_inference", "fix_tokenizer", "max_lora_rank"),
    *("use_async", "use_exact_model_name", "use_gradient_checkpointing"),
)
_INIT_NOTHING: dict[str, tuple[Any, ...]] = {
    "load_in_8bit": (False,),
    "load_in_16bit": (False,),
    "full_finetuning": (False,),
    "token": (None,),
    "rope_scaling": (None,),
    "trust_remote_code": (False,),
    "resize_model_vocab": (None,),
    "revision": (None,),
    "float8_kv_cache": (False,),
    "model_name": (),
}
# engine_args: vLLM's. What LocalBackend has no word for goes to it as engine_options.
_ENGINE = {
    "enforce_eager": "enforce_eager",
    "gpu_memory_utilization": "gpu_memory_utilization",
    "max_model_len": "context_length",
    "max_num_seqs": "max_running",
    "dtype": "dtype",
    "seed": "seed",
}
_LORA = {
    "r": "r",
    "rank": "r",
    "lora_alpha": "alpha",
    "alpha": "alpha",
    "target_modules": "target_modules",
    "random_state": "seed",
}
_LORA_NOT_NEEDED = ("use_gradient_checkpointing", "max_seq_length", "temporary_location")
_LORA_NOTHING: dict[str, tuple[Any, ...]] = {
    "lora_dropout": (0, None),
    "dropout": (0, None),
    "bias": ("none",),
    "layers_to_transform": (None,),
    "layers_pattern": (None,),
    "use_rslora": (False,),
    "modules_to_save": (None,),
    "init_lora_weights": (True,),
    "init_weights": (True,),
    "loftq_config": ({}, None),
}
_INSTEAD = {
    "chat_template_kwargs": "pass extra_body={'chat_template_kwargs': ...} with each request",
    "trainer_gpu_ids": "trainer and engine share one card",
    "inference_gpu_ids": "trainer and engine share one card",
    "full_finetuning": "a LoRA adapter is trained",
    "load_in_8bit": "LocalBackend(load_in_4bit=True) or (load_in_fp8=True) quantizes",
    "load_in_16bit": "LocalBackend(dtype='bfloat16') or 'float16'",
    "model_name": "base_model= names the model",
    "trust_remote_code": "models with code of their own are not loaded",
}


def translate(config: Mapping[str, Any]) -> Translated:
    """What `_internal_config` asks for. Raises ConfigError for a key that artnb cannot honour."""
    parts: dict[str, Callable[[Mapping[str, Any], Translated], None]] = {
        "init_args": _init_args,
        "engine_args": _engine_args,
        "peft_args": _lora_args,
        "trainer_args": _trainer_args,
    }
    made = Translated()
    for name, value in config.items():
        if name in parts:
            parts[name](value or {}, made)
        elif name == "allow_unvalidated_arch":
            made.dropped.append(name)
        elif name == "rollout_weight_update_mode" and value == "step_lora":
            continue  # as it is here
        elif value is not None:
            known = [*parts, "chat_template_kwargs"]
            raise _refused(name, value, _INSTEAD.get(name) or nearest(name, known).removeprefix("; "))
    return made


def translate_lora(config: Mapping[str, Any]) -> dict[str, Any]:
    """LoraConfig's options for ART's `lora_config`. Raises ConfigError."""
    made = Translated()
    _lora_args(config, made)
    return made.lora


def _init_args(given: Mapping[str, Any], made: Translated) -> None:
    for name, value in given.items():
        if name in _INIT:
            if value is not None:
                made.put(made.backend, _INIT[name], value)
        elif name in _INIT_NOT_NEEDED:
            made.dropped.append(name)
        elif value not in _INIT_NOTHING.get(name, ()):
            raise _refused(f"init_args.{name}", value, _INSTEAD.get(name, ""))


def _engine_args(given: Mapping[str, Any], made: Translated) -> None:
    further: dict[str, Any] = {}
    for name, value in given.items():
        if name in _ENGINE:
            if value is not None:
                made.put(made.backend, _ENGINE[name], value)
        else:
            further[name] = value
    if further:
        made.put(made.backend, "engine_options", further)


def _lora_args(given: Mapping[str, Any], made: Translated) -> None:
    for name, value in given.items():
        if name in _LORA:
            made.put(made.lora, _LORA[name], tuple(value) if name == "target_modules" else value)
        elif name in _LORA_NOT_NEEDED:
            made.dropped.append(name)
        elif value not in _LORA_NOTHING.get(name, ()):
            raise _refused(f"peft_args.{name}", value, "art.LoraConfig has r, alpha, target_modules and seed")


def _trainer_args(given: Mapping[str, Any], made: Translated) -> None:
    for name, value in given.items():
        raise _refused(f"trainer_args.{name}", value, "give options of the step to train, e.g. art.TrainConfig(...)")


def _refused(name: str, value: Any, instead: str) -> ConfigError:
    return ConfigError(f"_internal_config: {name}={value!r} cannot be honoured{f'; {instead}' if instead else ''}")
