"""Rows from trajectories: exact tokens, growth and forks, advantages, and a reason for whatever is left out."""

from __future__ import annotations

import math
import random
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from openai.types.chat.chat_completion import Choice

from artnb.config import TrainConfig
from artnb.training.rows import Skip, explain, rows_from_groups, rows_from_trajectory
from artnb.training.types import Row, RowBatch, SkipReason
from artnb.trajectories import ExceptionRecord, History, StopReason, Trajectory, TrajectoryGroup

USER = {"role": "user", "content": "hi"}


def choice(
    prompt_ids: list[int], sampled_ids: list[int], *, finish: str = "stop", logprobs: Any = "make", **extra: Any
) -> Choice:
    """A sampled choice; `logprobs` are -0.1, -0.2, … unless given. An extra that is ... is left out."""
    if logprobs == "make":
        logprobs = [-0.1 * (i + 1) for i in range(len(sampled_ids))]
    content = None if logprobs is None else [{"token": "?", "logprob": p, "top_logprobs": []} for p in logprobs]
    fields = {"prompt_token_ids": prompt_ids, "token_ids": sampled_ids, "policy": "m@0", **extra}
    return Choice.model_validate(
        {
            "index": 0,
            "finish_reason": finish,
            "message": {"role": "assistant", "content": "answer"},
            "logprobs": None if content is None else {"content": content},
            **{key: value for key, value in fields.items() if value is not ...},
        }
    )


def trajectory(reward: Any = 0.0, *choices: Choice, **fields: Any) -> Trajectory:
    made = Trajectory(messages_and_choices=[USER, *(choices or (choice([1, 2], [3, 4]),))], **fields)
    made.reward = reward  # as a rollout assigns it, unvalidated
    return made


def group(*rewards: Any, **fields: Any) -> TrajectoryGroup:
    return TrajectoryGroup([trajectory(reward) for reward in rewards], **fields)


def build(*groups: TrajectoryGroup, max_row_tokens: int | None = None, **options: Any) -> RowBatch:
    return rows_from_groups(groups, TrainConfig(**options), max_row_tokens=max_row_tokens)


def rows_of(made: list[Row] | Skip) -> list[Row]:
    assert not isinstance(made, Skip), made
    return made


def advantages(batch: RowBatch) -> list[float]:
    return [row.advantage for row in batch.rows]


def sampled_ids(row: Row) -> list[int]:
    return row.token_ids[row.sampled].tolist()


# ------------------------------------------------------------------------------------------------ tokens


def test_a_row_is_prompt_plus_sampled() -> None:
    made = choice([5, 6, 7], [8, 9], temperature=0.6)
    (row,) = rows_of(rows_from_trajectory(trajectory(1.0, made), group=4, index=2))
    assert row.token_ids.tolist() == [5, 6, 7, 8, 9] and len(row) == 5
    assert row.sampled.tolist() == [False, False, False, True, True]
    assert row.logprobs.tolist() == pytest.approx([0, 0, 0, -0.1, -0.2])
    assert row.temperatures.tolist() == pytest.approx([1, 1, 1, 0.6, 0.6])
    assert (row.group, row.trajectory, row.truncated) == (4, 2, False)
    assert (row.token_ids.dtype, row.sampled.dtype, row.logprobs.dtype) == (np.int64, np.bool_, np.float32)


def test_a_prompt_that_extends_the_row_grows_it() -> None:
    turns = [choice([1, 2], [3, 9]), choice([1, 2, 3, 9, 4, 5], [6, 9]), choice([1, 2, 3, 9, 4, 5, 6, 9], [7])]
    (row,) = rows_of(rows_from_trajectory(trajectory(1.0, *turns)))
    assert row.token_ids.tolist() == [1, 2, 3, 9, 4, 5, 6, 9, 7]
    assert row.sampled.tolist() == [False, False, True, True, False, False, True, True, True]


