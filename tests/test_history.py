"""The history on disk: what goes in comes back, through torn lines, full disks, resumes and late metrics."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import subprocess
import sys
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from openai.types.chat.chat_completion import Choice, ChoiceLogprobs

from artnb import durable
from artnb.errors import CheckpointError, ConfigError
from artnb.tracking.history import History
from artnb.tracking.records import to_line, trajectory_line, trajectory_record
from artnb.trajectories import ExceptionRecord, StopReason, Trajectory, TrajectoryGroup
from artnb.trajectories import History as Conversation


@pytest.fixture
def history(tmp_path: Path) -> History:
    return History(tmp_path / "model")


def choice(text: str | None = "hi", ids: tuple[int, ...] = (5, 6), **extra: Any) -> Choice:
    logprobs = [{"token": f"token_id:{i}", "logprob": -0.1 * i, "bytes": None, "top_logprobs": []} for i in ids]
    return Choice.model_validate(
        {
            "index": 0,
            "finish_reason": "stop",
            "message": {"role": "assistant", "content": text},
            "logprobs": {"content": logprobs},
            "prompt_token_ids": [1, 2, 3],
            "token_ids": list(ids),
            "temperature": 0.7,
            **extra,
        }
    )


def trajectory(reward: float | None = 1.0, text: str = "hi", **fields: Any) -> Trajectory:
    items = [{"role": "user", "content": "go"}, choice(text)]
    return Trajectory(messages_and_choices=items, reward=reward, **fields)  # type: ignore[arg-type]


# Metrics ------------------------------------------------------------------------------------------


def test_metrics_become_one_row_per_step(history: History) -> None:
    history.log_metrics(2, "train", {"reward": 0.5, "loss": 1, "trained": True})
    history.log_metrics(0, "val", {"reward": 0.1})
    history.log_metrics(2, "val", {"reward": np.float32(0.25), "val/legal": np.int64(3)})
    frame = history.metrics()
    assert list(frame["step"]) == [0, 2]
    assert list(frame.columns) == ["step", "val/reward", "train/reward", "train/loss", "train/trained", "val/legal"]
    assert frame.iloc[1].to_dict() == {
        "step": 2, "val/reward": 0.25, "train/reward": 0.5, "train/loss": 1, "train/trained": 1, "val/legal": 3
    }  # fmt: skip
    assert math.isnan(frame.loc[0, "train/reward"])
    assert str(frame["step"].dtype) == "int64"


def test_empty_history_has_empty_frames(history: History) -> None:
    assert list(history.metrics().columns) == ["step"]
    assert len(history.metrics_long()) == 0
    assert "reward" in history.trajectories().columns
    history.truncate_after(0)
    assert not history.folder.exists()


def test_last_value_of_a_metric_wins_and_late_ones_are_kept(history: History) -> None:
    history.log_metrics(3, "train", {"reward": 0.1, "loss": 5.0})
    history.log_metrics(7, "train", {"reward": 0.7})
    history.log_metrics(3, "train", {"reward": 0.2})
    history.log_metrics(3, "val", {"reward": 0.9})  # the evaluation of step 3 came in at step 7
    frame = history.metrics().set_index("step")
    assert frame.loc[3].to_dict() == {"train/reward": 0.2, "train/loss": 5.0, "val/reward": 0.9}
    assert frame.loc[7, "train/reward"] == 0.7


def test_nan_and_infinite_round_trip(history: History) -> None:
    history.log_metrics(1, "train", {"a": math.nan, "b": math.inf, "c": -math.inf, "d": None, "e": 0.1 + 0.2})
    row = history.metrics().iloc[0]
    assert math.isnan(row["train/a"])
    assert row["train/b"] == math.inf
    assert row["train/c"] == -math.inf
    assert math.isnan(row["train/d"])
    assert row["train/e"] == 0.1 + 0.2


def test_long_form(history: History) -> None:
    history.log_metrics(1, "val", {"reward": 0.0}, time=1_700_000_000)
    history.log_metrics(0, "train", {"reward": 1.0, "loss": 2.0}, time=1_700_000_000.5)
    history.log_metrics(1, "val", {"reward": 0.5}, time=1_700_000_001)
    frame = history.metrics_long()
    assert frame[["step", "split", "name", "value"]].values.tolist() == [
        [0, "train", "reward", 1.0],
        [0, "train", "loss", 2.0],
        [1, "val", "reward", 0.5],
    ]
    assert frame["time"].iloc[2] == pd.Timestamp(1_700_000_001, unit="s", tz="UTC")


@pytest.mark.parametrize("value", ["text", [1], {"a": 1}, np.zeros(2)])
def test_a_metric_is_a_number(history: History, value: Any) -> None:
    with pytest.raises(ConfigError, match="the metric 'x' is a"):
        history.log_metrics(1, "train", {"x": value})
    assert len(history.metrics()) == 0


@pytest.mark.parametrize("split", ["", "../val", "a/b", "a\\b", "..", "a..b", ".", "a b", "x" * 200, None])
def test_a_split_is_part_of_a_files_name(history: History, split: Any) -> None:
    with pytest.raises(ConfigError, match="split="):
        history.log_metrics(1, split, {"x": 1})
    with pytest.raises(ConfigError, match="split="):
        history.log_trajectories(1, split, [])


@pytest.mark.parametrize("step", [-1, True, "1", 1.0])
def test_a_step_is_a_whole_number(history: History, step: Any) -> None:
    with pytest.raises(ConfigError, match="whole number"):
        history.log_metrics(step, "val", {"x": 1})


# Torn, damaged, foreign, full ---------------------------------------------------------------------


@pytest.mark.parametrize("torn", [b'{"v":1,"kind":"metr', b"\0" * 100, b'{"v":1,"kind":"metrics"', b"x" * 200_000])
def test_torn_last_line_is_ignored_then_repaired(history: History, torn: bytes) -> None:
    history.log_metrics(1, "train", {"reward": 1.0})
    whole = history.metrics_file.read_bytes()
    history.metrics_file.write_bytes(whole + torn)
    assert list(History(history.folder).metrics()["step"]) == [1]
    again = History(history.folder)
    again.log_metrics(2, "train", {"reward": 2.0})
    assert list(again.metrics()["train/reward"]) == [1.0, 2.0]
    lines = again.metrics_file.read_bytes().splitlines(keepends=True)
    assert lines[:-1] == [whole]
    assert len(lines) == 2


@pytest.mark.parametrize("torn", [b'{"v":1,', b'{"v":1,"kind":"metrics","step":1,"spl', b"\0" * 10, b""])
def test_torn_first_line(history: History, torn: bytes) -> None:
    history.metrics_file.parent.mkdir(parents=True)
    history.metrics_file.write_bytes(torn)
    history.log_metrics(2, "train", {"reward": 2.0})
    assert list(history.metrics()["step"]) == [2]


def test_damaged_line_in_the_middle_costs_only_itself(history: History, caplog: pytest.LogCaptureFixture) -> None:
    for step in range(3):
        history.log_metrics(step, "train", {"reward": step})
    lines = history.metrics_file.read_bytes().splitlines(keepends=True)
    history.metrics_file.write_bytes(lines[0] + b"\xff\xfe not json\n" + lines[2])
    with caplog.at_level(logging.WARNING):
        assert list(history.metrics()["step"]) == [0, 2]
        history.metrics()
    assert caplog.text.count("line 2 is not artnb's or is damaged") == 1


@pytest.mark.parametrize(
    "content", [b"step,reward\n1,2\n", b"no line feed", b'{"step": 1}\n', b'{"v":2,"kind":"metrics"}\n']
)
def test_foreign_files_are_left_as_they_are(history: History, content: bytes) -> None:
    history.trajectories_folder.mkdir(parents=True)
    history.metrics_file.write_bytes(content)
    file = history.trajectories_folder / "val-0001.jsonl"
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match="not written by artnb"):
        history.log_metrics(1, "val", {"x": 1})
    with pytest.raises(CheckpointError, match="not written by artnb"):
        history.log_trajectories(1, "val", [TrajectoryGroup([trajectory()])])
    with pytest.raises(CheckpointError, match="not written by artnb"):
        history.truncate_after(0)
    assert history.metrics_file.read_bytes() == file.read_bytes() == content
    assert len(history.trajectories()) == 0


def test_full_disk_leaves_what_was_logged_and_the_next_append_works(
    history: History, monkeypatch: pytest.MonkeyPatch
) -> None:
    history.log_metrics(1, "train", {"reward": 1.0})
    history.log_trajectories(1, "train", [TrajectoryGroup([trajectory()])])
    before = history.metrics_file.read_bytes()
    write = os.write

    def short(descriptor: int, data: Any) -> int:
        # The disk takes ten bytes, then it is full.
        monkeypatch.setattr(os, "write", full)
        return write(descriptor, bytes(data)[:10])

    def full(descriptor: int, data: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", short)
    with pytest.raises(CheckpointError) as caught:
        history.log_metrics(2, "train", {"reward": 2.0})
    text = str(caught.value)
    assert "metrics of step 2 (train) could not be written" in text
    assert str(history.metrics_file) in text
    assert "no space left" in text
    assert "MB free on" in text
    assert "What was logged before is intact" in text
    assert history.metrics_file.read_bytes() == before
    for step in (1, 2):  # an append, and a new file
        monkeypatch.setattr(os, "write", short)
        with pytest.raises(CheckpointError, match=f"trajectories of step {step} .*no space left"):
            history.log_trajectories(step, "train", [TrajectoryGroup([trajectory()])])
    monkeypatch.setattr(os, "write", write)
    assert len(history.trajectories()) == 1
    assert [p.name for p in history.trajectories_folder.iterdir()] == ["train-0001.jsonl"]
    history.log_metrics(2, "train", {"reward": 2.0})
    history.log_trajectories(2, "train", [TrajectoryGroup([trajectory()])])
    assert list(history.metrics()["train/reward"]) == [1.0, 2.0]
    assert list(history.trajectories()["step"]) == [1, 2]


def test_failed_flush_is_not_a_logged_metric(history: History, monkeypatch: pytest.MonkeyPatch) -> None:
    history.log_metrics(1, "train", {"reward": 1.0})

    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(CheckpointError, match="Input/output error"):
            history.log_metrics(2, "train", {"reward": 2.0})
    assert list(history.metrics()["step"]) == [1]


LIMITED = """
import resource, sys
from artnb.errors import CheckpointError
from artnb.tracking.history import History
from artnb.tracking.records import to_line, trajectory_line, trajectory_record
history = History(sys.argv[1])
history.log_metrics(0, "train", {"reward": 1.0})
limit = history.metrics_file.stat().st_size + 50
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
try:
    history.log_metrics(1, "train", {"reward": 2.0})
