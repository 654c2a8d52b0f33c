"""vLLM engines over one tiny random model, in-process and in a child process. Marker `vllm`."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

from artnb.engines.vllm import VllmEngine
from artnb.engines.vllm_options import VllmOptions
from artnb.engines.vllm_process import VllmProcessEngine

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
SIZES: dict[str, Any] = {"head_dim": 32}
"""Of the tiny model: vLLM's attention on CPU knows no smaller heads."""
KINDS: dict[str, type[VllmEngine]] = {"in-process": VllmEngine, "child": VllmProcessEngine}


def make_engine(kind: str, base: Path, **options: Any) -> VllmEngine:
    eos = options.pop("eos_token_ids", [])
    chosen = {"dtype": "float32", "context_length": 512, "max_running": 32, "max_lora_rank": 8, "max_adapters": 2}
    return KINDS[kind](VllmOptions(model=str(base), **(chosen | options)), eos_token_ids=eos)


def unfinished(engine: VllmEngine) -> int:
    """Requests that vLLM itself still has."""
    child = getattr(engine, "_child", None)
    llm = engine._engine if child is None else child._llm
    return int(llm.output_processor.get_num_unfinished_requests())


async def until_idle(engine: VllmEngine) -> None:
    while engine.stats().running or engine.stats().waiting or unfinished(engine):
        await asyncio.sleep(0.002)


async def until_sampled(engine: VllmEngine, tokens: int) -> None:
    """Until it has sampled so many more than now."""
    wanted = engine.stats().generated_tokens + tokens
    while engine.stats().generated_tokens < wanted:
        await asyncio.sleep(0.001)
