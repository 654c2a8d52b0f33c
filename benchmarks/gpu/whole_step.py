"""Whole steps, generation and training: artnb against TRL's GRPOTrainer with vLLM colocated and its sleep mode on.

    python benchmarks/gpu/whole_step.py /tmp/1b4
    python benchmarks/gpu/whole_step.py /tmp/1b4 --quick --prompts 1200
    python benchmarks/gpu/whole_step.py TINY --device cpu --groups 2 --prompts 60 --new-tokens 8 --steps 1

Same model, prompts, group size and tokens on both sides: 32 groups of 8 single-turn rollouts, 128 new tokens each
(ignore_eos), a prompt of 1,200 and of 100 tokens that only a group shares. LoRA r 16 on all linear layers, bf16, one
optimizer step a batch, rewards from the answer's text. Each side in a process of its own, both with their defaults but
for what makes them alike; TRL with gradient checkpointing, 32 rows at once, a vLLM share of 0.3, and its importance
correction on, as it is with vLLM by default. On a CPU both sample without vLLM.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from harness import GIB, CardPeak, Words, machine, now, say, side, table

ROLLOUTS = 8
PHASES = ("sleep", "wake", "save", "swap", "probe")
RATE = 1e-5
# What a launcher would set. Without one TRL makes vLLM's group of one rank itself, and no DistributedDataParallel.
RANKS = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}


def reward_of(text: str) -> float:
    return sum(map(ord, text[:50])) % 97 / 97


def plan(args: argparse.Namespace) -> list[int]:
    """The prompt's tokens, step by step: one step to warm up, then the measured ones."""
    return [tokens for tokens in args.prompts for _ in range(args.steps + 1)]


def chats(words: Words, args: argparse.Namespace, step: int, tokens: int) -> list[Any]:
    """A step's prompts; no two share more than the chat template's beginning."""
    return [words.chat(tokens, system=1000 * step + g, user=1000 * step + g) for g in range(args.groups)]


def summary(args: argparse.Namespace, seconds: list[float], generation: list[float], peaks: list[int]) -> Any:
    found = {}
    for index, tokens in enumerate(args.prompts):
        start = index * (args.steps + 1)
        measured = slice(start + 1, start + args.steps + 1)
        found[str(tokens)] = {
            "seconds": seconds[measured],
            "generation": generation[measured],
            "peak": max(peaks[start : start + args.steps + 1]),
        }
    return found


def run_artnb(args: argparse.Namespace) -> Any:
    import artnb as art

    async def rollout(model: art.TrainableModel, messages: Any) -> art.Trajectory:
        completion = await model.openai_client().chat.completions.create(
            model=model.get_inference_name(),
            messages=messages,
            max_tokens=args.new_tokens,
            extra_body={"ignore_eos": True},
        )
        choice = completion.choices[0]
        assert completion.usage is not None and completion.usage.completion_tokens == args.new_tokens
        return art.Trajectory(
            messages_and_choices=[*messages, choice], reward=reward_of(choice.message.content or "")
        ).finish()

    async def work(scratch: str) -> Any:
        cpu = args.device == "cpu"
        backend = art.LocalBackend(
            path=scratch,
            engine="transformers" if cpu else "vllm",
            device=args.device,
            dtype="float32" if cpu else "bfloat16",
            sleep=args.sleep,
            context_length=args.context,
        )
        model = art.TrainableModel("whole", "bench", args.model)
        await model.register(backend)
        words = Words(next(iter(backend._bases.values())).policy.tokenizer)
        say("artnb: loaded")
        seconds, generation, peaks = [], [], []
        for step, tokens in enumerate(plan(args)):
            asked = chats(words, args, step, tokens)
            began = now()
            with CardPeak() as peak:
                groups = await art.gather_trajectory_groups(
                    (art.TrajectoryGroup(rollout(model, messages) for _ in range(ROLLOUTS)) for messages in asked),
                    pbar_desc=None,
                )
                generation.append(time.perf_counter() - began)
                result = await model.train(groups, art.TrainConfig(learning_rate=RATE))
                seconds.append(now() - began)
            peaks.append(peak.bytes)
            metrics = result.metrics
            say(
                f"artnb: prompt {tokens}: {seconds[-1]:.2f} s, gather {generation[-1]:.2f}, "
                f"train {metrics['seconds']:.2f}, "
                + "".join(f"{x} {metrics.get(f'seconds_{x}', 0.0):.2f}, " for x in PHASES)
                + f"{metrics['trajectories_trained']:.0f} rollouts, "
                f"{metrics['unique_tokens']:.0f} distinct tokens of {metrics['row_tokens']:.0f}, "
                f"peak {peaks[-1] / GIB:.1f} GiB"
            )
        await backend.close()
        return summary(args, seconds, generation, peaks)

    with tempfile.TemporaryDirectory() as scratch:
        return asyncio.run(work(scratch))


