"""Supervised jobs at the service: the file that is uploaded, the options, and W&B's own library where no account is."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from training_service import KEY, Fault, TrainingService, make_backend, make_model, running

import artnb as art
from artnb.errors import ConfigError, ServiceError
from artnb.serverless.upload import Destination, conversations, make_artifact, upload_to_wandb


@pytest.fixture
def service() -> Iterator[TrainingService]:
    with running() as made:
        yield made


class Shelf:
    """An upload of the user's own: it keeps what it was given."""

    def __init__(self) -> None:
        self.files: list[list[dict[str, object]]] = []
        self.destinations: list[Destination] = []

    def __call__(self, path: Path, destination: Destination, api_key: str) -> str:
        assert api_key == KEY
        self.files.append([json.loads(line) for line in path.read_text().splitlines()])
        self.destinations.append(destination)
        return f"https://shelf/{len(self.files)}.jsonl"


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


def lesson(answer: str, **fields: object) -> art.Trajectory:
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": answer}]
    return art.Trajectory(messages_and_choices=messages, **fields)


async def test_a_job_gets_the_file_in_the_order_of_the_plan(service: TrainingService, tmp_path: Path) -> None:
    shelf = Shelf()
    config = art.TrainSFTConfig(
        batch_size=2, epochs=2, lr_schedule="linear", learning_rate=1e-4, extra_metrics={"chapter": 3.0}
    )
    lessons = [lesson(f"a{i}", tools=TOOLS if i == 3 else None) for i in range(4)]
    async with make_backend(service, upload=shelf) as backend:
        model = make_model(tmp_path)
        await model.register(backend)
        result = await model.train_sft(lessons, config)
        assert result.step == 1 and result.metrics["loss"] == 1.0
        (sent,) = service.sent("POST", "/sft-training-jobs")
        assert sent["training_data_url"] == "https://shelf/1.jsonl"
        assert sent["config"]["batch_size"] == 2 and len(sent["config"]["learning_rate"]) == 4
        assert shelf.destinations == [Destination("team", "demo", "agent", "run-1")]
        answers = [row["messages"][1]["content"] for row in shelf.files[0]]  # type: ignore[index]
        assert sorted(answers[:4]) == sorted(answers[4:]) == ["a0", "a1", "a2", "a3"]
        assert [row["tools"] for row in shelf.files[0] if "tools" in row] == [TOOLS, TOOLS]
        assert service.count("GET", "/events") == service.count("GET", "sft-2/events")
        assert model.history()["sft/chapter"].tolist() == [3.0]
        assert len(model.trajectories(step=1, split="sft")) == 4
        with pytest.raises(ConfigError, match=r"no field for TrainSFTConfig\(weight_decay"):
            await model.train_sft(lessons, art.TrainSFTConfig(weight_decay=0.1))
        with pytest.raises(ConfigError, match="no trajectories"):
            await backend.train_sft(model, [])
        assert len(shelf.files) == 1


async def test_the_same_lessons_are_neither_uploaded_nor_trained_twice(
    service: TrainingService, tmp_path: Path
) -> None:
    shelf = Shelf()
    lessons = [lesson("a"), lesson("b")]
    async with make_backend(service, upload=shelf) as backend:
        model = make_model(tmp_path)
        await model.register(backend)
        service.fail("GET /events", Fault(500), times=4)
        with pytest.raises(ServiceError, match="goes on at the service"):
            await model.train_sft(lessons)
        assert (await model.train_sft(lessons)).step == 1
        assert len(shelf.files) == service.count("POST", "/sft-training-jobs") == 1
        assert (await model.train_sft(lessons, art.TrainSFTConfig(learning_rate=1e-3))).step == 2


def test_further_conversations_are_rows_of_their_own() -> None:
    whole = lesson("a", additional_histories=[art.History(messages_and_choices=[{"role": "user", "content": "b"}])])
    assert [json.loads(line)["messages"][0]["content"] for line in conversations([whole])] == ["?", "b"]


async def test_without_wandb_the_extra_is_named(
    service: TrainingService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    async with make_backend(service) as backend:
        model = make_model(tmp_path)
        await model.register(backend)
        with pytest.raises(ConfigError, match=r"pip install 'artnb\[wandb\]'.*upload="):
            await model.train_sft([lesson("a")])
        assert service.count("POST", "/sft-training-jobs") == 0


def test_wandb_that_may_not_use_the_network_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    with pytest.raises(ConfigError, match="WANDB_MODE='offline' keeps wandb from uploading"):
        upload_to_wandb(tmp_path / "train.jsonl", Destination("team", "demo", "agent", None), KEY)


def test_the_artifact_is_what_wandb_makes_of_the_file(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    path = tmp_path / "data.jsonl"
    path.write_bytes(b"".join(conversations([lesson("a"), lesson("b")])))
    destination = Destination("team", "demo", "agent", "run-1")
    artifact, other = make_artifact(path, destination), make_artifact(path, destination)
    assert artifact.type == "dataset" and artifact.name.startswith("agent-sft-data-")
    assert artifact.name != other.name
    (entry,) = artifact.manifest.entries.values()
    assert entry.path == "train.jsonl" and entry.size == path.stat().st_size
