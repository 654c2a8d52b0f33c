"""Turn rollout groups into training rows, with the exact tokens that were sampled and the advantage of each.

Model output is never tokenized again: a row is the prompt ids the engine saw plus the ids it sampled. What cannot be
trained is left out with a reason and a sentence, never silently. Does not give rewards, lay rows out in packs, or
need torch.
"""

from __future__ import annotations

import math
import numbers
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from openai.types.chat.chat_completion import Choice

from ..config import TrainConfig
from ..token_logprobs import token_logprobs
from ..trajectories import MessagesAndChoices, StopReason, Trajectory, TrajectoryGroup
from .explain import HOW_TO_SAMPLE, cut_short, explain
from .types import Row, RowBatch, SkipReason

__all__ = [
    "Found", "OpenRow", "Sampled", "Skip", "explain", "has_failed", "is_truncated", "look_at_group", "rows_from_groups",
    "rows_from_trajectory", "sampled_tokens",
]  # fmt: skip


class Skip(NamedTuple):
    """Why a trajectory makes no rows: the reason, and a sentence."""

    reason: SkipReason
    note: str
    choice: int | None = None  # which choice is at fault, counted over all histories

    def at(self, *, group: int | None = None, trajectory: int) -> str:
        """The sentence with its place: 'group 3, trajectory 1, choice 2: no log-probs; …'."""
        place = f"trajectory {trajectory}" if group is None else f"group {group}, trajectory {trajectory}"
        return f"{place}: {self.note}" if self.choice is None else f"{place}, choice {self.choice}: {self.note}"


class Sampled(NamedTuple):
    """The tokens of one choice."""

    prompt_ids: list[int]
    token_ids: list[int]  # the end token included
    logprobs: list[float]
    temperature: float


@dataclass(slots=True)
class OpenRow:
    """A row that may still grow. `spans`: where sampled tokens begin, their log-probs and their temperature."""

    token_ids: list[int] = field(default_factory=list)
    spans: list[tuple[int, Sequence[float], float]] = field(default_factory=list)

    def grows_into(self, prompt_ids: Sequence[int]) -> bool:
        """Whether the prompt begins with all of this row."""
        return len(prompt_ids) >= len(self.token_ids) and list(prompt_ids[: len(self.token_ids)]) == self.token_ids

    def add_context(self, token_ids: Sequence[int]) -> None:
        self.token_ids += token_ids

    def add_sampled(self, token_ids: Sequence[int], logprobs: Sequence[float], temperature: float) -> None:
        self.spans.append((len(self.token_ids), logprobs, temperature))
        self.token_ids += token_ids

    def close(self, **labels: Any) -> Row:
        n = len(self.token_ids)
        sampled, logprobs, temperatures = np.zeros(n, np.bool_), np.zeros(n, np.float32), np.ones(n, np.float32)
        for start, values, temperature in self.spans:
            span = slice(start, start + len(values))
            sampled[span], logprobs[span], temperatures[span] = True, values, temperature
        token_ids = np.asarray(self.token_ids, np.int64)
        return Row(token_ids=token_ids, sampled=sampled, logprobs=logprobs, temperatures=temperatures, **labels)


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
                return Skip(SkipReason.NO_LOGPROBS, tokens, choice=seen)
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
    logprobs = token_logprobs(choice.logprobs) or []
    if token_ids and not logprobs:
        return f"no log-probs; {HOW_TO_SAMPLE}"
    if len(logprobs) != len(token_ids):
        return f"{len(token_ids)} token ids but {len(logprobs)} log-probs; do not edit a choice's logprobs or token_ids"
    for position, value in enumerate(logprobs if not math.isfinite(sum(logprobs)) else ()):
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


def has_failed(trajectory: Trajectory) -> Skip | None:
    """Why a rollout's trajectory is no complete one, or None. Its reward may still be the default 0."""
    if trajectory.error is not None:
        return Skip(SkipReason.FAILED, f"failed with {trajectory.error.type}: {trajectory.error.message}")
    if trajectory.stop_reason in _FAILED_STOPS:
        return Skip(SkipReason.FAILED, f"ended by {trajectory.stop_reason.value}")
    return None


def rows_from_groups(groups: Sequence[TrajectoryGroup], config: TrainConfig, *, max_row_tokens: int | None) -> RowBatch:
    """The rows of one step with their advantages, and why the rest is not in them.

    The advantage is the reward minus the group's mean; over the standard deviation (ddof 1) + 1e-4 of the group or
    of the batch as `config.scale_rewards` says. As TRL: https://huggingface.co/docs/trl/grpo_trainer

    Args:
        max_row_tokens: longest row that the model's context or a pack can hold; None is no limit.
    """
    batch = RowBatch()

    def make(trajectory: Trajectory, group: int, index: int) -> list[Row] | Skip:
        return rows_from_trajectory(trajectory, group=group, index=index, max_row_tokens=max_row_tokens)

    found = [look_at_group(g, group, batch, make) for g, group in enumerate(groups)]
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
                group.leave_out(batch, made.reason, made.at(group=g, trajectory=index))
                continue
            advantage = reward - baseline
            for row in made:
                row.advantage = advantage if scale is None else advantage / (scale + 1e-4)
            batch.rows += made
            trained[g] += 1
        if not trained[g]:
            batch.group_reasons[g] = group.main_reason()
            batch.notes.append(f"group {g}: no trajectory to train: {group.in_words()}")
    batch.metrics = _metrics(groups, found, batch, trained)
    batch.notes += cut_short(batch)
    return batch


