"""The inspector's Python half: index, filters, messages on demand, standings as trained, exact export, escaped HTML."""

from __future__ import annotations

import json
import math
import random
import threading
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from inspector_groups import NASTY, call, episode, many, nasty_trajectory, sampled
from openai.types.chat.chat_completion import Choice

import artnb as art
from artnb.config import TrainConfig
from artnb.errors import CheckpointError, ConfigError
from artnb.notebook.inspector import Inspector
from artnb.notebook.trajectory_html import best_and_worst, trajectory_html
from artnb.notebook.trajectory_text import number, shown_message
from artnb.notebook.trajectory_view import from_jsonl, token_texts
from artnb.tracking.history import History
from artnb.tracking.records import VERSION
from artnb.training.rows import rows_from_groups
from artnb.trajectories import ExceptionRecord, StopReason, Trajectory, TrajectoryGroup


def ask(inspector: Inspector, kind: str, **content: Any) -> dict[str, Any]:
    """The first answer. It must be JSON that a browser reads: no NaN, no lone surrogate."""
    message, _ = next(inspector.answer({"kind": kind, "ask": "a1", **content}))
    json.dumps(message, allow_nan=False, ensure_ascii=False).encode()
    assert message["ask"] == "a1"
    return message


def shown(inspector: Inspector, at: int) -> dict[str, Any]:
    message = ask(inspector, "trajectory", number=at)
    assert message["kind"] == "trajectory", message
    return message["trajectory"]  # type: ignore[no-any-return]


def simple(reward: Any = 0.0, text: str = "answer", **fields: Any) -> Trajectory:
    made = Trajectory(messages_and_choices=[{"role": "user", "content": "hi"}, sampled(text, [1, 2])], **fields)
    made.reward = reward
    return made


@pytest.fixture
def saved(tmp_path: Path) -> History:
    """Steps 1 and 2 of training and a validation at 2."""
    history = History(tmp_path / "model")
    history.log_trajectories(1, "train", many(2, 4, 3, seed=1))
    history.log_trajectories(2, "train", many(3, 4, 3, seed=2))
    history.log_trajectories(2, "val", many(1, 2, 2, seed=3))
    return history


# Index -------------------------------------------------------------------------------------------


def test_the_index_has_a_row_for_each_trajectory_and_no_messages() -> None:
    groups = many(3, 4, 5)
    groups[1].trajectories[2].reward = None
    groups[2].exceptions.append(ExceptionRecord(type="ValueError", message="broke", traceback=""))
    index = ask(Inspector(groups), "index")
    assert index["group"] == [0] * 4 + [1] * 4 + [2] * 4 and index["index"] == [0, 1, 2, 3] * 3
    assert index["reward"][:2] == [number(t.reward) for t in groups[0].trajectories[:2]]
    assert index["reward"][6] == "unscored" and index["height"][6] is None
    assert min(h for h in index["height"] if h is not None) == 0.0 and max(filter(None, index["height"])) == 1.0
    assert index["turns"] == [5] * 12
    assert index["tokens"][0] == sum(
        len((c.model_extra or {})["token_ids"]) for c in groups[0].trajectories[0].choices()
    )
    assert index["metrics"]["searches"] == [4.0] * 12
    assert index["groups"][2]["failed"] == ["ValueError: broke"]
    assert index["groups"][0]["metadata"] == [["scenario", "0"]]
    rewards = [t.reward for t in groups[0].trajectories]
    assert index["groups"][0]["mean"] == pytest.approx(sum(rewards) / 4)  # type: ignore[arg-type]
    assert "You search a mailbox" not in json.dumps(index)


def test_the_index_stays_small() -> None:
    index = ask(Inspector(many(25, 8, 10)), "index")
    assert len(json.dumps(index)) < 400 * 200


@pytest.mark.parametrize("reward", [None, math.nan, math.inf, -math.inf, "high", True])
def test_rewards_that_are_no_plain_number_are_shown(reward: Any) -> None:
    inspector = Inspector([TrajectoryGroup([simple(reward), simple(1.0)])])
    index = ask(inspector, "index")
    assert index["reward"][0] == number(reward)
    shown(inspector, 0)


