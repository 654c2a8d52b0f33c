"""Trajectories and groups as values: made, copied, saved, read back, printed."""

from __future__ import annotations

import asyncio
import copy
import json
import pickle
from typing import Any

import pydantic
import pytest
from openai.types.chat.chat_completion import Choice

from artnb.gather import PendingGroup
from artnb.trajectories import ExceptionRecord, History, StopReason, Trajectory, TrajectoryGroup

TOOL_CALL = {"id": "c1", "type": "function", "function": {"name": "move", "arguments": '{"to": 5}'}}


def choice(text: str | None = "hello", **message: Any) -> Choice:
    logprobs = {"content": [{"token": "he", "logprob": -0.5, "bytes": None, "top_logprobs": []}], "refusal": None}
    return Choice.model_validate(
        {
            "index": 0,
            "finish_reason": "stop",
            "logprobs": logprobs,
            "message": {"role": "assistant", "content": text, **message},
            "token_ids": [17, 4],
            "prompt_token_ids": [1, 2, 3],
        }
    )


def full() -> Trajectory:
    return Trajectory(
        messages_and_choices=[
            {"role": "system", "content": "play 🎲 한글"},
            {"role": "user", "content": "go"},
            choice(None, tool_calls=[TOOL_CALL], reasoning_content="think"),
            {"role": "tool", "tool_call_id": "c1", "content": '{"ok": true}'},
            choice("done"),
        ],
        tools=[{"type": "function", "function": {"name": "move", "parameters": {"type": "object"}}}],
        additional_histories=[History(messages_and_choices=[{"role": "user", "content": "sub"}, choice("sub")])],
        reward=0.5,
        initial_policy_version=1,
        final_policy_version=2,
        metrics={"turns": 2, "won": True, "score": 0.25},
        metadata={"seed": 3, "name": "x", "none": None},
        logs=["a line"],
        stop_reason=StopReason.FINISHED,
        error=ExceptionRecord(type="ValueError", message="m", traceback="t"),
    )


def test_json_round_trip_keeps_choices_and_their_extra_fields() -> None:
    before = full()
    after = Trajectory.model_validate_json(before.model_dump_json())
    assert after.model_dump() == before.model_dump()  # == would also compare which fields were given
    for item in after.choices():
        assert isinstance(item, Choice)
        assert item.model_extra == {"token_ids": [17, 4], "prompt_token_ids": [1, 2, 3]}
        assert item.logprobs is not None and item.logprobs.content is not None
        assert item.logprobs.content[0].logprob == -0.5
    assert [type(item) is dict for item in after.messages_and_choices] == [True, True, False, True, False]
    assert after.messages_and_choices[2].message.reasoning_content == "think"  # type: ignore[union-attr]
    assert after.model_dump_json() == before.model_dump_json()


@pytest.mark.parametrize(
    "message",
    [
        {"role": "tool", "tool_call_id": "c", "content": None},
        {"role": "tool", "tool_call_id": "c", "content": {"a": [1, "🎲"]}},
        {"role": "tool", "content": [1, {"type": "text", "text": "x"}]},
        {"role": "assistant", "content": "x", "reasoning_content": "y", "tool_calls": [TOOL_CALL]},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"arguments": "{malformed"}}]},
        {"content": "no role"},
        {"role": "weird", "message": "x", "content": 3},
    ],
)
def test_odd_messages_and_tools_are_saved_as_they_are(message: Any) -> None:
    before = Trajectory(messages_and_choices=[message], tools=[{"type": "x", "odd": 1}])  # type: ignore[list-item]
    after = Trajectory.model_validate_json(before.model_dump_json())
    assert after.messages_and_choices == [message] and after.tools == before.tools
    assert before.model_dump()["messages_and_choices"] == [message]


def test_a_choice_with_a_finish_reason_of_the_servers_own_is_read_back() -> None:
    odd = Choice.construct(**{**choice().model_dump(), "finish_reason": "abort"})
    after = Trajectory.model_validate_json(Trajectory(messages_and_choices=[odd]).model_dump_json())
    (read,) = after.choices()
    assert read.finish_reason == "abort" and read.message.content == "hello"
    assert read.model_extra == {"token_ids": [17, 4], "prompt_token_ids": [1, 2, 3]}


def test_the_round_trip_of_a_group_and_pickling() -> None:
    group = TrajectoryGroup([full(), ValueError("x"), full()], metadata={"s": 1}, metrics={"m": 2}, logs=["l"])
    assert TrajectoryGroup.model_validate_json(group.model_dump_json()).model_dump() == group.model_dump()
    assert TrajectoryGroup.model_validate(json.loads(group.model_dump_json())).model_dump() == group.model_dump()
    assert pickle.loads(pickle.dumps(group)) == group


def test_messages_are_ready_to_be_sent_again() -> None:
    messages = full().messages()
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert messages[2] == {
        "role": "assistant", "content": "", "reasoning_content": "think", "tool_calls": [TOOL_CALL],
    }  # fmt: skip
    assert Trajectory(messages_and_choices=[{"role": "assistant", "content": None}]).messages()[0]["content"] == ""
    assert full().additional_histories[0].messages()[1]["content"] == "sub"


