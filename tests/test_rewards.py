"""Verifiable rewards, their weighted sum, and saved trajectories under another reward."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pydantic
import pytest
from openai.types.chat import ChatCompletionMessage
from openai.types.chat.chat_completion import Choice

import artnb as art
from artnb.errors import CheckpointError, ConfigError
from artnb.rewards import ExactMatch, JsonSchema, Numeric, Regex, ToolSuccess, Weighted, rescore
from artnb.tracking.history import History


def said(*texts: Any, **fields: Any) -> art.Trajectory:
    """A trajectory whose last assistant message is the last of `texts`."""
    messages: list[Any] = [{"role": "user", "content": "?"}]
    messages += [{"role": "assistant", "content": text} for text in texts]
    return art.Trajectory(messages_and_choices=messages, **fields)


@pytest.mark.parametrize(
    ("reward", "text", "value"),
    [
        (ExactMatch("Paris"), " Paris\n", 1.0),
        (ExactMatch("Paris"), "paris", 0.0),
        (ExactMatch("Paris", ignore_case=True), "PARIS", 1.0),
        (ExactMatch(["Paris", "Lyon"]), "Lyon", 1.0),
        (ExactMatch("rock & roll", ignore_punctuation=True), "rock  roll!", 1.0),
        (ExactMatch("서울 🎉"), "서울 🎉", 1.0),
        (ExactMatch("straße", ignore_case=True), "STRASSE", 1.0),
        (ExactMatch(42), "42", 1.0),
        (ExactMatch(""), "", 1.0),
        (ExactMatch("4"), "<think>2+2 is 5? no, 4</think>\n4", 1.0),
        (ExactMatch("4", extract=r"<answer>(.*?)</answer>"), "<answer>3</answer> no, <answer>4</answer>", 1.0),
        (ExactMatch("4", extract=r"<answer>(.*?)</answer>"), "4", 0.0),
        (ExactMatch("b", extract=r"[abc]"), "a or rather b", 1.0),
    ],
)
def test_exact_match(reward: ExactMatch, text: str, value: float) -> None:
    assert reward(said("something else", text)) == value


@pytest.mark.parametrize(
    ("right", "text", "value"),
    [
        (4, "2 + 2 = 4.", 1.0),
        (1234.5, "That makes $1,234.50", 1.0),
        (-3, "x = −3", 1.0),
        (3, "5 - 2 is 5-2 = 3", 1.0),
        (5, "on pages 3–5", 1.0),
        (0.75, "about 3/4 of it", 1.0),
        (0.45, "45 %", 1.0),
        (45, "45%", 1.0),
        (0.001, "1e-3", 1.0),
        (0.5, "it is .5", 1.0),
        (7, "no number here", 0.0),
        (7, "", 0.0),
        (7, "seven is 8", 0.0),
        (7, "7/0", 0.0),
        (12, "1,2 and 12", 1.0),
        ([1, 2], "2", 1.0),
        ("1,000", "1000", 1.0),
    ],
)
def test_numeric(right: Any, text: str, value: float) -> None:
    assert Numeric(right)(said(text)) == value
    assert Numeric(metadata="a")(said(text, metadata={"a": 7.0})) == Numeric(7)(said(text))


def test_numeric_tolerances() -> None:
    assert Numeric(100)(said("101")) == 0.0
    assert Numeric(100, tolerance=1)(said("101")) == 1.0
    assert Numeric(100, relative=0.02)(said("101")) == 1.0
    assert Numeric(100, relative=0.005)(said("101")) == 0.0


class City(pydantic.BaseModel):
    name: str
    people: int


SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}, "people": {"type": "integer"}}}
SCHEMA |= {"required": ["name", "people"]}


@pytest.mark.parametrize("schema", [City, SCHEMA])
@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"name": "Bonn", "people": 330000}', 1.0),
        ('Here it is:\n```json\n{"name": "Bonn", "people": 330000}\n```\nGood?', 1.0),
        ('{"name": "Bonn"}', 0.0),
        ('{"name": "Bonn", "people": "many"}', 0.0),
        ('{"name": "Bonn", "people": NaN}', 0.0),
        ("[]", 0.0),
        ("Bonn", 0.0),
        ("", 0.0),
        ('{"name": "Bonn", "people": 330000', 0.0),
    ],
)
def test_json_schema(schema: Any, text: str, value: float) -> None:
    if schema is SCHEMA:
        pytest.importorskip("jsonschema")
    assert JsonSchema(schema)(said(text)) == value


def test_regex_sees_thoughts_and_lines() -> None:
    form = Regex(r"<think>.+</think>\s*<answer>.+</answer>", full=True)
    assert form(said("<think>a\nb</think>\n<answer>4</answer>\n")) == 1.0
    assert form(said("so <think>a</think><answer>4</answer>")) == 0.0
    assert Regex("four")(said("three, four")) == 1.0


def test_without_an_answer_nothing_is_right() -> None:
    empty = art.Trajectory(messages_and_choices=[{"role": "user", "content": "4"}])
    for reward in (ExactMatch("4"), Numeric(4), Regex("4"), JsonSchema(City), ToolSuccess()):
        assert reward(empty) == 0.0
    parts = said([{"type": "text", "text": "4"}])
    assert ExactMatch("4")(parts) == 1.0


def test_sampled_choices_are_answers() -> None:
    message = ChatCompletionMessage(role="assistant", content="4")
    choice = Choice(index=0, finish_reason="stop", message=message)
    assert Numeric(4)(art.Trajectory(messages_and_choices=[{"role": "user", "content": "2+2"}, choice])) == 1.0


def call(name: str, arguments: str, identity: str) -> dict[str, Any]:
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}


def with_tools(*results: tuple[str, str, Any]) -> art.Trajectory:
    """Calls of one assistant message as (name, arguments, result's content; None: no result came)."""
    calls = [call(name, arguments, str(i)) for i, (name, arguments, _) in enumerate(results)]
    answers = [
        {"role": "tool", "tool_call_id": str(i), "content": content}
        for i, (_, _, content) in enumerate(results)
        if content is not None
    ]
    tools = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("search", "read")]
    return art.Trajectory(
        messages_and_choices=[{"role": "assistant", "content": None, "tool_calls": calls}, *answers], tools=tools
    )


