"""What is exported runs in vLLM: the printed lines are read by vLLM's own parser, and its answers are the adapter's."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from embedded_engine import GREEDY, ONE, Answer, ask, greedy_alone, make_adapters, make_prompts
from tiny_models import make_model
from vllm_engines import SIZES, make_engine

import artnb as art
from artnb.exported import Exported
from artnb.training.export import Source, export_checkpoint
from artnb.training.policy import load_policy

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]  # vLLM and torch warn of their own affairs


def parsed(line: str) -> Any:
    """What `vllm serve` reads from a line."""
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    try:
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
    except ImportError:  # before vLLM 0.32
        from vllm.entrypoints.openai.cli_args import make_arg_parser

    program, command, *words = shlex.split(line)
    assert (program, command) == ("vllm", "serve")
    return make_arg_parser(FlexibleArgumentParser()).parse_args(words)


def test_the_printed_lines_are_vllms() -> None:
    path = Path("/data/my exports/agent")
    merged = parsed(Exported(path, "merged", "Agent 001", 3, "Qwen/Qwen2.5-0.5B-Instruct", 12).vllm)
    assert (merged.model_tag, merged.served_model_name) == (str(path), ["Agent 001"])
    adapter = parsed(Exported(path, "adapter", "agent-001", 3, "Qwen/Qwen2.5-0.5B-Instruct", 12).vllm)
    assert (adapter.model_tag, adapter.enable_lora, adapter.max_lora_rank) == ("Qwen/Qwen2.5-0.5B-Instruct", True, 16)
    (module,) = adapter.lora_modules
    assert (module.name, module.path) == ("agent-001", str(path))


async def test_vllm_answers_from_both_exports_as_transformers_does(tmp_path: Path) -> None:
    base = make_model("llama", tmp_path / "base", **SIZES)
    policy = load_policy(base, lora=art.LoraConfig(r=4), device="cpu", dtype="float32")
    adapters = make_adapters(policy, tmp_path / "adapters")
    policy.load_adapter("one", adapters[ONE])
    prompts = make_prompts(4)
    expected = [greedy_alone(policy, prompt, GREEDY.max_tokens or 0, "one") for prompt in prompts]
    assert expected != [greedy_alone(policy, prompt, GREEDY.max_tokens or 0) for prompt in prompts]
    source = Source(adapters[ONE], "agent", base_model=str(base))

    async def answers(model: Path, lora: Path | None) -> list[Answer]:
        engine = make_engine("in-process", model)
        try:
            if lora is not None:
                await engine.load_adapter(ONE, lora)
            return [await ask(engine, prompt, GREEDY, None if lora is None else ONE) for prompt in prompts]
        finally:
            await engine.close()

    merged = export_checkpoint(source, tmp_path / "merged")
    adapter = export_checkpoint(source, tmp_path / "adapter", format="adapter")
    assert [ids for ids, _, _ in await answers(merged.path, None)] == expected
    assert [ids for ids, _, _ in await answers(base, adapter.path)] == expected
