"""What the dashboard costs the loop at 1,000 trajectories a step, and how soon the inspector opens 2,000.

    python benchmarks/dashboard.py
    python benchmarks/dashboard.py --trajectories 200 --repeats 2 --inspected 200

The loop is real but for the model: rollouts ask the endpoint through an OpenAI client, `gather_trajectory_groups`
collects them, the step goes to the history, and its events are told. The engine is the scripted one, which computes
nothing, and nothing is trained: a real step takes longer, so the dashboard's real share is smaller. Steps with and
without a dashboard take turns in one process. A kernel's connection is stood in for by packing each message the way
Jupyter does (JSON, then a signature). CPU seconds are compared, because other programs share the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import hmac
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import artnb as art
from artnb.engines.byte_tokenizer import ByteTokenizer
from artnb.engines.scripted import ScriptedEngine
from artnb.events import EVENTS
from artnb.notebook.courier import Courier
from artnb.notebook.dashboard import Dashboard
from artnb.notebook.progress import Progress
from artnb.serving.app import StaticResolver, create_app
from artnb.serving.chat import ChatFormat
from artnb.serving.transport import make_async_client
from artnb.tracking.summary import summarize

KEY, BASE, GROUP_SIZE = "benchmark", "base", 8
PACKS = 40
"""Progress events of the training phase."""


class Wire:
    """Counts what a dashboard sends, and packs it as a kernel would."""

    def __init__(self) -> None:
        self.messages = self.bytes = 0

    def send(self, message: Any) -> None:
        packed = json.dumps(message, ensure_ascii=False, allow_nan=False).encode()
        hmac.new(b"key", packed, hashlib.sha256).hexdigest()
        self.messages += 1
        self.bytes += len(packed)


class Inside:
    """CPU seconds of this thread inside the dashboard: less noisy than the difference of two steps."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._deep = False

    def timed(self, work: Callable[..., None]) -> Callable[..., None]:
        def call(*args: Any) -> None:
            if self._deep:
                return work(*args)
            self._deep, began = True, time.thread_time()
            try:
                return work(*args)
            finally:
                self.seconds += time.thread_time() - began
                self._deep = False

        return call


class Loop:
    """A training loop without a model: gather, history, events."""

    def __init__(self, folder: Path, trajectories: int) -> None:
        self.groups = max(1, trajectories // GROUP_SIZE)
        self.model = art.TrainableModel("agent", "benchmark", "no-model", base_path=folder)
        self.history = self.model._history()
        app = create_app(
            ScriptedEngine(lambda request: "a move and a word on why"), ChatFormat(ByteTokenizer()),
            StaticResolver(BASE), api_key=KEY,
        )  # fmt: skip
        self.client = make_async_client(app, KEY)
        self.at = 0

    async def rollout(self, seed: int) -> art.Trajectory:
        messages: list[Any] = [{"role": "user", "content": f"Your move in game {seed}."}]
        answer = await self.client.chat.completions.create(model=BASE, messages=messages, max_tokens=32)
        trajectory = art.Trajectory(messages_and_choices=[*messages, answer.choices[0]], reward=seed % 7 / 7)
        trajectory.metrics.update(win=float(seed % 2), legal_move_rate=0.5, moves=float(seed % 9))
        return trajectory

    async def step(self) -> None:
        self.at += 1
        seeds = range(self.groups * GROUP_SIZE)
        groups = await art.gather_trajectory_groups(
            (art.TrajectoryGroup(self.rollout(s) for s in seeds[i :: self.groups]) for i in range(self.groups)),
            pbar_desc=None,
        )
        with Progress(None, None, unit="pack", phase="train") as bar:
            for _ in range(PACKS):
                bar.update(1, loss=0.0)
        metrics = {**summarize(groups), **{f"metric_{i}": i * 0.7 for i in range(50)}, "trained": 1.0}
        self.history.log_trajectories(self.at, "train", groups, replace=True)
        self.history.log_metrics(self.at, "train", metrics)
        if EVENTS:
            EVENTS.emit("step", "benchmark/agent", step=self.at, split="train", metrics=metrics, reasons={}, notes=[])


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


async def loop_times(folder: Path, trajectories: int, repeats: int) -> None:
    """Steps with and without a dashboard in turns; prints medians, their ratio, and what was sent."""
    loop, wire = Loop(folder, trajectories), Wire()
    inside = Inside()
    Dashboard._send = lambda self, message, buffers=None: wire.send(message)  # type: ignore[method-assign]
    Dashboard._on_event = inside.timed(Dashboard._on_event)  # type: ignore[method-assign]
    Courier._ring = inside.timed(Courier._ring)  # type: ignore[method-assign]
    await loop.step()  # the first one loads and compiles
    inside.seconds, wire.messages, wire.bytes = 0.0, 0, 0
    times: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for repeat in range(2 * repeats):
        # with, without, without, with, …: what drifts with time meets both alike
        shown = repeat % 4 in (0, 3)
        board = loop.model.dashboard() if shown else None
        began, cpu = time.perf_counter(), cpu_seconds()
        await loop.step()
        times[shown].append((time.perf_counter() - began, cpu_seconds() - cpu))
        if board is not None:
            board.close()
    wall = {shown: statistics.median(w for w, _ in times[shown]) for shown in times}
    cpu_time = {shown: statistics.median(c for _, c in times[shown]) for shown in times}
    print(f"{loop.groups * GROUP_SIZE} trajectories a step, {repeats} steps each, medians")
    print(f"  without dashboard   {cpu_time[False]:.3f} CPU s   {wall[False]:.3f} s")
    print(f"  with dashboard      {cpu_time[True]:.3f} CPU s   {wall[True]:.3f} s")
    print(f"  ratio               {cpu_time[True] / cpu_time[False]:.4f}         {wall[True] / wall[False]:.4f}")
    share = inside.seconds / sum(c for _, c in times[True])
    print(f"  inside the dashboard {inside.seconds / repeats * 1e3:.1f} CPU ms a step: {share:.2%} of the loop")
    print(f"  sent                {wire.messages / repeats:.1f} messages, {wire.bytes / repeats / 1024:.1f} KiB a step")
    board = loop.model.dashboard()
    began = cpu_seconds()
    with Progress(None, None, phase="gather") as progress:
        for _ in range(200):
            progress.update(1, reward=0.5)
    each = (cpu_seconds() - began) / 200
    began = time.perf_counter()
    board.static()
    print(f"  one event           {each * 1e6:.0f} µs; the saved picture {time.perf_counter() - began:.2f} s")
    board.close()


def inspector_time(trajectories: int) -> None:
    """How soon the inspector opens so many trajectories of 20 turns: benchmarks/inspector.py in its own process."""
    script = Path(__file__).with_name("inspector.py")
    subprocess.run([sys.executable, str(script), "--trajectories", str(trajectories)], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trajectories", type=int, default=1000, help="a step")
    parser.add_argument("--repeats", type=int, default=6, help="steps with, and as many without")
    parser.add_argument("--inspected", type=int, default=2000, help="trajectories that the inspector opens; 0: none")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(loop_times(Path(folder), options.trajectories, options.repeats))
    if options.inspected:
        inspector_time(options.inspected)


if __name__ == "__main__":
    main()