def test_a_rewritten_history_starts_a_row() -> None:
    """user-reports #42: the template strips the thought (id 8), so turn 2 does not extend turn 1."""
    turns = [choice([1], [8, 3, 9]), choice([1, 3, 9, 4], [8, 5, 9]), choice([1, 3, 9, 4, 5, 9, 6], [7, 9])]
    rows = rows_of(rows_from_trajectory(trajectory(1.0, *turns)))
    assert [row.token_ids.tolist() for row in rows] == [
        [1, 8, 3, 9],
        [1, 3, 9, 4, 8, 5, 9],
        [1, 3, 9, 4, 5, 9, 6, 7, 9],
    ]
    assert [sampled_ids(row) for row in rows] == [[8, 3, 9], [8, 5, 9], [7, 9]]


def test_a_prompt_shorter_than_the_row_starts_a_row() -> None:
    rows = rows_of(rows_from_trajectory(trajectory(1.0, choice([1, 2], [3]), choice([1, 2], [3]))))
    assert [row.token_ids.tolist() for row in rows] == [[1, 2, 3], [1, 2, 3]]  # two samples of one prompt: both train


def test_sampled_ids_are_trained_ids() -> None:
    """user-reports #41: ids are opaque; a split that no tokenizer would make survives, in its own context.

    Random conversations over the bytes of emoji and Hangul, cut anywhere, with histories kept or rewritten."""
    rng = random.Random(0)
    for _ in range(50):
        prompt = list("👋 한글 hello".encode())[: rng.randint(1, 16)]
        made, contexts = [], []
        for _ in range(rng.randint(1, 6)):
            answer = [rng.choice([*"é👩‍👩‍👧 </think>he".encode(), 256, 257]) for _ in range(rng.randint(1, 9))]
            made.append(choice(list(prompt), answer, temperature=rng.choice([0.0, 0.5, 1.0])))
            contexts += [(tuple(prompt + answer[:i]), answer[i]) for i in range(len(answer))]
            kept = answer if rng.random() < 0.7 else answer[rng.randint(1, len(answer)) :]
            prompt = prompt + kept + list("도구: ok".encode())
        rows = rows_of(rows_from_trajectory(trajectory(1.0, *made)))
        trained = [
            (tuple(row.token_ids[:i].tolist()), int(row.token_ids[i]))
            for row in rows
            for i in np.flatnonzero(row.sampled)
        ]
        assert trained == contexts  # each sampled token once, after exactly the tokens it was sampled after


def test_interleaved_rollouts_with_equal_text_never_mix() -> None:
    """user-reports #52: two rollouts whose messages are equal, but whose tokens are not, sampled alternately."""
    a, b = trajectory(1.0, choice([1], [2, 3])), trajectory(0.0, choice([1], [23]))
    a.messages_and_choices.append(choice([1, 2, 3, 4], [5]))
    b.messages_and_choices.append(choice([1, 23, 4], [6]))
    batch = build(TrajectoryGroup([a, b]))
    assert [(row.trajectory, row.token_ids.tolist()) for row in batch.rows] == [
        (0, [1, 2, 3, 4, 5]),
        (1, [1, 23, 4, 6]),
    ]


def test_additional_histories_have_rows_of_their_own() -> None:
    other = History(messages_and_choices=[USER, choice([7], [8]), choice([7, 8, 9], [10])])
    made = trajectory(1.0, choice([1], [2]), additional_histories=[other, History(messages_and_choices=[USER])])
    rows = rows_of(rows_from_trajectory(made))
    assert [row.token_ids.tolist() for row in rows] == [[1, 2], [7, 8, 9, 10]]
    # A history whose prompt happens to extend the other's row is still another conversation.
    made.additional_histories = [History(messages_and_choices=[choice([1, 2, 3], [4])])]
    assert len(rows_of(rows_from_trajectory(made))) == 2


def test_a_dict_assistant_message_is_context_and_counted() -> None:
    """user-reports #19, #20: also when the dict has log-probs of its own."""
    made = trajectory(1.0, choice([1, 2, 3], [4]))
    made.messages_and_choices[1:1] = [{"role": "assistant", "content": "hello", "logprobs": {"content": []}}, USER]
    batch = build(TrajectoryGroup([made, trajectory(0.0)]))
    assert batch.metrics["context_assistant_messages"] == 1
    assert [sampled_ids(row) for row in batch.rows] == [[4], [3, 4]]


