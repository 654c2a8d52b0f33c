"""A program as ART's users write them, in the manner of its 2048 notebook: it imports art, and knows nothing of artnb.

    python -m artnb.compat sliding_row.py BASE_MODEL FOLDER

The game: slide four numbers to one side; equal neighbours add up. An answer that is no move ends it.
"""

import asyncio
import math
import random
import sys
import xml.etree.ElementTree as ET

import art
from art.local import LocalBackend
from openai import AsyncOpenAI
from pydantic import BaseModel

STEPS, ROLLOUTS, WINNING_VALUE = 2, 4, 16


class Scenario(BaseModel):
    step: int


def new_row(rng: random.Random) -> list[int]:
    return [rng.choice((0, 2, 2, 4)) for _ in range(4)]


def slide(row: list[int], move: str) -> list[int]:
    """Raises ValueError for anything but <move>left</move> and <move>right</move>."""
    try:
        direction = ET.fromstring(move).text
    except ET.ParseError:
        raise ValueError("no move") from None
    if direction not in ("left", "right"):
        raise ValueError(f"no such direction: {direction}")
    tiles = [tile for tile in (row if direction == "left" else row[::-1]) if tile]
    merged: list[int] = []
    while tiles:
        tile = tiles.pop(0)
        if tiles and tiles[0] == tile:
            tile += tiles.pop(0)
        merged.append(tile)
    merged += [0] * (len(row) - len(merged))
    return merged if direction == "left" else merged[::-1]


@art.retry(exceptions=(asyncio.TimeoutError))  # a class, where a tuple is meant: ART's notebooks have it so
async def rollout(model: art.Model[BaseModel], scenario: Scenario, seed: int) -> art.Trajectory:
    rng = random.Random(seed)
    row = new_row(rng)
    trajectory = art.Trajectory(
        messages_and_choices=[{"role": "system", "content": "Answer <move>left</move> or <move>right</move>."}],
        metadata={"notebook-id": "sliding-row", "step": scenario.step},
        reward=0,
    )
    client = AsyncOpenAI(base_url=model.inference_base_url, api_key=model.inference_api_key)
    moves = 0
    while max(row) < WINNING_VALUE and moves < 3:
        trajectory.messages_and_choices.append({"role": "user", "content": " ".join(map(str, row))})
        completion = await client.chat.completions.create(
            max_completion_tokens=6,
            messages=trajectory.messages(),
            model=model.get_inference_name(await model.get_step()),
            seed=seed * 10 + moves,
        )
        choice = completion.choices[0]
        content = choice.message.content
        assert isinstance(content, str)
        trajectory.messages_and_choices.append(choice)
        try:
            row = slide(row, content)
            moves += 1
        except ValueError:
            trajectory.reward = -1 + len(set(content) & set("<move>lftrigh")) / 20
            break
    else:
        trajectory.reward = math.log2(max(2, *row)) / math.log2(WINNING_VALUE)
    trajectory.metrics["max_value"] = max(row)
    trajectory.metrics["moves"] = moves
    await client.close()
    return trajectory


async def main(base_model: str, folder: str) -> None:
    model = art.TrainableModel(name="agent-001", project="sliding-row", base_model=base_model)
    # ART's way to fit a small card.
    model._internal_config = art.dev.InternalModelConfig(
        init_args=art.dev.InitArgs(max_seq_length=256, fast_inference=True),
        peft_args=art.dev.PeftArgs(r=4, lora_alpha=8),
    )
    backend = LocalBackend(in_process=True, path=folder)
    await model.register(backend)
    for i in range(await model.get_step(), STEPS):
        train_groups = await art.gather_trajectory_groups(
            (
                art.TrajectoryGroup(rollout(model, Scenario(step=i), seed=10 * i + r) for r in range(ROLLOUTS))
                for _ in "a"
            ),
            pbar_desc="gather",
            max_exceptions=ROLLOUTS,
        )
        await model.delete_checkpoints()
        await model.train(
            train_groups,
            config=art.TrainConfig(learning_rate=1e-3),
            _config={"logprob_calculation_chunk_size": 8},
        )
    print(f"step {await model.get_step()}, rank {model.lora.r}, context {backend.context_tokens(model)}")
    print(f"answers as {model.get_inference_name(await model.get_step())}")
    await backend.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