def run_trl(args: argparse.Namespace) -> Any:
    import torch
    from datasets import Dataset  # type: ignore[import-untyped]
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    cuda = args.device != "cpu"
    steps = plan(args)
    rows = args.groups * ROLLOUTS
    at_once = math.gcd(args.rows_at_once, rows)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    words = Words(tokenizer)
    prompts = [messages for step, tokens in enumerate(steps) for messages in chats(words, args, step, tokens)]
    seconds: list[float] = []
    generation: list[float] = []
    peaks: list[int] = []

    class Timed(GRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            began = now()
            batch = super()._generate_and_score_completions(inputs)
            generation.append(now() - began)
            shape = tuple(batch["prompt_ids"].shape), tuple(batch["completion_ids"].shape)
            assert shape == ((rows, steps[len(seconds)]), (rows, args.new_tokens)), shape
            return batch

    class Clock(TrainerCallback):  # type: ignore[misc]
        began = 0.0
        peak = CardPeak()

        def on_step_begin(self, *given: Any, **more: Any) -> None:
            self.peak = CardPeak().__enter__()
            self.began = now()

        def on_step_end(self, *given: Any, **more: Any) -> None:
            seconds.append(now() - self.began)
            self.peak.__exit__()
            peaks.append(self.peak.bytes)
            say(
                f"TRL: prompt {steps[len(seconds) - 1]}: {seconds[-1]:.2f} s, generate and score {generation[-1]:.2f}, "
                f"peak {peaks[-1] / GIB:.1f} GiB"
            )

    vllm: dict[str, Any] = {"generation_kwargs": {"min_new_tokens": args.new_tokens}, "use_cpu": True}
    if cuda:
        vllm = {
            "generation_kwargs": {"ignore_eos": True},
            "use_vllm": True,
            "vllm_mode": "colocate",
            "vllm_gpu_memory_utilization": 0.3,
            "vllm_enable_sleep_mode": True,
            "vllm_max_model_length": args.context,
        }
    trainer = Timed(
        model=AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16 if cuda else torch.float32),
        processing_class=tokenizer,
        reward_funcs=lambda completions, **more: [reward_of(c[0]["content"]) for c in completions],
        args=GRPOConfig(
            output_dir=tempfile.mkdtemp(),
            per_device_train_batch_size=at_once,
            gradient_accumulation_steps=rows // at_once,
            num_generations=ROLLOUTS,
            max_completion_length=args.new_tokens,
            max_steps=len(steps),
            learning_rate=RATE,
            lr_scheduler_type="constant",
            temperature=1.0,
            beta=0.0,
            bf16=cuda,
            gradient_checkpointing=True,
            mask_truncated_completions=False,
            shuffle_dataset=False,
            report_to=[],
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
            **vllm,
        ),
        train_dataset=Dataset.from_list([{"prompt": messages} for messages in prompts]),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
        callbacks=[Clock()],
    )
    trainer.remove_callback(PrinterCallback)
    say(f"TRL: loaded; {at_once} rows at once")
    trainer.train()
    return summary(args, seconds, generation, peaks)


def report(args: argparse.Namespace, ours: Any, trl: Any) -> None:
    rows: list[list[object]] = [
        ["prompt", "artnb s", "gather", "TRL s", "generate + score", "TRL / artnb", "GiB artnb", "GiB TRL"]
    ]
    for tokens in map(str, args.prompts):
        row: list[object] = [tokens, *["–"] * 7]
        medians = []
        for found, at in ((ours, 1), (trl, 3)):
            if found:
                one = found[tokens]
                medians.append(statistics.median(one["seconds"]))
                row[at], row[at + 1] = f"{medians[-1]:.2f}", f"{statistics.median(one['generation']):.2f}"
                row[6 if at == 1 else 7] = f"{one['peak'] / GIB:.1f}"
        if len(medians) == 2:
            row[5] = f"{medians[1] / medians[0]:.2f}"
        rows.append(row)
    print(
        f"\n{args.model}: {args.groups} groups of {ROLLOUTS}, {args.new_tokens} new tokens; median seconds a step "
        "after one to warm up, most of the card that was taken",
        flush=True,
    )
    table(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a model folder")
    parser.add_argument("--prompts", type=int, nargs="+", default=[1200, 100], help="tokens")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--steps", type=int, default=2, help="measured steps of each prompt, after one to warm up")
    parser.add_argument("--quick", action="store_true", help="the same as --steps 1")
    parser.add_argument("--sides", nargs="+", choices=("artnb", "trl"), default=["artnb", "trl"])
    parser.add_argument("--sleep", choices=("always", "auto", "never"), default="auto", help="artnb's engine")
    parser.add_argument("--rows-at-once", type=int, default=32, help="TRL's per_device_train_batch_size")
    parser.add_argument("--context", type=int, default=2048, help="tokens that both engines take")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--worker", choices=("artnb", "trl"), help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.quick:
        args.steps = 1
    if args.worker:
        found = {"artnb": run_artnb, "trl": run_trl}[args.worker](args)
        args.result.write_text(json.dumps(found))
        if args.worker == "trl":
            os._exit(0)  # vLLM inside TRL does not always end by itself
        return
    print(machine(), flush=True)
    given = ["--prompts", *args.prompts, "--new-tokens", args.new_tokens, "--groups", args.groups]
    given += ["--steps", args.steps, "--sleep", args.sleep, "--rows-at-once", args.rows_at_once]
    given += ["--context", args.context, "--device", args.device]
    results = {}
    for name in args.sides:
        command = [args.model, "--worker", name, *given]
        results[name] = side(__file__, command)
        if results[name] is None and name == "trl" and args.device != "cpu":
            say("TRL once more, as under a launcher")
            results[name] = side(__file__, command, RANKS)
    report(args, results.get("artnb"), results.get("trl"))
    if None in results.values():
        raise SystemExit("a side failed; what the other took is above")


if __name__ == "__main__":
    main()