except CheckpointError as error:
    print(error)
print(list(history.metrics()["step"]))
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
history.log_metrics(2, "train", {"reward": 3.0})
print(list(history.metrics()["step"]))
"""


def test_a_real_limit_on_file_size(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", LIMITED, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "no space left" in done.stdout
    assert done.stdout.endswith("[0]\n[0, 2]\n")


def test_threads_do_not_mix_lines(history: History) -> None:
    def work(number: int) -> None:
        for i in range(10):
            history.log_metrics(i, "train", {f"m{number}": i})

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    frame = history.metrics()
    assert frame.shape == (10, 5)
    assert frame.notna().all().all()


# Trajectories -------------------------------------------------------------------------------------


class Story(Trajectory):
    """A user's own trajectory with a field more."""

    answer: str = ""


def nasty_groups() -> list[TrajectoryGroup]:
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"q": "half'}}
    tool_choice = Choice.model_validate(
        {
            "index": 0,
            "finish_reason": "tool_calls",
            "message": {
                "role": "assistant",
                "content": None,
                "tool_calls": [call],
                "reasoning_content": "<think>한글 😀</think>",
            },
            "logprobs": {"content": [{"token": "\ud83d", "logprob": -math.inf, "bytes": [240], "top_logprobs": []}]},
            "token_ids": [9],
            "prompt_token_ids": [],
        }
    )
    rich = Trajectory(
        messages_and_choices=[
            {"role": "system", "content": "line\u2028separator\r\nand \x00 and \ud800"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            tool_choice,
            {"role": "tool", "tool_call_id": "c1", "content": None},  # type: ignore[typeddict-item]
            {"role": "tool", "tool_call_id": "c1", "content": {"nested": {"list": [1, None, math.nan]}}},  # type: ignore
            choice("done 🎉"),
        ],
        tools=[{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}],
        additional_histories=[
            Conversation(messages_and_choices=[{"role": "user", "content": "sub"}, choice("x", (7,))])
        ],
        reward=0.1 + 0.2,
        initial_policy_version=1,
        final_policy_version=2,
        metrics={"legal": True, "moves": 3, "share": 1.0, "odd": math.inf},
        metadata={"seed": 1, "name": "한글", "none": None, "flag": False, "x": 0.5},
        logs=["one", ""],
        stop_reason=StopReason.CONTEXT_FULL,
        error=ExceptionRecord(type="ValueError", message="bad", traceback="Traceback…"),
        start_time=datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=UTC),
    )
    try:
        raise KeyError("lost")
    except KeyError as error:
        failed = error
    return [
        TrajectoryGroup([rich, trajectory(None)], metadata={"scenario": "a"}, metrics={"m": 1}, logs=["log"]),
        TrajectoryGroup([failed]),
        TrajectoryGroup([]),
        TrajectoryGroup([trajectory(-1.0)], metadata={"scenario": "b"}),
    ]


