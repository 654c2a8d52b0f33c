"""CPU seconds of a gather whose engine computes nothing, and how much of them the garbage collector takes.

    OMP_NUM_THREADS=1 python benchmarks/gather_cost.py
    OMP_NUM_THREADS=1 python benchmarks/gather_cost.py --groups 8 --tokens 512 --train-side

256 rollouts of one request with 128 tokens, on the stepping engine of request_cost.py, in a process as a notebook's
is: torch, transformers, pandas and matplotlib are imported, and the rollouts of the last `--kept` steps are still
there. With `--train-side` also what a step does with them beside training: rows, and the lines of the history.
Medians of `--repeat` gathers.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import statistics
import time
from collections import deque
from typing import Any, cast

import matplotlib.pyplot
import pandas
import torch
import transformers
from request_cost import BOARDS, NAME, SYSTEM, ScriptedBackend, SteppingEngine

import artnb as art
from artnb.demo import demo_model
from artnb.tracking.records import trajectory_line
from artnb.training.rows import rows_from_groups

HEAVY = (matplotlib.pyplot, pandas, torch, transformers)


class CollectorTime:
    """Seconds in the garbage collector since `clear`, and how often it walked through everything."""

    def __init__(self) -> None:
        self.clear()
        gc.callbacks.append(self._seen)

    def clear(self) -> None:
        self.seconds, self.full, self._began = 0.0, 0, 0.0

    def _seen(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._began = time.perf_counter()
        else:
            self.seconds += time.perf_counter() - self._began
            self.full += info["generation"] == 2


async def rollout(model: art.TrainableModel, tokens: int, number: int) -> art.Trajectory:
    messages: list[Any] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": f"{BOARDS[number % len(BOARDS)]} {number}"},
    ]
    answer = await model.openai_client().chat.completions.create(model=NAME, messages=messages, max_tokens=tokens)
    return art.Trajectory(messages_and_choices=[*messages, answer.choices[0]], reward=float(number % 2))


async def gather(model: art.TrainableModel, options: argparse.Namespace) -> list[art.TrajectoryGroup]:
    each = range(options.rollouts)
    return await art.gather_trajectory_groups(
        (
            art.TrajectoryGroup(rollout(model, options.tokens, group * options.rollouts + i) for i in each)
            for group in range(options.groups)
        ),
        pbar_desc=None,
    )


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--rollouts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--kept", type=int, default=4, help="steps whose rollouts are still there")
    parser.add_argument("--train-side", action="store_true", help="also rows and history lines")
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    logging.getLogger("httpx2").setLevel(logging.WARNING)
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(demo_model()))
    answer = tokenizer.encode("5" + " and" * options.tokens, add_special_tokens=False)[: options.tokens - 1]
    engine = SteppingEngine([*answer, tokenizer.eos_token_id], tokenizer)
    model = art.TrainableModel(NAME, "benchmark", "none")
    await model.register(cast(Any, ScriptedBackend(engine, tokenizer)))
    kept: deque[list[art.TrajectoryGroup]] = deque(maxlen=options.kept)
    collector = CollectorTime()
    seconds: dict[str, list[float]] = {"gather": [], "of it collector": []}
    full = 0
    for number in range(options.kept + options.repeat):
        collector.clear()
        began = time.process_time()
        groups = await gather(model, options)
        ended = time.process_time()
        measured = number >= options.kept
        if measured:
            seconds["gather"].append(ended - began)
            seconds["of it collector"].append(collector.seconds)
            full += collector.full
        if options.train_side:
            began = time.process_time()
            rows_from_groups(groups, art.TrainConfig(), max_row_tokens=None)
            ended = time.process_time()
            for index, group in enumerate(groups):
                for place, trajectory in enumerate(group):
                    trajectory_line(trajectory, index, place)
            if measured:
                seconds.setdefault("rows", []).append(ended - began)
                seconds.setdefault("history lines", []).append(time.process_time() - ended)
        kept.append(groups)
    objects = len(gc.get_objects())
    print(f"{options.groups} x {options.rollouts} rollouts of {options.tokens} tokens; {objects:,} objects")
    for name, values in seconds.items():
        print(f"{name:16}{statistics.median(values):7.3f} CPU s  ({', '.join(f'{value:.2f}' for value in values)})")
    print(f"full collections a gather: {full / options.repeat:.1f}")


if __name__ == "__main__":
    asyncio.run(main())
