"""ServerlessBackend against a local service on a real socket: registering, training, history, resuming, checkpoints."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from training_service import (
    KEY,
    Fault,
    TrainingService,
    make_backend,
    make_model,
    registered,
    rollouts,
    running,
)

import artnb as art
from artnb.errors import CheckpointError, ConfigError, ModelError, ServiceError, TrainError
from artnb.events import EVENTS, Event
from artnb.serverless import ServerlessBackend
from artnb.serverless.jobs import FILE


@pytest.fixture
def service() -> Iterator[TrainingService]:
    with running() as made:
        yield made


async def test_registering_makes_the_model_once(service: TrainingService, tmp_path: Path) -> None:
    async with registered(service, tmp_path) as (model, backend):
        await model.register(backend)
        assert model.entity == "team"
        assert model.get_inference_name() == model.inference_model_name == "wandb-artifact:///team/demo/agent"
        assert model.get_inference_name(step=3) == "wandb-artifact:///team/demo/agent:step3"
        assert (model.inference_base_url, model.inference_api_key) == (service.url, KEY)
        assert await model.get_step() == 0
    async with registered(service, tmp_path):
        assert len(service.models) == 1
    assert service.sent("POST", "/models")[0] == {
        "entity": None,
        "project": "demo",
        "name": "agent",
        "base_model": "some/base",
        "return_existing": True,
    }


async def test_the_services_name_is_the_run_name(service: TrainingService, tmp_path: Path) -> None:
    async with registered(service, tmp_path, run_name="agent-run-7", entity="others") as (model, _):
        assert model.get_inference_name() == "wandb-artifact:///others/demo/agent-run-7"
        assert model.folder == tmp_path / "demo" / "models" / "agent"


async def test_what_the_service_cannot_have_is_refused(service: TrainingService, tmp_path: Path) -> None:
    async with registered(service, tmp_path) as (_, backend):
        other = art.TrainableModel(name="agent", project="demo", base_model="other/base", base_path=tmp_path)
        with pytest.raises(ModelError, match=r"base_model='some/base', not 'other/base'"):
            await other.register(backend)
        with pytest.raises(ConfigError, match="chooses the LoRA itself"):
            await make_model(tmp_path, "wide", lora=art.LoraConfig(r=64)).register(backend)
        with pytest.raises(ConfigError, match="not registered here"):
            await backend.train(make_model(tmp_path, "nobody"), rollouts(0, 1))
        with pytest.raises(ConfigError, match=r"trajectory_groups\[0\] is a Trajectory"):
            await backend.train(_model_of(backend, tmp_path), rollouts(0, 1)[0].trajectories)  # type: ignore[arg-type]


def _model_of(backend: ServerlessBackend, folder: Path) -> art.TrainableModel:
    model = make_model(folder)
    model.register(backend).result()
    return model


def test_a_key_is_needed_and_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    with pytest.raises(ConfigError, match=r"api_key=.*WANDB_API_KEY.*wandb\.ai/authorize"):
        ServerlessBackend()
    monkeypatch.setenv("WANDB_API_KEY", f" {KEY}\n")
    backend = ServerlessBackend()
    assert backend._service.key == KEY and backend._service.base_url == "https://api.training.wandb.ai/v1"
    assert KEY not in repr(backend) + repr(vars(backend))
    with pytest.raises(ConfigError, match="poll_seconds"):
        ServerlessBackend(poll_seconds=0)


async def test_a_step_is_sent_followed_and_kept(service: TrainingService, tmp_path: Path) -> None:
    seen: list[Event] = []
    forget = EVENTS.subscribe(seen.append)
    async with registered(service, tmp_path) as (model, backend):
        groups = rollouts(0.0, 1.0, 0.25, groups=2, metrics={"won": 1.0}, metadata={"level": 2})
        result = await backend.train(model, groups, learning_rate=2e-5, loss_fn="ppo", epsilon=0.2)
        forget()
        assert (result.step, result.trained) == (1, True) and await model.get_step() == 1
        assert result.artifact_name == "team/demo/agent:step1"
        assert result.metrics["loss"] == 1.0 and result.metrics["grad_norm"] == 2.0  # means of two gradient steps
        assert result.metrics["gradient_steps"] == 2.0
        (sent,) = service.sent("POST", "/training-jobs")
        assert sent["experimental_config"] == {"learning_rate": 2e-5, "loss_fn": "ppo", "epsilon": 0.2}
        trajectory = sent["trajectory_groups"][1]["trajectories"][2]
        assert trajectory["reward"] == 0.25 and trajectory["metrics"] == {"won": 1.0}
        assert trajectory["metadata"] == {"level": 2}
        assert trajectory["messages_and_choices"][0] == {"role": "user", "content": "task 1"}
        choice = trajectory["messages_and_choices"][1]
        assert choice["message"]["content"] == "answer 2" and len(choice["logprobs"]["content"]) == 2
        frame = model.history()
        assert frame["train/loss"].tolist() == [1.0] and frame["train/trained"].tolist() == [1.0]
        assert frame["train/reward"].iloc[0] == pytest.approx(1.25 / 3) and frame["train/won"].iloc[0] == 1.0
        assert sorted(model.trajectories(step=1, split="train")["reward"]) == [0.0, 0.0, 0.25, 0.25, 1.0, 1.0]
        await model.log(groups, metrics=result.metrics, step=result.step, split="train")  # as users of ART do
        assert len(model.trajectories(step=1, split="train")) == 6  # not kept twice
    (step,) = [event for event in seen if event.kind == "step"]
    assert step.model == "demo/agent" and step.data["step"] == 1 and step.data["metrics"]["loss"] == 1.0
    shown = [e.data for e in seen if e.kind == "progress" and e.data["phase"] == "train"]
    assert shown[-1]["done"] == shown[-1]["total"] == 2 and shown[-1]["closed"]


async def test_the_cursor_moves_and_no_event_is_asked_for_twice(service: TrainingService, tmp_path: Path) -> None:
    async with registered(service, tmp_path) as (model, backend):
        await backend.train(model, rollouts(0, 1))
    cursors = [query.get("after") for query in service.sent("GET", "/events")]
    job = next(iter(service.jobs))
    assert cursors == [None, f"{job}-0", f"{job}-1", f"{job}-2"]


async def test_events_that_are_new_odd_or_come_twice(service: TrainingService, tmp_path: Path) -> None:
    service.script = [
        ("queued", {"place": 3}),
        ("training_started", {}),
        ("gradient_step", {"loss": 2.0, "note": "text", "flag": True, "bad": None}),
        ("training_ended", {}),
    ]
    async with registered(service, tmp_path) as (model, backend):
        started = backend._service.events

        async def twice(job: str, after: str | None, **options: bool) -> object:
            found = await started(job, after, **options)
            return [*found, *found]

        backend._service.events = twice  # type: ignore[method-assign, assignment]
        result = await backend.train(model, rollouts(0, 1))
    assert result.metrics["loss"] == 2.0 and result.metrics["gradient_steps"] == 1.0
    assert not {"note", "flag", "bad"} & result.metrics.keys()


async def test_a_batch_without_signal_is_not_sent_and_says_why(
    service: TrainingService, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with registered(service, tmp_path) as (model, backend):
        result = await model.train(rollouts(0.5, 0.5, groups=2))
        assert (result.step, result.trained) == (0, False)
        assert result.reasons == {"all rewards equal": 2}
        assert service.count("POST", "/training-jobs") == 0
        assert "Every reward is 0.5" in capsys.readouterr().out
        assert len(model.trajectories(split="untrained")) == 4
        assert (await model.train(rollouts(0, 1))).step == 1
        assert len(model.trajectories(split="untrained")) == 4
        assert isinstance(backend, ServerlessBackend)


async def test_what_cannot_train_is_left_out_and_counted(service: TrainingService, tmp_path: Path) -> None:
    mixed = rollouts(0.0, 1.0, None, float("nan"))[0]
    mixed.trajectories[1].metrics["speed"] = float("inf")
    dicts = art.Trajectory(messages_and_choices=[{"role": "user", "content": "a"}], reward=1.0)
    plain = rollouts(0.75)[0].trajectories[0]
    plain.choices()[0].logprobs = None
    mixed.trajectories += [dicts, plain]
    failed = art.TrajectoryGroup([ValueError("no network")])
    async with registered(service, tmp_path) as (model, backend):
        result = await backend.train(model, [mixed, failed, *rollouts(1, 1)])
    (sent,) = service.sent("POST", "/training-jobs")
    (group,) = sent["trajectory_groups"]
    assert [t["reward"] for t in group["trajectories"]] == [0.0, 1.0]
    assert group["trajectories"][1]["metrics"] == {}
    assert result.reasons == {"failed": 1, "all rewards equal": 1}
    notes = " ".join(result.notes)
    for words in ("reward is None", "reward is nan", "no sampled choices", "no log-probs", "ValueError: no network"):
        assert words in notes
    assert result.metrics["groups_trained"] == 1.0 and result.metrics["trajectories_trained"] == 2.0


async def test_a_broken_connection_is_followed_again_and_nothing_trains_twice(
    service: TrainingService, tmp_path: Path
) -> None:
    groups = rollouts(0, 1)
    async with registered(service, tmp_path) as (model, backend):
        service.fail("GET /events", Fault(503), times=4)
        with pytest.raises(ServiceError, match=r"goes on at the service.*run the same call again") as raised:
            await backend.train(model, groups)
        assert raised.value.status == 503
        result = await backend.train(model, groups)
        assert result.step == 1 and result.metrics["gradient_steps"] == 2.0
        assert service.count("POST", "/training-jobs") == 1
        assert (await backend.train(model, groups)).step == 2  # the job has ended, so this is a new one
        assert model.history()["step"].tolist() == [1, 2]


async def test_an_interrupted_cell_and_a_new_kernel_find_the_job(
    service: TrainingService, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    groups = rollouts(0, 1, groups=2)
    service.held = True
    async with registered(service, tmp_path) as (model, backend):
        step = asyncio.create_task(backend.train(model, groups))
        while len(service.sent("GET", "/events")) < 4:
            await asyncio.sleep(0.005)
        with pytest.raises(ConfigError, match="a step of agent runs already"):
            await backend.train(model, groups)
        step.cancel()
        with pytest.raises(asyncio.CancelledError):
            await step
        assert "goes on at the service" in capsys.readouterr().out
    service.held = False
    async with registered(service, tmp_path) as (model, backend):
        assert "was started earlier and its end not seen" in capsys.readouterr().out
        result = await backend.resume(model)
        assert result is not None and result.step == 1
        assert result.metrics["gradient_steps"] == 2.0 and result.metrics["loss"] == 1.0
        assert model.history()["train/loss"].tolist() == [1.0]
        assert len(model.trajectories(step=1, split="train")) == 4  # kept when the job was started
        assert await backend.resume(model) is None
        assert not (model.folder / FILE).exists()
    assert service.count("POST", "/training-jobs") == 1


async def test_other_rollouts_wait_for_the_job_that_runs(service: TrainingService, tmp_path: Path) -> None:
    service.held = True
    async with registered(service, tmp_path) as (model, backend):
        service.fail("GET /events", Fault(500), times=4)
        with pytest.raises(ServiceError):
            await backend.train(model, rollouts(0, 1))
    service.held = False
    async with registered(service, tmp_path) as (model, backend):
        result = await backend.train(model, rollouts(1, 0, 0))
    assert result.step == 2
    order = [(verb, path) for verb, path, _ in service.calls if path.endswith(("jobs", "events"))]
    second = [i for i, (verb, _) in enumerate(order) if verb == "POST"][1]
    assert all("job-2" in path for _, path in order[1:second])  # the first is read to its end before the second begins


async def test_a_job_that_failed_or_vanished_is_not_waited_for_again(service: TrainingService, tmp_path: Path) -> None:
    groups = rollouts(0, 1)
    whole = service.script
    async with registered(service, tmp_path) as (model, backend):
        service.script = [("training_started", {"num_sequences": 1}), ("training_failed", {"error_message": "no GPU"})]
        with pytest.raises(TrainError, match=r"job job-2 failed: no GPU"):
            await backend.train(model, groups)
        service.script = [("training_failed", {})]
        with pytest.raises(TrainError, match="without saying why"):
            await backend.train(model, groups)
        service.script = whole
        service.fail("GET /events", Fault(404, {"message": "job not found"}))
        with pytest.raises(ServiceError, match="job not found"):
            await backend.train(model, groups)
        assert (await backend.train(model, groups)).step == 1
        assert service.count("POST", "/training-jobs") == 4


async def test_a_job_without_a_new_checkpoint_is_no_step(service: TrainingService, tmp_path: Path) -> None:
    service.script = [("training_started", {"num_sequences": 0}), ("training_ended", {})]
    async with registered(service, tmp_path) as (model, backend):
        service.checkpoints[backend._registered(model).there.id] = []
        ended = service._start

        def start(body: dict[str, object], request: object) -> str:
            job = ended(body, request)  # type: ignore[arg-type]
            service.jobs[job]["done"] = True  # it writes no checkpoint
            return job

        service._start = start  # type: ignore[method-assign, assignment]
        result = await backend.train(model, rollouts(0, 1))
    assert (result.step, result.trained) == (0, False)
    assert "ended without a new checkpoint" in result.notes[0]


async def test_a_record_that_is_not_ours_is_left_alone(service: TrainingService, tmp_path: Path) -> None:
    async with registered(service, tmp_path) as (model, backend):
        record = model.folder / FILE
        record.parent.mkdir(parents=True)
        record.write_text("notes of mine")
        with pytest.raises(CheckpointError, match=rf"{re.escape(str(record))} is not a record of a training job"):
            await backend.train(model, rollouts(0, 1))
        assert record.read_text() == "notes of mine"
        record.write_text(json.dumps({"v": 2, "job": {}}))
        with pytest.raises(CheckpointError, match="its format is 2"):
            await backend.resume(model)
        record.unlink()
        service.held = True
        service.fail("GET /events", Fault(500), times=4)
        with pytest.raises(ServiceError):
            await backend.train(model, rollouts(0, 1))
        service.held = False
        await backend.delete(model)
        await model.register(other := make_backend(service))
        assert await other.resume(model) is None  # the job's model is not there any more
        await other.close()


async def test_checkpoints_are_listed_over_pages_and_deleted_but_for_the_newest(
    service: TrainingService, tmp_path: Path
) -> None:
    async with registered(service, tmp_path) as (model, backend):
        for reward in (0.1, 0.9, 0.5, 0.3, 0.2):
            step = (await backend.train(model, rollouts(0, reward))).step
            await model.log(split="val", metrics={"reward": reward}, step=step)
        assert await backend.checkpoints(model) == [1, 2, 3, 4, 5]
        with pytest.raises(ConfigError, match="checkpoint 5 of agent is the newest"):
            await backend.delete_checkpoints(model, [2, 5])
        with pytest.raises(CheckpointError, match=r"no checkpoints \[9\] at the service; there are: \[1, 2, 3, 4, 5\]"):
            await backend.delete_checkpoints(model, [9])
        assert await model.delete_checkpoints() == [1, 3, 4]
        assert await backend.checkpoints(model) == [2, 5]
        await backend.delete_checkpoints(model, [])
        assert service.sent("DELETE", "/checkpoints") == [{"steps": [1, 3, 4]}]


async def test_rollouts_are_logged_here_and_there(service: TrainingService, tmp_path: Path) -> None:
    async with registered(service, tmp_path) as (model, backend):
        await backend.log(model, [*rollouts(0.5, None), rollouts(1)[0].trajectories[0]], split="val")
        assert len(model.trajectories(split="val")) == 3
        (body,) = service.logged
        assert body["split"] == "val" and body["model_id"] in service.models
        assert [[t["reward"] for t in g["trajectories"]] for g in body["trajectory_groups"]] == [[0.5, None], [1.0]]


async def test_trackers_follow_a_run_at_the_service_until_it_is_closed(
    service: TrainingService, tmp_path: Path
) -> None:
    told: list[Any] = []

    class Tracker:
        name, resumes = "notes", True

        def open(self, run: Any, state: Any) -> Tracker:
            return self

        def configure(self, config: Any) -> None: ...

        def log(self, logged: Any) -> None:
            told.append((logged.step, logged.columns().get("train/loss")))

        def close(self) -> None:
            told.append("closed")

    async with registered(service, tmp_path, report_metrics=[Tracker()]) as (model, backend):
        await backend.train(model, rollouts(0, 1))
        await backend.train(model, rollouts(1, 0))
    assert told == [(1, 1.0), (2, 1.0), "closed"]


async def test_deleting_a_model_leaves_its_history(service: TrainingService, tmp_path: Path) -> None:
    async with registered(service, tmp_path) as (model, backend):
        await backend.train(model, rollouts(0, 1))
        await backend.delete(model)
        assert service.models == {}
        assert len(model.history()) == 1
        with pytest.raises(ConfigError, match="not registered here"):
            await model.get_step()


async def test_the_key_is_in_no_log_no_output_and_no_file(
    service: TrainingService, tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    async with registered(service, tmp_path) as (model, backend):
        service.fail("POST /training-jobs", Fault(400, f"bad header: Bearer {KEY}"))
        with pytest.raises(ServiceError) as raised:
            await backend.train(model, rollouts(0, 1))
        assert "bad header: Bearer ***" in str(raised.value)
        await backend.train(model, rollouts(0, 1))
        client = model.openai_client()
        await client.chat.completions.create(model="agent", messages=[{"role": "user", "content": "a"}])
    assert caplog.records
    written = [path.read_text() for path in tmp_path.rglob("*") if path.is_file()]
    assert written
    out = capsys.readouterr()
    for text in (*(str(r.__dict__) for r in caplog.records), caplog.text, out.out, out.err, *written):
        assert KEY not in text


def test_one_backend_under_successive_loops_and_in_threads(service: TrainingService, tmp_path: Path) -> None:
    """user-reports #13, at the service: its sockets belong to the loop that opened them, and end with it."""
    model, backend = make_model(tmp_path), make_backend(service)
    model.register(backend).result()

    async def step(*rewards: float) -> int:
        return (await backend.train(model, rollouts(*rewards))).step

    assert asyncio.run(step(0, 1)) == 1
    assert asyncio.run(step(1, 0)) == 2
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(asyncio.run(step(0, 0, 1))))
    thread.start()
    thread.join()
    assert found == [3]
    asyncio.run(backend.close())
    assert not backend._service._held
    assert asyncio.run(model.get_step()) == 3  # closed is not gone: a later call opens new connections
    asyncio.run(backend.close())


def test_the_client_needs_only_the_core_install() -> None:
    heavy = "torch transformers peft fastapi starlette uvicorn wandb psutil filelock prometheus_client jinja2 pandas"
    probe = f"import sys, artnb.serverless; print([m for m in {heavy.split()!r} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"