@pytest.mark.parametrize(
    ("result", "value"),
    [
        (("search", '{"q": "x"}', "found"), 1.0),
        (("search", "", "found"), 1.0),  # no arguments at all is how some servers write {}
        (("search", "{q: x", "found"), 0.0),
        (("search", '["x"]', "found"), 0.0),
        (("delete", "{}", "found"), 0.0),  # no such tool was offered
        (("search", "{}", None), 0.0),
        (("search", "{}", "Error: no index"), 0.0),
        (("search", "{}", "Traceback (most recent call last): …"), 0.0),
        (("search", "{}", '{"error": "no index"}'), 0.0),
        (("search", "{}", '{"error": null, "hits": 3}'), 1.0),
        (("search", "{}", {"isError": True}), 0.0),
        (("search", "{}", [{"type": "text", "text": "Error"}]), 0.0),
        (("search", "{}", ""), 1.0),
    ],
)
def test_tool_success(result: tuple[str, str, Any], value: float) -> None:
    assert ToolSuccess()(with_tools(result)) == value
    assert ToolSuccess()(with_tools(result, ("read", "{}", "ok"))) == (value + 1) / 2


def test_tool_success_of_some_tools_and_with_an_own_rule() -> None:
    mixed = with_tools(("search", "{}", "nothing found"), ("read", "{}", "Error"))
    assert ToolSuccess("search")(mixed) == 1.0
    assert ToolSuccess("search", is_error=lambda text: "nothing" in text)(mixed) == 0.0
    assert ToolSuccess("write", without_calls=0.5)(mixed) == 0.5


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: ExactMatch(), "either the expected answer or metadata="),
        (lambda: ExactMatch("a", metadata="b"), "one only"),
        (lambda: ExactMatch("a", extract="("), "no regular expression"),
        (lambda: Numeric("Paris"), "'Paris' is no number"),
        (lambda: Numeric(True), "no number"),
        (lambda: Numeric(math.nan), "no number"),
        (lambda: Numeric(1, tolerance=-1), "tolerance"),
        (lambda: Regex("[")(said("")), "no regular expression"),
        (lambda: JsonSchema({"type": "objekt"}), "schema itself is wrong"),
        (lambda: JsonSchema("city"), "a JSON schema as a dict or a type"),
        (lambda: ToolSuccess(3), "names of tools"),
        (lambda: Weighted(), "needs parts"),
        (lambda: Weighted(a=3), "a must be a reward"),
        (lambda: Weighted(a=("x", Regex("a"))), "the weight of a"),
        (lambda: ExactMatch(metadata="anwser")(said("", metadata={"answer": "x"})), "did you mean 'answer'"),
        (lambda: ExactMatch(metadata="answer")(said("")), "no metadata at all"),
    ],
)
def test_wrong_rewards_say_what_to_do(make: Any, says: str) -> None:
    if "schema itself" in says:
        pytest.importorskip("jsonschema")
    with pytest.raises(ConfigError, match=says):
        make()


