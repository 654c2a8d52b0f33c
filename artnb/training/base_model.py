"""Find a base model, choose device and dtype for it, and load it. Knows nothing of adapters or training."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel

from ..attention import use
from ..config import check_choice
from ..errors import ConfigError, ModelError
from ..packed_linear import PackedWeight, pack_linears

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
Weights = Callable[[Mapping[str, torch.Size]], Mapping[str, torch.Tensor | PackedWeight]]
"""Shapes by the model's own names → the tensors to use, e.g. an engine's."""
_UNSET_LENGTH = 10**9
"""Tokenizers without a limit say 1e30."""


@dataclass(frozen=True, slots=True)
class BaseModel:
    """A frozen causal language model in eval mode that takes an `Attend`, with what sampling must know of it."""

    name: str  # the path or hub id it was loaded from
    model: PreTrainedModel
    tokenizer: Any
    device: torch.device
    dtype: torch.dtype
    context_length: int
    eos_token_ids: frozenset[int]


def pick_device(device: str = "auto") -> torch.device:
    """The device to use; "auto" takes CUDA, then MPS, then CPU.

    Raises: ConfigError for a device that is unknown or not there.
    """
    if device == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    kind = device.partition(":")[0]
    check_choice("device", "device", kind, ("auto", "cpu", "cuda", "mps"))
    there = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not there[kind]:
        raise ConfigError(f"device={device!r}: this machine, or this build of torch, has none; use device='auto'")
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"device={device!r} is not a device: {error}") from error
    if kind == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device={device!r}: this machine has {torch.cuda.device_count()} CUDA device(s)")
    return torch.device("cuda", torch.cuda.current_device()) if chosen == torch.device("cuda") else chosen


def pick_dtype(device: torch.device, dtype: str = "auto") -> torch.dtype:
    """The weights' dtype; "auto" takes the shortest that the device computes natively and that trains soundly.

    Raises: ConfigError for an unknown dtype, or bfloat16 on a CUDA device that lacks it.
    """
    if dtype != "auto":
        check_choice("dtype", "dtype", dtype, ("auto", *DTYPES))
        if dtype == "bfloat16" and device.type == "cuda" and torch.cuda.get_device_capability(device)[0] < 8:
            raise ConfigError("dtype='bfloat16' needs CUDA capability 8.0 or newer; use dtype='float16' or 'auto'")
        return DTYPES[dtype]
    if device.type == "cuda":
        return cuda_dtype(torch.cuda.get_device_capability(device))
    if device.type == "mps":
        # fp16 would need loss scaling; bf16 came with macOS 14.
        return torch.bfloat16 if torch.backends.mps.is_macos_or_newer(14, 0) else torch.float32
    return torch.bfloat16 if _cpu_has_bf16() else torch.float32


def cuda_dtype(capability: tuple[int, int]) -> torch.dtype:
    """bf16 from Ampere (8.0) on, fp16 before (a T4 is 7.5)."""
    return torch.bfloat16 if capability >= (8, 0) else torch.float16


def _cpu_has_bf16() -> bool:
    """Whether bf16 matrix products are native; where they are emulated they are several times slower than fp32."""
    if platform.machine().lower() in ("arm64", "aarch64"):
        return bool(getattr(torch.backends.cpu, "get_cpu_capability", str)() == "SVE256")  # Neoverse V1 and later
    # Private names of torch.cpu (2.3 to 2.13); a version without them gets fp32, which is always sound.
    checks = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(bool(getattr(torch.cpu, check, bool)()) for check in checks)


@dataclass(frozen=True, slots=True)
class BaseFiles:
    """What is known of a base model before its weights are loaded."""

    name: str  # path or hub id, as transformers takes it
    config: Any
    tokenizer: Any
    context_length: int
    eos_token_ids: frozenset[int]


def read_base(base_model: str | Path, *, context_length: int | None = None) -> BaseFiles:
    """Configuration and tokenizer of a causal language model from a folder or from the Hugging Face hub.

    `context_length` is capped at what the model was made for.

    Raises: ModelError when there is no such model; ConfigError for the length.
    """
    if context_length is not None and context_length < 2:
        raise ConfigError(f"context_length={context_length} must be at least 2: one token of prompt, one of answer")
    name = str(Path(base_model).expanduser()) if _is_path(base_model) else str(base_model)
    check_folder(base_model, name)
    try:
        config = AutoConfig.from_pretrained(name)
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, ImportError) as error:
        raise ModelError(_not_loaded(base_model, name, error)) from error
    text = config.get_text_config()
    longest = getattr(text, "max_position_embeddings", None) or tokenizer.model_max_length
    if longest >= _UNSET_LENGTH:
        if context_length is None:
            raise ConfigError(f"{base_model} does not say how long its context is; pass context_length=<tokens>")
        longest = context_length
    return BaseFiles(
        name=name,
        config=config,
        tokenizer=tokenizer,
        context_length=min(int(longest), context_length or int(longest)),
        eos_token_ids=_eos(_generation_config(name), tokenizer, text),
    )


def load_base(
    base_model: str | Path,
    *,
    device: str = "auto",
    dtype: str = "auto",
    context_length: int | None = None,
    weights: Weights | None = None,
) -> BaseModel:
    """Load a causal language model from a folder or from the Hugging Face hub, or build it around `weights`.

    Raises: as `read_base`; ConfigError for device and dtype.
    """
    where = pick_device(device)
    chosen = pick_dtype(where, dtype)
    files = read_base(base_model, context_length=context_length)
    if weights is not None:
        model = _built_around(files.config, chosen, weights)
    else:
        try:
            model = AutoModelForCausalLM.from_pretrained(files.name, dtype=chosen)
        except (OSError, ValueError, ImportError, SafetensorError) as error:
            raise ModelError(_not_loaded(base_model, files.name, error)) from error
    use(model)
    model.requires_grad_(False)
    model.to(where).eval()
    return BaseModel(
        name=files.name,
        model=model,
        tokenizer=files.tokenizer,
        device=where,
        dtype=chosen,
        context_length=files.context_length,
        eos_token_ids=files.eos_token_ids,
    )


def _built_around(config: Any, dtype: torch.dtype, weights: Weights) -> PreTrainedModel:
    """The model's modules over tensors that exist already; its buffers (rotary frequencies) are its own."""
    with init_empty_weights(include_buffers=False):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    given = weights({name: weight.shape for name, weight in model.named_parameters()})
    plain = {name: weight for name, weight in given.items() if isinstance(weight, torch.Tensor)}
    model.load_state_dict(plain, strict=False, assign=True)
    model.tie_weights()
    pack_linears(model, {name: weight for name, weight in given.items() if isinstance(weight, PackedWeight)})
    missing = [name for name, weight in model.named_parameters() if weight.is_meta]
    if missing:
        raise ModelError(f"{len(missing)} weights were not given, the first is {missing[0]!r}")
    return model


