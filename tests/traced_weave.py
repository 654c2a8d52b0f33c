"""Rollouts that Weave traces, in a process of its own: weave.init patches openai for all of it.

python traced_weave.py FOLDER

Reads the calls and their feedback back with weave's own client and prints them as one line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import weave
from agents import even_rollout
from endpoint_for_tests import Endpoint
from scripted_backend import ScriptedBackend

import artnb as art
from artnb.tracking.follow import TRACKING
from artnb.tracking.weave import without_tokens


@weave.op
async def rollout(model: art.TrainableModel, prompt: str, seed: int) -> art.Trajectory:
    made: art.Trajectory = await even_rollout(model, prompt, seed)
    made.reward = None  # a judge decides later
    return made


async def main(folder: str) -> dict[str, Any]:
    client = weave.init("team/tests", postprocess_output=without_tokens)
    model = art.TrainableModel("agent", "tests", "scripted", base_path=folder, report_metrics=["weave"])
    await model.register(ScriptedBackend(Endpoint(["one", "two", "three", "four", "five", "six"])))  # type: ignore[arg-type]
    groups = await art.gather_trajectory_groups(
        [art.TrajectoryGroup(rollout(model, "hello", seed) for seed in range(2))], pbar_desc=None
    )
    for reward, trajectory in enumerate(groups[0]):
        trajectory.reward = float(reward)
    await model.log(groups, split="train", step=1)
    await model.log(groups, split="val", step=1)  # once more: its reward is known already
    model.chat([{"role": "user", "content": "in a cell"}], max_tokens=8)
    stream = await model.openai_client().chat.completions.create(
        model=model.name, messages=[{"role": "user", "content": "streamed"}], max_tokens=8, stream=True
    )
    text = "".join([c.choices[0].delta.content or "" async for c in stream if c.choices])
    TRACKING.detach("tests/agent")
    client.flush()
    calls = [
        {
            "id": call.id,
            "parent": call.parent_id,
            "op": call.func_name,
            "inputs": json.loads(json.dumps(dict(call.inputs), default=str)),
            "output": call.output,
            "usage": dict((call.summary or {}).get("usage", {})),
            "feedback": [{"type": f.feedback_type, "payload": dict(f.payload)} for f in call.feedback],
        }
        for call in client.get_calls()
    ]
    said = [t.messages()[-1]["content"] for t in groups[0]]
    tokens = [len(choice.model_extra["token_ids"]) for t in groups[0] for choice in t.choices()]
    return {"calls": calls, "said": said, "text": text, "tokens": tokens}


if __name__ == "__main__":
    found = asyncio.run(main(sys.argv[1]))
    print("FOUND " + json.dumps(found, default=lambda value: getattr(value, "unwrap", lambda: str(value))()))
