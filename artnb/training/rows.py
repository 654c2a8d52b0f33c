"""Turn rollout groups into training rows, with the exact tokens that were sampled and the advantage of each.

Model output is never tokenized again: a row is the prompt ids the engine saw plus the ids it sampled. What cannot be
trained is left out with a reason and a sentence, never silently. Does not give rewards, lay rows out in packs, or
need torch.
"""

from __future__ import annotations

import math
import numbers
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from openai.types.chat.chat_completion import Choice

from ..config import TrainConfig
from ..trajectory import MessagesAndChoices, StopReason, Trajectory, TrajectoryGroup
from .types import Row, RowBatch, SkipReason

HOW_TO_SAMPLE = (
    "sample through model.openai_client(), whose choices carry token ids and log-probs, and keep the Choice itself in "
    "messages_and_choices"
)


class Skip(NamedTuple):
    """Why a trajectory makes no rows: the reason, and a sentence that does not name the trajectory."""

    reason: SkipReason
    note: str


class Sampled(NamedTuple):
    """The tokens of one choice."""

    prompt_ids: list[int]
    token_ids: list[int]  # the end token included
    logprobs: list[float]
    temperature: float


@dataclass(slots=True)
class OpenRow:
    """A row that may still grow. `sampled`, `logprobs` and `temperatures` are as long as `token_ids`."""

    token_ids: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    temperatures: list[float] = field(default_factory=list)

    def grows_into(self, prompt_ids: Sequence[int]) -> bool:
        """Whether the prompt begins with all of this row."""
        return len(prompt_ids) >= len(self.token_ids) and list(prompt_ids[: len(self.token_ids)]) == self.token_ids

    def add_context(self, token_ids: Sequence[int]) -> None:
        n = len(token_ids)
        self.token_ids += token_ids
        self.sampled += [False] * n
        self.logprobs += [0.0] * n
        self.temperatures += [1.0] * n

    def add_sampled(self, token_ids: Sequence[int], logprobs: Sequence[float], temperature: float) -> None:
        n = len(token_ids)
        self.token_ids += token_ids
        self.sampled += [True] * n
        self.logprobs += logprobs
        self.temperatures += [temperature] * n

    def close(self, **labels: Any) -> Row:
        return Row(
            token_ids=np.asarray(self.token_ids, np.int64),
            sampled=np.asarray(self.sampled, np.bool_),
            logprobs=np.asarray(self.logprobs, np.float32),
            temperatures=np.asarray(self.temperatures, np.float32),
            **labels,
        )


def rows_from_trajectory(
    trajectory: Trajectory, *, group: int = 0, index: int = 0, max_row_tokens: int | None = None
) -> list[Row] | Skip:
    """The rows of one trajectory, or why there are none. Its reward is not looked at.

    A choice's row is its prompt ids plus its sampled ids. The next choice of the same history extends the row when its
    prompt begins with all of it; otherwise the history was rewritten (e.g. the template strips <think>) and a new
    row starts. So every sampled token is trained once, in the context in which it was sampled.

    Args:
        group, index: where the trajectory stands; copied to the rows.
        max_row_tokens: a longer row leaves the whole trajectory out: training only its short rows would
            credit them with a reward that the missing ones earned.
    """
    rows: list[OpenRow] = []
    seen = 0
    for history, _ in trajectory.histories():
        row: OpenRow | None = None
        for item in history:
            if not isinstance(item, Choice):
                continue
            tokens = sampled_tokens(item)
            if isinstance(tokens, str):
                return Skip(SkipReason.NO_LOGPROBS, f"choice {seen}: {tokens}")
            seen += 1
            if not tokens.token_ids:  # cut before its first token: nothing to train, and the next prompt has the rest
                continue
            if row is None or not row.grows_into(tokens.prompt_ids):
                row = OpenRow()
                rows.append(row)
            row.add_context(tokens.prompt_ids[len(row.token_ids) :])
            row.add_sampled(tokens.token_ids, tokens.logprobs, tokens.temperature)
    if not rows:
        return Skip(SkipReason.NO_CHOICES, f"no sampled choices, nothing to train; {HOW_TO_SAMPLE}")
    longest = max(len(row.token_ids) for row in rows)
    if max_row_tokens is not None and longest > max_row_tokens:
        return Skip(SkipReason.TOO_LONG, f"a row of {longest} tokens is longer than the limit of {max_row_tokens}")
    truncated = is_truncated(trajectory)
    return [row.close(group=group, trajectory=index, truncated=truncated) for row in rows]