def test_a_line_is_that_of_its_record() -> None:
    plain = [choice("half a \ud83d"), choice('an inner " and null'), choice("finite")]
    plain[2].logprobs = ChoiceLogprobs.model_validate(
        {"content": [{"token": "a", "logprob": math.nan, "bytes": [97], "top_logprobs": []}]}
    )
    known = [t for group in nasty_groups() for t in group.trajectories]
    for one in [*known, *(Trajectory(messages_and_choices=[c, c]) for c in plain)]:
        told = [to_line(trajectory_record(one, 1, 2)), trajectory_line(one, 1, 2)]
        assert len({json.dumps(json.loads(line)) for line in told}) == 1
    assert b"NaN" in told[1]


def test_groups_come_back_exactly(history: History) -> None:
    groups = nasty_groups()
    history.log_trajectories(3, "val", groups)
    loaded = History(history.folder).load_groups(3, "val")
    assert [len(g) for g in loaded] == [2, 0, 0, 1]
    rich, was = loaded[0].trajectories[0], groups[0].trajectories[0]
    nan = rich.messages_and_choices[4]["content"]["nested"]["list"].pop()  # type: ignore
    assert math.isnan(nan)
    was.messages_and_choices[4]["content"]["nested"]["list"].pop()  # type: ignore
    assert loaded == groups
    assert [type(v) for v in rich.metrics.values()] == [bool, int, float, float]
    assert isinstance(rich.messages_and_choices[2], Choice)
    assert rich.messages_and_choices[2].model_extra == was.messages_and_choices[2].model_extra  # type: ignore
    assert rich.choices()[0].message.model_fields_set == was.choices()[0].message.model_fields_set
    assert rich.messages() == was.messages()
    assert rich.stop_reason is StopReason.CONTEXT_FULL
    assert "KeyError" in loaded[1].exceptions[0].traceback


