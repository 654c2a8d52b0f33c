"""Numbers about gathered groups: rewards, lengths, failures, cost. Plain arithmetic; says nothing about them."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from openai.types.chat.chat_completion import Choice

from ..gather import sampled_tokens
from ..trajectories import StopReason, Trajectory, TrajectoryGroup

T = TypeVar("T")
Solved = float | Callable[[Trajectory], bool] | None

SAME = 1e-9
"""Rewards closer than this, relative to their size, are the same."""


def measure(
    groups: Sequence[TrajectoryGroup],
    *,
    seconds: float,
    solved: Solved,
    context_length: int | None,
    rollouts_per_step: int | None,
    train_seconds_per_rollout: float | None,
) -> dict[str, Any]:
    """The fields of a PreflightReport that follow from the rollouts. `seconds` is the wall time of all of them."""
    trajectories = [t for group in groups for t in group]
    choices = [choice for t in trajectories for choice in t.choices()]
    scored = [t for t in trajectories if is_scored(t)]
    rewards = [float(t.reward) for t in scored if t.reward is not None]
    records = [record for group in groups for record in group.exceptions]
    rollouts = len(trajectories) + len(records)
    records += [t.error for t in trajectories if t.error is not None]
    exceptions = Counter(record.type.rpartition(".")[2] for record in records)
    rule, count = count_solved(scored, rewards, solved)
    cut = [choice for choice in choices if choice.finish_reason == "length"]
    correlation, compared = length_correlation(groups)
    prompts, sampled = _known(longest_prompt, trajectories), _known(completion_tokens, trajectories)
    durations = [float(t.metrics["duration"]) for t in trajectories if "duration" in t.metrics]
    return {
        "rollouts": rollouts,
        "scenarios": len(groups),
        "scored": len(scored),
        "nonfinite_rewards": sum(t.reward is not None and not math.isfinite(t.reward) for t in trajectories),
        "solved": count,
        "solved_rule": rule,
        "reward_mean": statistics.fmean(rewards) if rewards else None,
        "reward_min": min(rewards, default=None),
        "reward_max": max(rewards, default=None),
        "reward_spreads": tuple(spread(group) for group in groups),
        "reward_scales": tuple(scale(group) for group in groups),
        "length_correlation": correlation,
        "length_correlation_n": compared,
        "turns_mean": _mean([len(t.choices()) for t in trajectories]),
        "turns_max": max((len(t.choices()) for t in trajectories), default=None),
        "prompt_tokens_mean": _mean(prompts),
        "prompt_tokens_max": max(prompts, default=None),
        "completion_tokens_mean": _mean(sampled),
        "completion_tokens_max": max(sampled, default=None),
        "row_tokens_mean": _mean(_known(row_tokens, trajectories)),
        "longest": max(_known(whole_length, choices), default=None),
        "context_length": context_length,
        "context_full": sum(t.stop_reason is StopReason.CONTEXT_FULL for t in trajectories),
        "answers": len(choices),
        "answers_cut": len(cut),
        "answers_cut_at": tuple(sorted(set(_known(sampled_tokens, cut)))),
        "answers_without_tokens": sum(sampled_tokens(c) is None for c in choices),
        "exceptions": dict(exceptions.most_common()),
        "exception_examples": {r.type.rpartition(".")[2]: r.message for r in reversed(records)},
        "seconds": seconds,
        "seconds_per_rollout": _mean(durations),
        "rollouts_per_step": rollouts_per_step,
        "train_seconds_per_rollout": train_seconds_per_rollout,
    }


def is_scored(trajectory: Trajectory) -> bool:
    """Whether it has a reward that can train."""
    return trajectory.reward is not None and math.isfinite(trajectory.reward)


def same(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=SAME, abs_tol=SAME)


def count_solved(scored: Sequence[Trajectory], rewards: Sequence[float], solved: Solved) -> tuple[str, int | None]:
    """What "solved" means here, in words, and how many of the scored rollouts are; None where it is left open."""
    if callable(solved):
        return "solved() says so", sum(bool(solved(t)) for t in scored)
    if solved is not None:
        return f"reward ≥ {solved:g}", sum(r >= solved or same(r, solved) for r in rewards)
    if not rewards:
        return "no reward", None
    best, worst = max(rewards), min(rewards)
    if same(best, worst):
        return "reward > 0", len(rewards) if best > 0 else 0
    at_best = sum(same(r, best) for r in rewards)
    if at_best == 1 and len(set(rewards)) > len(rewards) / 2:
        return f"{len(set(rewards))} different rewards; pass solved=", None
    return f"reward {best:g}, the best seen", at_best


def spread(group: TrajectoryGroup) -> float | None:
    """Standard deviation of the group's rewards (over n, as in the advantage); None with fewer than two scored."""
    rewards = [float(t.reward) for t in group if t.reward is not None and is_scored(t)]
    if len(rewards) < 2:
        return None
    return 0.0 if same(max(rewards), min(rewards)) else statistics.pstdev(rewards)


