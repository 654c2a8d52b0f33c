"""What Python's garbage collector takes of a gather, with the heap spared (as gathers do it) and without.

    python benchmarks/garbage.py
    python benchmarks/garbage.py --rollouts 64 --repeats 2

Rollouts of one request with 128 sampled tokens on the scripted engine, in a process that has loaded torch,
transformers, pandas and matplotlib as a notebook has. CPU seconds of the process, and those inside the collector.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import statistics
import time
from typing import Any

import matplotlib.pyplot  # noqa: F401
import pandas  # noqa: F401
import torch  # noqa: F401
import transformers.models.llama.modeling_llama  # noqa: F401

import artnb as art
import artnb.local.build
from artnb import gather
from artnb.engines.byte_tokenizer import ByteTokenizer
from artnb.engines.scripted import ScriptedEngine
from artnb.garbage import heap_spared
from artnb.serving.app import StaticResolver, create_app
from artnb.serving.chat import ChatFormat
from artnb.serving.transport import make_async_client

TOKENS = 128


async def measure(args: argparse.Namespace) -> None:
    app = create_app(
        ScriptedEngine(lambda request: "x" * TOKENS),
        ChatFormat(ByteTokenizer()), StaticResolver("base"), api_key="key",
    )  # fmt: skip
    client = make_async_client(app, "key")

    async def rollout(seed: int) -> art.Trajectory:
        messages: list[Any] = [{"role": "user", "content": f"Your move in game {seed}."}]
        answer = await client.chat.completions.create(model="base", messages=messages, max_tokens=TOKENS)
        return art.Trajectory(messages_and_choices=[*messages, answer.choices[0]], reward=1.0)

    collecting = 0.0

    def collected(phase: str, info: dict[str, int]) -> None:
        nonlocal collecting
        collecting += time.thread_time() * (1 if phase == "stop" else -1)

    gc.callbacks.append(collected)
    ways: dict[str, Any] = {"spared": heap_spared, "as it is": contextlib.nullcontext}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    kept: list[Any] = []
    for repeat in range(args.repeats + 1):
        for name, way in ways.items():
            gather.heap_spared = way
            collecting, began = 0.0, time.process_time()
            done = await art.gather_trajectories(map(rollout, range(args.rollouts)), pbar_desc=None)
            if repeat:  # the first fills caches
                found[name].append((time.process_time() - began, collecting))
            kept = [*kept[-3:], done]  # a loop holds a few steps' rollouts
    print(f"{args.rollouts} rollouts of {TOKENS} tokens, {len(gc.get_objects()):,} objects; medians of {args.repeats}")
    for name, runs in found.items():
        cpu, inside = (statistics.median(column) for column in zip(*runs, strict=True))
        print(f"{name:10s} {cpu:.3f} CPU s, {inside:.3f} of them in the collector")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