def test_frame_of_trajectories(history: History) -> None:
    history.log_trajectories(3, "val", nasty_groups())
    history.log_trajectories(1, "train", [TrajectoryGroup([trajectory(0.5, metrics={"legal": 1})])])
    frame = history.trajectories()
    assert frame[["step", "split", "group", "trajectory"]].values.tolist() == [
        [1, "train", 0, 0], [3, "val", 0, 0], [3, "val", 0, 1], [3, "val", 3, 0]
    ]  # fmt: skip
    rich = frame.iloc[1]
    assert rich["reward"] == 0.1 + 0.2
    assert rich["stop_reason"] == "context_full"
    assert rich["turns"] == 3  # the additional history's, too
    assert rich["completion_tokens"] == 1 + 2 + 1
    assert rich["first_text"].startswith("line\u2028")
    assert rich["last_text"] == "done 🎉"
    assert rich["first_text"].endswith("and \0 and ?")
    assert rich["messages"][0]["content"].endswith("\ud800")
    assert rich["messages"][1]["content"][1]["text"] == "b"
    assert rich["messages"][2]["tool_calls"][0]["function"]["arguments"] == '{"q": "half'
    assert rich["error"] == "ValueError: bad"
    assert rich["metric/moves"] == 3
    assert rich["meta/name"] == "한글"
    assert rich["group_meta/scenario"] == "a"
    assert math.isnan(frame.iloc[2]["reward"])
    assert list(history.trajectories(step=1)["split"]) == ["train"]
    assert list(history.trajectories(split="val")["step"]) == [3, 3, 3]
    assert len(history.trajectories(step=1, split="val")) == 0