def test_only_dict_messages_have_nothing_to_train() -> None:
    made = Trajectory(messages_and_choices=[USER, {"role": "assistant", "content": "hello"}], reward=1.0)
    batch = build(TrajectoryGroup([made, made]))
    assert batch.group_reasons == {0: SkipReason.NO_CHOICES} and not batch.rows
    assert "no sampled choices" in batch.notes[0] and "keep the Choice" in explain(batch)


@pytest.mark.parametrize("temperature", [0, 0.0, None, ...])
def test_greedy_and_absent_temperatures_are_one(temperature: Any) -> None:
    (row,) = rows_of(rows_from_trajectory(trajectory(1.0, choice([1], [2], temperature=temperature))))
    assert row.temperatures.tolist() == [1.0, 1.0]


BAD_CHOICES = {
    "no logprobs": (choice([1], [2], logprobs=None), "no log-probs"),
    "empty logprobs": (choice([1], [2], logprobs=[]), "no log-probs"),
    "no token ids": (choice([1], [2], token_ids=...), "no token_ids"),
    "no prompt ids": (choice([1], [2], prompt_token_ids=None), "no prompt_token_ids"),
    "neither": (choice([1], [2], prompt_token_ids=..., token_ids=...), "no prompt_token_ids and token_ids"),
    "shorter": (choice([1], [2, 3], logprobs=[-1.0]), "2 token ids but 1 log-probs"),
    "longer": (choice([1], [2], logprobs=[-1.0, -1.0]), "1 token ids but 2 log-probs"),
    "nan": (choice([1], [2, 3], logprobs=[-1.0, math.nan]), "log-prob 1 is nan"),
    "-inf": (choice([1], [2], logprobs=[-math.inf]), "log-prob 0 is -inf"),
    "temperature": (choice([1], [2], temperature=-1.0), "temperature -1.0"),
}


@pytest.mark.parametrize("name", BAD_CHOICES)
def test_a_choice_without_usable_logprobs_leaves_its_trajectory_out(name: str) -> None:
    """user-reports #17, #20: named by group, trajectory and choice, and the rest trains."""
    bad, words = BAD_CHOICES[name]
    broken = trajectory(0.5, choice([1], [2]), choice([1, 2], [3]), bad)
    batch = build(group(0.0, 1.0), TrajectoryGroup([trajectory(0.0), broken, trajectory(1.0)]))
    assert batch.trajectory_reasons == {SkipReason.NO_LOGPROBS: 1} and not batch.group_reasons
    (note,) = batch.notes
    assert note.startswith("group 1, trajectory 1, choice 2: ") and words in note
    assert {(row.group, row.trajectory) for row in batch.rows} == {(0, 0), (0, 1), (1, 0), (1, 2)}
    assert advantages(batch)[2:] == advantages(batch)[:2]  # the mean is that of the other two


def test_a_group_without_any_logprobs_says_so_and_not_that_rewards_are_equal() -> None:
    """user-reports #17: rewards differ, log-probs are absent."""
    bad = [trajectory(reward, choice([1], [2], logprobs=None)) for reward in (0.0, 1.0)]
    batch = build(TrajectoryGroup(bad))
    assert batch.group_reasons == {0: SkipReason.NO_LOGPROBS}
    assert "no log-probs" in explain(batch) and "model.openai_client()" in explain(batch)


def test_an_answer_without_tokens_is_no_error() -> None:
    made = trajectory(1.0, choice([1], [], logprobs=None, finish="length"), choice([1, 2], [3]))
    (row,) = rows_of(rows_from_trajectory(made))
    assert row.token_ids.tolist() == [1, 2, 3] and row.truncated
    made = rows_from_trajectory(trajectory(1.0, choice([1], [])))
    assert isinstance(made, Skip) and made.reason is SkipReason.NO_CHOICES


# ------------------------------------------------------------------------------------------------ rewards


def test_advantages_are_trl_s() -> None:
    rewards = [0.0, 1.0, 0.5, 1.0]
    mean, std = 0.625, float(np.std(rewards, ddof=1))
    assert advantages(build(group(*rewards))) == pytest.approx([(r - mean) / (std + 1e-4) for r in rewards])
    assert advantages(build(group(*rewards), scale_rewards="none")) == pytest.approx([r - mean for r in rewards])
    two = build(group(*rewards), group(3.0, 5.0), scale_rewards="batch")
    std = float(np.std([*rewards, 3.0, 5.0], ddof=1))
    assert advantages(two) == pytest.approx(
        [(r - mean) / (std + 1e-4) for r in rewards] + [-1 / std, 1 / std], rel=1e-3
    )


