"""The trainer's log-probs come back to their choices, through packs, minibatches and rewritten histories."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from inspector_groups import sampled
from tiny_models import make_model

from artnb.config import LoraConfig, TrainConfig
from artnb.notebook.inspector import Inspector
from artnb.tracking.history import History
from artnb.training.pack import build_packs
from artnb.training.policy import Policy, load_policy
from artnb.training.ratios import keep_trainer_logprobs
from artnb.training.rows import rows_from_groups
from artnb.training.trainer import Trainer
from artnb.trajectories import Trajectory, TrajectoryGroup


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    made = load_policy(make_model("llama", tmp_path_factory.mktemp("m"), num_hidden_layers=2), lora=LoraConfig(r=4),
                       device="cpu", dtype="float32")  # fmt: skip
    made.add_adapter("a")
    return made


def talk(reward: float, first: list[int], second: list[int], *, rewritten: bool) -> Trajectory:
    """Two sampled turns; the second's prompt extends the first turn, or not."""
    one = sampled("x", [1, 2, 3], token_ids=first, logprobs={"content": _entries(first)})
    prompt = [9, 9] if rewritten else [1, 2, 3, *first, 7]
    two = sampled("y", prompt, token_ids=second, logprobs={"content": _entries(second)})
    return Trajectory(messages_and_choices=[{"role": "user", "content": "u"}, one, two], reward=reward)


def _entries(ids: list[int]) -> list[dict[str, object]]:
    return [{"token": f"t{i}", "bytes": None, "logprob": -2.0, "top_logprobs": []} for i in ids]


def make_groups() -> list[TrajectoryGroup]:
    return [
        TrajectoryGroup([talk(0.0, [10, 11], [12], rewritten=False), talk(1.0, [10, 13], [14, 15], rewritten=True)]),
        TrajectoryGroup([talk(1.0, [10], [12], rewritten=False), talk(1.0, [11], [12], rewritten=False)]),  # no signal
        TrajectoryGroup([talk(0.0, [20, 21, 22], [], rewritten=False), talk(2.0, [23], [24], rewritten=True)]),
    ]


@pytest.mark.parametrize("minibatches", [1, 2])
def test_each_choice_gets_its_own(policy: Policy, tmp_path: Path, minibatches: int) -> None:
    groups = make_groups()
    config = TrainConfig(learning_rate=1e-2, minibatches=minibatches, num_iterations=2)
    batch = rows_from_groups(groups, config, max_row_tokens=None)
    expected = {}
    for row in batch.rows:  # each alone, before the step: no packing, no update
        (pack,) = build_packs([row], 1000)
        logp_RT, _ = policy.token_logprobs(pack, adapter="a")
        for position, value in zip(np.flatnonzero(row.sampled), logp_RT[0].tolist(), strict=False):
            expected[row.group, row.trajectory, tuple(row.token_ids[: position + 1])] = value
    Trainer(policy, "a").step(batch, config, step=0)
    keep_trainer_logprobs(groups, batch.rows)
    checked = 0
    for g, group in enumerate(groups):
        for index, trajectory in enumerate(group):
            for choice in trajectory.choices():
                extra = choice.model_extra or {}
                if g == 1:
                    assert "trainer_logprobs" not in extra
                    continue
                assert len(extra["trainer_logprobs"]) == len(extra["token_ids"])
                for at, value in enumerate(extra["trainer_logprobs"]):
                    before = (*extra["prompt_token_ids"], *extra["token_ids"][: at + 1])
                    assert value == pytest.approx(expected[g, index, before], abs=2e-4)
                    checked += 1
    assert checked == sum(int(row.sampled.sum()) for row in batch.rows)

    history = History(tmp_path / "m")
    history.log_trajectories(1, "train", groups)
    message, _ = next(Inspector(history=history).answer({"kind": "trajectory", "number": 0}))
    tokens = message["trajectory"]["histories"][0][1]["tokens"]
    assert all(ratio > 0 for ratio in tokens["ratios"]) and json.dumps(tokens)
    kept = (groups[0].trajectories[0].choices()[0].model_extra or {})["trainer_logprobs"]
    assert tokens["ratios"] == pytest.approx(np.exp(np.array(kept) + 2.0).tolist())


def test_what_is_not_trained_again_keeps_nothing_old() -> None:
    groups = make_groups()
    groups[0].trajectories[0].choices()[0].trainer_logprobs = [-1.0, -1.0]  # type: ignore[attr-defined]
    keep_trainer_logprobs(groups, [])
    assert "trainer_logprobs" not in (groups[0].trajectories[0].choices()[0].model_extra or {})
