"""vLLM's beginning and end in this process, and the memory of its key/value cache."""

from __future__ import annotations

import gc
import logging
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from ..errors import ConfigError, EngineError
from .vllm_options import VllmOptions, engine_args, engine_environment
from .vllm_outputs import TokenOutputs
from .vllm_request import line

logger = logging.getLogger("artnb")
WAKE_MARGIN_BYTES = 256 << 20
"""What must be free beside the cache before it is mapped again."""


def start(options: VllmOptions) -> Any:
    """vLLM's LLMEngine, stepped by whoever calls `step`. Raises: ConfigError, EngineError when it does not start."""
    with engine_environment(options, in_process=True), _kept_random_state():
        from vllm.v1.engine.llm_engine import LLMEngine

        args = engine_args(options, in_process=True)
        try:
            engine: Any = LLMEngine.from_engine_args(args)
        except ConfigError:
            raise
        except Exception as error:
            collect()
            raise EngineError(f"vLLM did not start: {line(error)}") from error
        engine.output_processor = TokenOutputs(engine.output_processor)
        return engine


def stop(engine: Any, *, asleep: bool) -> None:
    """Give back what the engine holds; the caller keeps no reference to it."""
    try:
        if asleep:
            engine.wake_up()  # what is not mapped cannot be freed
        engine.engine_core.shutdown()
    except Exception:
        logger.exception("vLLM did not shut down cleanly")
    del engine
    _forget_slots()
    collect()
    # Each thread that computed a matrix product keeps a work space, 32 MiB of it on a Hopper GPU; torch has no public
    # name for giving them back.
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if torch.cuda.is_initialized() and clear is not None:
        clear()
        torch.cuda.empty_cache()


def _forget_slots() -> None:
    """vLLM's LoRA kernels keep the engine's adapter slots in dicts of their module, by their addresses, for ever."""
    kernels = sys.modules.get("vllm.lora.ops.triton_ops.utils")
    for name in ("_LORA_A_PTR_DICT", "_LORA_B_PTR_DICT"):
        getattr(kernels, name, {}).clear()


def pool_bytes() -> int:
    """Of the memory that sleep gives away: the key/value cache's."""
    from vllm.device_allocator.cumem import CuMemAllocator

    return int(CuMemAllocator.get_instance().get_current_usage())


def check_room(needed: int) -> None:
    """vLLM maps its cache piece by piece, and one that fails half-way cannot be tried again.

    What the trainer has freed goes back to the card: torch would keep it for the next step. Raises: EngineError when
    `needed` bytes are not free.
    """
    torch.cuda.empty_cache()
    if _free() < needed + WAKE_MARGIN_BYTES:
        collect()  # takes a tenth of a second where there are many objects, so only now
    free = _free()
    if free < needed + WAKE_MARGIN_BYTES:
        gib = 1024.0**3
        raise EngineError(
            f"the engine cannot wake: its cache takes {needed / gib:.1f} GiB and {free / gib:.1f} GiB are free. Free "
            "what else holds GPU memory and try again; a smaller max_running or context_length needs less"
        )


def _free() -> int:
    free, _ = torch.cuda.mem_get_info()
    return int(free)


def collect() -> None:
    """Give back what only reference cycles hold, on the GPU too."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


@contextmanager
def _kept_random_state() -> Iterator[None]:
    """vLLM seeds the process's generators as it starts; what the user seeded there stays as it was."""
    python, numpy = random.getstate(), np.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