def test_no_trajectories_and_a_group_that_only_failed() -> None:
    index = ask(Inspector([]), "index")
    assert index["group"] == [] and index["groups"] == []
    broken = TrajectoryGroup([ValueError("no")])
    inspector = Inspector([broken])
    assert ask(inspector, "index")["groups"][0]["failures"] == 1
    assert inspector.selection() == [] and inspector.static_html() == ""
    assert "0 trajectories in 1 groups" in repr(inspector)


# On disk -----------------------------------------------------------------------------------------


def test_a_step_on_disk_opens_as_the_groups_in_memory(saved: History) -> None:
    groups = many(3, 4, 3, seed=2)
    memory, disk = Inspector(groups), Inspector(history=saved)
    one, other = ask(memory, "index"), ask(disk, "index")
    assert (other["step"], other["split"]) == (2, "train")
    assert other["saved"] == [[1, "train"], [2, "train"], [2, "val"]]
    for key in ("group", "index", "reward", "height", "stop", "turns", "tokens", "last", "metrics", "stops", "groups"):
        assert one[key] == other[key], key
    for at in (0, 7, 11):
        assert shown(memory, at) == shown(disk, at)
    for query in ({"text": "budget"}, {"reward": [0.3, 0.8]}, {"trained": True, "sort": "reward"}):
        assert memory.find(**query) == disk.find(**query)


def test_only_the_opened_trajectory_is_parsed(saved: History, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    stored = type(saved.stored(1, "train"))
    original = stored._record
    monkeypatch.setattr(stored, "_record", lambda self, at: (read.append(at), original(self, at))[1])
    inspector = Inspector(history=saved)
    ask(inspector, "index")
    assert len(set(read)) <= 2  # the best and the worst, for the page without a kernel
    read.clear()
    shown(inspector, 5)
    assert set(read) <= {4, 5, 6, 7}  # it and its group, whose rewards its advantage needs


def test_files_from_before_the_heads_are_read(saved: History, tmp_path: Path) -> None:
    new = saved.trajectories_folder / "train-0002.jsonl"
    records = [json.loads(line) for line in new.read_bytes().splitlines()]
    for record in records:
        if record["kind"] == "trajectory":
            del record["summary"]
            long = {k: record["fields"].pop(k) for k in ("messages_and_choices", "additional_histories", "tools")}
            record["fields"] = {**long, **record["fields"]}
    old = History(tmp_path / "old")
    old.log_trajectories(2, "train", [])
    path = old.trajectories_folder / "train-0002.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    before, after = Inspector(history=old), Inspector(history=saved)
    assert ask(before, "index")["tokens"] == ask(after, "index")["tokens"]
    assert shown(before, 3) == shown(after, 3)


def test_torn_and_foreign_lines_are_left_out(saved: History) -> None:
    path = saved.trajectories_folder / "train-0001.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(
        b"".join([*lines[:3], b"\0\0\0\n", b'{"kind":"trajectory"}\n', *lines[3:]]) + b'{"v":1,"kind":"traj'
    )
    assert len(Inspector(history=saved, step=1)) == 8
    assert VERSION == 1


@pytest.mark.parametrize(
    "text", ["plain words 12", "Straße", "KELVIN", "\u212aelvin", "a\\u0062c", "tab\there", "한글"]
)
def test_texts_on_disk_are_found_as_those_in_memory(tmp_path: Path, text: str) -> None:
    parts = [{"type": "text", "text": "plain "}, {"type": "text", "text": "words 12"}]
    called = {"role": "assistant", "tool_calls": [call("f", json.dumps({"q": text}))]}
    group = TrajectoryGroup(
        [
            simple(0.0, f"before {text} after"),
            Trajectory(messages_and_choices=[{"role": "user", "content": parts}]),  # type: ignore[list-item, misc]
            Trajectory(messages_and_choices=[called]),  # type: ignore[list-item, misc]
            simple(1.0, "other"),
        ]
    )
    history = History(tmp_path / "m")
    history.log_trajectories(1, "train", [group])
    memory, disk = Inspector([group]), Inspector(history=history)
    for needle in (text, text.upper(), text.casefold(), "plain words", "strasse", "kelvin", "abc", "words", "nowhere"):
        assert disk.find(text=needle) == memory.find(text=needle), needle
    assert 0 in disk.find(text=text) and disk.find(text="nowhere") == []


def test_a_key_in_the_metadata_does_not_end_the_head(tmp_path: Path) -> None:
    history = History(tmp_path / "m")
    text = ',"messages_and_choices":[{'
    trajectory = simple(0.5, metadata={text: text, "messages_and_choices": "x"}, logs=[text])
    history.log_trajectories(1, "train", [TrajectoryGroup([trajectory])])
    assert Inspector(history=history).trajectory(0) == trajectory