def sampled_tokens(choice: Choice) -> Sampled | str:
    """The tokens of a choice, or what is wrong with them and what to do."""
    extra = choice.model_extra or {}
    prompt_ids, token_ids = extra.get("prompt_token_ids"), extra.get("token_ids")
    if prompt_ids is None or token_ids is None:
        missing = " and ".join(name for name in ("prompt_token_ids", "token_ids") if extra.get(name) is None)
        return f"no log-probs that can be trained, for the choice has no {missing}; {HOW_TO_SAMPLE}"
    content = (choice.logprobs.content if choice.logprobs else None) or []
    if token_ids and not content:
        return f"no log-probs; {HOW_TO_SAMPLE}"
    if len(content) != len(token_ids):
        return f"{len(token_ids)} token ids but {len(content)} log-probs; do not edit a choice's logprobs or token_ids"
    logprobs = [entry.logprob for entry in content]
    for position, value in enumerate(logprobs):
        if not math.isfinite(value):
            return f"log-prob {position} is {value}, not a number to train with; the engine that sampled it is at fault"
    temperature = extra.get("temperature")
    temperature = 1.0 if temperature is None else float(temperature)
    if not (math.isfinite(temperature) and temperature >= 0.0):
        return f"temperature {temperature} is impossible, so its log-probs cannot be recomputed; {HOW_TO_SAMPLE}"
    # Greedy answers report log-probs at temperature 1 (engines/base.py).
    return Sampled(list(prompt_ids), list(token_ids), logprobs, temperature or 1.0)


def is_truncated(trajectory: Trajectory) -> bool:
    """One flag per rollout, however many turns it had: an answer was cut, or the history filled the context."""
    if trajectory.stop_reason in (StopReason.TRUNCATED, StopReason.CONTEXT_FULL):
        return True
    return any(choice.finish_reason == "length" for choice in trajectory.choices())


def rows_from_groups(groups: Sequence[TrajectoryGroup], config: TrainConfig, *, max_row_tokens: int | None) -> RowBatch:
    """The rows of one step with their advantages, and why the rest is not in them.

    The advantage is the reward minus the group's mean; over the standard deviation (ddof 1) + 1e-4 of the group or
    of the batch as `config.scale_rewards` says. As TRL: https://huggingface.co/docs/trl/grpo_trainer

    Args:
        max_row_tokens: longest row that the model's context or a pack can hold; None is no limit.
    """
    batch = RowBatch()
    found = [_look_at_group(g, group, batch, max_row_tokens) for g, group in enumerate(groups)]
    batch_std = _std([reward for group in found for reward in group.rewards.values()])
    trained: Counter[int] = Counter()  # group → trajectories
    for g, group in enumerate(found):
        if g in batch.group_reasons:
            continue
        baseline = math.fsum(group.rewards.values()) / len(group.rewards)
        scale = {"group": _std(list(group.rewards.values())), "batch": batch_std}.get(config.scale_rewards)
        for index, reward in group.rewards.items():
            made = group.made[index]
            if config.mask_truncated_completions and not isinstance(made, Skip) and made[0].truncated:
                made = Skip(SkipReason.TRUNCATED, "cut short, and mask_truncated_completions is on")
            if isinstance(made, Skip):
                _leave_out(batch, made.reason, f"group {g}, trajectory {index}: {made.note}")
                group.left_out[made.reason] += 1
                continue
            advantage = reward - baseline
            for row in made:
                row.advantage = advantage if scale is None else advantage / (scale + 1e-4)
            batch.rows += made
            trained[g] += 1
        if not trained[g]:
            reason = group.left_out.most_common(1)[0][0]
            batch.group_reasons[g] = reason
            batch.notes.append(f"group {g}: none of {len(group.rewards)} scored trajectories is left: {reason.value}")
    batch.metrics = _metrics(groups, found, batch, trained)
    return batch