def scale(group: TrajectoryGroup) -> float | None:
    """The largest size of a reward in the group; None without a scored rollout."""
    return max((abs(float(t.reward)) for t in group if t.reward is not None and is_scored(t)), default=None)


def length_correlation(groups: Sequence[TrajectoryGroup]) -> tuple[float | None, int]:
    """Pearson's r between reward and tokens an answer, and the number of rollouts in it.

    Both are taken against their group's mean, as the advantage is, so that hard scenarios with long answers do not
    count. Tokens an answer, not tokens in all: a game that is not lost early has more answers, and that is no fault.
    Only groups with a spread take part. None where there is nothing to compare.
    """
    xs: list[float] = []
    ys: list[float] = []
    for group in groups:
        pairs = [(completion_tokens(t), len(t.choices()), t.reward) for t in group if is_scored(t) and t.choices()]
        known = [(n / turns, float(r)) for n, turns, r in pairs if n is not None and r is not None]
        if len(known) < 2 or same(max(r for _, r in known), min(r for _, r in known)):
            continue
        mean_x, mean_y = (statistics.fmean(column) for column in zip(*known, strict=True))
        xs += [x - mean_x for x, _ in known]
        ys += [y - mean_y for _, y in known]
    sx, sy = math.fsum(x * x for x in xs), math.fsum(y * y for y in ys)
    if sx <= 0 or sy <= 0:
        return None, len(xs)
    return math.fsum(x * y for x, y in zip(xs, ys, strict=True)) / math.sqrt(sx * sy), len(xs)


def prompt_length(choice: Choice) -> int | None:
    ids = (choice.model_extra or {}).get("prompt_token_ids")
    return len(ids) if isinstance(ids, list) else None


def whole_length(choice: Choice) -> int | None:
    """Prompt and answer together, in tokens."""
    prompt, sampled = prompt_length(choice), sampled_tokens(choice)
    return None if prompt is None or sampled is None else prompt + sampled


def longest_prompt(trajectory: Trajectory) -> int | None:
    return max(_known(prompt_length, trajectory.choices()), default=None)


def completion_tokens(trajectory: Trajectory) -> int | None:
    counts = _known(sampled_tokens, trajectory.choices())
    return sum(counts) if counts else None


def row_tokens(trajectory: Trajectory) -> int | None:
    """What training reads of it: the last prompt and answer of each history, which hold the earlier ones."""
    ends = []
    for items, _ in trajectory.histories():
        wholes = _known(whole_length, [item for item in items if isinstance(item, Choice)])
        ends += [max(wholes)] if wholes else []
    return sum(ends) if ends else None


def _known(length: Callable[[T], int | None], items: Sequence[T]) -> list[int]:
    """The lengths of those items that have one."""
    return [n for item in items if (n := length(item)) is not None]


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None
