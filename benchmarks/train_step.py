"""Training one group of rollouts that share a system prompt: artnb against TRL's GRPOTrainer, in one run.

    python benchmarks/train_step.py            # SmolLM2-135M's shape, random weights; about 15 minutes on 2 cores
    python benchmarks/train_step.py --quick    # 4 layers of it; about 2 minutes

One group of 8 six-turn rollouts; a turn is 40 tokens of context and 20 sampled ones. Same rows, model, LoRA (r 16 on
all linear layers), device, dtype (fp32) and AdamW on both sides; each in a process of its own, so that peak memory
(maximum resident set) is comparable. CPU seconds are printed too: other programs on the machine change them less.
Only generation is left out: TRL's own training loop gets the prepared batch where it would have generated one. TRL
runs with its defaults (gradient checkpointing on, one batch of 8, its fused output layer), except bf16, which is
off on both sides. artnb runs with its own.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

ROLLOUTS, TURNS, CONTEXT, SAMPLED = 8, 6, 40, 20
SHAPE = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}


def make_model(folder: Path, layers: int) -> None:
    import torch
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, **SHAPE)).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({"<eos>": 0, "<pad>": 1, "go": 2}, unk_token="<pad>"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", pad_token="<pad>").save_pretrained(folder)


def make_batch(prompt: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Token ids [8, S], which of them were sampled [8, S], advantages [8]."""
    rng = np.random.default_rng(0)
    turn = np.arange(CONTEXT + SAMPLED) >= CONTEXT
    ids_RS = rng.integers(3, SHAPE["vocab_size"], (ROLLOUTS, prompt + TURNS * len(turn)))
    ids_RS[:, :prompt] = ids_RS[0, :prompt]
    sampled_S = np.concatenate([np.zeros(prompt, bool), np.tile(turn, TURNS)])
    advantage_R = np.array([1.0, -1.0] * (ROLLOUTS // 2), np.float32)
    return ids_RS, np.tile(sampled_S, (ROLLOUTS, 1)), advantage_R


def resident_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1024 * 1024 if sys.platform == "darwin" else 1024)


def run_artnb(folder: Path, prompt: int, steps: int) -> dict[str, Any]:
    from artnb.config import LoraConfig, TrainConfig
    from artnb.training.policy import load_policy
    from artnb.training.trainer import Trainer
    from artnb.training.types import Row, RowBatch

    policy = load_policy(folder, lora=LoraConfig(r=16, alpha=32.0), device="cpu", dtype="float32")
    policy.add_adapter("bench")
    ids_RS, sampled_RS, advantage_R = make_batch(prompt)
    rows = [
        Row(ids, sampled, np.zeros(len(ids), np.float32), np.ones(len(ids), np.float32), advantage=float(a))
        for ids, sampled, a in zip(ids_RS, sampled_RS, advantage_R, strict=True)
    ]
    trainer = Trainer(policy, "bench")
    config = TrainConfig(learning_rate=1e-6, importance_correction="none")  # TRL has no sampler's log-probs here either
    before = resident_mib()
    seconds, cpu_seconds, entropies, metrics = [], [], [], {}
    for step in range(steps + 1):
        started, cpu_started = time.perf_counter(), time.process_time()
        metrics = trainer.step(RowBatch(rows=rows), config, step=step).metrics
        seconds.append(time.perf_counter() - started)
        cpu_seconds.append(time.process_time() - cpu_started)
        entropies.append(metrics["entropy"])
    return {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "before": before,
        "peak": resident_mib(),
        "entropy": entropies[0],
        "unique_tokens": metrics["unique_tokens"],
        "row_tokens": metrics["row_tokens"],
        "recomputed_layers": policy.recomputed_layers(int(metrics["unique_tokens"])),
    }


def run_trl(folder: Path, prompt: int, steps: int) -> dict[str, Any]:
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    ids_RS, sampled_RS, advantage_R = (torch.from_numpy(x) for x in make_batch(prompt))
    at = prompt + CONTEXT
    batch = {
        "prompt_ids": ids_RS[:, :at],
        "prompt_mask": torch.ones_like(ids_RS[:, :at]),
        "completion_ids": ids_RS[:, at:],
        "completion_mask": torch.ones_like(ids_RS[:, at:]),
        "tool_mask": sampled_RS[:, at:].long(),
        "advantages": advantage_R,
        "num_items_in_batch": sampled_RS.sum(),
    }

    class Prepared(GRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            return dict(batch)

    seconds: list[float] = []
    cpu_seconds: list[float] = []

    class Clock(TrainerCallback):
        started = cpu_started = 0.0

        def on_step_begin(self, *args: Any, **more: Any) -> None:
            self.started, self.cpu_started = time.perf_counter(), time.process_time()

        def on_step_end(self, *args: Any, **more: Any) -> None:
            seconds.append(time.perf_counter() - self.started)
            cpu_seconds.append(time.process_time() - self.cpu_started)

    with tempfile.TemporaryDirectory() as scratch:
        trainer = Prepared(
            model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
            reward_funcs=lambda completions, **more: [0.0] * len(completions),
            args=GRPOConfig(
                output_dir=scratch,
                per_device_train_batch_size=ROLLOUTS,
                num_generations=ROLLOUTS,
                max_steps=steps + 1,
                learning_rate=1e-6,
                bf16=False,
                use_cpu=True,
                report_to=[],
                save_strategy="no",
                logging_steps=1,
                disable_tqdm=True,
            ),
            train_dataset=Dataset.from_dict({"prompt": ["go"] * ROLLOUTS}),
            processing_class=AutoTokenizer.from_pretrained(folder),
            peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
            callbacks=[Clock()],
        )
        before = resident_mib()
        trainer.train()
    entropy = next(entry["entropy"] for entry in trainer.state.log_history if "entropy" in entry)
    return {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "before": before,
        "peak": resident_mib(),
        "entropy": entropy,
    }


def measure(side: str, folder: Path, prompt: int, steps: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--worker", side, "--model", str(folder)]
    command += ["--prompts", str(prompt), "--steps", str(steps)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    if done.returncode:
        raise SystemExit(f"{side} failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])  # type: ignore[no-any-return]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="4 layers instead of 30")
    parser.add_argument("--steps", type=int, default=2, help="measured steps, after one warm-up")
    parser.add_argument("--prompts", type=int, nargs="+", default=[1200, 100], help="lengths of the system prompt")
    parser.add_argument("--worker", choices=("artnb", "trl"), help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
        work = run_artnb if args.worker == "artnb" else run_trl
        print(json.dumps(work(args.model, args.prompts[0], args.steps)))
        return
    with tempfile.TemporaryDirectory() as scratch:
        layers = 4 if args.quick else 30
        make_model(Path(scratch), layers)
        threads = os.environ.get("OMP_NUM_THREADS", f"{os.cpu_count()} (all)")
        print(f"SmolLM2-135M shape, {layers} layers, random weights, LoRA r 16, fp32, CPU threads: {threads}")
        for prompt in args.prompts:
            ours, trl = (measure(side, Path(scratch), prompt, args.steps) for side in ("artnb", "trl"))
            if abs(ours["entropy"] - trl["entropy"]) > 1e-2:
                raise SystemExit(f"the two did not see the same tokens: entropy {ours['entropy']} and {trl['entropy']}")
            a, b = (statistics.median(side["seconds"][1:]) for side in (ours, trl))
            a_cpu, b_cpu = (statistics.median(side["cpu_seconds"][1:]) for side in (ours, trl))
            print(f"\n{prompt}-token prompt: {ROLLOUTS} rollouts of {TURNS} turns")
            for name, seconds, cpu, side in (("artnb", a, a_cpu, ours), ("TRL", b, b_cpu, trl)):
                each = ", ".join(f"{s:.1f}" for s in side["seconds"][1:])
                print(
                    f"  {name:6} {seconds:7.2f} s a step ({each}), {cpu:.1f} CPU seconds,"
                    f" peak memory {side['peak']:6.0f} MiB"
                    f" ({side['before']:.0f} before the first step)"
                )
            unique, row = ours["unique_tokens"], ours["row_tokens"]
            print(f"  unique / row tokens {unique:.0f} / {row:.0f} = {unique / row:.2f}", end="")
            print(f"   layers recomputed by artnb {ours['recomputed_layers']} of {layers}")
            print(
                f"  artnb is {b / a:.2f} times as fast (by CPU seconds {b_cpu / a_cpu:.2f}),"
                f" with {ours['peak'] / trl['peak']:.2f} times the memory",
                flush=True,
            )


if __name__ == "__main__":
    main()
