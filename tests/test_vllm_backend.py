"""LocalBackend over vLLM on CPU, as a user meets it: sample, train, sleep and wake, close, and again."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
import vllm_engines
from agents import even_groups
from tiny_models import make_model

import artnb as art
from artnb.errors import ArtnbError, ConfigError, EngineError, TrainError

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]
FAST = art.TrainConfig(learning_rate=5e-3)
METRICS = {"probe_base", "probe_adapter", "seconds_sleep", "seconds_wake", "seconds_swap", "seconds_probe"}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("base") / "tiny", **vllm_engines.SIZES)


def make(base: Path, path: Path, engine: str, **options: Any) -> tuple[art.TrainableModel, art.LocalBackend]:
    chosen = {"device": "cpu", "dtype": "float32", "verbose": False, "served_checkpoints": 1, "max_running": 16}
    backend = art.LocalBackend(path=path, engine=engine, **(chosen | options))
    return art.TrainableModel(name="agent", project="tests", base_model=base, lora=art.LoraConfig(r=4)), backend


async def greedy(model: art.TrainableModel, name: str | None = None, tokens: int = 12) -> list[int]:
    answer = await model.openai_client().chat.completions.create(
        model=name or model.get_inference_name(),
        messages=[{"role": "user", "content": "hello"}],
        temperature=0,
        max_tokens=tokens,
        extra_body={"ignore_eos": True},
    )
    return list(answer.choices[0].model_extra["token_ids"])


def engine_processes() -> list[psutil.Process]:
    """Children of this process, but for the one by which Python keeps track of shared memory."""
    children = psutil.Process().children(recursive=True)
    return [p for p in children if p.is_running() and "resource_tracker" not in " ".join(p.cmdline())]


@pytest.mark.parametrize("engine", ["vllm", "vllm-process"])
async def test_train_close_and_again(base: Path, tmp_path: Path, engine: str) -> None:
    """user-reports #15, #55, #61, #64"""
    before = engine_processes()
    model, backend = make(base, tmp_path / "art", engine)
    async with backend:
        await model.register(backend)
        first, base_first = await greedy(model), await greedy(model, str(base))
        assert first == base_first, "checkpoint 0 is the untouched adapter"
        for step in range(2):
            result = await model.train(await even_groups(model, step), FAST)
            assert result.trained and result.metrics.keys() >= METRICS
            assert max(result.metrics["probe_base"], result.metrics["probe_adapter"]) < 1e-3
        assert result.metrics["mismatch_log_ratio_max"] < 1e-3
        last = await greedy(model)
        assert last != first, "what was trained is what is sampled"
        assert await greedy(model, str(base)) == base_first, "the base answers as before"
        assert await greedy(model, "agent@0") == first, "an older checkpoint is served beside the newest"
        assert await greedy(model, "agent@2") == last
        if engine == "vllm-process":
            (child,) = [p for p in engine_processes() if p not in before and p.ppid() == os.getpid()]
            worker = (child.children() or [child])[0]  # on CPU vLLM puts its worker into one more process
            assert os.getpgid(worker.pid) != os.getpgid(0), "an interrupt of the kernel's group does not reach it"
            await dies(model, child)
        else:
            task = asyncio.create_task(greedy(model, tokens=400))
            while not backend._bases[str(base)].engine.stats().running:
                await asyncio.sleep(0.001)
            await backend.close()
            with pytest.raises(Exception, match=r"closed|abort"):
                await task
    assert [p for p in engine_processes() if p not in before] == []

    model, backend = make(base, tmp_path / "art", engine)
    async with backend:
        await model.register(backend)
        assert await model.get_step() == 2
        assert await greedy(model) == last
        assert (await model.train(await even_groups(model, 2), FAST)).step == 3
    assert [p for p in engine_processes() if p not in before] == []


async def dies(model: art.TrainableModel, child: psutil.Process) -> None:
    """Every request gets an error that says what to do, and so does the next step."""
    groups = await even_groups(model, 9)
    tasks = [asyncio.create_task(greedy(model, tokens=400)) for _ in range(4)]
    backend_engine = model.backend()._bases[str(model.base_model)].engine  # type: ignore[attr-defined]
    while backend_engine.stats().running < 4:
        await asyncio.sleep(0.001)
    os.kill(child.pid, signal.SIGKILL)
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all("process has died" in str(error) for error in results), results
    with pytest.raises(Exception, match="register the model again"):
        await greedy(model)
    with pytest.raises(ArtnbError, match="register the model again"):
        await model.train(groups, FAST)
    assert await model.get_step() == 2


async def test_a_probe_that_differs_stops_the_run_and_leaves_nothing(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, backend = make(base, tmp_path / "art", "vllm", max_probe_difference=1e-9)
    closed: list[Any] = []
    close = vllm_engines.VllmEngine.close

    async def watched(self: Any) -> None:
        await close(self)
        closed.append(self)

    monkeypatch.setattr(vllm_engines.VllmEngine, "close", watched)
    with pytest.raises(TrainError, match=r"the probe failed: of the base model.*Nothing was trained yet"):
        await model.register(backend)
    assert len(closed) == 1 and closed[0].state == "closed"
    await backend.close()


async def test_options_that_need_other_weights(base: Path, tmp_path: Path) -> None:
    for options in ({"load_in_4bit": True}, {"load_in_fp8": True}):
        model, backend = make(base, tmp_path / "art", "vllm-process", **options)
        with pytest.raises(ConfigError, match="engine='vllm'"):
            await model.register(backend)
    model, backend = make(base, tmp_path / "art", "vllm", engine_options={"max_lora": 2})
    with pytest.raises((ConfigError, EngineError), match="did you mean"):
        await model.register(backend)
