"""Preflight: what it measures, what it warns of and with which number, and that it leaves no trace."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from agents import even_groups, even_rollout
from openai.types.chat.chat_completion import Choice

import artnb as art
from artnb.errors import ConfigError
from artnb.rewards.measure import count_solved, length_correlation
from artnb.rewards.report import duration, wilson

MODEL = art.Model(name="asked", project="tests")


def choice(tokens: int = 4, prompt: int = 10, reason: str = "stop", **extra: Any) -> Choice:
    """A sampled choice of so many tokens."""
    message = {"role": "assistant", "content": "x" * tokens}
    ids = {"token_ids": [1] * tokens, "prompt_token_ids": [2] * prompt}
    return Choice.model_validate({"index": 0, "finish_reason": reason, "message": message, **ids, **extra})


def trajectory(reward: float | None, tokens: int = 4, reason: str = "stop", turns: int = 1) -> art.Trajectory:
    items: list[Any] = [{"role": "user", "content": "q"}]
    for turn in range(turns):
        items.append(choice(tokens, 10 + 20 * turn, reason))
    return art.Trajectory(messages_and_choices=items, reward=reward)


def rewarding(*rewards: float | None, **options: Any) -> Callable[..., Any]:
    """A rollout that earns these rewards one after the other."""
    left = list(rewards)

    async def rollout(model: art.Model, scenario: Any) -> art.Trajectory:
        return trajectory(left.pop(0), **options)

    return rollout


async def run(rollout: Callable[..., Any], scenarios: Any = (1, 2), group_size: int = 4, **options: Any) -> Any:
    return await art.preflight(rollout, scenarios, model=MODEL, group_size=group_size, **options)


def warning(report: Any, *words: str) -> str:
    """The one warning that holds all words."""
    found = [text for text in report.warnings if all(word in text for word in words)]
    assert len(found) == 1, (words, report.warnings)
    return str(found[0])


async def test_a_healthy_task_has_numbers_and_no_warning() -> None:
    report = await run(rewarding(0, 1, 0, 0.5, 1, 0, 0, 0, turns=2), steps=20, groups_per_step=8)
    assert report.warnings == []
    assert (report.rollouts, report.scenarios, report.scored, report.solved) == (8, 2, 8, 2)
    assert report.solve_rate == 0.25 and report.groups_with_signal == 2
    assert (report.reward_min, report.reward_max, report.reward_mean) == (0, 1, 0.3125)
    assert (report.turns_mean, report.prompt_tokens_max, report.completion_tokens_mean) == (2, 30, 8)
    assert (report.longest, report.row_tokens_mean) == (34, 34)
    assert report.rollouts_per_step == 32 and report.sampled_tokens_per_step == 8 * 32
    assert report.seconds_for_run == pytest.approx(20 * report.seconds / 8 * 32)
    assert report.training_seconds_per_step is None and "training not measured" in str(report)
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.rollouts = 3


async def test_without_a_plan_there_is_no_estimate() -> None:
    report = await run(rewarding(*[0, 1] * 4))
    assert report.seconds_per_step is None and report.seconds_for_run is None
    assert "pass groups_per_step=" in str(report)


@pytest.mark.parametrize(("rewards", "rate", "words"), [([0] * 8, "0%", "0 of 8"), ([1] * 8, "100%", "8 of 8")])
async def test_a_solve_rate_at_either_end_is_told_with_its_number(rewards: list[int], rate: str, words: str) -> None:
    """user-reports #40."""
    report = await run(rewarding(*rewards))
    assert f"Solve rate {rate}" in warning(report, "Solve rate", words, "interval")
    assert "0 of 2 groups" in warning(report, "spread")


async def test_no_warning_for_a_rate_inside() -> None:
    rewards = [1.0, *[0.0] * 15]  # 6 %
    report = await run(rewarding(*rewards), range(4))
    assert report.solve_rate == 1 / 16 and not any("Solve rate" in text for text in report.warnings)


async def test_what_solved_means_can_be_said() -> None:
    rewards = [0.1 * i for i in range(8)]
    report = await run(rewarding(*rewards))
    assert report.solve_rate is None and "8 different rewards; pass solved=" in str(report)
    assert (await run(rewarding(*rewards), solved=0.5)).solved == 3
    report = await run(rewarding(*rewards), solved=lambda t: t.reward < 0.15)
    assert report.solved == 2 and "solved() says so" in str(report)


def test_the_best_seen_counts_and_equal_rewards_do_not() -> None:
    def solved(*rewards: float) -> int | None:
        return count_solved([], rewards, None)[1]

    assert solved(-1, 0, 1, 1, 1) == 3
    assert solved(0, 0, 0) == 0 and solved(-1, -1) == 0 and solved(0.5, 0.5) == 2
    assert solved(0.1 + 0.2, 0.3, 0.0) == 2, "rounding is no difference"
    assert solved(3.1, 2.2, 1.7, 0.4) is None and solved() is None