def explain(batch: RowBatch) -> str:
    """What was trained and what was not, in a sentence, and where nothing was, what to change.

    >>> explain(rows_from_groups(groups, TrainConfig(), max_row_tokens=None))  # doctest: +SKIP
    'Nothing was trained: 2 groups: 2 had all rewards equal (e.g. group 0: all 8 rewards equal 0). Every rollout …'
    """
    total = int(batch.metrics.get("groups", len(batch.group_reasons)))
    if total == 0:
        return "Nothing was trained: no groups were given."
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
_FAILED_STOPS = (StopReason.FAILED, StopReason.TIMEOUT, StopReason.CANCELLED)


@dataclass(slots=True)
class _Found:
    """What a group holds: `rewards` of the trajectories compared with each other, by index, and their rows."""

    rewards: dict[int, float] = field(default_factory=dict)
    made: dict[int, list[Row] | Skip] = field(default_factory=dict)
    left_out: Counter[SkipReason] = field(default_factory=Counter)


def _look_at_group(g: int, group: TrajectoryGroup, batch: RowBatch, max_row_tokens: int | None) -> _Found:
    """Sort out what cannot be compared; set `batch.group_reasons[g]` when what is left has no signal."""
    found = _Found()

    def leave_out(reason: SkipReason, note: str) -> None:
        found.left_out[reason] += 1
        _leave_out(batch, reason, note)

    for error in group.exceptions:
        leave_out(SkipReason.FAILED, f"group {g}: a rollout failed with {error.type}: {error.message}")
    for index, trajectory in enumerate(group.trajectories):
        skip = _not_scored(trajectory)
        if skip is None:
            made = rows_from_trajectory(trajectory, group=g, index=index, max_row_tokens=max_row_tokens)
            # What was not sampled here says nothing about this policy, so it does not move the baseline. A trajectory
            # that is too long or cut short *is* the policy's: without it the mean would be that of the rollouts that
            # happened to fit, and the rest would be praised or blamed against the wrong expectation.
            if not isinstance(made, Skip) or made.reason not in (SkipReason.NO_LOGPROBS, SkipReason.NO_CHOICES):
                found.rewards[index] = float(trajectory.reward)  # type: ignore[arg-type]  # _not_scored has checked it
                found.made[index] = made
                continue
            skip = made
        leave_out(skip.reason, f"group {g}, trajectory {index}: {skip.note}")

    rewards = list(found.rewards.values())
    others = f" ({sum(found.left_out.values())} left out)" if found.left_out else ""
    if not rewards:
        reason = found.left_out.most_common(1)[0][0] if found.left_out else SkipReason.EMPTY
        counts = ", ".join(f"{count} {reason.value}" for reason, count in found.left_out.most_common())
        note = f"no trajectory to train: {counts}" if counts else "it holds no trajectory"
    elif len(rewards) == 1:
        reason = SkipReason.ONE_SCORED
        note = f"only one scored trajectory, reward {rewards[0]:g}: nothing to compare it with{others}"
    elif max(rewards) - min(rewards) <= 8 * np.finfo(np.float64).eps * max(map(abs, rewards)):  # rounding, no spread
        reason = SkipReason.ALL_EQUAL
        note = f"all {len(rewards)} rewards equal {rewards[0]:g}{others}"
    else:
        return found
    batch.group_reasons[g] = reason
    batch.notes.append(f"group {g}: {note}")
    batch.trajectory_reasons[reason] += len(rewards)
    return found


def _not_scored(trajectory: Trajectory) -> Skip | None:
    """Why a trajectory's reward cannot be compared, or None when it can."""
    if trajectory.error is not None:
        return Skip(SkipReason.FAILED, f"failed with {trajectory.error.type}: {trajectory.error.message}")
    if trajectory.stop_reason in _FAILED_STOPS:
        return Skip(SkipReason.FAILED, f"ended by {trajectory.stop_reason.value}")
    reward: object = trajectory.reward  # assignments are not validated, so it may be anything
    if reward is None:
        return Skip(SkipReason.UNSCORED, "reward is None")
    if not isinstance(reward, numbers.Real) and not hasattr(reward, "__float__"):
        return Skip(SkipReason.NONFINITE_REWARD, f"reward {reward!r} is not a number")
    if not math.isfinite(float(reward)):
        return Skip(SkipReason.NONFINITE_REWARD, f"reward is {float(reward)}")
    return None