def test_a_file_that_was_replaced_is_noticed(saved: History) -> None:
    inspector = Inspector(history=saved, step=1)
    saved.log_trajectories(1, "train", many(2, 4, 6, seed=9), replace=True)
    answer = ask(inspector, "trajectory", number=6)
    assert answer["kind"] == "error" and "was replaced" in answer["message"]
    with pytest.raises(CheckpointError, match="inspect the step again"):
        inspector.trajectory(6)


def test_a_subclass_of_trajectory_is_read_and_exported_with_its_fields(tmp_path: Path) -> None:
    class Project(Trajectory):
        answer: str = ""

    history = History(tmp_path / "m")
    history.log_trajectories(1, "train", [TrajectoryGroup([Project(answer="42"), Project(answer="43")])])
    (first, _) = found = Inspector(history=history).selection()
    assert first.answer == "42"  # type: ignore[attr-defined]
    data = b"".join(b for _, buffers in Inspector(history=history).answer({"kind": "export"}) for b in buffers)
    assert from_jsonl(data) == found


def test_another_step_is_opened_in_place(saved: History) -> None:
    inspector = Inspector(history=saved)
    inspector.selected = [3]
    index = ask(inspector, "open", step=1, split="train")
    assert (index["step"], index["split"], len(index["group"])) == (1, "train", 8)
    assert inspector.selected == [] and len(inspector.selection()) == 8


def test_newest_step_and_what_is_missing(saved: History, tmp_path: Path) -> None:
    assert "step 2, val" in repr(Inspector(history=saved, split="val"))
    assert "step 1, train" in repr(Inspector(history=saved, step=1))
    with pytest.raises(ConfigError, match=r"of step 9.*there are: train 1, train 2, val 2"):
        Inspector(history=saved, step=9)
    with pytest.raises(ConfigError, match="none yet; train a step"):
        Inspector(history=History(tmp_path / "nothing"))
    with pytest.raises(ConfigError, match="either groups or a history"):
        Inspector()
    with pytest.raises(ConfigError, match="step and split choose from a history"):
        Inspector([], step=1)


def test_model_inspect(tmp_path: Path) -> None:
    model = art.TrainableModel("agent", "demo", "nobody/none", base_path=tmp_path)
    model._history().log_trajectories(4, "train", many(1, 2, 1))
    assert "step 4, train" in repr(model.inspect())  # no backend, no await
    group = TrajectoryGroup([simple(0.0), simple(1.0)])
    assert len(model.inspect(groups=[group])) == 2
    together = model.inspect(trajectories=[simple(0.0), simple(1.0)])
    assert [s[1] for s in ask(together, "standings", groups=[0])["standings"]] == [True, True]
    with pytest.raises(ConfigError, match="either trajectories or groups"):
        model.inspect(groups=[group], trajectories=[])


# Filters -----------------------------------------------------------------------------------------


