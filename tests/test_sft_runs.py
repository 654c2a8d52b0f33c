"""SFT as a user runs it: a tiny random model, the real engine and trainer, real files."""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from agents import even_groups
from safetensors.torch import load_file

import artnb as art
from artnb.errors import ConfigError, DataError, RenderError
from artnb.local import step as local_step
from artnb.training.sft_batches import buffered_order, create_lr_schedule, learning_rates, sft_batches
from artnb.utils.sft import (
    create_sft_dataset_iterator,
    get_file_row_count,
    iterate_file,
    train_sft_from_file,
)

LORA = art.LoraConfig(r=4)
WORDS = ["one", "two", "three", "four", "five", "six", "seven"]


def conversation(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


ROWS = [conversation(f"say {n}", word) for n, word in enumerate(WORDS)]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "train.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in ROWS))
    return path


def make(tiny_base: Path, folder: Path) -> tuple[art.TrainableModel, Any]:
    backend = art.LocalBackend(path=folder, device="cpu", dtype="float32", verbose=False)
    return art.TrainableModel("agent", "tests", tiny_base, lora=LORA), backend


def weights(path: Path | None) -> dict[str, list[float]]:
    assert path is not None
    return {name: tensor.flatten().tolist() for name, tensor in load_file(path / "adapter_model.safetensors").items()}


# What is trained when ---------------------------------------------------------------------------


def test_every_row_is_in_every_epoch_and_epochs_differ() -> None:
    batches = sft_batches(7, art.TrainSFTConfig(batch_size=3, epochs=3))
    assert [len(batch) for batch in batches] == [3, 3, 1] * 3
    epochs = [[row for batch in batches[i : i + 3] for row in batch] for i in (0, 3, 6)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert batches == sft_batches(7, art.TrainSFTConfig(batch_size=3, epochs=3))
    assert batches != sft_batches(7, art.TrainSFTConfig(batch_size=3, epochs=3, seed=1))
    assert sft_batches(3, art.TrainSFTConfig(epochs=2, shuffle=False)) == [[0, 1], [2]] * 2


@pytest.mark.parametrize("buffer", [1, 3, 100])
def test_a_stream_is_shuffled_within_its_buffer(buffer: int) -> None:
    order = list(buffered_order(50, 2, seed=7, buffer=buffer))
    assert Counter(order) == dict.fromkeys(range(50), 2)
    assert all(row < place % 50 + buffer for place, row in enumerate(order)), "nothing is drawn before it was read"
    assert (order[:50] == list(range(50))) == (buffer == 1)
    assert buffer == 1 or order[:50] != order[50:]


def test_schedules() -> None:
    assert create_lr_schedule(4, 1.0, "constant") == [1.0] * 4
    assert create_lr_schedule(4, 1.0, "linear") == [1.0, 0.75, 0.5, 0.25]
    assert create_lr_schedule(4, 1.0, "cosine") == pytest.approx(
        [0.5 * (1 + math.cos(math.pi * i / 4)) for i in range(4)]
    )
    assert create_lr_schedule(6, 1.0, "linear", warmup_steps=2) == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    assert create_lr_schedule(3, 1.0, "constant", warmup_steps=5) == pytest.approx([0.2, 0.4, 0.6])
    assert create_lr_schedule(2, 1.0, "linear", min_lr=0.5) == [1.0, 0.75]
    assert create_lr_schedule(0, 1.0) == []
    with pytest.raises(ConfigError, match="did you mean 'cosine'"):
        create_lr_schedule(1, 1.0, "cosin")  # type: ignore[arg-type]
    config = art.TrainSFTConfig(learning_rate=2.0, lr_schedule="linear", warmup_ratio=0.5)
    assert learning_rates(config, 4) == [1.0, 2.0, 2.0, 1.0]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"learning_rate": [1e-4], "lr_schedule": "linear"}, "one rate per batch; leave out lr_schedule"),
        ({"learning_rate": [1e-4], "warmup_ratio": 0.1}, "one rate per batch"),
        ({"lr_schedule": "cosin"}, "did you mean 'cosine'"),
        ({"warmup_ratio": 1.5}, "warmup_ratio=1.5 must be >= 0.0 and <= 1.0"),
        ({"shuffle": "no"}, "shuffle='no' must be True or False"),
        ({"extra_metrics": {"x": math.nan}}, r"extra_metrics\['x'\]"),
        ({"warmup_steps": 3}, "has no option 'warmup_steps'; did you mean 'warmup_ratio'"),
    ],
)
def test_options_that_cannot_be_honoured(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        art.TrainSFTConfig(**options)


# A call -----------------------------------------------------------------------------------------


async def test_a_file_with_a_row_that_is_too_long(tiny_base: Path, tmp_path: Path, capsys: Any) -> None:
    """user-reports #39: the others train, with the learning rates of their batches."""
    path = tmp_path / "train.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in [*ROWS[:3], conversation("x" * 100_000, "y"), ROWS[3]]))
    model, backend = make(tiny_base, tmp_path / "art")
    async with backend:
        await model.register(backend)
        config = art.TrainSFTConfig(learning_rate=[1e-3, 2e-3, 3e-3, 4e-3, 5e-3], batch_size=1, shuffle=False)
        result = await model.train_sft(path, config, verbose=True)
        assert result.trained and result.reasons == {"too long": 1}
        assert result.notes[0].startswith("trajectory 3 (train.jsonl, line 4): 1 of 1 rows left out")
        assert result.metrics["updates"] == 4 and result.metrics["learning_rate"] == 5e-3
        assert result.metrics["loss_last"] < result.metrics["loss_first"]
        shown = capsys.readouterr().out
        assert "1 trajectory left out: 1 too long" in shown and f"artnb: {result}" in shown
        frame = model.trajectories(step=1, split="sft")
        assert list(frame["meta/line"]) == [1, 2, 3, 4, 5]
        history = model.history()
        assert history["sft/left_out/too_long"].tolist() == [0.2] and history["sft/updates"].tolist() == [4]

        with pytest.raises(ConfigError, match="4 learning rates for 5 batches"):
            await model.train_sft(path, art.TrainSFTConfig(learning_rate=[1e-3] * 4, batch_size=1))
        path.write_text('{"messages": []}\n')
        with pytest.raises(DataError, match=r"train\.jsonl: 1 of 1 rows cannot be used: line 1"):
            await model.train_sft(path)
        with pytest.raises(ConfigError, match="no trajectories were given"):
            await model.train_sft([])
        with pytest.raises(ConfigError, match=r"every option is in art\.TrainSFTConfig"):
            await model.train_sft(ROWS, _config={"x": 1})  # type: ignore[arg-type]
        assert await model.get_step() == 1


async def test_a_row_that_the_template_refuses_changes_nothing(tiny_base: Path, tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    model, backend = make(tiny_base, tmp_path / "art")
    async with backend:
        await model.register(backend)
        base = backend._models["agent"].served()
        base.chat.tokenizer.chat_template = (
            "{%- if messages[0].role == 'system' %}{{- raise_exception('System role not supported') }}{%- endif %}"
            + base.chat.tokenizer.chat_template
        )
        system = {"messages": [{"role": "system", "content": "be kind"}, *ROWS[0]["messages"]]}
        path.write_text("\n".join(json.dumps(row) for row in [ROWS[0], system]))
        with pytest.raises(RenderError, match=r"trajectory 1 \(train\.jsonl, line 2\): .*System role not supported"):
            await model.train_sft(path)
        assert await model.get_step() == 0 and model.history().empty


async def test_the_history_keeps_the_first_rows_of_a_large_data_set(
    tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_step, "KEPT_EXAMPLES", 3)
    model, backend = make(tiny_base, tmp_path / "art")
    async with backend:
        await model.register(backend)
        result = await model.train_sft(ROWS, art.TrainSFTConfig(batch_size=4))
        assert result.metrics["trajectories"] == 7 and len(model.trajectories(step=1)) == 3


async def test_sft_then_rl_on_the_same_adapter(tiny_base: Path, tmp_path: Path) -> None:
    model, backend = make(tiny_base, tmp_path / "art")
    async with backend:
        await model.register(backend)
        rows = [conversation("hello", "Paris is fine")] * 4
        taught = await model.train_sft(rows, art.TrainSFTConfig(learning_rate=5e-3, batch_size=4, epochs=16))
        asked = [{"role": "user", "content": "hello"}]
        assert model.chat(asked, temperature=0, max_tokens=24).choices[0].message.content == "Paris is fine"
        groups = await even_groups(model, 0)
        result = await model.train(groups, art.TrainConfig(learning_rate=1e-4))
        assert result.step == 2 and result.trained
        assert result.metrics["mismatch_log_ratio_max"] < 1e-3, "rollouts are sampled from what SFT made"
        before, after = weights(taught.checkpoint_path), weights(result.checkpoint_path)
        assert before.keys() == after.keys() and before != after
        # A small step leaves what was taught.
        assert model.chat(asked, temperature=0, max_tokens=24).choices[0].message.content == "Paris is fine"
        assert list(model.history()["step"]) == [1, 2]


# Longer runs ------------------------------------------------------------------------------------


def test_a_file_is_gone_through_in_epochs(file: Path) -> None:
    assert get_file_row_count(file) == 7
    whole = [row.metadata["line"] for row in iterate_file(file, epochs=2, shuffle_buffer_size=3)]
    assert sorted(whole[:7]) == sorted(whole[7:]) == list(range(1, 8))
    rest = [row.metadata["line"] for row in iterate_file(file, epochs=2, shuffle_buffer_size=3, initial_skip=5)]
    assert rest == whole[5:]
    assert [row.metadata["line"] for row in iterate_file(file, shuffle_buffer_size=1)] == list(range(1, 8))
    with pytest.raises(ConfigError, match="shuffle_buffer_size=0"):
        iterate_file(file, shuffle_buffer_size=0)


@pytest.mark.parametrize("chunk_size", [1, 3, 10])
@pytest.mark.parametrize("done", [0, 4, 5, 8])
def test_chunks_cover_the_data_set_and_go_on_at_any_batch(chunk_size: int, done: int, capsys: Any) -> None:
    rows = [art.Trajectory(metadata={"n": n}) for n in range(7)]
    options: dict[str, Any] = {"epochs": 2, "batch_size": 2, "peak_lr": 1.0, "warmup_ratio": 0.25}

    def flat(**more: Any) -> tuple[list[Any], list[float], list[int]]:
        chunks = list(create_sft_dataset_iterator(rows, **options, **more, show_progress=False))
        assert all(not chunk.config.shuffle for chunk in chunks)
        numbers = [row.metadata["n"] for chunk in chunks for row in chunk.trajectories]
        return numbers, [rate for chunk in chunks for rate in chunk.config.learning_rate], [c.step for c in chunks]

    numbers, rates, steps = flat(chunk_size=chunk_size)
    assert sorted(numbers[:7]) == sorted(numbers[7:]) == list(range(7))
    assert rates == create_lr_schedule(8, 1.0, "linear", 2)
    assert steps == {1: list(range(8)), 3: [0, 3, 4, 7], 10: [0, 4]}[chunk_size]
    rest, later, _ = flat(chunk_size=chunk_size, initial_step=done)
    assert later == rates[done:]
    trained = [n for batch in range(done) for n in numbers[7 * (batch // 4) :][:7][2 * (batch % 4) :][:2]]
    assert trained + rest == numbers
    assert capsys.readouterr().err == ""


async def run_file(model: art.TrainableModel, file: Path, **options: Any) -> list[Any]:
    return await train_sft_from_file(model, file, epochs=2, batch_size=3, peak_lr=5e-3, **options)


async def test_a_run_in_parts_and_an_interrupted_one_equal_the_whole(
    tiny_base: Path, tmp_path: Path, file: Path, capsys: Any
) -> None:
    async def registered(folder: str) -> tuple[art.TrainableModel, Any]:
        model, backend = make(tiny_base, tmp_path / folder)
        await model.register(backend)
        return model, backend

    model, backend = await registered("whole")
    async with backend:
        (result,) = await run_file(model, file)
        whole = weights(result.checkpoint_path)
        assert result.metrics["updates"] == 5 and result.step == 1

    model, backend = await registered("parts")
    async with backend:
        results = await run_file(model, file, checkpoint_every=2)
        assert [r.metrics["updates"] for r in results] == [2, 2, 1]
        assert weights(results[-1].checkpoint_path) == whole

    model, backend = await registered("cut")
    async with backend:
        running = asyncio.create_task(run_file(model, file, checkpoint_every=2, resume=True))
        while await model.get_step() < 1:
            await asyncio.sleep(0.01)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        reached = await model.get_step()
        assert 1 <= reached < 3
    model, backend = await registered("cut")
    async with backend:
        assert await model.get_step() == reached
        results = await run_file(model, file, checkpoint_every=2, resume=True)
        assert f"training batches {2 * reached} to 4" in capsys.readouterr().out
        assert weights(results[-1].checkpoint_path) == whole
        assert (await model.get_step(), model.history()["sft/updates"].sum()) == (3, 5)

        # Run again, the cell trains nothing; other options are another run, and so is the same one without resume.
        assert await run_file(model, file, checkpoint_every=2, resume=True) == []
        assert "all are trained already" in capsys.readouterr().out
        assert len(await run_file(model, file, final_step=2)) == 1
        assert len(await run_file(model, file, schedule_type="cosine", resume=True, final_step=1)) == 1
        (rest,) = await run_file(model, file, schedule_type="cosine", resume=True)
        assert rest.metrics["updates"] == 4


async def test_a_run_through_a_file_says_what_it_cannot_do(tiny_base: Path, tmp_path: Path, file: Path) -> None:
    model, backend = make(tiny_base, tmp_path / "art")
    with pytest.raises(ConfigError, match="there is no _config here"):
        await train_sft_from_file(model, file, _config={"lr": 1})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="checkpoint_every=0 must be >= 1"):
        await train_sft_from_file(model, file, checkpoint_every=0)
    with pytest.raises(ConfigError, match=r"call `await model\.register"):
        await train_sft_from_file(model, file)
    async with backend:
        await model.register(backend)
        with file.open("a") as lines:
            lines.write("\n{")
        with pytest.raises(DataError, match=r"line 8 is not JSON"):
            await train_sft_from_file(model, file)
        assert await model.get_step() == 0
