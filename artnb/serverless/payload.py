"""A step's rollouts as the service takes them, and why the rest is not sent.

The service compares the trajectories of a group and makes its own tokens, so a trajectory goes there with its choices
and their log-probs as they were sampled. A group without signal is not sent: it would be paid for and teach nothing.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from openai.types.chat.chat_completion import Choice

from ..tracking.records import to_line
from ..tracking.summary import summarize
from ..training.explain import HOW_TO_SAMPLE, explain
from ..training.rows import Skip, look_at_group
from ..training.types import Row, RowBatch, SkipReason
from ..trajectories import MessagesAndChoices, Trajectory, TrajectoryGroup


@dataclass(slots=True)
class Payload:
    """What is sent, and what is said about the rest."""

    groups: list[dict[str, Any]]
    batch: RowBatch  # without rows: reasons, notes and metrics
    digest: str  # of the groups: the same rollouts have the same one

    def in_words(self) -> str:
        """What was left out and, where nothing is sent, what to change."""
        if not self.groups:
            return explain(self.batch)
        left = "; ".join(self.batch.notes[:3])
        more = f"; and {len(self.batch.notes) - 3} more" if len(self.batch.notes) > 3 else ""
        return f"{len(self.groups)} of {int(self.batch.metrics['groups'])} groups are sent. Left out: {left}{more}"


def make_payload(groups: Sequence[TrajectoryGroup]) -> Payload:
    """The groups that can train, without what in them cannot."""
    batch = RowBatch()
    found = [look_at_group(g, group, batch, _can_train) for g, group in enumerate(groups)]
    kept = [
        (group, [group.trajectories[i] for i in found[g].rewards])
        for g, group in enumerate(groups)
        if g not in batch.group_reasons
    ]
    rewards = [reward for group in found for reward in group.rewards.values()]
    batch.metrics = {
        "groups": float(len(groups)),
        "groups_trained": float(len(kept)),
        "trajectories_trained": float(sum(len(trajectories) for _, trajectories in kept)),
    }
    summary = summarize(groups)
    batch.metrics |= {name: summary[name] for name in ("reward", "reward_std_in_groups") if name in summary}
    if rewards:
        batch.metrics |= {"reward_min": min(rewards), "reward_max": max(rewards)}
    sent = [group_json(group, trajectories) for group, trajectories in kept]
    return Payload(sent, batch, hashlib.sha256(json.dumps(sent).encode()).hexdigest())


def group_json(group: TrajectoryGroup, trajectories: Sequence[Trajectory] | None = None) -> dict[str, Any]:
    """A group with the fields that the service's own client has; `trajectories` in place of all of its own."""
    record = {
        "trajectories": [_trajectory(t) for t in (group.trajectories if trajectories is None else trajectories)],
        "exceptions": [error.model_dump() for error in group.exceptions],
        "metadata": group.metadata,
        "metrics": _finite(group.metrics),
        "logs": group.logs,
    }
    plain: dict[str, Any] = json.loads(to_line(record))
    return plain


def _trajectory(trajectory: Trajectory) -> dict[str, Any]:
    return {
        "messages_and_choices": _items(trajectory.messages_and_choices),
        "tools": trajectory.tools,
        "additional_histories": [
            {"messages_and_choices": _items(history.messages_and_choices), "tools": history.tools}
            for history in trajectory.additional_histories
        ],
        "reward": None if trajectory.reward is None else float(trajectory.reward),
        "initial_policy_version": trajectory.initial_policy_version,
        "final_policy_version": trajectory.final_policy_version,
        "metrics": _finite(trajectory.metrics),
        "metadata": trajectory.metadata,
        "logs": trajectory.logs,
    }


def _items(items: MessagesAndChoices) -> list[Any]:
    return [item.model_dump(mode="json", warnings=False) if isinstance(item, Choice) else item for item in items]


def _finite(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has no form for NaN and infinity that another language reads."""
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def _can_train(trajectory: Trajectory, group: int, index: int) -> list[Row] | Skip:
    """No rows: they are made at the service. A choice without log-probs would be trained as if on its own policy."""
    choices = trajectory.choices()
    if not choices:
        return Skip(SkipReason.NO_CHOICES, f"no sampled choices, nothing to train; {HOW_TO_SAMPLE}")
    for number, choice in enumerate(choices):
        content = choice.logprobs.content if choice.logprobs else None
        if content is None or (not content and choice.message.content):
            return Skip(SkipReason.NO_LOGPROBS, f"no log-probs; {HOW_TO_SAMPLE}", choice=number)
        if not all(math.isfinite(entry.logprob) for entry in content):
            return Skip(SkipReason.NO_LOGPROBS, "a log-prob is no number that can be trained with", choice=number)
    return []