def test_a_users_subclass_comes_back_as_one(history: History) -> None:
    history.log_trajectories(1, "val", [TrajectoryGroup([Story(answer="42", reward=1.0)])])
    group = history.load_groups(1, "val", Story)[0]
    loaded = group.trajectories[0]
    assert isinstance(loaded, Story)
    assert loaded.answer == "42"


def test_values_json_does_not_know(history: History, caplog: pytest.LogCaptureFixture) -> None:
    odd = trajectory()
    odd.metrics["numpy"] = np.float64(0.5)
    odd.metadata["path"] = Path("a") / "b"  # type: ignore[assignment]
    odd.messages_and_choices.append({"role": "tool", "content": {"at": datetime(2026, 1, 1), "set": {2, 1}}})  # type: ignore
    odd.messages_and_choices.append(choice("as a message").message)  # type: ignore[arg-type]
    with caplog.at_level(logging.WARNING):
        history.log_trajectories(1, "val", [TrajectoryGroup([odd])])
    assert caplog.text == ""
    loaded = history.load_groups(1, "val")[0].trajectories[0]
    assert loaded.metrics["numpy"] == 0.5
    assert loaded.metadata["path"] == str(Path("a") / "b")
    assert loaded.messages_and_choices[2]["content"] == {"at": "2026-01-01T00:00:00", "set": [1, 2]}  # type: ignore
    assert loaded.messages()[3]["content"] == "as a message"  # type: ignore[typeddict-item]
    odd.messages_and_choices.append({"role": "tool", "content": object()})  # type: ignore
    with caplog.at_level(logging.WARNING):
        history.log_trajectories(2, "val", [TrajectoryGroup([odd])])
    assert "a object in a trajectory is kept as text" in caplog.text


def test_choice_that_does_not_validate_is_kept(history: History) -> None:
    message = {"role": "assistant", "content": "x"}
    odd = Choice.construct(index=0, finish_reason="abort", message=message, token_ids=[1])
    history.log_trajectories(1, "val", [TrajectoryGroup([Trajectory(messages_and_choices=[odd])])])
    loaded = history.load_groups(1, "val")[0].trajectories[0].choices()[0]
    assert loaded.finish_reason == "abort"
    assert loaded.message.content == "x"
    assert loaded.model_extra == {"token_ids": [1]}


