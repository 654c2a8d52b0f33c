"""Where the time and the memory of a real loop go: gather, sleep, train, wake, save, swap, probe.

    python benchmarks/gpu/phases.py /tmp/1b4                              # 5 steps
    python benchmarks/gpu/phases.py /tmp/1b4 --steps 20 --cycles 30       # mismatch after 20 steps, then 30 cycles
    python benchmarks/gpu/phases.py /tmp/1b4 --sampling                   # first what sampling.py measures, same engine
    python benchmarks/gpu/phases.py /tmp/7b --quick                       # 2 steps: the memory of a 7B model
    python benchmarks/gpu/phases.py TINY --device cpu --groups 2 --rollouts 2 --prompt 60 --new-tokens 8 --cycles 3

The agent is synthetic: 32 groups of 8 rollouts share a system prompt so that a first prompt has 1,200 tokens; 4 turns
of 64 new tokens each (ignore_eos), the user's words between them, random rewards. Make the model with make_model.py and
without --tokenizer, so that a rollout stays one training row (rows a trajectory are printed).

The part that is neither sampling nor training is the whole step without the gather and without the trainer's own time.
It holds sleep, wake, save, swap, probe, making rows and writing the history. Memory is the card's (what is used beyond
an empty CUDA process), with the engine awake and the trainer loaded, after a step. A cycle is sleep, a step on two
groups, wake, save, swap and probe; a failed probe ends the run.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import sampling
import torch
from harness import GIB, Words, cpu_options, device_used, machine, say, table

import artnb as art

PHASES = ("sleep", "train", "wake", "save", "swap", "probe")


async def rollout(
    model: art.TrainableModel, words: Words, args: argparse.Namespace, group: int, seed: int
) -> art.Trajectory:
    client = model.openai_client()
    trajectory = art.Trajectory(messages_and_choices=words.chat(args.prompt, system=0, user=group))
    for turn in range(args.turns):
        if turn:
            trajectory.messages_and_choices.append({"role": "user", "content": words.text(12, 1000 * group + turn)})
        completion = await client.chat.completions.create(
            model=model.get_inference_name(),
            messages=trajectory.messages(),
            max_tokens=args.new_tokens,
            extra_body={"ignore_eos": True},
        )
        trajectory.messages_and_choices.append(completion.choices[0])
    trajectory.reward = random.Random(seed).random()
    return trajectory.finish()


async def gather(
    model: art.TrainableModel, words: Words, args: argparse.Namespace, step: int
) -> list[art.TrajectoryGroup]:
    first = step * args.groups
    return await art.gather_trajectory_groups(
        (
            art.TrajectoryGroup(
                rollout(model, words, args, group, seed=group * args.rollouts + i) for i in range(args.rollouts)
            )
            for group in range(first, first + args.groups)
        ),
        pbar_desc=None,
    )


def differences(groups: list[art.TrajectoryGroup]) -> np.ndarray:
    """Trainer's minus sampler's log-prob of every sampled token that was trained, in nats."""
    found: list[float] = []
    for group in groups:
        for trajectory in group:
            for choice in trajectory.choices():
                ours = (choice.model_extra or {}).get("trainer_logprobs")
                if ours is not None and choice.logprobs is not None and choice.logprobs.content is not None:
                    found += [a - b.logprob for a, b in zip(ours, choice.logprobs.content, strict=True)]
    return np.array(found)


def memory_parts(base: Any, trained: Any) -> dict[str, int]:
    """Bytes of what must be there once: base weights, KV cache, adapters (the engine's slots, the trainer's), AdamW."""
    weights = {p.data_ptr(): p.nbytes for name, p in base.policy.base.named_parameters() if "lora_" not in name}
    slots: dict[int, int] = {}
    if hasattr(base.engine, "module"):
        for module in base.engine.module.modules():
            for name in ("lora_a_stacked", "lora_b_stacked"):
                held = getattr(module, name, ())
                for tensor in [held] if isinstance(held, torch.Tensor) else held:
                    slots[tensor.data_ptr()] = tensor.nbytes
    options = getattr(base.engine, "_options", None)
    cache = base.engine.stats().extra.get("kv_bytes") or getattr(options, "kv_cache_bytes", None) or 0
    own = sum(p.nbytes for p in base.policy.adapter_parameters(trained.adapter).values())
    return {
        "weights": sum(weights.values()),
        "KV cache": int(cache),
        "adapters": sum(slots.values()) + own,
        "optimizer": 2 * own,
    }


async def loop(
    model: art.TrainableModel, words: Words, args: argparse.Namespace, base: Any
) -> tuple[list[dict[str, float]], list[art.TrajectoryGroup], dict[str, float]]:
    """The steps' seconds by phase, the last step's groups, and its metrics."""
    config = art.TrainConfig(learning_rate=args.learning_rate)
    steps: list[dict[str, float]] = []
    for step in range(args.steps):
        busy = base.engine.stats().forward_seconds
        began = time.perf_counter()
        groups = await gather(model, words, args, step)
        gathered = time.perf_counter()
        result = await model.train(groups, config)
        ended = time.perf_counter()
        metrics = result.metrics
        taken = {phase: metrics.get(f"seconds_{phase}", 0.0) for phase in PHASES} | {"train": metrics["seconds"]}
        taken |= {"gather": gathered - began, "step": ended - began}
        taken["engine busy"] = base.engine.stats().forward_seconds - busy
        taken["rest"] = ended - gathered - sum(taken[phase] for phase in PHASES)
        steps.append(taken)
        say(
            f"step {step}: {taken['step']:.2f} s = gather {taken['gather']:.2f}, "
            + ", ".join(f"{phase} {taken[phase]:.2f}" for phase in (*PHASES, "rest"))
            + f"; rows {metrics['rows']:.0f} of {metrics['row_tokens']:.0f} tokens, {metrics['unique_tokens']:.0f} of "
            + f"them distinct, in {metrics['packs']:.0f} packs; "
            + f"mismatch ratio {metrics.get('mismatch_ratio', float('nan')):.4f}"
        )
    return steps, groups, metrics


def show_time(steps: list[dict[str, float]]) -> None:
    measured = steps[1:] or steps
    median = {name: statistics.median(step[name] for step in measured) for name in measured[0]}
    share = statistics.median(1 - (step["gather"] + step["train"]) / step["step"] for step in measured)
    print(f"\nmedian of {len(measured)} steps{' after the first' if len(steps) > 1 else ''}")
    names = ["gather", *PHASES, "rest", "step", "engine busy"]
    table([["seconds", *names], ["", *(f"{median[name]:.3f}" for name in names)]])
    print(f"neither sampling nor training: {100 * share:.1f} % of a step (first step: {steps[0]['step']:.1f} s)")


def show_memory(used: int, empty: int, parts: dict[str, int]) -> None:
    together = sum(parts.values())
    others = together - parts["weights"]
    names = list(parts)
    print("\nengine awake, trainer loaded")
    table([["GiB", "used", *names, "together"], ["", *(f"{b / GIB:.2f}" for b in (used, *parts.values(), together))]])
    print(
        f"used / together = {used / together:.3f}; (used - KV cache - adapters - optimizer) / weights = "
        f"{(used - others) / parts['weights']:.3f}; an empty CUDA process holds {empty / GIB:.2f} GiB more"
    )


def show_mismatch(groups: list[art.TrajectoryGroup], metrics: dict[str, float], steps: int) -> None:
    apart = differences(groups)
    if not len(apart):
        print("\nno log-probs of the trainer were kept")
        return
    print(
        f"\nsampler against trainer after {steps} steps, {len(apart)} tokens: mean absolute difference "
        f"{np.abs(apart).mean():.5f} nats, largest {np.abs(apart).max():.3f}, mean ratio {np.exp(apart).mean():.5f}, "
        f"KL (k3) {metrics.get('mismatch_k3', float('nan')):.2e}"
    )


async def cycles(model: art.TrainableModel, groups: list[art.TrajectoryGroup], count: int) -> None:
    config = art.TrainConfig(learning_rate=1e-7)  # the same rollouts stay nearly those of the policy
    host, device, reserved, probes = [], [], [], []
    for cycle in range(count):
        result = await model.train(groups, config)
        gc.collect()
        host.append(psutil.Process().memory_info().rss / 2**20)
        device.append(device_used() / 2**20)
        reserved.append(torch.cuda.memory_reserved() / 2**20 if torch.cuda.is_initialized() else 0.0)
        found = result.metrics
        probes.append((found.get("probe_base", float("nan")), found.get("probe_adapter", float("nan"))))
        say(
            f"cycle {cycle}: host {host[-1]:.0f} MiB, device {device[-1]:.0f} MiB, torch reserved {reserved[-1]:.0f} "
            f"MiB, probe {probes[-1][0]:.4f} {probes[-1][1]:.4f}, sleep {found.get('seconds_sleep', 0):.2f} s, "
            f"wake {found.get('seconds_wake', 0):.2f} s"
        )
    print(f"\n{count} cycles of sleep, train, wake; the probe held each time: {len(probes)} of {count}")
    skipped = min(3, count - 2)  # the first cycles fill caches
    rows: list[list[object]] = [["MiB", "first", f"cycle {skipped}", "last", "slope a cycle"]]
    for name, values in (("host", host), ("device", device), ("torch reserved", reserved)):
        slope = np.polyfit(range(count - skipped), values[skipped:], 1)[0]
        rows.append([name, *(f"{values[i]:.0f}" for i in (0, skipped, -1)), f"{slope:+.2f}"])
    table(rows)
    print("largest probe difference: base {:.4f}, adapter {:.4f} nats".format(*np.max(probes, axis=0)))


async def run(args: argparse.Namespace, scratch: str) -> None:
    empty = 0
    if args.device != "cpu":
        torch.zeros(1, device="cuda")
        empty = device_used()
    backend = art.LocalBackend(
        path=scratch,
        engine=args.engine,
        device=args.device,
        sleep=args.sleep,
        context_length=args.prompt + args.turns * (args.new_tokens + 64),
        max_running=args.groups * args.rollouts,
        engine_options=cpu_options(args.device) if args.engine == "vllm" else None,
    )
    model = art.TrainableModel("phases", "bench", args.model)
    began = time.perf_counter()
    await model.register(backend)
    say(f"registered in {time.perf_counter() - began:.0f} s")
    base = next(iter(backend._bases.values()))
    if args.sampling:
        await sampling.measure(model, base, sampling.parser().parse_args([str(args.model)]))
    steps, groups, metrics = await loop(model, Words(base.policy.tokenizer), args, base)
    used = device_used() - empty
    print(
        f"\n{machine()}; {args.model}: {args.groups} groups of {args.rollouts} rollouts of {args.turns} turns",
        flush=True,
    )
    show_time(steps)
    if args.device != "cpu":
        show_memory(used, empty, memory_parts(base, backend._models[model.name]))
    show_mismatch(groups, metrics, args.steps)
    if args.cycles:
        await cycles(model, groups[:2], args.cycles)
    await backend.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a model folder")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--cycles", type=int, default=0, help="sleep/train/wake cycles after the steps")
    parser.add_argument("--sampling", action="store_true", help="run sampling.py's comparison before, vLLM starts once")
    parser.add_argument("--quick", action="store_true", help="the same as --steps 2")
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--rollouts", type=int, default=8, help="of a group")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=1200, help="tokens of the first prompt")
    parser.add_argument("--new-tokens", type=int, default=64, help="of a turn")
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--sleep", choices=("always", "auto", "never"), default="always")
    parser.add_argument("--engine", choices=("vllm", "transformers"), default="vllm")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    if args.quick:
        args.steps = 2
    if args.cycles == 1:
        parser.error("--cycles: a slope needs two or more")
    with tempfile.TemporaryDirectory() as scratch:
        asyncio.run(run(args, scratch))


if __name__ == "__main__":
    main()