def filtered() -> Inspector:
    first = TrajectoryGroup(
        [
            simple(0.2, "Grüße aus KÖLN", stop_reason=StopReason.FINISHED, metrics={"moves": 3}),
            simple(0.9, "nothing", stop_reason=StopReason.TRUNCATED, metrics={"moves": 5}),
            simple(None, "nothing", metrics={"moves": math.nan}),
        ]
    )
    calls = [call("search_inbox", '{"query": "\\ud55c\\uae00"}')]
    with_tool = Trajectory(
        messages_and_choices=[
            {"role": "user", "content": [{"type": "text", "text": "needle in a part"}, {"type": "image_url"}]},
            sampled("ok", [1], reasoning="Deep Thought", calls=calls),
        ],
        reward=0.5,
        stop_reason=StopReason.FINISHED,
    )
    return Inspector([first, TrajectoryGroup([with_tool, simple(0.5, "nothing")])])


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"reward": (0.5, None)}, [1, 3, 4]),
        ({"reward": (None, 0.5)}, [0, 3, 4]),
        ({"reward": (0.5, 0.5), "sort": "group", "descending": True}, [4, 3]),
        ({"metrics": {"moves": (4, None)}}, [1]),
        ({"metrics": {"moves": (None, None)}}, [0, 1, 2, 3, 4]),
        ({"metrics": {"unheard of": (0, 1)}}, []),
        ({"stop": ["finished"]}, [0, 3]),
        ({"stop": ["none", "truncated"]}, [1, 2, 4]),
        ({"text": "köln"}, [0]),
        ({"text": "GRÜSSE"}, [0]),
        ({"text": "needle in"}, [3]),
        ({"text": "deep thought"}, [3]),
        ({"text": "한글"}, [3]),
        ({"text": "search_inbox"}, [3]),
        ({"text": "nowhere"}, []),
        ({"trained": True}, [0, 1]),
        ({"trained": False}, [2, 3, 4]),
        ({"group": 1}, [3, 4]),
        ({"group": 7}, []),
        ({"sort": "reward"}, [0, 3, 4, 1, 2]),
        ({"sort": "reward", "descending": True}, [1, 3, 4, 0, 2]),
        ({"sort": "metric/moves", "descending": True}, [1, 0, 2, 3, 4]),
        ({"sort": "stop"}, [0, 3, 1, 2, 4]),
        ({"text": "nothing", "reward": (0.6, None), "stop": "truncated"}, [1]),
    ],
)
def test_filters_and_sorting(query: dict[str, Any], expected: list[int]) -> None:
    inspector = filtered()
    assert inspector.find(**query) == expected
    answer = ask(inspector, "query", query=json.loads(json.dumps(query)))  # as the browser sends it
    assert answer["numbers"] == expected


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ({"rewards": (0, 1)}, "did you mean 'reward'"),
        ({"sort": "rewrd"}, "did you mean 'reward'"),
        ({"reward": 0.5}, "the lowest and the highest"),
        ({"reward": ("a", None)}, "the lowest and the highest"),
        ({"metrics": {"moves": [1]}}, "moves"),
    ],
)
def test_wrong_filters_are_named(query: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        filtered().find(**query)
    answer = ask(filtered(), "query", query=query)
    assert answer["kind"] == "error"


# What was trained --------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_advantages_are_those_of_the_rows(scale: Any) -> None:
    groups = many(4, 5, 2)
    groups[1].trajectories[0].reward = None
    config = TrainConfig(scale_rewards=scale)
    expected = {
        (r.group, r.trajectory): r.advantage for r in rows_from_groups(groups, config, max_row_tokens=None).rows
    }
    inspector = Inspector(groups, config=config)
    for g, group in enumerate(groups):
        for n, trained, advantage, _ in ask(inspector, "standings", groups=[g])["standings"]:
            index = n - 5 * g
            assert trained is ((g, index) in expected)
            assert advantage == expected.get((g, index))
            assert shown(inspector, n)["advantage"] == advantage
        assert len(group) == 5


def _not_sampled() -> Trajectory:
    items: list[Any] = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "a dict"}]
    return Trajectory(messages_and_choices=items, reward=1.0)


def _no_ids(reward: float = 1.0) -> Trajectory:
    foreign = Choice.model_validate(
        {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "from elsewhere"}}
    )
    return Trajectory(messages_and_choices=[{"role": "user", "content": "x"}, foreign], reward=reward)


RAISED = ExceptionRecord(type="KeyError", message="k", traceback="")


@pytest.mark.parametrize(
    ("odd", "reason"),
    [
        (lambda: simple(None), "reward is None"),
        (lambda: simple(math.nan), "reward is nan"),
        (_not_sampled, "no sampled choices"),
        (_no_ids, "no prompt_token_ids and token_ids"),
        (lambda: simple(0.0, stop_reason=StopReason.TIMEOUT), "ended by timeout"),
        (
            lambda: simple(0.0, error=ExceptionRecord(type="KeyError", message="k", traceback="")),
            "failed with KeyError",
        ),
        (lambda: simple(0.0, "x" * 400), "longer than the limit of 60"),
    ],
)
def test_what_did_not_train_says_why(odd: Any, reason: str) -> None:
    group = TrajectoryGroup([simple(0.0), simple(1.0), odd()])
    inspector = Inspector([TrajectoryGroup([]), group], max_row_tokens=60)
    assert [shown(inspector, n)["trained"] for n in range(3)] == [True, True, False]
    assert reason in shown(inspector, 2)["reason"]
    assert not shown(inspector, 2)["reason"].startswith("group")