async def test_failures_are_counted_by_type_and_the_rest_is_measured() -> None:
    count = 0

    async def rollout(model: art.Model, scenario: Any) -> art.Trajectory:
        nonlocal count
        count += 1
        if count % 4 == 0:
            raise KeyError("square <b>9</b>")
        if count % 4 == 1:
            await asyncio.Event().wait()
        return trajectory(float(count % 2))

    report = await run(rollout, timeout=0.05)
    assert report.exceptions == {"KeyError": 2, "RolloutTimeoutError": 2}
    assert (report.rollouts, report.scored) == (8, 4)
    text = warning(report, "4 of 8 rollouts failed")
    assert "2 × KeyError (e.g. 'square <b>9</b>')" in text and "2 × RolloutTimeoutError" in text
    assert "<b>9" in str(report) and "<b>" not in report._repr_html_()


async def test_all_failed_is_a_report_too() -> None:
    async def rollout(model: art.Model, scenario: Any) -> art.Trajectory:
        raise ValueError("no")

    report = await run(rollout)
    assert report.solve_rate is None and report.seconds_per_rollout is None
    assert "8 of 8 rollouts failed: 8 × ValueError" in warning(report, "failed")
    assert str(report) and report._repr_html_() and len(report.table) > 8


async def test_cut_answers_name_the_share_and_the_cap() -> None:
    """user-reports #24."""
    report = await run(rewarding(*[0, 1] * 4, tokens=16, reason="length"))
    assert "100% of the answers (8 of 8) were cut by length, at 16 tokens" in warning(report, "max_tokens")


async def test_answers_that_are_cut_short_by_design_are_no_warning() -> None:
    report = await run(rewarding(*[0, 1] * 4, tokens=2, reason="length"))
    assert report.answers_cut == 8 and not any("cut by length" in line for line in report.warnings)


async def test_unbounded_and_unlike_rewards() -> None:
    report = await run(rewarding(0, 2048, 512, 64, 1, 2, 1, 2))
    assert "from 0 to 2048" in warning(report, "unbounded")
    text = warning(report, "very different scale")
    assert "is 2 in one and 2048 in another (1024 times)" in text
    report = await run(rewarding(-1, -1, -1, -0.9, -1, -1, 1, 1))
    assert report.warnings == [], "spreads that differ by chance are not another scale"
    report = await run(rewarding(0, float("nan"), 1, 0, float("inf"), None, 1, 0))
    assert "2 rewards are NaN or infinite" in warning(report, "NaN")
    assert "1 of 8 rollouts have no reward" in warning(report, "None")
    assert report.scored == 5


def graded(slope: float, noise: float, offset: int = 0) -> art.TrajectoryGroup:
    lengths = [5, 9, 14, 22, 30, 41]
    wobble = [1, -1, 1, -1, -1, 1]
    return art.TrajectoryGroup(
        [trajectory(slope * n + noise * w, tokens=n + offset) for n, w in zip(lengths, wobble, strict=True)]
    )


async def test_reward_that_goes_with_length_is_told_with_r_and_n() -> None:
    groups = [graded(0.02, 0.02), graded(0.02, 0.02, offset=300)]
    r, n = length_correlation(groups)
    assert n == 12 and r is not None and r > 0.9
    left = [t for g in groups for t in g]

    async def rollout(model: art.Model, scenario: Any) -> art.Trajectory:
        return left.pop(0)

    report = await run(rollout, group_size=6, solved=0.5)
    assert f"r = {r:.2f}, n = 12" in warning(report, "longer answers")


