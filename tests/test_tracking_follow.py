"""How trackers follow a run: none of them can hold up or fail what is logged, and each is told everything once."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pydantic
import pytest

import artnb as art
from artnb.errors import ConfigError
from artnb.tracking import choose
from artnb.tracking.choose import plain, without_secrets
from artnb.tracking.follow import TRACKING
from artnb.tracking.traces import current_traces
from artnb.tracking.tracker import Logged, RunInfo, State


@dataclass(eq=False)
class Recorder:
    """A tracker of a user's own that notes what it is told."""

    name: str = "recorder"
    resumes: bool = True
    fails_in: str = ""
    gate: threading.Event | None = None
    told: list[Any] = field(default_factory=list)

    def open(self, run: RunInfo, state: State) -> Recorder:
        self._may_fail("open")
        self.told.append(("open", run.project, run.name, dict(run.config)))
        return self

    def log(self, logged: Logged) -> None:
        if self.gate is not None:
            self.gate.wait()
        self._may_fail("log")
        self.told.append((logged.step, logged.columns()))

    def configure(self, config: Mapping[str, Any]) -> None:
        self.told.append(config)

    def close(self) -> None:
        self.told.append("close")

    def _may_fail(self, where: str) -> None:
        if where == self.fails_in:
            raise OSError("the network is unreachable\nand more")

    def steps(self) -> list[int]:
        return [item[0] for item in self.told if isinstance(item, tuple) and item[0] != "open"]


@pytest.fixture(autouse=True)
def _nothing_is_followed_afterwards() -> Iterator[None]:
    yield
    TRACKING.close()


def make(tmp_path: Path, *trackers: Any, **options: Any) -> art.Model:
    return art.Model("agent", "tests", base_path=tmp_path, report_metrics=trackers, **options)


async def log(model: art.Model, step: int, split: str = "val", **metrics: float) -> None:
    await model.log(metrics=metrics or {"reward": float(step)}, split=split, step=step)


async def test_a_tracker_is_told_everything_in_order_and_of_the_config(tmp_path: Path) -> None:
    recorder = Recorder()
    model = make(tmp_path, recorder, config={"scenario": "s"})
    model.update_wandb_config({"before": 1})
    await log(model, 1, split="train", reward=0.5)
    await log(model, 7)
    await log(model, 3)
    model.update_wandb_config({"after": {"x": 2}})
    model.update_wandb_config({"after": {"x": 2}})
    TRACKING.detach("tests/agent")
    TRACKING.detach("tests/agent")
    (_, project, name, config), *rest = recorder.told
    assert (project, name) == ("tests", "agent") and config["scenario"] == "s" and config["before"] == 1
    values = [(1, {"train/reward": 0.5}), (7, {"val/reward": 7.0}), (3, {"val/reward": 3.0})]
    assert rest == [*values, {"after": {"x": 2}}, "close"]