def test_the_list_that_the_rollout_keeps_is_not_shared_with_the_messages() -> None:
    item = {"role": "user", "content": None}
    trajectory = Trajectory(messages_and_choices=[item])  # type: ignore[list-item]
    trajectory.messages()[0]["role"] = "system"  # type: ignore[index]
    assert item == {"role": "user", "content": None}


def test_for_logging_is_json_and_says_what_was_sampled() -> None:
    logged = json.loads(json.dumps(full().for_logging()))
    assert [m["trainable"] for m in logged["messages"]] == [False, False, True, False, True]
    assert logged["reward"] == 0.5 and logged["metrics"]["turns"] == 2


def test_histories_and_choices_include_the_additional_ones() -> None:
    trajectory = full()
    assert len(trajectory.histories()) == 2 and len(trajectory.choices()) == 3


def test_copies() -> None:
    group = TrajectoryGroup([full(), ValueError("x")], metadata={"s": 1})
    for copied in (copy.copy(group), copy.deepcopy(group), group.model_copy(), group.model_copy(deep=True)):
        assert copied == group and copied is not group
        assert len(copied) == 1 and len(copied.exceptions) == 1
    before = group.model_dump_json()
    deep = copy.deepcopy(group)
    deep.trajectories[0].metrics["turns"] = 99
    deep.trajectories[0].messages_and_choices.clear()
    deep.metadata["s"] = 2
    assert group.model_dump_json() == before


def test_two_trajectories_share_no_default() -> None:
    first, second = Trajectory(), Trajectory()
    first.messages_and_choices.append({"role": "user", "content": "x"})
    first.metrics["a"] = 1
    first.log("x")
    assert (second.messages_and_choices, second.metrics, second.logs) == ([], {}, [])
    one, two = TrajectoryGroup(), TrajectoryGroup()
    one.log("x")
    one.metadata["a"] = 1
    assert (two.logs, two.metadata) == ([], {})


async def test_durations() -> None:
    trajectory = Trajectory()
    assert trajectory.finish() is trajectory and trajectory.metrics["duration"] >= 0
    async with trajectory.track_duration("tool"):
        await asyncio.sleep(0.01)
    first = trajectory.metrics["tool_duration"]
    with pytest.raises(KeyError):
        async with trajectory.track_duration("tool"):
            await asyncio.sleep(0.01)
            raise KeyError
    assert trajectory.metrics["tool_duration"] > first > 0


def test_a_reward_of_none_is_kept() -> None:
    assert Trajectory(reward=None).reward is None
    assert Trajectory.model_validate_json(Trajectory(reward=None).model_dump_json()).reward is None
    assert Trajectory().reward == 0.0


def test_unknown_fields_raise() -> None:
    with pytest.raises(pydantic.ValidationError):
        Trajectory(rewards=1.0)  # type: ignore[call-arg]


def test_a_group_from_a_generator_with_exceptions_among_it() -> None:
    try:
        raise ValueError("with a traceback")
    except ValueError as error:
        raised = error
    group = TrajectoryGroup(item for item in [Trajectory(reward=1), raised, Trajectory(reward=2)])  # type: ignore[misc]
    assert [t.reward for t in group] == [1, 2] and len(group) == 2
    (record,) = group.exceptions
    assert (record.type, record.message) == ("ValueError", "with a traceback")
    assert 'raise ValueError("with a traceback")' in record.traceback


def test_the_name_of_an_exceptions_type_says_where_it_is_from() -> None:
    assert ExceptionRecord.of(KeyError("k")).type == "KeyError"
    assert ExceptionRecord.of(json.JSONDecodeError("m", "d", 0)).type == "json.decoder.JSONDecodeError"


def test_empty_groups() -> None:
    for group in (TrajectoryGroup(), TrajectoryGroup([]), TrajectoryGroup(iter(()))):
        assert len(group) == 0 and list(group) == [] and group.exceptions == []


async def test_awaitables_make_a_pending_group() -> None:
    async def rollout() -> Trajectory:
        return Trajectory(reward=1)

    pending = TrajectoryGroup((rollout() for _ in range(3)), metadata={"s": 1})
    assert isinstance(pending, PendingGroup) and not isinstance(pending, TrajectoryGroup)
    assert repr(pending) == "PendingGroup(3 rollouts, not started)"
    group = await pending
    assert isinstance(group, TrajectoryGroup) and len(group) == 3 and group.metadata == {"s": 1}
    assert "started" in repr(pending)


def test_reprs_are_short() -> None:
    trajectory = full()
    assert len(repr(trajectory)) < 120 and "token" not in repr(trajectory)
    assert str(trajectory).startswith("Trajectory(reward=0.5")
    group = TrajectoryGroup([*(Trajectory(reward=i / 3) for i in range(100)), Trajectory(reward=None), ValueError("x")])
    assert len(repr(group)) < 160 and repr(group) == str(group)
    assert "101 trajectories" in repr(group) and "0.333" in repr(group) and "1 failed" in repr(group)
    assert "None" in repr(TrajectoryGroup([Trajectory(reward=None)]))