def test_length_is_compared_inside_groups_and_by_answer() -> None:
    flat = art.TrajectoryGroup([trajectory(float(i % 2), tokens=5 + i // 2 % 2) for i in range(8)])
    long = art.TrajectoryGroup([trajectory(5.0 + i % 2, tokens=500 + i // 2 % 2) for i in range(8)])
    assert length_correlation([flat, long]) == (pytest.approx(0.0), 16), "hard scenarios with long answers"
    games = art.TrajectoryGroup([trajectory(float(turns), tokens=2, turns=turns) for turns in range(1, 9)])
    assert length_correlation([games]) == (None, 8), "more turns are not longer answers"
    equal = art.TrajectoryGroup([trajectory(1.0, tokens=n) for n in range(1, 9)])
    assert length_correlation([equal]) == (None, 0)


async def test_too_few_to_judge_is_no_warning() -> None:
    report = await run(rewarding(*[0.0, 0.5, 1.0, 1.0]), [1])
    assert report.warnings == []


async def test_answers_that_cannot_be_trained() -> None:
    async def bare(model: art.Model, scenario: Any) -> art.Trajectory:
        answer = choice()
        plain = Choice(index=0, finish_reason="stop", message=answer.message)
        return art.Trajectory(messages_and_choices=[{"role": "user", "content": "q"}, plain], reward=1.0)

    assert "8 of 8 answers carry no token ids" in warning(await run(bare), "token ids")

    async def dicts(model: art.Model, scenario: Any) -> art.Trajectory:
        return art.Trajectory(messages_and_choices=[{"role": "assistant", "content": "a"}], reward=1.0)

    assert "put the Choice itself" in warning(await run(dicts), "0 answers")


async def test_any_kind_of_function_and_scenarios() -> None:
    def plain(model: art.Model, scenario: int, bonus: float = 0.0) -> art.Trajectory:
        return trajectory(scenario % 2 + bonus)

    def factory(model: art.Model, scenario: int, bonus: float = 0.0) -> Any:
        async def work() -> art.Trajectory:
            return plain(model, scenario, bonus)

        return work()

    class Agent:
        async def __call__(self, model: art.Model, scenario: int, bonus: float = 0.0) -> art.Trajectory:
            return plain(model, scenario, bonus)

    for rollout in (plain, factory, Agent()):
        report = await run(rollout, range(100), group_size=2, max_scenarios=4, bonus=2.0)
        assert (report.rollouts, report.reward_min, report.reward_max) == (8, 2.0, 3.0)
    seen: list[int] = []

    async def watch(model: art.Model, scenario: int) -> art.Trajectory:
        seen.append(scenario)
        return trajectory(1.0)

    await run(watch, list(range(100)), group_size=1)
    assert seen == [0, 25, 50, 75], "a list is sampled over its length"
    seen.clear()
    await run(watch, iter(range(100)), group_size=1, max_scenarios=2)
    assert seen == [0, 1]


async def test_bad_input_names_what_to_change() -> None:
    with pytest.raises(ConfigError, match="no scenarios"):
        await run(rewarding(), [])
    with pytest.raises(ConfigError, match="group_size=0"):
        await run(rewarding(), group_size=0)
    with pytest.raises(ConfigError, match="give the function itself"):
        await run(rewarding(1)(MODEL, 1))
    with pytest.raises(ConfigError, match="groups_per_step"):
        await run(rewarding(), groups_per_step=0)

    async def forgot(model: art.Model, scenario: Any) -> None:
        return None

    assert "is a `return` missing?" in warning(await run(forgot), "failed")


async def test_an_interrupt_passes_through_and_ends_the_rollouts() -> None:
    running = asyncio.Event()
    ended: list[int] = []

    async def rollout(model: art.Model, scenario: int) -> art.Trajectory:
        running.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(scenario)
        raise AssertionError

    task = asyncio.create_task(run(rollout))
    await running.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert sorted(ended) == [1, 1, 1, 1, 2, 2, 2, 2]


async def test_the_html_is_short_and_says_what_the_text_says() -> None:
    report = await run(rewarding(*[0, 1] * 4), steps=3, groups_per_step=2)
    page = report._repr_html_()
    assert len(page) < 5000 and page.count("<tr>") == len(report.table)
    for name, value in report.table.itertuples(index=False):
        assert name in page and f"{name}" in str(report) and value in str(report)


def test_wilson_and_duration() -> None:
    assert wilson(0, 16) == (0.0, pytest.approx(0.1936, abs=1e-4))
    assert wilson(8, 16) == (pytest.approx(0.2800, abs=1e-4), pytest.approx(0.7200, abs=1e-4))
    assert [duration(s) for s in (None, 0.5, 42, 300, 7200)] == ["—", "0.5 s", "42 s", "5.0 min", "2.0 h"]


async def test_on_a_real_engine_it_leaves_no_trace(tiny_base: Path, tmp_path: Path) -> None:
    backend = art.LocalBackend(path=tmp_path / "art", device="cpu", context_length=100, verbose=False)
    model = art.TrainableModel("agent", "tests", tiny_base, lora=art.LoraConfig(r=4))

    async def rollout(model: art.TrainableModel, scenario: str, turns: int) -> art.Trajectory:
        return await even_rollout(model, scenario, seed=len(scenario), turns=turns)

    async def captured(model: art.TrainableModel, scenario: str) -> art.Trajectory:
        async with art.trajectory(group=scenario) as t:
            played = await even_rollout(model, scenario, seed=1)
            t.reward = played.reward
        return t

    async with backend:
        model.register(backend)  # not awaited: preflight waits for it
        report = await art.preflight(rollout, ["a", "b"], model=model, turns=2, steps=5, groups_per_step=4)
        assert (report.rollouts, report.context_length, report.turns_mean) == (8, 100, 2)
        assert report.longest is not None and report.longest > 30
        assert report.answers_cut <= 16 and report.completion_tokens_mean is not None
        assert report.training_seconds_per_step is None

        report = await art.preflight(captured, ["a", "b"], model=model)
        assert report.answers == 16 and report.scored == 8
        assert len(model.collector()) == 0, "what a preflight captured is not trained on"
        assert len(model.history()) == 0 and len(model.trajectories()) == 0
        assert await model.get_step() == 0

        await model.train(await even_groups(model, 0), art.TrainConfig(learning_rate=1e-4))
        report = await art.preflight(rollout, ["a", "b"], model=model, turns=1, groups_per_step=4)
        assert report.training_seconds_per_step is not None and report.training_seconds_per_step > 0
        assert "training" in str(report) and "not measured" not in str(report)
