"""Whatever takes long shows one line with a rate and an end, and tells the dashboard its phase."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agents import even_groups, even_rollout

import artnb as art
from artnb.events import EVENTS, Event


@pytest.fixture
def told() -> Iterator[list[dict[str, Any]]]:
    """The progress events of a test."""
    events: list[dict[str, Any]] = []

    def listen(event: Event) -> None:
        if event.kind == "progress":
            events.append(dict(event.data))

    unsubscribe = EVENTS.subscribe(listen)
    yield events
    unsubscribe()


def phases(told: list[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(event["phase"] for event in told))


def last(told: list[dict[str, Any]], phase: str, desc: str) -> dict[str, Any]:
    return next(e for e in reversed(told) if e["phase"] == phase and e["desc"] == desc)


async def test_every_phase_shows_a_line_with_its_end(
    tiny_base: Path, tmp_path: Path, told: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    async def rollout(model: art.TrainableModel, scenario: str) -> art.Trajectory:
        return await even_rollout(model, scenario, seed=1)

    async with art.LocalBackend(path=tmp_path / "art", device="cpu") as backend:
        model = art.TrainableModel("agent", "tests", tiny_base, lora=art.LoraConfig(r=4))
        await model.register(backend)
        loaded = last(told, "load", f"load {tiny_base.name}")
        assert loaded["closed"] and loaded["done"] == loaded["total"] > 20 and loaded["unit"] == "weight"
        assert told[0]["phase"] == "load" and told[0]["done"] == 0, "the phase is known before the first weight"
        out = capsys.readouterr()
        assert f"load {tiny_base.name}: 100%" in out.err and "Loading weights" not in out.err

        await art.preflight(rollout, ["a"], model=model)
        assert last(told, "gather", "preflight")["done"] == last(told, "gather", "preflight")["total"] == 4
        await art.gather_trajectories((rollout(model, "b") for _ in range(3)), pbar_desc="evaluate")
        assert last(told, "gather", "evaluate")["total"] == 3

        config = art.TrainConfig(learning_rate=1e-4, num_iterations=2, minibatches=2, max_tokens_per_pack=64)
        await model.train(await even_groups(model, 0), config)
        trained = last(told, "train", "train step 1")
        assert trained["closed"] and trained["done"] == trained["total"] > 4 and "loss" in trained["shown"]
        await model.train_sft([await rollout(model, "c")] * 3, art.TrainSFTConfig(learning_rate=1e-4))
        supervised = last(told, "train", "sft step 2")
        assert supervised["done"] == supervised["total"] == 2
        assert {"load", "gather", "train", "save", "swap"} <= set(phases(told))
        shown = capsys.readouterr().err
    for desc in ("preflight", "evaluate", "train step 1", "sft step 2"):
        assert f"{desc}: 100%" in shown


async def test_a_quiet_backend_loads_without_a_line(
    tiny_base: Path, tmp_path: Path, told: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    async with art.LocalBackend(path=tmp_path / "art", device="cpu", verbose=False) as backend:
        await art.TrainableModel("agent", "tests", tiny_base).register(backend)
    out = capsys.readouterr()
    assert (out.out, out.err) == ("", "")
    assert told[0]["phase"] == "load", "the dashboard is told all the same"


def test_bars_of_other_threads_and_names_stay_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    import threading

    from transformers.utils import logging

    from artnb.local.loading import watched_weights

    seen: list[tuple[int, int]] = []
    with watched_weights(lambda done, total: seen.append((done, total))):
        assert list(logging.tqdm([1, 2], desc="Loading weights")) == [1, 2]
        assert list(logging.tqdm([1, 2], desc="Fetching files")) == [1, 2]
        other = threading.Thread(target=lambda: list(logging.tqdm([1, 2, 3], desc="Loading weights")))
        other.start()
        other.join()
    assert seen == [(1, 2), (1, 2)]
    shown = capsys.readouterr().err
    assert "Fetching files: 100%" in shown and "3/3" in shown
    list(logging.tqdm([1], desc="Loading weights"))
    assert seen == [(1, 2), (1, 2)], "the hook is gone"
