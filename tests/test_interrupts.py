"""Interrupts wherever they can hit: at every suspension of a call, twice in a row, and while threads are at work.

Whatever was interrupted, the model is at a complete step, in memory, on disk and in its history, and trains on.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import torch
from agents import even_groups
from interrupting import Cut
from remote_server import Serving, client
from safetensors.torch import load_file

import artnb as art
from artnb.training.checkpoints import CheckpointStore, model_folder

LORA = art.LoraConfig(r=4)
FAST = art.TrainConfig(learning_rate=1e-3, max_mismatch_kl=1e9)  # the same rollouts for all steps: only whole they are
SFT = art.TrainSFTConfig(learning_rate=1e-3, batch_size=1)
EXAMPLES = [
    art.Trajectory(
        messages_and_choices=[{"role": "user", "content": "a"}, {"role": "assistant", "content": words}], reward=0.0
    )
    for words in ("b c d", "e f")
]
CUTS = [(False, None), (False, 1), (False, 2), (True, None)]
"""Early or late at a suspension, and which one after it is hit, too: a person presses the button again."""

Call = Callable[[], Coroutine[Any, Any, Any]]


async def sweep(call: Call, check: Callable[[], Coroutine[Any, Any, None]]) -> int:
    """Cut `call()` at every suspension, in every way, and `check` after each. Returns how often it was cut."""
    cut = 0
    for late, after in CUTS:
        for at in range(1, 100):
            hits = [at] if after is None else [at, at + after]
            hit = await Cut(*hits, late=late).run(call())
            try:
                await check()
            except AssertionError as error:
                raise AssertionError(f"cut at suspension {hits}, {'late' if late else 'early'}: {error}") from error
            if not hit:
                break
            cut += 1
    return cut


def handle(base: Path, name: str = "agent") -> art.TrainableModel:
    return art.TrainableModel(name=name, project="tests", base_model=base, lora=LORA)


def local(path: Path) -> art.LocalBackend:
    return art.LocalBackend(path=path, device="cpu", dtype="float32", verbose=False)


@pytest.fixture
async def held(tiny_base: Path, tmp_path: Path) -> AsyncIterator[tuple[art.TrainableModel, art.LocalBackend]]:
    model, backend = handle(tiny_base), local(tmp_path / "art")
    async with backend:
        await model.register(backend)
        yield model, backend


async def alone() -> None:
    """No other task is left, once those that were cancelled had their turn."""
    try:
        async with asyncio.timeout(30):
            while asyncio.all_tasks() != {asyncio.current_task()}:
                await asyncio.sleep(0.002)
    except TimeoutError:
        raise AssertionError(f"tasks are left: {asyncio.all_tasks()}") from None


async def is_whole(model: art.TrainableModel, backend: art.LocalBackend, scratch: Path) -> None:
    """One step everywhere, nothing left behind."""
    trained = backend._models[model.name]
    base, step = trained.served(), trained.step
    assert await model.checkpoints() == list(range(step + 1)), "checkpoints"
    history = model.history()
    assert len(history) == 0 or list(history["step"]) == list(range(1, step + 1)), "history"
    assert [ref.step for ref in base.engine.adapters() if ref.name == model.name] == [step], "adapters"
    disk = load_file(trained.store.path(step) / "adapter_model.safetensors")
    base.policy.save_adapter(trained.adapter, scratch)
    memory = load_file(scratch / "adapter_model.safetensors")
    assert all(torch.equal(memory[name], disk[name]) for name in disk), "the trainer is not at the checkpoint"
    assert base.engine.state == "awake", "asleep"
    assert not trained._stops and not trained._turn._lock.locked(), "a step is still being made"
    await alone()


@pytest.mark.parametrize("sleeps", [False, True])
@pytest.mark.parametrize("kind", ["train", "train_sft", "nothing to learn"])
async def test_a_step_is_made_or_not(
    held: tuple[art.TrainableModel, art.LocalBackend],
    kind: str,
    sleeps: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model, backend = held
    backend._models["agent"].served().room.sleeps = sleeps
    groups = await even_groups(model, 0, 1, 4)
    calls: dict[str, Call] = {
        "train": lambda: model.train(groups, FAST),
        "train_sft": lambda: model.train_sft(EXAMPLES, SFT),
        "nothing to learn": lambda: model.train([], FAST),
    }
    (tmp_path / "scratch").mkdir()

    async def check() -> None:
        await is_whole(model, backend, tmp_path / "scratch")
        step = await model.get_step()
        assert (await model.train(groups, FAST)).step == step + 1, "it does not go on"

    assert await sweep(calls[kind], check) > 3
    began = time.monotonic()
    await calls[kind]()
    took, kept = time.monotonic() - began, 0
    for part in range(16):  # inside the step, where only threads and tasks of its own are
        before = await model.get_step()
        task = asyncio.create_task(calls[kind]())
        await asyncio.sleep(took * part / 14)
        for _ in range(1 + part % 2):
            task.cancel()
            await asyncio.sleep(0.002)
        (outcome,) = await asyncio.gather(task, return_exceptions=True)
        assert isinstance(outcome, asyncio.CancelledError | art.TrainResult), outcome
        made = await model.get_step() > before
        told = f"the interrupt came after step {before + 1} was trained" in capsys.readouterr().out
        assert told == (made and isinstance(outcome, asyncio.CancelledError))
        kept += made
        await check()
    assert kept < 16 or kind == "nothing to learn", "no interrupt came early enough to stop a step"


def engines_that_run() -> int:
    return sum(thread.name == "artnb-engine" for thread in threading.enumerate())


async def test_registering_forking_and_closing(tiny_base: Path, tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    others = engines_that_run()
    made: list[art.LocalBackend] = []

    async def register() -> None:
        made.append(local(tmp_path / f"art-{len(made)}"))
        await made[-1].register(handle(tiny_base))

    async def registered() -> None:
        async with made[-1] as backend:
            await backend.register(model := handle(tiny_base))
            await model.register(backend)
            await is_whole(model, backend, tmp_path / "scratch")
            assert (await model.train(await even_groups(model, 0, 1, 4), FAST)).step == 1

    assert await sweep(register, registered) > 3
    assert engines_that_run() == others, "a base was loaded that nobody closes"

    source = made[-1].path
    backend = local(source)
    engines: list[Any] = []

    forks: list[str] = []

    async def fork() -> None:
        forks.append(f"fork-{len(forks)}")
        await backend.fork_checkpoint(handle(tiny_base, forks[-1]), from_model="agent")
        await backend.register(handle(tiny_base, forks[-1]))

    async def forked() -> None:
        model = handle(tiny_base, forks[-1])
        if model.name not in backend._models:
            await backend.fork_checkpoint(model, from_model="agent")
        await model.register(backend)
        assert await model.get_step() == 1

    assert await sweep(fork, forked) > 3
    await backend.close()

    async def close() -> None:
        again = local(source)
        await handle(tiny_base).register(again)
        engines.append(next(iter(again._bases.values())).engine)
        made.append(again)
        await again.close()

    async def closed() -> None:
        await made[-1].close()
        assert all(engine.state == "closed" for engine in engines)
        async with local(source) as again:
            await handle(tiny_base).register(again)

    assert await sweep(close, closed) > 3


@pytest.fixture(scope="module")
def serving(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    with Serving(tmp_path_factory.mktemp("server") / "there", tiny_base) as server:
        yield server


@pytest.mark.parametrize("kind", ["train", "train_sft"])
async def test_a_step_at_a_server_is_made_or_not(serving: Serving, tiny_base: Path, tmp_path: Path, kind: str) -> None:
    name = kind.replace("_", "-")
    model, backend = client(serving.url, tiny_base, tmp_path, name)
    store = CheckpointStore(model_folder(serving.folder, "tests", name))
    async with backend:
        await model.register(backend)
        groups = await even_groups(model, 0, 1, 4)

        async def check() -> None:
            step = await model.get_step()
            assert store.steps() == list(range(step + 1)), "checkpoints there"
            history = model.history()
            assert list(history["step"]) == list(range(1, step + 1)) if step else len(history) == 0, "history here"
            assert serving.changing(name) is None, "still at it"
            assert (await model.train(groups, FAST)).step == step + 1, "one that was interrupted is made up for"
            await alone()

        call: Call = (
            (lambda: model.train(groups, FAST)) if kind == "train" else (lambda: model.train_sft(EXAMPLES, SFT))
        )
        assert await sweep(call, check) > 20