def _generation_config(name: str) -> Any:
    try:
        return GenerationConfig.from_pretrained(name)
    except OSError:
        return None  # not every model has the file


def _is_path(base_model: str | Path) -> bool:
    text = str(base_model)
    return isinstance(base_model, Path) or text.startswith((".", "/", "~")) or Path(text).is_dir()


def check_folder(base_model: str | Path, name: str) -> None:
    """Raise ModelError, saying what is missing, where `base_model` is a path (`name`, expanded) without a model."""
    if not _is_path(base_model):
        return
    folder = Path(name)
    if not folder.is_dir():
        raise ModelError(f"base_model={name!r}: there is no such folder. Give a folder with config.json, or a hub id")
    if not (folder / "config.json").is_file():
        found = ", ".join(sorted(p.name for p in folder.iterdir())[:8]) or "nothing"
        hint = ""
        if (folder / "adapter_config.json").is_file():
            hint = "; it is a LoRA adapter: give its base model here and load the adapter on top"
        raise ModelError(
            f"base_model={name!r}: the folder has no config.json (it holds {found}){hint}. "
            "A model folder holds config.json, tokenizer.json and *.safetensors, as save_pretrained writes them"
        )


def _not_loaded(base_model: str | Path, name: str, error: Exception) -> str:
    reason = str(error).strip().split("\n")[0]
    if _is_path(base_model):
        return (
            f"base_model={name!r}: the folder has a config.json but does not load as a causal language model: {reason}"
        )
    return (
        f"base_model={name!r}: no folder of that name here, and the Hugging Face hub gave no model for it: {reason}. "
        "Check the spelling (owner/name), the network, and for gated models `hf auth login`; "
        "or give the path of a folder with config.json"
    )


def _eos(generation: Any, tokenizer: Any, text_config: Any) -> frozenset[int]:
    found: set[int] = set()
    for value in (
        getattr(generation, "eos_token_id", None),
        tokenizer.eos_token_id,
        getattr(text_config, "eos_token_id", None),
    ):
        found.update([] if value is None else [value] if isinstance(value, int) else value)
    return frozenset(found)
