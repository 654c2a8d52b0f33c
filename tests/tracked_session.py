"""A session of its own that logs to a model, in a process of its own: W&B reads its environment once in a process.

python tracked_session.py FOLDER FIRST LAST [crash | impatient]

Logs steps FIRST to LAST of split train, and step 3 of split val after step 7; prints the history's length at the end.
With `crash` the process ends as if it were killed. With `impatient` W&B has 3 seconds to start.
"""

from __future__ import annotations

import asyncio
import os
import sys

import artnb as art
from artnb.tracking.wandb import WandbTracker


async def main(folder: str, first: int, last: int) -> None:
    asked = [WandbTracker(settings={"init_timeout": 3.0})] if "impatient" in sys.argv else None
    model = art.Model("agent", "tests", base_path=folder, config={"scenario": "s"}, report_metrics=asked)
    for step in range(first, last + 1):
        await model.log(metrics={"reward": step / 10}, split="train", step=step)
        if step == 7:
            await model.log(metrics={"reward": 0.3}, split="val", step=3)
    print("history", len(model.history()))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
    if sys.argv[4:] == ["crash"]:
        sys.stdout.flush()
        os._exit(1)
