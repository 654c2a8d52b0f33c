"""An engine that sleeps while the trainer works: in which order, and what a wake that fails leaves behind."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from agents import even_groups

import artnb as art
from artnb.errors import EngineError, TrainError

FAST = art.TrainConfig(learning_rate=1e-2)


@pytest.fixture
async def sleeper(tiny_base: Path, tmp_path: Path) -> Any:
    """A model on a backend whose engine sleeps for each step, as vLLM does where both do not fit."""
    backend = art.LocalBackend(path=tmp_path / "art", device="cpu", dtype="float32", verbose=False)
    model = art.TrainableModel(name="agent", project="tests", base_model=tiny_base, lora=art.LoraConfig(r=4))
    async with backend:
        await model.register(backend)
        base = next(iter(backend._bases.values()))
        base.room.sleeps = True
        yield model, base


async def test_it_sleeps_and_wakes_and_requests_meanwhile_wait(sleeper: Any) -> None:
    model, base = sleeper
    groups = await even_groups(model, 0)
    task = asyncio.create_task(model.train(groups, FAST))
    while base.engine.state != "asleep":
        await asyncio.sleep(0.001)
    asked = asyncio.create_task(even_groups(model, 1))
    result = await task
    assert result.trained and {"seconds_sleep", "seconds_wake", "seconds_save"} <= result.metrics.keys()
    assert base.engine.state == "awake"
    assert all(len(group) == 4 for group in await asked), "no request is lost"


async def test_a_wake_that_fails_undoes_the_step_and_can_be_tried_again(
    sleeper: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, base = sleeper
    await model.train(await even_groups(model, 0), FAST)
    groups = await even_groups(model, 1)
    tried = 0

    async def no_room() -> None:
        nonlocal tried
        tried += 1
        raise EngineError("the engine cannot wake: its cache takes 14.0 GiB and 2.0 GiB are free")

    with monkeypatch.context() as patched:
        patched.setattr(base.engine, "wake", no_room)
        with pytest.raises(TrainError, match=r"cannot wake.*2\.0 GiB are free.*phase: wake"):
            await model.train(groups, FAST)
    assert tried == 1 and base.engine.state == "asleep"
    trained = base.models["agent"]
    assert trained.step == 1 and trained.store.steps() == [0, 1], "the step that was not served is not kept"
    assert list(model.history()["step"]) == [1]
    again = await even_groups(model, 1)
    assert base.engine.state == "awake", "the next request wakes it"
    assert (await model.train(again, FAST)).step == 2


async def test_a_step_that_fails_or_is_interrupted_leaves_it_awake(
    sleeper: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, base = sleeper
    groups = await even_groups(model, 0)
    trainer = base.models["agent"].trainer

    def fails(*args: Any, **options: Any) -> None:
        raise TrainError("no")

    with monkeypatch.context() as patched:
        patched.setattr(trainer, "step", fails)
        with pytest.raises(TrainError, match="no"):
            await model.train(groups, FAST)
    assert base.engine.state == "awake"
    slow = art.TrainConfig(learning_rate=1e-4, num_iterations=500, max_tokens_per_pack=64)
    task = asyncio.create_task(model.train(groups, slow))
    while base.engine.state != "asleep":
        await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert base.engine.state == "awake" and await model.get_step() == 0
    assert (await model.train(groups, FAST)).step == 1


async def test_a_step_that_cannot_be_saved_leaves_it_awake(sleeper: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, base = sleeper
    groups = await even_groups(model, 0)
    with monkeypatch.context() as patched:
        patched.setattr(base.models["agent"].store, "save", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            await model.train(groups, FAST)
    assert base.engine.state == "awake" and await model.get_step() == 0
    assert (await model.train(groups, FAST)).step == 1