async def test_async_parts_are_refused() -> None:
    async def judge(trajectory: art.Trajectory) -> float:
        return 1.0

    with pytest.raises(ConfigError, match="async"):
        Weighted(a=judge)


def test_parts_and_weights_are_metrics() -> None:
    reward = Weighted(correct=Numeric(metadata="answer"), form=(0.2, Regex(r"<b>")), short=(-0.1, lambda t: 3))
    trajectory = said("<b>4</b>", metadata={"answer": 4})
    assert reward(trajectory) == pytest.approx(1.0 + 0.2 - 0.3)
    assert trajectory.metrics == {
        "reward/correct": 1.0,
        "reward_weight/correct": 1.0,
        "reward/form": 1.0,
        "reward_weight/form": 0.2,
        "reward/short": 3.0,
        "reward_weight/short": -0.1,
    }
    assert "form=0.2 × Regex" in repr(reward)


@pytest.mark.parametrize("value", [None, math.nan, math.inf])
def test_a_part_without_a_number_leaves_the_whole_unscored(value: Any) -> None:
    trajectory = said("4")
    assert Weighted(a=Numeric(4), b=lambda t: value)(trajectory) is None
    assert trajectory.metrics["reward/a"] == 1.0
    assert "reward/b" not in trajectory.metrics
    assert any("b gave no number" in line for line in trajectory.logs)


# Saved trajectories --------------------------------------------------------------------------------


def saved_run(folder: Path) -> History:
    """Two steps of two groups of two, and a validation step."""
    history = History(folder)
    for step, split in ((1, "train"), (2, "train"), (2, "val")):
        groups = [
            art.TrajectoryGroup(
                [said(str(n + step), reward=0.25, metadata={"answer": "3"}) for n in range(2)],
                metadata={"scenario": g},
                exceptions=[ValueError("one failed")],
            )
            for g in range(2)
        ]
        history.log_trajectories(step, split, groups)
    return history


async def test_a_models_folder_is_rescored_without_a_backend(tmp_path: Path) -> None:
    history = saved_run(tmp_path / "m")
    before = {path: path.read_bytes() for path in history.trajectories_folder.iterdir()}
    groups = await rescore(tmp_path / "m", ExactMatch(metadata="answer"))
    assert [(g.metadata["split"], g.metadata["step"], g.metadata["scenario"]) for g in groups] == [
        ("train", 1, 0), ("train", 1, 1), ("train", 2, 0), ("train", 2, 1), ("val", 2, 0), ("val", 2, 1),
    ]  # fmt: skip
    assert [[t.reward for t in group] for group in groups] == [[0.0, 0.0]] * 2 + [[0.0, 1.0]] * 4
    assert all(t.metrics["previous_reward"] == 0.25 for group in groups for t in group)
    assert all(len(group.exceptions) == 1 for group in groups)
    assert {path: path.read_bytes() for path in history.trajectories_folder.iterdir()} == before

    model = art.Model(name="m", project="p", base_path=tmp_path)
    history.folder.rename(tmp_path / "kept")
    model.folder.parent.mkdir(parents=True)
    (tmp_path / "kept").rename(model.folder)
    for where in (model, str(model.folder), model.folder / "history" / "trajectories"):
        again = await rescore(where, ExactMatch(metadata="answer"), step=2, split="val")
        assert [[t.reward for t in group] for group in again] == [[0.0, 1.0]] * 2


