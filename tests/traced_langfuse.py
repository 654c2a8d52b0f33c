"""Rollouts that Langfuse traces, in a process of its own: it wraps openai for all of it.

python traced_langfuse.py FOLDER

Prints what the rollouts said, as one line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import langfuse.openai  # noqa: F401 - traces what any OpenAI client asks
from agents import even_rollout
from endpoint_for_tests import Endpoint
from langfuse import observe
from scripted_backend import ScriptedBackend

import artnb as art
from artnb.tracking.langfuse import LangfuseTracker


@observe(name="rollout", capture_input=False, capture_output=False)
async def rollout(model: art.TrainableModel, prompt: str, seed: int) -> art.Trajectory:
    made: art.Trajectory = await even_rollout(model, prompt, seed)
    made.reward = None  # a judge decides later
    made.metrics["won"] = seed == 1
    return made


async def main(folder: str) -> dict[str, Any]:
    tracker = LangfuseTracker(metrics=("won",))
    model = art.TrainableModel("agent", "tests", "scripted", base_path=folder, report_metrics=[tracker])
    await model.register(ScriptedBackend(Endpoint(["one", "two", "three", "four", "five", "six"])))  # type: ignore[arg-type]
    groups = await art.gather_trajectory_groups(
        [art.TrajectoryGroup(rollout(model, "hello", seed) for seed in range(2))], pbar_desc=None
    )
    for reward, trajectory in enumerate(groups[0]):
        trajectory.reward = reward + 0.25
    await model.log(groups, split="train", step=1)
    model.chat([{"role": "user", "content": "in a cell"}], max_tokens=8)
    stream = await model.openai_client().chat.completions.create(
        model=model.name,
        messages=[{"role": "user", "content": "streamed"}],
        max_tokens=8,
        stream=True,
        stream_options={"include_usage": True},
    )
    text = "".join([c.choices[0].delta.content or "" async for c in stream if c.choices])
    return {"said": {t.messages()[-1]["content"]: t.reward for t in groups[0]}, "text": text}


if __name__ == "__main__":
    print("FOUND " + json.dumps(asyncio.run(main(sys.argv[1]))))