def test_a_small_but_real_spread_trains() -> None:
    """user-reports #18."""
    batch = build(group(0.147, 0.0875, 0.1295, 0.0525))
    assert len(batch.rows) == 4 and not batch.group_reasons
    assert sum(advantages(batch)) == pytest.approx(0.0, abs=1e-9) and max(advantages(batch)) > 0.9
    assert build(group(0.147, 0.0875)).rows


@pytest.mark.parametrize("rewards", [[0.25] * 8, [0.0] * 2, [0.1 + 0.2, 0.3], [-1.0, -1.0], [True, 1, 1.0]])
def test_all_equal_rewards_do_not_train(rewards: list[float]) -> None:
    batch = build(group(0.0, 1.0), group(*rewards))
    assert batch.group_reasons == {1: SkipReason.ALL_EQUAL}
    assert batch.notes == [f"group 1: all {len(rewards)} rewards equal {rewards[0]:g}"]
    assert batch.trajectory_reasons == {SkipReason.ALL_EQUAL: len(rewards)}
    assert {row.group for row in batch.rows} == {0}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, np.float32("nan"), "high"])
def test_a_reward_that_is_no_number_leaves_its_trajectory_out(bad: Any) -> None:
    batch = build(group(0.0, bad, 1.0))
    assert batch.trajectory_reasons == {SkipReason.NONFINITE_REWARD: 1}
    assert batch.notes[0].startswith("group 0, trajectory 1: reward ")
    assert advantages(batch) == pytest.approx([-0.70700, 0.70700], abs=1e-4)
    assert all(math.isfinite(value) for value in batch.metrics.values())


def test_unscored_is_not_zero() -> None:
    batch = build(group(None, 1.0, 3.0))
    assert batch.metrics["reward"] == 2.0
    assert batch.trajectory_reasons == {SkipReason.UNSCORED: 1} and [row.trajectory for row in batch.rows] == [1, 2]
    assert batch.metrics["left_out/unscored"] == pytest.approx(1 / 3)
    assert build(group(None, None)).group_reasons == {0: SkipReason.UNSCORED}


def test_one_scored_trajectory_has_nothing_to_be_compared_with() -> None:
    for made in (group(1.0), group(1.0, None, math.nan), group(1.0, None)):
        batch = build(made)
        assert batch.group_reasons == {0: SkipReason.ONE_SCORED} and not batch.rows
        assert "reward 1" in batch.notes[-1] and "at least two" in explain(batch)


def test_groups_of_8_7_1_0_survivors_in_one_batch() -> None:
    """user-reports #36."""
    error = [ValueError("boom")]
    seven = group(0, 1, 2, 3, 4, 5, 6, None)
    one = group(*[None] * 7, 1.0)
    none = TrajectoryGroup([], exceptions=error * 8)
    batch = build(group(*range(8)), seven, one, none, TrajectoryGroup([]))
    assert batch.group_reasons == {2: SkipReason.ONE_SCORED, 3: SkipReason.FAILED, 4: SkipReason.EMPTY}
    assert [sum(row.group == g for row in batch.rows) for g in range(5)] == [8, 7, 0, 0, 0]
    for g in (0, 1):
        assert sum(row.advantage for row in batch.rows if row.group == g) == pytest.approx(0.0, abs=1e-9)
    assert sum(batch.trajectory_reasons.values()) + batch.metrics["trajectories_trained"] == 32


FAILED = {
    "error": {"error": ExceptionRecord.of(ValueError("boom"))},
    "timeout": {"stop_reason": StopReason.TIMEOUT},
    "cancelled": {"stop_reason": StopReason.CANCELLED},
    "failed": {"stop_reason": StopReason.FAILED},
}


