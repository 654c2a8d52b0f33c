"""Kill a training run at 20 random instants and let it finish: `python kill_run.py BASE FOLDER [SEED]`.

One process loads the libraries and forks every attempt, so that an attempt starts in a moment. Prints
one JSON line with what was seen; test_kill.py judges it.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import transformers  # noqa: F401  (imported before the forks)
from agents import even_groups

import artnb as art
import artnb.local.backend
import artnb.local.step
from artnb.tracking.history import History
from artnb.training.checkpoints import CheckpointStore, model_folder

STEPS = 14
KILLS = 20


async def run(base: str, folder: Path) -> None:
    backend = art.LocalBackend(path=folder, device="cpu", dtype="float32", verbose=False)
    model = art.TrainableModel(name="agent", project="kill", base_model=base, lora=art.LoraConfig(r=4))
    await model.register(backend)
    started = await model.get_step()
    with (folder / "resumed.log").open("a") as log:
        log.write(f"{started}\n")
    for step in range(started, STEPS):
        await model.train(await even_groups(model, step), art.TrainConfig(learning_rate=5e-3))
    await backend.close()


def fork(base: str, folder: Path) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            asyncio.run(run(base, folder))
            os._exit(0)
        except BaseException:
            import traceback

            traceback.print_exc()
            os._exit(1)
    return pid


def rows(folder: Path, until: int) -> list[dict[str, float]]:
    """The history up to a step: what does not depend on the clock or on how the machine was doing."""
    path = model_folder(folder, "kill", "agent")
    frame = History(path).metrics()
    keep = ["step", "train/reward", "train/loss", "train/grad_norm", "train/sampled_tokens"]
    frame = frame[frame["step"] <= until] if len(frame) else frame
    return [{k: round(float(row[k]), 5) for k in keep} for _, row in frame.iterrows()]


def compare(found: list[dict[str, float]], expected: list[dict[str, float]]) -> str:
    """The first difference beyond rounding, or ""."""
    if len(found) != len(expected):
        return f"{len(found)} steps, not {len(expected)}"
    for a, b in zip(found, expected, strict=True):
        for name in a:
            if abs(a[name] - b[name]) > 1e-4:
                return f"step {a['step']:.0f}: {name} is {a[name]}, not {b[name]}"
    return ""


def main(base: str, folder: Path, seed: int) -> None:
    whole, cut = folder / "whole", folder / "cut"
    for path in (whole, cut):
        path.mkdir(parents=True)
    begun = time.monotonic()
    if os.waitpid(fork(base, whole), 0)[1] != 0:
        sys.exit("the uninterrupted run failed")
    duration = time.monotonic() - begun
    expected = rows(whole, STEPS)
    store = CheckpointStore(model_folder(cut, "kill", "agent"))
    rng = random.Random(seed)
    problems: list[str] = []
    kills, before = 0, 0
    latest_after_kill: list[int] = []
    while kills < KILLS:
        pid = fork(base, cut)
        # From before the model is loaded to well into the run, and short enough that the run outlasts the kills.
        time.sleep(rng.uniform(0.05, 0.6) * duration / 2 if kills % 4 else rng.uniform(0.0, 0.2) * duration)
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        if not os.WIFSIGNALED(status) and os.WEXITSTATUS(status) != 0:
            problems.append(f"attempt {kills} failed by itself")
        kills += 1
        latest = store.latest() or 0
        if latest < before:
            problems.append(f"kill {kills}: latest step went from {before} to {latest}")
        if latest:
            store.verify(latest)
        if difference := compare(rows(cut, latest), expected[:latest]):
            problems.append(f"kill {kills}: history up to step {latest}: {difference}")
        latest_after_kill.append(latest)
        before = latest
        if latest >= STEPS:
            # Start anew in another folder, to spend all kills on a run that is under way.
            cut = folder / f"cut{kills}"
            cut.mkdir()
            store = CheckpointStore(model_folder(cut, "kill", "agent"))
            before = 0
    if os.waitpid(fork(base, cut), 0)[1] != 0:
        problems.append("the last resume failed")
    if difference := compare(rows(cut, STEPS), expected):
        problems.append(f"the finished history: {difference}")
    resumed = [int(line) for line in (cut / "resumed.log").read_text().split()]
    print(json.dumps({"kills": kills, "latest": latest_after_kill, "resumed": resumed, "problems": problems}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 0)
