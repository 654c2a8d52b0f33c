"""Learning: tic-tac-toe and 2048 from the notebooks with a small real model, over several seeds.

    python benchmarks/gpu/learn.py SMOLLM2_FOLDER                                  # both games, seeds 0 1 2
    python benchmarks/gpu/learn.py SMOLLM2_FOLDER --games tic_tac_toe --seeds 0 --learning-rate 2e-4 4e-4 8e-4
    python benchmarks/gpu/learn.py SMOLLM2_FOLDER --device cpu --engine transformers --quick --seeds 0

256 held-out games before and after; between them the training is timed alone. All seeds, games and learning rates share
one engine, each as a model of its own. A seed decides the adapter's first values, the games and the sampling, as far
as the order in which the engine batches requests lets it.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import itertools
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from harness import ROOT, cpu_options, machine, say, table
from phases import show_mismatch

import artnb as art

for folder in ("tic_tac_toe", "2048"):
    sys.path.append(str(ROOT / "notebooks" / folder))

GAMES: dict[str, Any] = {
    "tic_tac_toe": importlib.import_module("tic_tac_toe"),
    "2048": importlib.import_module("game_2048"),
}
SHOWN = {"tic_tac_toe": ("reward", "win", "illegal"), "2048": ("reward", "score", "legal_move_rate")}
HELD_OUT = 1_000_000


async def learn(backend: art.LocalBackend, name: str, seed: int, rate: float, args: argparse.Namespace) -> list[object]:
    """Train one model and return its row of the table."""
    game = GAMES[name]
    model = art.TrainableModel(
        f"{name}-{seed}-{rate:g}".replace(".", "_"), "learn", args.model, lora=art.LoraConfig(seed=seed)
    )
    await model.register(backend)
    held_out = game.scenarios(args.held_out, first_seed=HELD_OUT)
    before = await game.evaluate(model, held_out, seed=seed, desc=None)
    shown = ", ".join(f"{key} {before[key]:.2f}" for key in SHOWN[name])
    say(f"{name}, seed {seed}, learning rate {rate:g}: before: {shown}")
    config = art.TrainConfig(
        learning_rate=rate,
        lr_schedule=args.schedule,
        total_steps=args.steps,
        entropy_coef=args.entropy_coef,
        minibatches=args.minibatches,
    )
    curve: list[float] = []
    gathering = training = 0.0
    began = time.perf_counter()
    for step in range(args.steps):
        started = time.perf_counter()
        first = (seed * args.steps + step) * args.groups
        groups = await art.gather_trajectory_groups(
            (
                art.TrajectoryGroup(
                    game.rollout(
                        model,
                        scenario,
                        seed=(scenario.seed * args.group_size + i) % 2**24,
                        temperature=args.temperature,
                    )
                    for i in range(args.group_size)
                )
                for scenario in game.scenarios(args.groups, first_seed=first)
            ),
            pbar_desc=None,
        )
        gathering += time.perf_counter() - started
        result = await model.train(groups, config)
        training += result.metrics.get("seconds", 0.0)
        curve.append(result.metrics.get("reward", float("nan")))
        if step % 5 == 0:
            say(
                f"{name}, seed {seed}, step {step}: reward {curve[-1]:+.3f}, groups trained "
                f"{result.metrics['groups_trained']:.0f}, mismatch ratio "
                f"{result.metrics.get('mismatch_ratio', float('nan')):.4f}, {time.perf_counter() - began:.1f} s"
            )
    seconds = time.perf_counter() - began
    show_mismatch(groups, result.metrics, args.steps)
    after = await game.evaluate(model, held_out, seed=seed, desc=None)
    print(f"  curve: {' '.join(f'{reward:+.2f}' for reward in curve)}", flush=True)
    pairs = [f"{before[key]:.2f} → {after[key]:.2f}" for key in SHOWN[name]]
    say(f"{name}, seed {seed}: " + ", ".join(f"{k} {v}" for k, v in zip(SHOWN[name], pairs, strict=True)))
    return [name, seed, f"{rate:g}", *pairs, f"{seconds:.0f}", f"{gathering:.0f}", f"{training:.0f}"]


async def run(args: argparse.Namespace, scratch: str) -> None:
    backend = art.LocalBackend(
        path=scratch,
        engine=args.engine,
        device=args.device,
        context_length=512,
        sleep=args.sleep,
        engine_options=cpu_options(args.device) if args.engine == "vllm" else None,
        verbose=False,
    )
    found: dict[str, list[list[object]]] = {name: [] for name in args.games}
    for name, rate, seed in itertools.product(args.games, args.learning_rate, args.seeds):
        found[name].append(await learn(backend, name, seed, rate, args))
    print(f"\n{machine()}; {args.model}")
    print(
        f"{args.steps} steps of {args.groups} × {args.group_size} games; {args.held_out} held-out games, before → after"
    )
    for name, rows in found.items():
        table([["", "seed", "rate", *SHOWN[name], "seconds", "gather", "train"], *rows])
    await backend.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="SmolLM2-135M-Instruct's folder")
    parser.add_argument("--games", nargs="+", choices=GAMES, default=list(GAMES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, nargs="+", default=[3e-4], help="several are tried in turn")
    parser.add_argument("--schedule", choices=("constant", "linear", "cosine"), default="linear")
    parser.add_argument("--entropy-coef", type=float, default=0.0)
    parser.add_argument("--minibatches", type=int, default=1, help="updates a step")
    parser.add_argument("--temperature", type=float, default=1.0, help="of the rollouts in training; held out: 1")
    parser.add_argument("--held-out", type=int, default=256, help="games of an evaluation")
    parser.add_argument("--quick", action="store_true", help="2 steps of 2 groups of 4, 8 held-out games")
    parser.add_argument("--sleep", choices=("always", "auto", "never"), default="auto")
    parser.add_argument("--engine", choices=("auto", "vllm", "transformers"), default="auto")
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    if args.quick:
        args.steps, args.groups, args.group_size, args.held_out = 2, 2, 4, 8
    with tempfile.TemporaryDirectory() as scratch:
        asyncio.run(run(args, scratch))


if __name__ == "__main__":
    main()
