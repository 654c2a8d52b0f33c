"""A rollout for tiny random models: the reward is the share of sampled tokens with an even id."""

from __future__ import annotations

from typing import Any

import artnb as art


async def even_rollout(model: art.TrainableModel, prompt: str, seed: int, turns: int = 2, **options: Any) -> Any:
    """A multi-turn conversation; rewards even token ids, which GRPO can learn even on random weights."""
    client = model.openai_client()
    traj = art.Trajectory(messages_and_choices=[{"role": "user", "content": prompt}], reward=0.0)
    for turn in range(turns):
        completion = await client.chat.completions.create(
            model=model.get_inference_name(options.get("step")),
            messages=traj.messages(),
            max_tokens=6,
            seed=seed * 100 + turn,
        )
        traj.messages_and_choices.append(completion.choices[0])
        if turn + 1 < turns:
            traj.messages_and_choices.append({"role": "user", "content": "go on"})
    ids = [i for choice in traj.choices() for i in choice.model_extra["token_ids"]]
    traj.reward = sum(i % 2 == 0 for i in ids) / len(ids)
    return traj


async def even_groups(
    model: art.TrainableModel, step: int, groups: int = 2, size: int = 4
) -> list[art.TrajectoryGroup]:
    """Gathered groups of `even_rollout`, the same for the same step and weights."""
    return await art.gather_trajectory_groups(
        (
            art.TrajectoryGroup(
                even_rollout(model, f"scenario {g}", seed=1000 * step + 10 * g + i) for i in range(size)
            )
            for g in range(groups)
        ),
        pbar_desc=None,
    )