def test_groups_without_a_signal_say_why() -> None:
    equal = TrajectoryGroup([simple(1.0), simple(1.0)], exceptions=[ValueError("a failed rollout is noted, too")])
    inspector = Inspector([equal, TrajectoryGroup([simple(0.5)])])
    assert shown(inspector, 1)["reason"] == "all 2 rewards equal 1 (1 left out)"
    assert "only one scored trajectory" in shown(inspector, 2)["reason"]
    masked = TrajectoryGroup([simple(0.0), simple(1.0, stop_reason=StopReason.TRUNCATED)])
    inspector = Inspector([masked], config=TrainConfig(mask_truncated_completions=True))
    assert "mask_truncated_completions is on" in shown(inspector, 1)["reason"]


def test_splits_that_are_not_trained_say_so(tmp_path: Path) -> None:
    history = History(tmp_path / "m")
    for split in ("val", "sft"):
        history.log_trajectories(1, split, [TrajectoryGroup([simple(0.0), _not_sampled()])])
    val = shown(Inspector(history=history, split="val"), 0)
    assert val["trained"] is False and val["reason"] == "split 'val' is looked at, not trained"
    assert [m["state"] for m in val["histories"][0]] == ["context", "sampled"]
    sft = Inspector(history=history, split="sft")
    assert [m["state"] for m in shown(sft, 1)["histories"][0]] == ["context", "trained"]
    assert "supervised" in shown(sft, 1)["reason"]


def test_trained_and_context_are_told_apart_message_by_message() -> None:
    trajectory = simple(1.0)
    trajectory.messages_and_choices.insert(1, {"role": "assistant", "content": "a dict: context"})
    trajectory.messages_and_choices.append(sampled("", [1, 2, 3]))
    empty = trajectory.messages_and_choices[-1]
    assert isinstance(empty, Choice) and empty.model_extra is not None and empty.logprobs is not None
    empty.model_extra["token_ids"] = []
    empty.logprobs.content = []
    values = shown(Inspector([TrajectoryGroup([trajectory, simple(0.0)])]), 0)
    assert [m["state"] for m in values["histories"][0]] == ["context", "context", "trained", "sampled"]


def test_a_rewritten_history_has_several_rows() -> None:
    trajectory = simple(1.0)
    trajectory.messages_and_choices.append(sampled("again", [9, 9, 9]))
    assert shown(Inspector([TrajectoryGroup([trajectory, simple(0.0)])]), 0)["rows"] == 2


# Tokens ------------------------------------------------------------------------------------------


def test_tokens_have_their_ids_logprobs_and_the_ratio_where_it_is_known() -> None:
    trajectory = simple(1.0, "eight ch")
    choice = trajectory.choices()[0]
    assert choice.logprobs is not None and choice.model_extra is not None
    logprobs = [entry.logprob for entry in choice.logprobs.content or []]
    inspector = Inspector([TrajectoryGroup([trajectory, simple(0.0)])])
    tokens = shown(inspector, 0)["histories"][0][1]["tokens"]
    assert tokens["texts"] == ["eigh", "t ch", "<|im_end|>"] and tokens["count"] == 3
    assert tokens["ids"] == choice.model_extra["token_ids"] and tokens["logprobs"] == logprobs
    assert tokens["ratios"] is None
    choice.model_extra["trainer_logprobs"] = [value + math.log(2) for value in logprobs]
    assert shown(inspector, 0)["histories"][0][1]["tokens"]["ratios"] == pytest.approx([2.0] * 3)
    choice.model_extra["trainer_logprobs"] = [math.nan, 1e9, logprobs[2]]
    assert shown(inspector, 0)["histories"][0][1]["tokens"]["ratios"] == [None, None, pytest.approx(1.0)]


@pytest.mark.parametrize("text", ["한글 and 🎉🎉", "plain", "👩‍👩‍👧", ""])
def test_a_character_spread_over_tokens_is_whole_again(text: str) -> None:
    raw = [[byte] for byte in text.encode()]
    assert "".join(token_texts(raw, ["�"] * len(raw))) == text


def test_bytes_that_are_no_text_are_shown_as_such() -> None:
    assert token_texts([[0xFF], [0x61]], ["?", "a"]) == ["\ufffd", "a"]
    assert token_texts([[0xED, 0x95], None], ["?", "x"]) == ["", "x"]
    assert token_texts([[0xED, 0x95]], ["?"]) == ["\ufffd"]