@pytest.mark.parametrize("name", FAILED)
def test_a_failed_rollout_contributes_nothing(name: str) -> None:
    """user-reports #37: the batch is the one without it, though it holds choices and a default reward of 0."""
    failed = trajectory(0.0, **FAILED[name])
    with_it = build(TrajectoryGroup([trajectory(1.0), failed, trajectory(3.0), RuntimeError("late")]))
    without = build(TrajectoryGroup([trajectory(1.0), trajectory(3.0)]))
    assert with_it.trajectory_reasons == {SkipReason.FAILED: 2}
    assert advantages(with_it) == advantages(without)
    for left, right in zip(with_it.rows, without.rows, strict=True):
        assert np.array_equal(left.token_ids, right.token_ids)
    for key in ("reward", "reward_std_in_groups", "rows", "sampled_tokens"):
        assert with_it.metrics[key] == without.metrics[key]
    assert any("RuntimeError: late" in note for note in with_it.notes)


def test_the_order_of_groups_and_trajectories_does_not_matter() -> None:
    """user-reports #38: advantages come from the group object, not from the order in which rollouts ended."""
    rng = random.Random(1)
    scored = [[rng.random() for _ in range(5)] for _ in range(4)]

    def by_reward(groups: list[list[float]]) -> dict[float, float]:
        batch = build(*(group(*rewards) for rewards in groups))
        return {groups[row.group][row.trajectory]: row.advantage for row in batch.rows}

    shuffled = [rng.sample(rewards, 5) for rewards in rng.sample(scored, 4)]
    assert by_reward(shuffled) == pytest.approx(by_reward(scored), abs=1e-12)


# ------------------------------------------------------------------------------------------------ too long, cut short


def test_a_row_that_is_too_long_leaves_its_trajectory_out_but_not_its_reward() -> None:
    long = trajectory(3.0, choice([1], [2]), choice([5] * 90, [6] * 10))
    batch = build(TrajectoryGroup([trajectory(1.0), long, trajectory(2.0)]), max_row_tokens=99)
    assert batch.trajectory_reasons == {SkipReason.TOO_LONG: 1} and [row.trajectory for row in batch.rows] == [0, 2]
    assert batch.notes == ["group 0, trajectory 1: a row of 100 tokens is longer than the limit of 99"]
    assert advantages(batch) == pytest.approx([-1 / 1.0001, 0.0])  # the mean of 1, 3 and 2 is 2
    fits = build(TrajectoryGroup([trajectory(1.0), long, trajectory(2.0)]), max_row_tokens=100)
    assert len(fits.rows) == 4


def test_a_group_of_too_long_rows_says_so() -> None:
    batch = build(group(0.0, 1.0), max_row_tokens=3)
    assert batch.group_reasons == {0: SkipReason.TOO_LONG} and not batch.rows
    assert "too long" in explain(batch) and "limit of 3" in explain(batch)


def test_one_truncated_turn_marks_the_rollout_once() -> None:
    """user-reports #35."""
    turns = [choice([1], [2]), choice([1, 2], [3], finish="length"), choice([1, 9], [4])]
    cut = trajectory(3.0, *turns)
    kept = build(TrajectoryGroup([cut, trajectory(1.0)]))
    assert [row.truncated for row in kept.rows] == [True, True, False]
    assert kept.metrics["trajectories_truncated"] == 0.5 and kept.metrics["completions_truncated"] == 0.25
    masked = build(TrajectoryGroup([cut, trajectory(1.0), trajectory(2.0)]), mask_truncated_completions=True)
    assert masked.trajectory_reasons == {SkipReason.TRUNCATED: 1}
    assert advantages(masked) == pytest.approx([-1 / 1.0001, 0.0])  # its reward still belongs to the mean


def test_all_truncated_and_masked_is_a_step_without_rows_that_says_why() -> None:
    """user-reports #29."""
    cut = [trajectory(r, choice([1], [2], finish="length")) for r in (0.0, 1.0)]
    batch = build(TrajectoryGroup(cut), mask_truncated_completions=True)
    assert not batch.rows and batch.group_reasons == {0: SkipReason.TRUNCATED}
    assert "100% of the answers were cut by length, the longest after 1 token: raise max_tokens" in explain(batch)


