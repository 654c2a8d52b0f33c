"""`name@step`: checkpoints served side by side, more of them than stay loaded, and some deleted meanwhile."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

pytest.importorskip("torch")

from agents import even_groups

import artnb as art
from artnb.errors import CheckpointError, ConfigError

STEPS = 5
Served = tuple[art.TrainableModel, art.LocalBackend]


@pytest.fixture
async def served(tiny_base: Path, tmp_path: Path) -> AsyncIterator[Served]:
    """A model of five steps; two older checkpoints stay loaded."""
    backend = art.LocalBackend(
        path=tmp_path / "art", device="cpu", dtype="float32", served_checkpoints=2, verbose=False
    )
    async with backend:
        model = art.TrainableModel("agent", "tests", tiny_base, lora=art.LoraConfig(r=4))
        await model.register(backend)
        groups = await even_groups(model, 0)
        for _ in range(STEPS):
            await model.train(groups, art.TrainConfig(learning_rate=2e-2))
        yield model, backend


async def ask(model: art.TrainableModel, step: int, tokens: int = 12) -> tuple[list[int], str]:
    answer: Any = await model.openai_client().chat.completions.create(
        model=model.get_inference_name(step),
        messages=[{"role": "user", "content": "hello"}],
        temperature=0,
        max_tokens=tokens,
        extra_body={"ignore_eos": True},
    )
    extra = answer.choices[0].model_extra
    return extra["token_ids"], extra["policy"]


async def test_every_step_answers_as_itself_however_many_are_asked_at_once(served: Served) -> None:
    """user-reports #64."""
    model, _ = served
    alone = [(await ask(model, step))[0] for step in range(STEPS + 1)]
    assert len({tuple(ids) for ids in alone}) >= 4, "the steps differ"
    order = [step for step in range(STEPS + 1) for _ in range(10)]
    random.Random(0).shuffle(order)
    answers = await asyncio.gather(*(ask(model, step) for step in order))
    assert answers == [(alone[step], f"agent@{step}") for step in order]


async def test_a_checkpoint_is_deleted_while_it_answers(served: Served) -> None:
    """Answers that have begun are finished; later ones are told that it is gone, and nothing else is disturbed."""
    model, backend = served
    alone = {step: (await ask(model, step, 60))[0] for step in (1, 2, STEPS)}
    running = [asyncio.create_task(ask(model, step, 60)) for step in (1, 2, STEPS) for _ in range(4)]
    while not backend._models["agent"].served().engine.stats().running:
        await asyncio.sleep(0.001)
    await backend.delete_checkpoints(model, [1, 2])
    late = await asyncio.gather(*(ask(model, step) for step in (1, 2, 3, STEPS) * 3), return_exceptions=True)
    for answer, step in zip(late, (1, 2, 3, STEPS) * 3, strict=True):
        if step in (1, 2):
            assert isinstance(answer, openai.NotFoundError), answer
            assert f"agent has no checkpoint {step}; it has [0, 3, 4, 5]" in str(answer)
        else:
            assert not isinstance(answer, BaseException) and answer[1] == f"agent@{step}"
    done = await asyncio.gather(*running, return_exceptions=True)
    for answer, step in zip(done, (step for step in (1, 2, STEPS) for _ in range(4)), strict=True):
        if isinstance(answer, openai.NotFoundError):
            assert step != STEPS, "one that had not begun"
        else:
            assert answer == (alone[step], f"agent@{step}"), "one that had"
    assert {f"agent@{step}" for step in (0, 3, 4, 5)} < {m.id for m in (await model.openai_client().models.list()).data}
    assert await model.checkpoints() == [0, 3, 4, 5]
    loaded = {ref.step for ref in backend._models["agent"].served().engine.adapters()}
    assert not loaded & {1, 2}, "what was deleted is not held in memory either"


async def test_what_cannot_be_deleted(served: Served) -> None:
    model, backend = served
    with pytest.raises(ConfigError, match="checkpoint 5 of agent is the newest and is served; it stays"):
        await backend.delete_checkpoints(model, [4, 5])
    with pytest.raises(CheckpointError, match="there is no checkpoint 9"):
        await backend.delete_checkpoints(model, [4, 9])
    assert (await ask(model, 4))[1] == "agent@4" and await model.checkpoints() == [0, 1, 2, 3, 4, 5]


async def test_names_that_are_no_step(served: Served) -> None:
    model, _ = served
    for name in ("agent@../3", "agent@0003/..", "agent@-1", "agent@²", "agent@9", "../agent", "agent@"):
        with pytest.raises(openai.NotFoundError, match="agent"):
            await model.openai_client().chat.completions.create(model=name, messages=[{"role": "user", "content": "x"}])


async def test_the_best_and_the_newest_are_kept(served: Served) -> None:
    model, _ = served
    for step, loss in ((1, 0.3), (2, 0.1), (3, 0.2), (4, 0.5)):
        await model.log(split="val", metrics={"loss": loss}, step=step)
    assert await model.delete_checkpoints("val/los", keep_last=1) == [], "unknown: nothing is deleted"
    assert await model.delete_checkpoints("val/loss", keep_best=2, keep_last=2, lower_is_better=True) == [0, 1]
    assert await model.delete_checkpoints("val/loss", keep_best=1) == [2, 3]
    assert await model.delete_checkpoints(keep_best=0) == [4]
    assert await model.checkpoints() == [5]
