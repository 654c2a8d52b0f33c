"""The first minutes in a notebook: install, import, start, two sessions at once (user-reports, section 1)."""

from __future__ import annotations

import asyncio
import multiprocessing
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from agents import even_groups, even_rollout

import artnb as art
from artnb.restart import replaced

ROOT = Path(__file__).parent.parent


def test_a_package_that_was_replaced_under_the_kernel_is_one_line() -> None:
    """user-reports #6."""
    code = "import numpy, pandas; numpy.__version__ = '1.0.0'; import artnb as art; print(art.TrainConfig().beta)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout == "0.0\n"
    assert done.stderr.startswith("artnb: restart the runtime") and "numpy (1.0.0 → " in done.stderr
    assert done.stderr.count("\n") == 1 and "pandas" not in done.stderr


def test_what_was_not_replaced_is_not_mentioned(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    assert replaced() == []
    monkeypatch.setattr(torch, "__version__", torch.__version__.partition("+")[0] + "+cu999")
    assert replaced() == [], "another build of the same version"


class NotebookStream:
    """What a notebook puts in place of stdout: it writes, and has no file descriptor."""

    encoding = "utf-8"

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        return None


async def test_all_of_a_run_works_where_stdout_has_no_fileno(
    tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """user-reports #11."""
    out, err = NotebookStream(), NotebookStream()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    async with art.LocalBackend(path=tmp_path / "art", device="cpu") as backend:
        model = art.TrainableModel("agent", "tests", tiny_base, lora=art.LoraConfig(r=4))
        await model.register(backend)
        await asyncio.to_thread(lambda: model.inference_base_url)  # the HTTP server, too
        await model.train(await even_groups(model, 0), art.TrainConfig(learning_rate=1e-3))
    assert "starts at step 0" in out.text and "train step 1" in err.text


def test_one_model_under_successive_loops_and_from_a_thread(tiny_base: Path, tmp_path: Path) -> None:
    """user-reports #13. A script calls asyncio.run twice; a helper thread has a loop of its own."""
    model = art.TrainableModel("agent", "tests", tiny_base, lora=art.LoraConfig(r=4))
    backend = art.LocalBackend(path=tmp_path / "art", device="cpu", verbose=False)

    async def part(step: int) -> float:
        await model.register(backend)
        result = await model.train(await even_groups(model, step), art.TrainConfig(learning_rate=1e-3))
        return (await even_rollout(model, "q", seed=result.step)).reward

    async def from_a_thread() -> float:
        return await asyncio.to_thread(lambda: asyncio.run(part(2)))

    try:
        for work in (part(0), part(1), from_a_thread()):
            assert 0 <= asyncio.run(work) <= 1
        assert model.chat([{"role": "user", "content": "hi"}], max_tokens=2).choices
        assert asyncio.run(model.get_step()) == 3
    finally:
        asyncio.run(backend.close())


def _session(base: str, path: str, pipe: Any) -> None:
    """Another notebook's kernel: serves, says so, answers whenever asked, ends when told."""

    async def serve() -> None:
        backend = art.LocalBackend(path=path, device="cpu", verbose=False)
        model = art.TrainableModel("other", "tests", base, lora=art.LoraConfig(r=4))
        await model.register(backend)
        pipe.send("ready")
        while await asyncio.to_thread(pipe.recv) == "ask":
            pipe.send((await even_rollout(model, "q", seed=1)).reward)
        await backend.close()

    asyncio.run(serve())


async def test_closing_one_session_leaves_the_other_alone(tiny_base: Path, tmp_path: Path) -> None:
    """user-reports #14."""
    mine, theirs = multiprocessing.get_context("spawn").Pipe()
    child = multiprocessing.get_context("spawn").Process(
        target=_session, args=(str(tiny_base), str(tmp_path / "art"), theirs)
    )
    child.start()

    async def heard() -> Any:
        assert await asyncio.to_thread(mine.poll, 120), "the other session says nothing"
        return mine.recv()

    try:
        model = art.TrainableModel("agent", "tests", tiny_base, lora=art.LoraConfig(r=4))
        async with art.LocalBackend(path=tmp_path / "art", device="cpu", verbose=False) as backend:
            await model.register(backend)
            assert await heard() == "ready"
            mine.send("ask")
            before = await heard()
        mine.send("ask")
        assert await heard() == before
        mine.send("end")
        await asyncio.to_thread(child.join, 60)
        assert child.exitcode == 0
    finally:
        if child.is_alive():
            child.kill()
        child.join()
        mine.close()
        theirs.close()
        child.close()


async def test_a_run_needs_no_key_no_network_and_no_stdin(
    tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """user-reports #77: metrics are on disk, and a late evaluation of an earlier step is kept."""
    for name in ("OPENAI_API_KEY", "WANDB_API_KEY", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "stdin", None)
    async with art.LocalBackend(path=tmp_path / "art", device="cpu", verbose=False) as backend:
        model = art.TrainableModel("agent", "tests", tiny_base, lora=art.LoraConfig(r=4))
        await model.register(backend)
        for step in range(3):
            await model.train(await even_groups(model, step), art.TrainConfig(learning_rate=1e-3))
        await model.log([art.Trajectory(reward=0.25)], split="val", step=1)
        await model.log([art.Trajectory(reward=0.75)], split="val")
    history = art.TrainableModel("agent", "tests", tiny_base, base_path=tmp_path / "art").history()
    assert list(history["step"]) == [1, 2, 3]
    assert history["val/reward"].tolist()[::2] == [0.25, 0.75] and history["train/loss"].notna().all()