def _leave_out(batch: RowBatch, reason: SkipReason, note: str) -> None:
    batch.trajectory_reasons[reason] += 1
    batch.notes.append(note)


def _std(rewards: Sequence[float]) -> float:
    """Unbiased, as TRL's; 0 for fewer than two."""
    return float(np.std(rewards, ddof=1)) if len(rewards) > 1 else 0.0


def _metrics(
    groups: Sequence[TrajectoryGroup], found: Sequence[_Found], batch: RowBatch, trained: Counter[int]
) -> dict[str, float]:
    """Numbers of the step; a mean over nothing is left out."""
    trajectories = [t for group in groups for t in group.trajectories]
    total = len(trajectories) + sum(len(group.exceptions) for group in groups)
    scored = [float(t.reward) for t in trajectories if t.reward is not None and _not_scored(t) is None]
    choices = [choice for t in trajectories for choice in t.choices()]
    stds = [_std(list(group.rewards.values())) for group in found if len(group.rewards) > 1]
    metrics: dict[str, float] = {
        "groups": len(groups),
        "groups_trained": len(groups) - len(batch.group_reasons),
        "trajectories": total,
        "trajectories_trained": sum(trained.values()),
        "rows": len(batch.rows),
        "row_tokens": sum(len(row) for row in batch.rows),
        "sampled_tokens": sum(int(row.sampled.sum()) for row in batch.rows),
        "context_assistant_messages": sum(
            _context_assistants(history) for t in trajectories for history, _ in t.histories()
        ),
    }
    if scored:
        metrics |= {"reward": math.fsum(scored) / len(scored), "reward_min": min(scored), "reward_max": max(scored)}
    if stds:
        metrics["reward_std_in_groups"] = math.fsum(stds) / len(stds)
    if metrics["trajectories_trained"]:
        metrics["rows_per_trajectory"] = metrics["rows"] / metrics["trajectories_trained"]
    if choices:
        metrics["completions_truncated"] = sum(c.finish_reason == "length" for c in choices) / len(choices)
    if trajectories:
        metrics["trajectories_truncated"] = sum(map(is_truncated, trajectories)) / len(trajectories)
    for reason, count in batch.trajectory_reasons.items():
        metrics[f"left_out/{reason.name.lower()}"] = count / total
    for reason, count in Counter(batch.group_reasons.values()).items():
        metrics[f"groups_left_out/{reason.name.lower()}"] = count / len(groups)
    return metrics


def _context_assistants(history: MessagesAndChoices) -> int:
    return sum(not isinstance(item, Choice) and item.get("role") == "assistant" for item in history)


def _example(batch: RowBatch, group: int) -> str:
    """The first sentence about a group as a whole, else about one of its trajectories."""
    for prefix in (f"group {group}: ", f"group {group}, "):
        for note in batch.notes:
            if note.startswith(prefix) and "a rollout failed" not in note:
                return note
    return ""


def _hints(batch: RowBatch) -> list[str]:
    """What to change when nothing was trained."""
    hints = []
    metrics, reasons = batch.metrics, set(batch.group_reasons.values())
    cut = metrics.get("completions_truncated", 0.0)
    if cut > 0.5 and reasons & {SkipReason.ALL_EQUAL, SkipReason.TRUNCATED}:
        hints.append(f"{cut:.0%} of the answers were cut by length: raise max_tokens in the rollout's request.")
    if SkipReason.ALL_EQUAL in reasons:
        low, high = metrics["reward_min"], metrics["reward_max"]
        if low == high:
            hints.append(
                f"Every reward is {low:g}, so either no rollout succeeds or every one does: choose tasks that the model "
                "solves sometimes (about one try in three is a good start), or give partial credit."
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


def _count(n: int, one: str, many: str | None = None) -> str:
    return f"{n} {one if n == 1 else many or one + 's'}"
