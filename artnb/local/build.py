"""From a base model's name to weights and engine on this machine: which engine, how much memory for whom.

"auto" takes vLLM where a CUDA device and vLLM are there, and the embedded engine everywhere else.
"""

from __future__ import annotations

import asyncio
import importlib.util
from typing import TYPE_CHECKING

import torch

from ..capture import CaptureRegistry
from ..config import LoraConfig
from ..engines.transformers import TransformersEngine
from ..engines.vllm import VllmEngine
from ..engines.vllm_options import VllmOptions
from ..engines.vllm_process import VllmProcessEngine
from ..engines.vllm_weights import shared_weights
from ..errors import ConfigError
from ..memory import held_bytes
from ..training.base_model import pick_device, pick_dtype, read_base
from ..training.policy import load_policy
from .cards import this_card
from .loading import Report, watched_weights
from .plan import MemoryPlan, plan_memory
from .probe import Probe
from .served import ServedBase
from .shapes import shape_of

if TYPE_CHECKING:
    from .backend import LocalBackend


FOR_VLLM: dict[str, object] = {
    "load_in_4bit": False,
    "load_in_fp8": False,
    "sleep": "auto",
    "gpu_memory_utilization": None,
    "enforce_eager": False,
    "engine_options": {},
}
"""Options that the embedded engine cannot honour, with their defaults."""
SPARE_SHARE = 0.25
"""Of the card's free memory a training pass may take so much: the card is the backend's, and large packs are faster."""


def load_base(
    name: str, backend: LocalBackend, captures: CaptureRegistry, lora: LoraConfig, report: Report
) -> ServedBase:
    """Load weights and start the engine. Blocks: runs in a worker thread. `report` hears of each weight."""
    engine, why = choose_engine(backend.engine, pick_device(backend.device))
    if engine != "transformers":
        return _with_vllm(name, backend, captures, lora, why, in_process=engine == "vllm")
    return _embedded(name, backend, captures, lora, report, why)


def choose_engine(asked: str, device: torch.device) -> tuple[str, str]:
    """Which engine, and why in words."""
    if asked != "auto":
        return asked, f"engine={asked!r} was asked for"
    if device.type != "cuda":
        return "transformers", ""
    if importlib.util.find_spec("vllm") is None:
        return "transformers", "vLLM is not installed (pip install 'artnb[gpu]' makes sampling several times faster)"
    return "vllm", "vLLM is installed"


def _embedded(
    name: str, backend: LocalBackend, captures: CaptureRegistry, lora: LoraConfig, report: Report, why: str
) -> ServedBase:
    for option, default in FOR_VLLM.items():
        if getattr(backend, option) != default:
            raise ConfigError(
                f"LocalBackend: {option} is for engine='vllm'; here it is 'transformers' ({why or 'CPU'})"
            )
    with watched_weights(report):
        policy = load_policy(
            name,
            lora=lora,
            device=backend.device,
            dtype=backend.dtype,
            context_length=backend.context_length,
            activation_gib=backend.activation_gib,
            spare_share=SPARE_SHARE,
            compile_layers=backend.compile_layers,
        )
    engine = TransformersEngine(
        policy,
        eos_token_ids=policy.eos_token_ids,
        context_length=policy.context_length,
        kv_tokens=backend.kv_tokens,
        max_running=backend.max_running or 64,
        seed=backend.seed,
    )
    return ServedBase(name, policy, engine, backend, captures, why=why)


def _with_vllm(
    name: str, backend: LocalBackend, captures: CaptureRegistry, lora: LoraConfig, why: str, *, in_process: bool
) -> ServedBase:
    device = pick_device(backend.device)
    if backend.kv_tokens is not None:
        raise ConfigError(
            "LocalBackend: kv_tokens is for the embedded engine; with vLLM gpu_memory_utilization=, max_running= and "
            "context_length= decide about the cache"
        )
    # vLLM repacks a CPU's weights for its own kernels, so that they cannot be shared there.
    shares = in_process and device.type == "cuda"
    if not shares and (backend.load_in_4bit or backend.load_in_fp8):
        raise ConfigError(
            "LocalBackend: load_in_4bit and load_in_fp8 need a CUDA device and engine='vllm', whose weights the "
            "trainer shares; elsewhere it would train other weights than are served"
        )
    dtype = str(pick_dtype(device, backend.dtype)).removeprefix("torch.")
    files = read_base(name, context_length=backend.context_length)
    plan = _plan(name, backend, lora, device, shares=shares) if device.type == "cuda" else None
    if plan is not None and backend.verbose:
        print(plan.table(), flush=True)
    context = files.context_length if plan is None else plan.context_length
    options = VllmOptions(
        model=files.name,
        dtype=dtype,
        context_length=context,
        max_running=(backend.max_running or 256) if plan is None else plan.max_running,
        kv_cache_bytes=None if plan is None else plan.kv_cache_bytes,
        gpu_memory_utilization=0.9 if plan is None else plan.gpu_memory_utilization,
        batched_tokens=None if plan is None else plan.batched_tokens,
        max_lora_rank=lora.r,
        max_adapters=2 + backend.served_checkpoints,
        enforce_eager=backend.enforce_eager or (plan is not None and not plan.cuda_graphs),
        sleep=plan is not None and plan.sleep,
        seed=backend.seed,
        quantization="bitsandbytes" if backend.load_in_4bit else "fp8" if backend.load_in_fp8 else None,
        extra=backend.engine_options,
    )
    kind = VllmEngine if in_process else VllmProcessEngine
    engine = kind(options, eos_token_ids=files.eos_token_ids)
    try:
        policy = load_policy(
            name,
            lora=lora,
            device=backend.device,
            dtype=dtype,
            context_length=context,
            activation_gib=backend.activation_gib,
            spare_share=SPARE_SHARE,
            compile_layers=backend.compile_layers,
            weights=(lambda shapes: shared_weights(engine.module, shapes, getattr(torch, dtype))) if shares else None,
        )
        probe = Probe(engine, policy, limit=backend.max_probe_difference) if backend.max_probe_difference else None
        return ServedBase(
            name, policy, engine, backend, captures, sleeps=plan is None or plan.sleep, probe=probe, why=why
        )
    except BaseException:
        asyncio.run(engine.close())  # nobody else knows of it
        raise


def _plan(name: str, backend: LocalBackend, lora: LoraConfig, device: torch.device, *, shares: bool) -> MemoryPlan:
    free, total = torch.cuda.mem_get_info(device)
    return plan_memory(
        shape_of(name),
        this_card(device),
        context_length=backend.context_length,
        lora=lora,
        max_running=backend.max_running or 256,
        dtype=None if backend.dtype == "auto" else backend.dtype,
        load_in_4bit=backend.load_in_4bit,
        load_in_fp8=backend.load_in_fp8,
        engine_shares_weights=shares,
        sleep=backend.sleep,
        gpu_memory_utilization=backend.gpu_memory_utilization,
        max_loras=2 + backend.served_checkpoints,
        cuda_graphs=False if backend.enforce_eager else None,
        used_by_others=max(0, total - free - held_bytes(device)),
    )
