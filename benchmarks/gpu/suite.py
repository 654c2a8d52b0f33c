"""All GPU measurements of LOG.md on one machine: a job at a time on each card, each with a limit and a log of its own.

    python benchmarks/gpu/suite.py /tmp/out --small SMOLLM2_FOLDER                 # makes the 1.4B and 7B models first
    python benchmarks/gpu/suite.py /tmp/out --small SMOLLM2_FOLDER --jobs phases-7b learn tests
    python benchmarks/gpu/suite.py /tmp/out --list

What each job measures stands in its script. Jobs start in the order of `--jobs`, as soon as a card is free; cores are
shared out evenly among the cards. The seeds of `learn` share a card, so their seconds are upper bounds. A job that
fails or runs out of time does not stop the others; the end of every log is printed as its job ends.
"""

from __future__ import annotations

import argparse
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from harness import ROOT, machine, say, table

HERE = Path(__file__).parent
SEEDS = (0, 1, 2)
SHOWN_LINES = 30
STARTED: list[subprocess.Popen[bytes]] = []
PROGRESS = re.compile(r"^\[ *\d+\.\d s\]|it/s\]|\d+%\|")


@dataclass(frozen=True)
class Job:
    """Commands that share a card at the same time; more than one only for `learn`."""

    commands: tuple[tuple[str, ...], ...]
    minutes: float


def jobs(models: Path, small: Path) -> dict[str, Job]:
    b, b7 = str(models / "1b4"), str(models / "7b")

    def script(name: str, *arguments: str, minutes: float) -> Job:
        return Job(((str(HERE / f"{name}.py"), *arguments),), minutes)

    learn = (str(HERE / "learn.py"), str(small), "--games")
    tictactoe = ("tic_tac_toe", "--temperature", "1.6", "--learning-rate", "6e-4")
    tested = [str(ROOT / "tests" / f"test_{name}.py") for name in ("gpu_backend", "flex_tree", "transformers_engine")]
    return {
        "phases-7b": script("phases", b7, "--quick", "--turns", "2", "--new-tokens", "32", minutes=6),
        "phases": script("phases", b, "--steps", "20", "--cycles", "30", "--sampling", minutes=10),
        "whole-step": script("whole_step", b, minutes=7),
        "train-step": script("train_step", b, minutes=6),
        "train-step-7b": script("train_step", b7, "--quick", minutes=8),
        "learn": Job(tuple((*learn, *tictactoe, "--seeds", str(seed)) for seed in SEEDS), minutes=6),
        "learn-2048": Job(tuple((*learn, "2048", "--seeds", str(seed)) for seed in SEEDS), minutes=8),
        "tests": Job((("-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", *tested),), minutes=8),
    }


def run(name: str, job: Job, card: str, cores: Sequence[int], args: argparse.Namespace) -> tuple[str, float]:
    """How the job ended, and after how many seconds."""
    began, ended = time.monotonic(), []
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": card,
        "ARTNB_TEST_MODEL": str(args.small),
        "PYTHONUNBUFFERED": "1",
    }
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    logs = [
        args.out / (f"{name}.log" if len(job.commands) == 1 else f"{name}-{i}.log") for i in range(len(job.commands))
    ]
    running = []

    def start(command: Sequence[str], file: IO[bytes]) -> subprocess.Popen[bytes]:
        whole = [sys.executable, *command]
        into = subprocess.STDOUT
        process = subprocess.Popen(whole, stdout=file, stderr=into, env=environment, start_new_session=True)
        STARTED.append(process)
        return process

    for command, log in zip(job.commands, logs, strict=True):
        with log.open("wb") as file:
            running.append(start(command, file))
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(running[-1].pid, cores)
    for process in running:
        try:
            code = process.wait(max(1.0, 60 * job.minutes + began - time.monotonic()))
            ended.append("ok" if code == 0 else f"exit {code}")
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with the sides that it started
            ended.append("out of time")
    seconds = time.monotonic() - began
    for log in logs:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line and not PROGRESS.search(line)]
        print("\n".join([f"\n== {log.name}, {seconds:.0f} s, {', '.join(ended)}", *lines[-SHOWN_LINES:]]), flush=True)
    return ", ".join(dict.fromkeys(ended)), seconds


def make_models(models: Path, chosen: Sequence[str]) -> None:
    wanted = {"7b" if name.endswith("7b") else "1b4" for name in chosen if not name.startswith(("learn", "tests"))}
    for shape in sorted(wanted):
        if not (models / shape / "config.json").exists():
            subprocess.run([sys.executable, str(HERE / "make_model.py"), shape, str(models / shape)], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder of the logs")
    parser.add_argument("--small", type=Path, default=Path("SMOLLM2_FOLDER"), help="SmolLM2-135M-Instruct's folder")
    parser.add_argument("--models", type=Path, default=Path("/tmp"), help="where 1b4 and 7b are, or are made")
    parser.add_argument("--cards", nargs="+", default=None, help="CUDA's numbers; default: all")
    parser.add_argument("--jobs", nargs="+", default=None, help="default: all")
    parser.add_argument("--list", action="store_true", help="print the jobs' commands and run nothing")
    args = parser.parse_args()
    known = jobs(args.models, args.small)
    chosen = args.jobs or list(known)
    if unknown := [name for name in chosen if name not in known]:
        parser.error(f"no job {unknown[0]!r}; there are {', '.join(known)}")
    if args.list:
        for name in chosen:
            print(name, *(f"  python {' '.join(command)}" for command in known[name].commands), sep="\n")
        return
    cards = args.cards or [str(i) for i in range(max(1, machine().partition(";")[0].count(",") + 1))]
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
    args.out.mkdir(parents=True, exist_ok=True)
    make_models(args.models, chosen)
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    for name in chosen:
        waiting.put(name)
    rows: list[list[str]] = [["job", "card", "end", "seconds"]]

    def worker(index: int) -> None:
        share = cores[index * len(cores) // len(cards) : (index + 1) * len(cores) // len(cards)] or cores
        while True:
            try:
                name = waiting.get_nowait()
            except queue.Empty:
                return
            say(f"{name} on card {cards[index]}")
            end, seconds = run(name, known[name], cards[index], share, args)
            rows.append([name, cards[index], end, f"{seconds:.0f}"])

    threads = [threading.Thread(target=worker, args=(index,), daemon=True) for index in range(len(cards))]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    finally:  # interrupted, for one
        for process in STARTED:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    print(f"\n{machine()}")
    table(rows)


if __name__ == "__main__":
    main()