def test_a_full_context_still_trains() -> None:
    """user-reports #32."""
    full = trajectory(0.0, stop_reason=StopReason.CONTEXT_FULL)
    batch = build(TrajectoryGroup([full, trajectory(1.0)]))
    assert len(batch.rows) == 2 and batch.rows[0].truncated
    assert len(build(TrajectoryGroup([full, trajectory(1.0)]), mask_truncated_completions=True).rows) == 1


# ------------------------------------------------------------------------------------------------ the whole batch


def test_118_short_trajectories() -> None:
    """user-reports #23: 118 rows of their own length, with no padding anywhere."""
    rng = random.Random(2)
    groups = [
        TrajectoryGroup([trajectory(rng.random(), choice([1] * rng.randint(2, 60), [2] * 5)) for _ in range(size)])
        for size in [8] * 14 + [6]
    ]
    batch = build(*groups)
    assert len(batch.rows) == batch.metrics["trajectories"] == batch.metrics["rows"] == 118
    assert batch.metrics["row_tokens"] == sum(len(row) for row in batch.rows) < 118 * 65
    assert batch.metrics["sampled_tokens"] == 118 * 5


def test_metrics_add_up() -> None:
    two_rows = trajectory(1.0, choice([1], [2]), choice([9], [2, 3]))
    batch = build(
        TrajectoryGroup([two_rows, trajectory(0.0)]), group(2.0, 2.0), TrajectoryGroup([], exceptions=[ValueError()])
    )
    expected = {
        "groups": 3,
        "groups_trained": 1,
        "trajectories": 5,
        "trajectories_trained": 2,
        "rows": 3,
        "row_tokens": 2 + 3 + 4,
        "sampled_tokens": 1 + 2 + 2,
        "rows_per_trajectory": 1.5,
        "context_assistant_messages": 0,
        "reward": 1.25,
        "reward_min": 0.0,
        "reward_max": 2.0,
        "reward_std_in_groups": math.sqrt(0.5) / 2,
        "completions_truncated": 0.0,
        "trajectories_truncated": 0.0,
        "left_out/all_equal": 0.4,
        "left_out/failed": 0.2,
        "groups_left_out/all_equal": 1 / 3,
        "groups_left_out/failed": 1 / 3,
    }
    assert batch.metrics == pytest.approx(expected)


def test_building_rows_changes_no_trajectory_and_can_be_repeated() -> None:
    made = TrajectoryGroup([trajectory(1.0, choice([1], [2]), choice([1, 2], [3])), trajectory(0.0)])
    before = made.model_dump_json()
    first, second = build(made), build(made)
    assert made.model_dump_json() == before
    assert [row.token_ids.tolist() for row in first.rows] == [row.token_ids.tolist() for row in second.rows]
    # A trajectory that was saved and read back makes the same rows: ids and log-probs survive JSON.
    again = build(TrajectoryGroup.model_validate_json(before))
    assert [row.token_ids.tolist() for row in again.rows] == [row.token_ids.tolist() for row in first.rows]
    assert [row.logprobs.tolist() for row in again.rows] == [row.logprobs.tolist() for row in first.rows]


def test_explain_names_counts_an_example_and_what_to_change() -> None:
    same = explain(build(group(*[0.0] * 8), group(0.0, 0.0), group(None, None), TrajectoryGroup([])))
    assert same.startswith(
        "Nothing was trained: 4 groups: 2 had all rewards equal (e.g. group 0: all 8 rewards equal 0), "
    )
    assert "1 were unscored" in same and "1 held no trajectory" in same
    assert "Every reward is 0" in same and "solves sometimes" in same
    assert "not inside one" in explain(build(group(0.0, 0.0), group(1.0, 1.0)))
    assert explain(build()) == "Nothing was trained: nothing was given."
    trained = explain(build(group(0.0, 1.0, None), group(1.0, 1.0)))
    assert trained == (
        "1 of 2 groups trained; 1 had all rewards equal (e.g. group 1: all 2 rewards equal 1). 3 trajectories left out."
    )
    failed = explain(build(TrajectoryGroup([], exceptions=[ValueError("boom")])))
    assert "1 had only failed rollouts" in failed and "boom" in failed and "tracebacks" in failed


def test_rows_need_no_torch() -> None:
    code = "import sys, artnb.training.rows; sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
