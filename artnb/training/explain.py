"""Say in words what a batch of rows holds and lacks, and what to change when it holds nothing.

Reads a RowBatch only. Does not decide what trains (rows.py does), and prints nothing.
"""

from __future__ import annotations

from collections import Counter
from statistics import fmean, pstdev

from .types import RowBatch, SkipReason

HOW_TO_SAMPLE = (
    "sample through model.openai_client(), whose choices carry token ids and log-probs, and keep the Choice itself in "
    "messages_and_choices"
)

SHORT_BY_DESIGN = 8
"""Tokens: who allows no more wants a letter, a number or a word, and cuts the rest on purpose. Limits that are set by
accident are larger; the smallest default of a completions API is 16."""
MUCH_LESS = 0.5
"""Standard deviations by which cut answers earn less than whole ones before it is said that the cut costs them."""

_IN_WORDS = {
    SkipReason.EMPTY: "held no trajectory",
    SkipReason.ALL_EQUAL: "had all rewards equal",
    SkipReason.ONE_SCORED: "had only one scored trajectory",
    SkipReason.UNSCORED: "were unscored",
    SkipReason.NONFINITE_REWARD: "had rewards that are NaN or infinite",
    SkipReason.NO_CHOICES: "had no sampled choices",
    SkipReason.NO_LOGPROBS: "had no log-probs",
    SkipReason.TOO_LONG: "had only rows that are too long",
    SkipReason.TRUNCATED: "had only truncated trajectories",
    SkipReason.FAILED: "had only failed rollouts",
}


def explain(batch: RowBatch) -> str:
    """What was trained and what was not, in a sentence, and where nothing was, what to change.

    >>> explain(rows_from_groups(groups, TrainConfig(), max_row_tokens=None))  # doctest: +SKIP
    'Nothing was trained: 2 groups: 2 had all rewards equal (e.g. group 0: all 8 rewards equal 0). Every rollout …'
    """
    total = int(batch.metrics.get("groups", len(batch.group_reasons)))
    if total == 0 and batch.trajectory_reasons:  # supervised rows have no groups
        left_out = sum(batch.trajectory_reasons.values())
        counts = ", ".join(f"{count} {reason.value}" for reason, count in batch.trajectory_reasons.most_common())
        done = f"{_count(len(batch.rows), 'row')} trained" if batch.rows else "Nothing was trained"
        return f"{done}: {_count(left_out, 'trajectory', 'trajectories')} left out: {counts} (e.g. {batch.notes[0]})."
    if total == 0:
        return "Nothing was trained: nothing was given."
    parts = []
    for reason, count in Counter(batch.group_reasons.values()).most_common():
        example = _example(batch, next(g for g, r in batch.group_reasons.items() if r is reason))
        parts.append(f"{count} {_IN_WORDS[reason]}{f' (e.g. {example})' if example else ''}")
    if batch.rows:
        left_out = sum(batch.trajectory_reasons.values())
        sentence = f"{total - len(batch.group_reasons)} of {_count(total, 'group')} trained"
        sentence += f"; {', '.join(parts)}" if parts else ""
        return f"{sentence}. {_count(left_out, 'trajectory', 'trajectories')} left out." if left_out else f"{sentence}."
    return " ".join([f"Nothing was trained: {_count(total, 'group')}: {', '.join(parts)}.", *_hints(batch)])


def _example(batch: RowBatch, group: int) -> str:
    """What was noted about a group as a whole: the last of its notes, after those on its rollouts."""
    return next((note for note in reversed(batch.notes) if note.startswith(f"group {group}: ")), "")


def _hints(batch: RowBatch) -> list[str]:
    """What to change when nothing was trained."""
    metrics, reasons = batch.metrics, set(batch.group_reasons.values())
    low, high = metrics.get("reward_min", 0.0), metrics.get("reward_max", 0.0)
    # Where rewards differ between groups, answers that are cut are not what keeps them equal inside one.
    hints = [] if reasons == {SkipReason.ALL_EQUAL} and low != high else cut_short(batch)
    if SkipReason.ALL_EQUAL in reasons:
        if low == high:
            hints.append(
                f"Every reward is {low:g}, so either no rollout succeeds or every one does: choose tasks that the model"
                " solves sometimes (about one try in three is a good start), or give partial credit."
            )
        else:
            hints.append(
                f"Rewards differ between groups ({low:g} to {high:g}) but not inside one: sample at temperature 1, use "
                "more rollouts per group, or give partial credit, so that tries at the same task differ."
            )
    if SkipReason.NO_LOGPROBS in reasons or SkipReason.NO_CHOICES in reasons:
        hints.append(f"To fix it, {HOW_TO_SAMPLE}.")
    if SkipReason.ONE_SCORED in reasons:
        hints.append("A group needs at least two scored rollouts of the same task.")
    if SkipReason.UNSCORED in reasons:
        hints.append("Set trajectory.reward in the rollout, or score the groups before training.")
    if SkipReason.FAILED in reasons:
        hints.append("The tracebacks are in group.exceptions and trajectory.error.")
    return hints


def cut_short(batch: RowBatch) -> list[str]:
    """A warning when most answers end by length and that seems to matter: what was cut off could not be rewarded.

    It does not matter, and nothing is said, where no cut answer is longer than SHORT_BY_DESIGN tokens, and where the
    rewards of the trained groups tell cut rollouts apart and do not put them MUCH_LESS below the whole ones. Where cut
    rollouts are left out of training (mask_truncated_completions) it always matters.
    """
    cut, longest = batch.metrics.get("completions_truncated", 0.0), batch.metrics.get("truncated_tokens_max")
    meant = longest is not None and longest <= SHORT_BY_DESIGN
    masked = batch.trajectory_reasons[SkipReason.TRUNCATED] > 0
    if cut <= 0.5 or (not masked and (meant or _cut_earn_like_whole(batch))):
        return []
    after = "" if longest is None else f", the longest after {_count(round(longest), 'token')}"
    return [f"{cut:.0%} of the answers were cut by length{after}: raise max_tokens in the rollout's requests."]


def _cut_earn_like_whole(batch: RowBatch) -> bool:
    cut: dict[tuple[int, int], float] = {}  # (group, trajectory) → advantage; one trajectory may have several rows
    whole: dict[tuple[int, int], float] = {}
    for row in batch.rows:
        (cut if row.truncated else whole)[row.group, row.trajectory] = row.advantage
    groups = {group for group, _ in cut}
    told_apart = any(len({value for (g, _), value in cut.items() if g == group}) > 1 for group in groups)
    if not told_apart or not whole:
        return told_apart
    spread = pstdev([*cut.values(), *whole.values()])
    return fmean(whole.values()) - fmean(cut.values()) <= MUCH_LESS * spread


def _count(n: int, one: str, many: str | None = None) -> str:
    return f"{n} {one if n == 1 else many or one + 's'}"
