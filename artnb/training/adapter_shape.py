"""Whether an adapter folder is what a model's LoraConfig would make, found out without the base model's weights."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import peft
from accelerate import init_empty_weights
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ..config import LoraConfig
from ..errors import CheckpointError, ConfigError, ModelError
from .adapter_files import WEIGHTS_FILE, read_adapter_config
from .base_model import check_folder

Shape = tuple[int, ...]


def empty_model(base_model: str | Path) -> PreTrainedModel:
    """The base model's modules without weights (on the meta device); only its config is read.

    Raises: ModelError when there is no such model.
    """
    check_folder(base_model, str(base_model))
    try:
        config = AutoConfig.from_pretrained(str(base_model))
        with init_empty_weights():
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError, ImportError) as error:
        reason = str(error).strip().split("\n")[0]
        raise ModelError(
            f"base_model={str(base_model)!r} cannot be read as a causal language model: {reason}"
        ) from error
    model.tie_weights()
    return model


def adapter_shapes(base_model: str | Path, lora: LoraConfig) -> dict[str, Shape]:
    """Names and shapes of the weights in an adapter's file, as `lora` makes it on the base model.

    Raises: ModelError; ConfigError when `target_modules` names no layer.
    """
    targets = lora.target_modules if isinstance(lora.target_modules, str) else list(lora.target_modules)
    options = peft.LoraConfig(r=lora.r, target_modules=targets, task_type="CAUSAL_LM")
    model = empty_model(base_model)
    with init_empty_weights(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*is_gradient_checkpointing.*", FutureWarning)  # as in adapters.py
        try:
            wrapped = peft.get_peft_model(model, options)
        except ValueError as error:
            raise ConfigError(f"LoraConfig: target_modules={lora.target_modules!r}: {error}") from error
        held = peft.get_peft_model_state_dict(wrapped, save_embedding_layers=False)
    return {name: tuple(weight.shape) for name, weight in held.items()}


def read_adapter_shapes(path: Path) -> dict[str, Shape]:
    """Names and shapes of the weights in a PEFT folder, whose values are not read. Raises: CheckpointError."""
    try:
        with safe_open(path / WEIGHTS_FILE, framework="pt") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118  # no mapping
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path / WEIGHTS_FILE} cannot be read: {error}") from error


def check_adapter(path: Path, base_model: str | Path, lora: LoraConfig) -> None:
    """Raise ConfigError unless the adapter folder is what `lora` makes on the base model; the error says what fits."""
    config = read_adapter_config(path)
    there, mine = read_adapter_shapes(path), adapter_shapes(base_model, lora)
    problem = _difference(there, mine)
    if problem is None and float(config.get("lora_alpha", 0)) != lora.alpha:
        problem = f"its alpha is {config.get('lora_alpha')}, the model's {lora.alpha:g}"
    if problem is not None:
        raise ConfigError(
            f"the adapter in {path} does not fit {base_model} with {_shown(lora)}: {problem}. "
            f"If it is of this base, make the model with lora={_fitting(config)}"
        )


def _difference(there: Mapping[str, Shape], mine: Mapping[str, Shape]) -> str | None:
    """How an adapter's weights differ from what they should be, in words."""
    lacking, more = sorted(mine.keys() - there.keys()), sorted(there.keys() - mine.keys())
    if lacking or more:
        parts = [f"it lacks {len(lacking)} weights ({_layers(lacking)})"] if lacking else []
        parts += [f"it has {len(more)} more ({_layers(more)})"] if more else []
        return " and ".join(parts)
    wrong = [name for name in sorted(mine) if there[name] != mine[name]]
    if wrong:
        first = wrong[0]
        return f"{len(wrong)} weights have other shapes: {first} is {list(there[first])}, not {list(mine[first])}"
    return None


def _layers(names: list[str]) -> str:
    """The kinds of layers that weights belong to: 'down_proj, up_proj'."""
    kinds = sorted({re.sub(r"\.lora_[AB]\.weight$", "", name).rpartition(".")[2] for name in names})
    return ", ".join(kinds[:6]) + (", …" if len(kinds) > 6 else "")


def _shown(lora: LoraConfig) -> str:
    return f"LoraConfig(r={lora.r}, alpha={lora.alpha:g}, target_modules={lora.target_modules!r})"


def _fitting(config: Mapping[str, Any]) -> str:
    targets = config.get("target_modules")
    shown = tuple(sorted(targets)) if isinstance(targets, list) else targets
    return f"art.LoraConfig(r={config.get('r')}, alpha={config.get('lora_alpha')}, target_modules={shown!r})"