def test_long_texts_and_tokens_are_cut_and_can_be_had_whole() -> None:
    trajectory = simple(1.0, "word " * 8000)
    inspector = Inspector([TrajectoryGroup([trajectory, simple(0.0)])])
    message = shown(inspector, 0)["histories"][0][1]
    assert len(message["text"]) == 20_000 and message["missing"] == 20_000
    assert len(message["tokens"]["texts"]) == 4000 and message["tokens"]["count"] == 10_001
    whole = ask(inspector, "trajectory", number=0, whole=True)["trajectory"]["histories"][0][1]
    assert len(whole["text"]) == 40_000 and whole["missing"] == 0 and len(whole["tokens"]["ids"]) == 10_001


def test_reasoning_stands_apart() -> None:
    message = shown_message({"role": "assistant", "content": "<think>\nhm\n</think>\n\nYes."})
    assert (message.reasoning, message.text) == ("hm", "Yes.")
    assert shown_message({"role": "user", "content": "<think>a</think>b"}).reasoning == ""
    assert shown_message(sampled("Yes.", [1], reasoning="hm")).reasoning == "hm"


def test_tool_calls_as_the_model_wrote_them() -> None:
    good, bad = call("f", '{"a": ["한"]}'), call("g", '{"a": ')
    calls = shown_message({"role": "assistant", "content": None, "tool_calls": [good, bad]}).tool_calls
    assert json.loads(calls[0].arguments) == {"a": ["한"]} and "한" in calls[0].arguments
    assert calls[1].arguments == '{"a": '
    assert shown_message({"role": "assistant", "tool_calls": [None, {}]}).tool_calls[1].name == "?"  # type: ignore[typeddict-item]


# Selection and export ----------------------------------------------------------------------------


def test_selection_is_the_ticks_else_what_the_browser_shows() -> None:
    inspector = filtered()
    assert len(inspector.selection()) == 5
    ask(inspector, "query", query={"reward": [0.5, None], "sort": "reward", "descending": True})
    assert [t.reward for t in inspector.selection()] == [0.9, 0.5, 0.5]
    inspector.selected = [2, 0]
    assert inspector.selection() == [inspector.trajectory(2), inspector.trajectory(0)]
    inspector.selected = [99]
    with pytest.raises(ConfigError, match="there is no trajectory 99"):
        inspector.selection()


def test_export_reads_back_exactly(tmp_path: Path) -> None:
    groups = [*many(2, 3, 3), TrajectoryGroup([nasty_trajectory(), simple(math.inf), simple(None)])]
    inspector = Inspector(groups)
    answers = list(inspector.answer({"kind": "export", "numbers": [7, 0, 6, 8]}))
    assert answers[-1][0]["done"] and answers[-1][0]["count"] == 4
    everything = [t for group in groups for t in group]
    exported = from_jsonl(b"".join(b for _, buffers in answers for b in buffers))
    assert exported == [everything[n] for n in (7, 0, 6, 8)]
    assert exported[1].choices()[0].model_extra == everything[0].choices()[0].model_extra
    inspector.selected = [6]
    assert from_jsonl(inspector.save(tmp_path / "new" / "one.jsonl").read_bytes()) == [everything[6]]
    with pytest.raises(ValueError, match="line 1"):
        from_jsonl(b'{"a": 1}\n')


def test_a_large_export_comes_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("artnb.notebook.inspector.EXPORT_BYTES", 1000)
    answers = list(Inspector(many(1, 4, 3)).answer({"kind": "export", "ask": 1}))
    assert [m["done"] for m, _ in answers] == [False] * 4 + [True]
    assert len(from_jsonl(b"".join(b for _, buffers in answers for b in buffers))) == 4


# Without a kernel --------------------------------------------------------------------------------


class Reader(HTMLParser):
    """What a browser would make of the HTML: tags, attributes, text."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.depth = 0
        self.text = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        self.depth += 1

    def handle_endtag(self, tag: str) -> None:
        self.depth -= 1

    def handle_data(self, data: str) -> None:
        self.text += data


def test_static_html_holds_every_text_and_no_foreign_tag() -> None:
    nasty = nasty_trajectory()
    nasty.additional_histories.append(
        art.History(messages_and_choices=[{"role": "user", "content": NASTY[0]}, {"role": NASTY[1], "content": "x"}])  # type: ignore[list-item, misc]
    )
    page = Reader(trajectory_html(nasty, title=NASTY[2]))
    assert page.tags <= {"div", "b", "details", "summary"} and page.depth == 0
    assert page.attributes <= {"style", "dir", "open"}
    for text in NASTY:
        # HTML has no NUL and half an emoji is no text: both are replaced, never dropped with what follows.
        assert text.encode("utf-8", "replace").decode().replace("\0", "") in page.text.replace("\0", ""), text


@pytest.fixture
def displayed(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What is displayed."""
    bundles: list[dict[str, Any]] = []
    monkeypatch.setattr("IPython.display.display", lambda bundle, **_: bundles.append(bundle))
    return bundles