async def test_what_is_in_memory_is_rescored_and_left_as_it_is() -> None:
    group = art.TrajectoryGroup([said("3", reward=0.5), said("4", reward=None)])

    async def reward(trajectory: art.Trajectory) -> float:
        return Numeric(4)(trajectory)

    for given in (group, [group], (g for g in [group]), list(group)):
        (scored,) = await rescore(given, reward)
        assert [t.reward for t in scored] == [0.0, 1.0]
        assert [t.metrics for t in scored] == [{"previous_reward": 0.5}, {}]
    assert [t.reward for t in group] == [0.5, None]
    assert [t.metrics for t in group] == [{}, {}]
    ((scored,),) = await rescore(group.trajectories[0], Weighted(a=Numeric(3)))
    assert scored.reward == 1.0 and scored.metrics["reward/a"] == 1.0
    assert await rescore([], Numeric(3)) == []


async def test_a_reward_of_groups() -> None:
    group = art.TrajectoryGroup([said("3", reward=0.5), said("4", reward=0.1)])
    (ranked,) = await rescore(group, lambda g: [i / len(g) for i in range(len(g))], by="group")
    assert [t.reward for t in ranked] == [0.0, 0.5]

    async def judged(g: art.TrajectoryGroup) -> art.TrajectoryGroup:
        return art.TrajectoryGroup([t.model_copy(update={"reward": 0.9}) for t in g])

    (scored,) = await rescore(group, judged, by="group")
    assert [(t.reward, t.metrics["previous_reward"]) for t in scored] == [(0.9, 0.5), (0.9, 0.1)]
    assert [t.reward for t in group] == [0.5, 0.1]


async def test_a_reward_that_raises_is_data_unless_it_always_does(caplog: pytest.LogCaptureFixture) -> None:
    group = art.TrajectoryGroup([said("3", reward=0.5), said("x", reward=0.1)])
    (scored,) = await rescore(group, lambda t: float(t.messages()[-1]["content"]))
    assert [t.reward for t in scored] == [3.0, None]
    assert "ValueError" in scored.trajectories[1].logs[0] and "1 of 2" in caplog.text
    with pytest.raises(ZeroDivisionError):
        await rescore(group, lambda t: 1 / 0)
    with pytest.raises(TypeError, match="is a str, not a number"):
        await rescore(group, lambda t: "good")
    (scored,) = await rescore(group, lambda t: math.nan)
    assert [t.reward for t in scored] == [None, None]


async def test_wrong_input_says_what_to_do(tmp_path: Path) -> None:
    group = art.TrajectoryGroup([said("3")])
    saved_run(tmp_path)
    cases: list[tuple[Any, ...]] = [
        ((group, 3), {}, "not a function of a trajectory"),
        ((group, Numeric(3)), {"by": "groups"}, "did you mean 'group'"),
        ((group, Numeric(3)), {"step": 1}, "in memory"),
        (([3], Numeric(3)), {}, "item 0 is a int"),
        ((group, lambda g: [1, 2]), {"by": "group"}, "a number for each of its 1"),
        ((group, lambda g: None), {"by": "group"}, "a number for each of its 1"),
        ((group, Numeric(3)), {"max_concurrency": 0}, "max_concurrency"),
    ]
    for arguments, options, says in cases:
        with pytest.raises(ConfigError, match=says):
            await rescore(*arguments, **options)
    with pytest.raises(CheckpointError, match="there are: train 1, train 2, val 2"):
        await rescore(tmp_path, Numeric(3), step=7)
    with pytest.raises(CheckpointError, match="holds no history"):
        await rescore(tmp_path / "nowhere", Numeric(3))


def test_saved_metrics_of_parts_are_json() -> None:
    trajectory = said("3")
    trajectory.reward = Weighted(a=Numeric(3))(trajectory)
    assert json.loads(trajectory.model_dump_json())["metrics"]["reward/a"] == 1.0
