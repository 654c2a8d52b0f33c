"""A notebook's cells run again in one process: one base in memory, one engine, the same run goes on."""

from __future__ import annotations

import asyncio
import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest
from agents import even_groups, even_rollout

import artnb as art
import artnb.local.backend
from artnb.errors import ConfigError, ModelError, TrainError
from artnb.local.build import load_base
from artnb.local.resident import Residents

LORA = art.LoraConfig(r=4)
FAST = art.TrainConfig(learning_rate=5e-3)
SLOW = art.TrainConfig(learning_rate=1e-3, num_iterations=400, max_tokens_per_pack=64)


def cell(base: Path, tmp_path: Path, name: str = "agent", **options: Any) -> tuple[art.TrainableModel, Any]:
    """What the first cell of a notebook makes, each time it is run."""
    options = {"path": tmp_path / "art", "device": "cpu", "verbose": False, **options}
    return art.TrainableModel(name, "tests", base, lora=LORA), art.LocalBackend(**options)


async def answer(model: art.TrainableModel, step: int | None = None) -> str | None:
    reply = await model.openai_client().chat.completions.create(
        model=model.get_inference_name(step), messages=[{"role": "user", "content": "hi"}], temperature=0, max_tokens=8
    )
    return reply.choices[0].message.content


async def test_run_all_twice_is_one_engine_and_the_same_run(
    tiny_base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def run_all() -> tuple[art.TrainableModel, Any, list[float]]:
        model, backend = cell(tiny_base, tmp_path, verbose=True)
        model.register(backend)
        for step in range(await model.get_step(), 2):
            await model.train(await even_groups(model, step), FAST)
        return model, backend, list(model.history()["train/reward"])

    model, backend, first = await run_all()
    said = await answer(model)
    again, second, rewards = await run_all()
    assert rewards == first and await again.get_step() == 2
    assert await answer(again) == said
    assert second is not backend and second._bases is backend._bases and len(backend._bases) == 1
    assert "agent is loaded already, at step 2" in capsys.readouterr().out

    assert (await model.train(await even_groups(model, 2), FAST)).step == 3, "the first handle works, too"
    assert await again.get_step() == 3
    await second.close()
    for closed in (model, again):
        with pytest.raises(ConfigError, match="closed"):
            await closed.train([])
    await backend.close()


async def test_what_one_backend_closed_the_other_may_load_again(tiny_base: Path, tmp_path: Path) -> None:
    model, backend = cell(tiny_base, tmp_path)
    again, second = cell(tiny_base, tmp_path)
    await model.register(backend)
    await again.register(second)
    base = weakref.ref(next(iter(backend._bases.values())))
    await second.close()
    assert base() is None, "the memory is given back although the first backend is still there"
    await backend.register(model)
    assert await model.get_step() == 0
    await backend.close()


async def test_other_options_take_over_and_leave_one_base(
    tiny_base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, backend = cell(tiny_base, tmp_path)
    await model.register(backend)
    await model.train(await even_groups(model, 0), FAST)
    base = weakref.ref(next(iter(backend._bases.values())))
    again, second = cell(tiny_base, tmp_path, max_running=8, verbose=True)
    seen: list[Any] = []
    monkeypatch.setattr(artnb.local.backend, "load_base", lambda *args: seen.append(base()) or load_base(*args))
    await again.register(second)
    assert seen == [None], "the first base has left the memory before the second is loaded"
    assert "held by an earlier backend with other options" in capsys.readouterr().out
    assert await again.get_step() == 1, "it goes on where the other was"
    with pytest.raises(ConfigError, match="closed"):
        await model.train([])
    await second.close()


async def test_backends_of_other_models_or_folders_stay_apart(tiny_base: Path, tmp_path: Path) -> None:
    model, backend = cell(tiny_base, tmp_path)
    other, elsewhere = cell(tiny_base, tmp_path, path=tmp_path / "elsewhere")
    third, limited = cell(tiny_base, tmp_path, name="third", max_running=8)
    async with backend, elsewhere, limited:
        await asyncio.gather(model.register(backend), other.register(elsewhere), third.register(limited))
        assert len({id(b._bases) for b in (backend, elsewhere, limited)}) == 3
        await elsewhere.close()
        await limited.close()
        assert await answer(model) is not None


async def test_registering_twice_at_once_loads_once(tiny_base: Path, tmp_path: Path) -> None:
    model, backend = cell(tiny_base, tmp_path)
    again, second = cell(tiny_base, tmp_path)
    model.register(backend)  # the cell is run again before the first registration is done
    again.register(second)
    assert await again.get_step() == await model.get_step() == 0
    assert backend._bases is second._bases and len(backend._bases) == 1
    await second.close()


async def test_a_failed_registration_can_be_repeated(tiny_base: Path, tmp_path: Path) -> None:
    model, backend = cell(tmp_path / "nowhere", tmp_path)
    with pytest.raises(ModelError, match="no such folder"):
        await model.register(backend)
    shutil.copytree(tiny_base, tmp_path / "nowhere")
    await model.register(backend)
    assert await model.get_step() == 0
    await backend.close()


async def test_a_folder_that_was_removed_starts_anew(
    tiny_base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, backend = cell(tiny_base, tmp_path)
    await model.register(backend)
    fresh = await answer(model)
    await model.train(await even_groups(model, 0), art.TrainConfig(learning_rate=3e-2))
    assert await answer(model) != fresh
    shutil.rmtree(tmp_path / "art")
    again, second = cell(tiny_base, tmp_path, verbose=True)
    await again.register(second)
    assert "was removed; it starts anew" in capsys.readouterr().out
    assert await again.get_step() == 0 and await answer(again) == fresh and len(again.history()) == 0
    assert (await again.train(await even_groups(again, 0), FAST)).step == 1
    await second.close()


async def test_closing_ends_the_step_that_runs(tiny_base: Path, tmp_path: Path) -> None:
    model, backend = cell(tiny_base, tmp_path)
    await model.register(backend)
    groups = await even_groups(model, 0)
    await model.train(groups, FAST)
    running = asyncio.create_task(model.train(groups, SLOW))
    waiting = asyncio.create_task(model.train(groups, FAST))
    while not backend._models["agent"]._stops:
        await asyncio.sleep(0.01)
    again, second = cell(tiny_base, tmp_path, max_running=8)
    await again.register(second)  # takes over
    with pytest.raises(TrainError, match="closed while the step ran; the last complete step is 1"):
        await running
    with pytest.raises(ConfigError, match="closed"):
        await waiting
    assert await again.get_step() == 1 and (await again.train(groups, FAST)).step == 2
    await second.close()


async def test_auto_train_started_again_replaces_the_first(tiny_base: Path, tmp_path: Path) -> None:
    model, backend = cell(tiny_base, tmp_path)
    again, second = cell(tiny_base, tmp_path)
    await model.register(backend)
    await again.register(second)

    async def play(seed: int) -> None:
        async with art.trajectory(group=f"g{seed // 2}") as t:
            t.reward = (await even_rollout(model, f"scenario {seed // 2}", seed=seed)).reward

    first = model.auto_train(groups_per_step=1, group_size=2, config=FAST)
    await asyncio.gather(*map(play, range(2)))
    assert [r.step for r in await first.wait(1)] == [1]
    other = again.auto_train(groups_per_step=1, group_size=2, config=FAST)
    while not repr(first).startswith("<auto_train of agent: ended"):
        await asyncio.sleep(0.01)
    await asyncio.gather(*map(play, range(2, 6)))
    assert [r.step for r in await other.wait(2)] == [2, 3]
    assert len(first.results) == 1
    other.stop()
    await second.close()


def test_a_key_that_was_closed_is_made_anew() -> None:
    residents = Residents()
    first = residents.join("a")
    assert residents.join("a") is first and residents.join("b") is not first

    async def close() -> None:
        async with residents.turn:
            await residents.close(first)

    asyncio.run(close())
    assert first.closed and residents.join("a") is not first


def test_turns_are_taken_across_event_loops() -> None:
    residents = Residents()
    order: list[str] = []

    async def take(name: str, hold: asyncio.Event | None = None) -> None:
        async with residents.turn:
            order.append(f"{name} in")
            await asyncio.sleep(0.05)
            order.append(f"{name} out")

    async def main() -> None:
        mine = asyncio.create_task(take("first"))
        await asyncio.sleep(0.01)
        await asyncio.to_thread(asyncio.run, take("second"))
        await mine

    asyncio.run(main())
    assert order == ["first in", "first out", "second in", "second out"]
