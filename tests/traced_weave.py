"""A training step whose rollouts are traced by Weave, in a process of its own: weave.init patches openai for all of it.

python traced_weave.py BASE_MODEL FOLDER

Reads the calls and their feedback back with weave's own client and prints them as one line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import weave
from agents import even_rollout

import artnb as art
from artnb.tracking.weave import without_tokens


@weave.op
async def rollout(model: art.TrainableModel, prompt: str, seed: int) -> art.Trajectory:
    made: art.Trajectory = await even_rollout(model, prompt, seed)
    made.reward = None  # a judge decides later
    return made


async def main(base: str, folder: str) -> dict[str, Any]:
    client = weave.init("team/tests", postprocess_output=without_tokens)
    async with art.LocalBackend(path=folder, device="cpu", verbose=False) as backend:
        model = art.TrainableModel("agent", "tests", base, lora=art.LoraConfig(r=2), report_metrics=["weave"])
        await model.register(backend)
        groups = await art.gather_trajectory_groups(
            [art.TrajectoryGroup(rollout(model, "hello", seed) for seed in range(2))], pbar_desc=None
        )
        for reward, trajectory in enumerate(groups[0]):
            trajectory.reward = float(reward)
        result = await model.train(groups)
        await model.log(groups, split="train", step=1)  # once more: known already
        model.chat([{"role": "user", "content": "in a cell"}], max_tokens=3)
        stream = await model.openai_client().chat.completions.create(
            model=model.name, messages=[{"role": "user", "content": "streamed"}], max_tokens=3, stream=True
        )
        text = "".join([c.choices[0].delta.content or "" async for c in stream if c.choices])
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
    return {"calls": calls, "said": said, "text": text, "trained": result.trained}


if __name__ == "__main__":
    found = asyncio.run(main(sys.argv[1], sys.argv[2]))
    print("FOUND " + json.dumps(found, default=lambda value: getattr(value, "unwrap", lambda: str(value))()))