_FAILED_STOPS = (StopReason.FAILED, StopReason.TIMEOUT, StopReason.CANCELLED)


@dataclass(slots=True)
class Found:
    """What a group holds: `rewards` of the trajectories compared with each other, by index, and their rows."""

    rewards: dict[int, float] = field(default_factory=dict)
    made: dict[int, list[Row] | Skip] = field(default_factory=dict)
    left_out: Counter[SkipReason] = field(default_factory=Counter)
    first_note: dict[SkipReason, str] = field(default_factory=dict)

    def leave_out(self, batch: RowBatch, reason: SkipReason, note: str) -> None:
        self.left_out[reason] += 1
        self.first_note.setdefault(reason, note)
        batch.trajectory_reasons[reason] += 1
        batch.notes.append(note)

    def main_reason(self) -> SkipReason:
        """The most frequent one; EMPTY where nothing was left out because there was nothing."""
        return self.left_out.most_common(1)[0][0] if self.left_out else SkipReason.EMPTY

    def in_words(self) -> str:
        counts = ", ".join(f"{count} {reason.value}" for reason, count in self.left_out.most_common())
        return f"{counts}; the first: {self.first_note[self.main_reason()]}"


def look_at_group(
    g: int, group: TrajectoryGroup, batch: RowBatch, make: Callable[[Trajectory, int, int], list[Row] | Skip]
) -> Found:
    """Sort out what cannot be compared; set `batch.group_reasons[g]` when what is left has no signal.

    `make(trajectory, g, its index)` gives the rows of a scored trajectory, or why there are none.
    """
    found = Found()
    for error in group.exceptions:
        found.leave_out(batch, SkipReason.FAILED, f"group {g}: a rollout failed with {error.type}: {error.message}")
    for index, trajectory in enumerate(group.trajectories):
        skip = _not_scored(trajectory)
        if skip is None:
            made = make(trajectory, g, index)
            # What was not sampled here says nothing about this policy, so it does not move the baseline. A trajectory
            # that is too long or cut short *is* the policy's: without it the mean would be that of the rollouts that
            # happened to fit, and the rest would be praised or blamed against the wrong expectation.
            if not isinstance(made, Skip) or made.reason not in (SkipReason.NO_LOGPROBS, SkipReason.NO_CHOICES):
                found.rewards[index] = float(trajectory.reward)  # type: ignore[arg-type]  # _not_scored has checked it
                found.made[index] = made
                continue
            skip = made
        found.leave_out(batch, skip.reason, skip.at(group=g, trajectory=index))

    rewards = list(found.rewards.values())
    others = f" ({sum(found.left_out.values())} left out)" if found.left_out else ""
    if not rewards:
        reason = found.main_reason()
        note = f"no trajectory to train: {found.in_words()}" if found.left_out else "it holds no trajectory"
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
    if rewards:
        batch.trajectory_reasons[reason] += len(rewards)
    return found


def _not_scored(trajectory: Trajectory) -> Skip | None:
    """Why a trajectory's reward cannot be compared, or None when it can."""
    if (failure := has_failed(trajectory)) is not None:
        return failure
    reward: object = trajectory.reward  # assignments are not validated, so it may be anything
    if reward is None:
        return Skip(SkipReason.UNSCORED, "reward is None")
    if not isinstance(reward, numbers.Real) and not hasattr(reward, "__float__"):
        return Skip(SkipReason.NONFINITE_REWARD, f"reward {reward!r} is not a number")
    if not math.isfinite(float(reward)):
        return Skip(SkipReason.NONFINITE_REWARD, f"reward is {float(reward)}")
    return None


def _std(rewards: Sequence[float]) -> float:
    """Unbiased, as TRL's; 0 for fewer than two."""
    return float(np.std(rewards, ddof=1)) if len(rewards) > 1 else 0.0


def _metrics(
    groups: Sequence[TrajectoryGroup], found: Sequence[Found], batch: RowBatch, trained: Counter[int]
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
        cut = [choice for choice in choices if choice.finish_reason == "length"]
        metrics["completions_truncated"] = len(cut) / len(choices)
        if lengths := [len(ids) for choice in cut if (ids := (choice.model_extra or {}).get("token_ids")) is not None]:
            metrics["truncated_tokens_max"] = max(lengths)
    if trajectories:
        metrics["trajectories_truncated"] = sum(map(is_truncated, trajectories)) / len(trajectories)
    for reason, count in batch.trajectory_reasons.items():
        metrics[f"left_out/{reason.name.lower()}"] = count / total
    for reason, count in Counter(batch.group_reasons.values()).items():
        metrics[f"groups_left_out/{reason.name.lower()}"] = count / len(groups)
    return metrics


def _context_assistants(history: MessagesAndChoices) -> int:
    return sum(not isinstance(item, Choice) and item.get("role") == "assistant" for item in history)
