"""A notebook's kernel on a machine with the core install only: `python remote_client_run.py URL BASE FOLDER STEPS`.

What `artnb[local]` adds cannot be imported here. Prints one JSON line; test_remote_cut.py reads it.
"""

from __future__ import annotations

import asyncio
import json
import sys
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any

HEAVY = (
    *("torch", "transformers", "peft", "accelerate", "safetensors", "fastapi", "starlette", "uvicorn"),
    *("prometheus_client", "jinja2", "gguf", "filelock", "psutil", "vllm", "wandb", "weave", "langfuse"),
)


class Absent(MetaPathFinder):
    """As if none of them was installed."""

    def find_spec(self, name: str, *_: Any) -> None:
        if name.partition(".")[0] in HEAVY:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


async def run(url: str, base: str, folder: Path, steps: int) -> dict[str, Any]:
    from agents import even_groups

    import artnb as art

    model = art.TrainableModel("agent", "cut", base, lora=art.LoraConfig(r=4), base_path=folder)
    async with art.RemoteBackend(url) as backend:
        model.register(backend)
        losses, captured = [], []
        for step in range(await model.get_step(), steps):
            groups = await even_groups(model, step)
            result = await model.train(groups, art.TrainConfig(learning_rate=5e-3))
            losses.append(result.metrics["loss"])
            captured.append(result.metrics["mismatch_log_ratio_max"])
            await model.log(groups, split="val")
        said = model.chat([{"role": "user", "content": "hello"}], temperature=0, max_tokens=8)
        return {
            "step": await model.get_step(),
            "losses": losses,
            "mismatch": max(captured),
            "history": [int(step) for step in model.history()["step"]],
            "answer": said.choices[0].model_extra["token_ids"],
        }


if __name__ == "__main__":
    sys.meta_path.insert(0, Absent())
    made = asyncio.run(run(sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4])))
    made["loaded"] = [name for name in HEAVY if name in sys.modules]
    print(json.dumps(made))