@pytest.mark.parametrize("where", ["open", "log"])
async def test_a_tracker_that_fails_costs_one_line(
    tmp_path: Path, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    bad, good = Recorder("bad", fails_in=where), Recorder("good")
    model = make(tmp_path, bad, good)
    with caplog.at_level(logging.WARNING, "artnb"):
        for step in range(5):
            await log(model, step)
        TRACKING.detach("tests/agent")
    (line,) = [record.message for record in caplog.records]
    assert "agent is not reported to bad (OSError: the network is unreachable)" in line and "\n" not in line
    assert good.steps() == [0, 1, 2, 3, 4] == list(model.history()["step"])
    # The next session makes up for it.
    again = Recorder("bad")
    await log(make(tmp_path, again), 5)
    TRACKING.detach("tests/agent")
    assert again.steps() == [0, 1, 2, 3, 4, 5]


async def test_nobody_waits_for_a_tracker_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hangs = Recorder(gate=threading.Event())
    model = make(tmp_path, hangs)
    for step in range(3):
        await log(model, step)
    assert len(model.history()) == 3 and hangs.steps() == []
    monkeypatch.setattr("artnb.tracking.follow.CLOSE_LIMIT_S", 0.05)
    with caplog.at_level(logging.WARNING, "artnb"):
        TRACKING.detach("tests/agent")
    assert "agent: recorder did not end in time" in caplog.text
    assert hangs.gate is not None
    hangs.gate.set()


async def test_a_cell_that_runs_again_goes_on_with_the_same_trackers(tmp_path: Path) -> None:
    first, second = Recorder(), Recorder()
    await log(make(tmp_path, first), 0)
    await log(make(tmp_path, first), 1)
    assert "close" not in first.told
    await log(make(tmp_path, second), 2)
    assert first.told[-1] == "close" and first.steps() == [0, 1]
    await log(make(tmp_path), 3)
    assert second.told[-1] == "close" and second.steps() == [2]


async def test_many_cells_at_once_follow_a_run_once(tmp_path: Path) -> None:
    recorder = Recorder()
    models = [make(tmp_path, recorder) for _ in range(8)]
    await asyncio.gather(*(asyncio.to_thread(asyncio.run, log(model, i)) for i, model in enumerate(models)))
    TRACKING.detach("tests/agent")
    assert sorted(recorder.steps()) == list(range(8))
    assert [item[0] for item in recorder.told if isinstance(item, tuple)].count("open") == 1


async def test_trackers_that_do_not_resume_hear_only_what_comes(tmp_path: Path) -> None:
    await log(make(tmp_path), 0)
    recorder = Recorder(resumes=False)
    await log(make(tmp_path, recorder), 1)
    TRACKING.detach("tests/agent")
    assert recorder.steps() == [1] and not (tmp_path / "tests/models/agent/tracking").exists()


async def test_a_state_that_is_damaged_is_a_new_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    await log(make(tmp_path, Recorder()), 0)
    TRACKING.detach("tests/agent")
    (tmp_path / "tests/models/agent/tracking/recorder.json").write_text("[1,")
    recorder = Recorder()
    with caplog.at_level(logging.WARNING, "artnb"):
        await log(make(tmp_path, recorder), 1)
        TRACKING.detach("tests/agent")
    assert recorder.steps() == [0, 1] and "recorder.json cannot be read or is damaged" in caplog.text


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (["wandbb"], r"'wandbb' is unknown; did you mean 'wandb'\?"),
        ("wandb", r"must be a list, e.g. report_metrics=\['wandb'\]"),
        ([3], "neither a name"),
        (["wandb", "wandb"], "'wandb' is there twice"),
        (["langfuse"], r"'langfuse' needs a package: pip install 'artnb\[langfuse\]'"),
    ],
)
def test_wrong_values_say_what_to_do(value: Any, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    there = importlib.util.find_spec

    def find(name: str) -> Any:
        return None if name == "langfuse" else there(name)

    monkeypatch.setattr(importlib.util, "find_spec", find)
    with pytest.raises(ConfigError, match=said):
        art.Model("agent", "tests", report_metrics=value)
    with pytest.raises(ConfigError, match=r"report_metrcs.*did you mean 'report_metrics'"):
        art.TrainableModel("agent", "tests", "base", report_metrcs=["wandb"])


async def test_a_key_without_the_library_is_said_once_and_metrics_are_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setattr(choose, "_installed", lambda name: False)
    choose._wandb_is_there.cache_clear()
    model = art.Model("agent", "tests", base_path=tmp_path)
    with caplog.at_level(logging.WARNING, "artnb"):
        await log(model, 0)
        await log(model, 1)
    choose._wandb_is_there.cache_clear()
    assert len(caplog.records) == 1 and "pip install 'artnb[wandb]'" in caplog.text
    assert len(model.history()) == 2


def test_a_folder_called_wandb_is_not_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "onlyafolder").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert importlib.util.find_spec("onlyafolder") is not None and not choose._installed("onlyafolder")


class UsersConfig(pydantic.BaseModel):
    name: str = "x"
    api_key: str = "sk-1"
    secret: pydantic.SecretStr = pydantic.SecretStr("sk-2")


def test_configs_become_json_without_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "a-key-of-the-environment")
    config = {
        "users": UsersConfig(),
        "train": art.TrainConfig(learning_rate=1e-4),
        "path": Path("a/b"),
        "HF_TOKEN": "hf_1",
        "list": ["a-key-of-the-environment", (1, 2)],
        "judge": {"url": "http://127.0.0.1", "auth-token": "t", "use": "a-key-of-the-environment"},
        "eos_token": "</s>",
        "max_tokens": 3,
    }
    cleaned = without_secrets(plain(config))
    assert cleaned["users"] == {"name": "x"} and cleaned["train"]["learning_rate"] == 1e-4
    assert cleaned["judge"] == {"url": "http://127.0.0.1"} and cleaned["list"] == [[1, 2]]
    assert (cleaned["eos_token"], cleaned["max_tokens"], cleaned["path"]) == ("</s>", 3, str(Path("a/b")))
    assert "HF_TOKEN" not in cleaned


def test_a_trajectory_outside_of_traces_is_as_before() -> None:
    trajectory = art.Trajectory(reward=1.0)
    assert current_traces() == {} == trajectory._traces
    assert "traces" not in trajectory.model_dump_json() and trajectory == trajectory.model_copy()


def test_a_trajectory_notes_the_span_around_it() -> None:
    trace = pytest.importorskip("opentelemetry.trace")
    context = trace.SpanContext(0xABC, 0xDEF, is_remote=False)
    with trace.use_span(trace.NonRecordingSpan(context)):
        inside = art.Trajectory()
    assert inside._traces == {"otel": f"{0xABC:032x}"} and art.Trajectory()._traces == {}


def test_a_trackers_library_is_imported_where_the_run_is_attached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the tracker's thread it would meet a cell's own imports of it, and openai's look at a half imported httpx."""
    importers: list[threading.Thread] = []
    real = importlib.import_module

    def spied(name: str, package: str | None = None) -> Any:
        if name == "tensorboard":
            importers.append(threading.current_thread())
        return real(name, package)

    monkeypatch.setattr(choose.importlib, "import_module", spied)
    tracker = Recorder(name="tensorboard")
    model = art.Model("agent", "tracking", base_path=tmp_path, report_metrics=[tracker])
    choose.track(model)
    TRACKING.detach("tracking/agent")
    assert importers == [threading.current_thread()] and tracker.told[-1] == "close"