def test_it_shows_the_widget_and_beside_it_the_best_and_worst_as_html(displayed: list[dict[str, Any]]) -> None:
    groups = many(2, 4, 2)
    groups[1].trajectories[1].reward = 7.5
    groups[0].trajectories[2].reward = -3.0
    inspector = Inspector(groups)
    inspector._ipython_display_()
    live, saved = displayed
    assert live["application/vnd.jupyter.widget-view+json"]["model_id"] == inspector.model_id
    assert "text/html" not in live, "nbconvert takes one form of an output: the widget, where its state is saved"
    text = Reader(saved["text/html"]).text
    assert "Best · reward 7.5" in text and "Worst · reward −3" in text
    assert f'class="{inspector.static_class}"' in saved["text/html"]
    assert len(live["text/plain"]) < 120 and len(saved["text/plain"]) < 120
    inspector.close()
    inspector._ipython_display_()
    assert displayed[2:] == [saved]
    assert [values["title"] for values in inspector.preview] == ["Best", "Worst"]
    json.dumps(inspector.preview, allow_nan=False)


def test_nothing_floods_a_cell() -> None:
    long = episode_of(400, "word " * 5000)
    html = trajectory_html(long)
    assert len(html) < 150_000 and "messages left out" in html and "more characters" in html
    inspector = Inspector([TrajectoryGroup([long])])
    assert len(json.dumps(inspector.preview)) < 200_000
    assert len(repr(inspector)) < 120


def episode_of(messages: int, text: str) -> Trajectory:
    items: list[Any] = [{"role": "user", "content": text} for _ in range(messages)]
    return Trajectory(messages_and_choices=items, reward=0.0)


def test_best_and_worst() -> None:
    assert best_and_worst([]) == []
    assert best_and_worst([None, math.nan]) == [("First", 0)]
    assert best_and_worst([None, 1.0, 1.0]) == [("Best", 1)]
    assert best_and_worst([0.5, 2.0, -1.0, 2.0]) == [("Best", 1), ("Worst", 2)]


# Messages of the browser -------------------------------------------------------------------------


def test_what_cannot_be_answered_is_said(caplog: pytest.LogCaptureFixture) -> None:
    inspector = filtered()
    for content in (
        {"kind": "no such"},
        {"kind": "trajectory", "number": 99},
        {"kind": "trajectory"},
        {"kind": "open"},
    ):
        message, _ = next(inspector.answer(content))
        assert message["kind"] == "error" and message["message"], content
    assert "could not answer" in caplog.text


def test_answers_go_out_through_the_comm(monkeypatch: pytest.MonkeyPatch) -> None:
    inspector, sent, done = filtered(), [], threading.Event()
    monkeypatch.setattr(inspector, "send", lambda content, buffers=None: (sent.append(content), done.set()))
    inspector._received(inspector, {"kind": "trajectory", "number": 1, "ask": 7}, [])
    assert sent[0]["kind"] == "trajectory" and sent[0]["ask"] == 7
    done.clear()
    inspector._received(inspector, {"kind": "query", "query": {"text": "köln"}, "ask": 8}, [])  # in a thread
    assert done.wait(10) and sent[1]["numbers"] == [0]
    inspector._received(inspector, "noise", [])
    assert len(sent) == 2


def test_a_group_is_compared_and_large_ones_say_what_is_left_out() -> None:
    big = TrajectoryGroup([episode(random.Random(n), 1, "task") for n in range(20)])
    answer = ask(Inspector([big]), "compare", group=0)
    assert len(answer["trajectories"]) == 16 and answer["left_out"] == 4
    answer = ask(Inspector([big]), "compare", numbers=[3, 1])
    assert [values["index"] for values in answer["trajectories"]] == [3, 1]
