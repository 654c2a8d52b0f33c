"""Code as ART's users write it, in the manner of its tic-tac-toe and email notebooks. It imports art.

`main(art, ...)` trains `model` on `backend` through every call that those notebooks make.
"""

import asyncio
from typing import Any

from pydantic import BaseModel


class Answer(BaseModel):
    square: str


def code(art: Any) -> Any:
    """The rollout, made after `art` is known: annotations and decorators are read when a function is made."""
    from art.utils import iterate_dataset, limit_concurrency
    from art.utils.strip_logprobs import strip_logprobs

    class ProjectTrajectory(art.Trajectory):
        answer: Answer | None = None

    @limit_concurrency(2)
    async def judge(text: str) -> float:
        await asyncio.sleep(0)
        return sum(map(ord, text)) % 100 / 100  # of random text, too, no two are likely to be equal

    @art.retry(max_attempts=2, exceptions=(ConnectionError,))
    async def rollout(model: art.Model, scenario: dict[str, Any], seed: int) -> ProjectTrajectory:
        traj = ProjectTrajectory(
            messages_and_choices=[
                {"role": "system", "content": "You play noughts and crosses. Answer with a square."},
                {"role": "user", "content": scenario["board"]},
            ],
            reward=0.0,
            metadata={"scenario_id": scenario["id"]},
        )
        async with traj.track_duration("llm_completion"):
            completion = await model.openai_client().chat.completions.create(
                model=model.inference_model_name, messages=traj.messages(), max_completion_tokens=8, seed=seed
            )
        choice = completion.choices[0]
        traj.messages_and_choices.append(choice)
        traj.answer = Answer(square=(choice.message.content or "")[:2])
        traj.reward = await judge(choice.message.content or "")
        traj.metrics["length"] = len(choice.message.content or "")
        traj.log(f"answered {traj.answer.square!r}")
        assert "logprobs" not in str(strip_logprobs({"logprobs": 1, "choice": choice.model_dump()}))
        return traj

    return rollout, iterate_dataset


async def main(art: Any, model: Any, backend: Any, steps: int = 2) -> list[Any]:
    """Train, log, evaluate and tidy up; returns what each step said."""
    rollout, iterate_dataset = code(art)
    await model.register(backend)
    scenarios = [{"id": i, "board": f"board {i}: _ x o"} for i in range(2 * steps)]
    results = []
    batches = iterate_dataset(
        scenarios, groups_per_step=2, num_epochs=1, initial_step=await model.get_step(), use_tqdm=False
    )
    for batch in batches:
        groups = await art.gather_trajectory_groups(
            (
                art.TrajectoryGroup(
                    (rollout(model, scenario, seed=100 * batch.step + r) for r in range(3)),
                    metadata={"scenario_id": scenario["id"]},
                )
                for scenario in batch.items
            ),
            pbar_desc=None,
            max_exceptions=1,
            after_each=keep(art),
        )
        result = await backend.train(model, groups, learning_rate=1e-3, normalize_advantages=True, verbose=False)
        await model.log(groups, metrics=result.metrics, step=result.step, split="train")
        val = await art.gather_trajectories(
            (rollout(model, scenario, seed=7) for scenario in scenarios[:1]), pbar_desc=None
        )
        await model.log(val, split="val")
        await model.delete_checkpoints("train/reward")
        model.merge_state({"dataset": {"step": batch.step}, "last": result.step})
        results.append(result)
    return results


def keep(art: Any) -> Any:
    async def after_each(group: Any) -> Any:
        assert isinstance(group, art.TrajectoryGroup)
        return group if len(group) else None

    return after_each