def test_more_groups_of_this_process_are_added_an_earlier_processs_replaced(
    history: History, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = TrajectoryGroup([trajectory(1.0)]), TrajectoryGroup([trajectory(2.0), trajectory(3.0)])
    history.log_trajectories(3, "val", [first])
    History(history.folder).log_trajectories(3, "val", [second, first])
    assert history.trajectories()[["group", "trajectory", "reward"]].values.tolist() == [
        [0, 0, 1.0], [1, 0, 2.0], [1, 1, 3.0], [2, 0, 1.0]
    ]  # fmt: skip
    history.log_trajectories(3, "val", [second], replace=True)
    assert list(history.trajectories()["reward"]) == [2.0, 3.0]
    from artnb.tracking import history as module

    later = durable.ProcessId(1, 2, "h")
    monkeypatch.setattr(module, "this_process", lambda: later)
    history.log_trajectories(3, "val", [first])
    assert list(history.trajectories()["reward"]) == [1.0]


def test_torn_trajectory_line_is_repaired(history: History) -> None:
    history.log_trajectories(3, "val", [TrajectoryGroup([trajectory(1.0), trajectory(2.0)])])
    path = history.trajectories_folder / "val-0003.jsonl"
    path.write_bytes(path.read_bytes()[:-100])
    assert list(history.trajectories()["reward"]) == [1.0]
    history.log_trajectories(3, "val", [TrajectoryGroup([trajectory(3.0)])])
    assert list(history.trajectories()["reward"]) == [1.0, 3.0]


def test_unknown_step_or_split_names_what_there_is(history: History) -> None:
    with pytest.raises(CheckpointError, match="there are: none"):
        history.load_groups(1, "val")
    history.log_trajectories(1, "val-hard", [])
    assert history.load_groups(1, "val-hard") == []
    with pytest.raises(CheckpointError, match=r"no trajectories of split 'val' at step 1 .*there are: val-hard 1"):
        history.load_groups(1, "val")


# Resuming -----------------------------------------------------------------------------------------


def test_truncate_after_drops_later_steps_only(history: History) -> None:
    for step in range(5):
        history.log_metrics(step, "train", {"reward": step})
        history.log_trajectories(step, "train", [TrajectoryGroup([trajectory(float(step))])])
    history.log_metrics(1, "val", {"reward": 9.0})  # late
    left = history.trajectories_folder / ".tmp-train-0004.jsonl-1.1.aa-bb"
    left.write_text("half")
    history.truncate_after(2)
    assert list(history.metrics()["step"]) == [0, 1, 2]
    assert history.metrics().set_index("step").loc[1, "val/reward"] == 9.0
    assert list(history.trajectories()["step"]) == [0, 1, 2]
    assert not left.exists()
    kept = history.metrics_file.stat()
    history.truncate_after(2)
    assert history.metrics_file.stat().st_ino == kept.st_ino  # nothing to drop: the file is not rewritten
    history.truncate_after(-1)
    assert len(history.metrics()) == 0


def test_truncate_is_all_or_nothing(history: History, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in range(3):
        history.log_metrics(step, "train", {"reward": step})
    history.log_metrics(1, "val", {"reward": 9.0})  # late: the file has to be rewritten
    before = history.metrics_file.read_bytes()

    def full(descriptor: int, data: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(CheckpointError, match="history up to step 1"):
        history.truncate_after(1)
    assert history.metrics_file.read_bytes() == before


def test_truncating_the_end_needs_no_space(history: History, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in range(4):
        history.log_metrics(step, "train", {"reward": step})

    def full(descriptor: int, data: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    history.truncate_after(1)
    assert list(history.metrics()["step"]) == [0, 1]


def test_truncate_keeps_lines_that_are_not_records(history: History) -> None:
    for step in (0, 2, 1):
        history.log_metrics(step, "train", {"reward": step})
    lines = history.metrics_file.read_bytes().splitlines(keepends=True)
    history.metrics_file.write_bytes(lines[0] + lines[1] + b"damaged\n" + lines[2])
    history.truncate_after(1)
    assert history.metrics_file.read_bytes() == lines[0] + b"damaged\n" + lines[2]


def test_resumed_history_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    def run(history: History, steps: range) -> None:
        for step in steps:
            history.log_metrics(step, "train", {"reward": step / 7, "loss": -step})
            if step % 2 == 0:
                history.log_metrics(step, "val", {"reward": step / 3})

    whole, resumed = History(tmp_path / "a"), History(tmp_path / "b")
    run(whole, range(1, 7))
    run(resumed, range(1, 5))
    resumed = History(tmp_path / "b")
    resumed.truncate_after(3)
    run(resumed, range(3, 7))  # step 3 is logged a second time
    pd.testing.assert_frame_equal(whole.metrics(), resumed.metrics())


LIGHT = """
import sys
import artnb.tracking.history, artnb.training.checkpoints, artnb.local.lockfile, artnb.notebook.plots
print(sorted({"torch", "transformers", "pandas", "matplotlib"} & set(sys.modules)))
"""


def test_importing_loads_neither_torch_nor_pandas() -> None:
    done = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n", done.stderr
