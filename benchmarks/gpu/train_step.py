"""Training alone, artnb against TRL's GRPOTrainer, on the same rows, model, LoRA (r 16, all linear layers) and card.

    python benchmarks/gpu/make_model.py 1b4 /tmp/1b4
    python benchmarks/gpu/train_step.py /tmp/1b4                 # several models may follow each other
    python benchmarks/gpu/train_step.py /tmp/1b4 --quick         # one measured step of each case
    python benchmarks/gpu/train_step.py TINY --device cpu --quick --groups 2 --prompt 60

Cases, named by --cases: `long` and `short` are 32 groups of 8 single-turn rollouts of 128 new tokens after a prompt of
1,200 and of 100 tokens that a group shares; `turns` is one group of 8 six-turn rollouts after a prompt of 1,200 (a turn
is 40 tokens of context and 20 sampled ones).

Each side runs in a process of its own, with its own defaults. TRL as its users run it: bf16, gradient checkpointing,
batches of 32 rows (8 where there are only 8; fewer where they do not fit, which is then said), one optimizer step over
all rows, PyTorch's attention. Generation is left out: its own training loop gets the prepared batch where it would have
generated one. With vLLM TRL computes the log-probs of all rows once more before it trains, for its importance
correction, unless a user turns that off; artnb has them from its only pass. The figures here are without it, in TRL's
favour; --old-logprobs measures it, too, in the last step.

"Utilisation" is 6 × weights × distinct tokens / seconds / 989e12, where 989e12 FLOP/s is the data sheet's dense bf16
rate of an H100 or H200. LoRA without recomputing needs 4 FLOPs a weight and token, not 6, so that it can exceed what
the matrix products reach.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import DENSE_BF16, GIB, Peak, machine, now, say, side, table

GROUP, NEW_TOKENS = 8, 128
TURNS, CONTEXT, SAMPLED = 6, 40, 20
RATE = 1e-6  # so small that all steps see the same weights


@dataclass(frozen=True)
class Case:
    """What is trained on in a step: `groups` × 8 rows."""

    name: str
    groups: int
    prompt: int
    turns: bool

    @property
    def rows(self) -> int:
        return self.groups * GROUP

    def batch(self, vocabulary: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Token ids [R, S], which of them were sampled [S], advantages [R]."""
        turn = np.arange(CONTEXT + SAMPLED) >= CONTEXT
        tail = np.tile(turn, TURNS) if self.turns else np.ones(NEW_TOKENS, bool)
        rng = np.random.default_rng(self.prompt)
        ids_RS = rng.integers(10, vocabulary, (self.rows, self.prompt + len(tail)))
        for first in range(0, self.rows, GROUP):
            ids_RS[first : first + GROUP, : self.prompt] = ids_RS[first, : self.prompt]
        sampled_S = np.concatenate([np.zeros(self.prompt, bool), tail])
        return ids_RS, sampled_S, np.tile([1.0, -1.0], self.rows // 2).astype(np.float32)


def keys(completion_RT: torch.Tensor) -> list[int]:
    """A number for each row's tokens after the prompt, by which it is known again when it was shuffled."""
    places_T = torch.arange(1, completion_RT.shape[1] + 1, device=completion_RT.device)
    return [int(key) for key in (completion_RT * places_T).sum(-1).tolist()]


def cases(args: argparse.Namespace) -> list[Case]:
    long = args.prompt
    known = {
        "long": Case("long", args.groups, long, False),
        "short": Case("short", args.groups, min(100, long), False),
        "turns": Case("turns", 1, long, True),
    }
    return [known[name] for name in args.cases]


def vocabulary(folder: Path) -> int:
    return int(json.loads((folder / "config.json").read_text())["vocab_size"])


def run_artnb(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    from artnb.config import LoraConfig, TrainConfig
    from artnb.training.policy import load_policy
    from artnb.training.trainer import Trainer
    from artnb.training.types import Row, RowBatch

    dtype = "float32" if args.device == "cpu" else "bfloat16"
    policy = load_policy(folder, lora=LoraConfig(r=16, alpha=32.0), device=args.device, dtype=dtype)
    weights = sum(p.numel() for p in policy.base.parameters())
    policy.add_adapter("bench")
    trainer = Trainer(policy, "bench")
    say(f"artnb: {weights / 1e9:.2f}B weights loaded")
    config = TrainConfig(learning_rate=RATE, importance_correction="none")  # TRL's side has none either
    found: dict[str, Any] = {}
    for case in cases(args):
        ids_RS, sampled_S, advantage_R = case.batch(vocabulary(folder))
        blank_S = np.zeros(len(sampled_S), np.float32)
        rows = [
            Row(ids_S, sampled_S, blank_S, blank_S + 1, advantage=float(advantage), group=index // GROUP)
            for index, (ids_S, advantage) in enumerate(zip(ids_RS, advantage_R, strict=True))
        ]
        seconds, peaks, first = [], [], {}
        sums: list[tuple[int, float]] = []
        for step in range(args.steps + 1):
            Peak.start()
            began = now()
            metrics = trainer.step(RowBatch(rows=rows), config, step=step).metrics
            seconds.append(now() - began)
            peaks.append(Peak.bytes())
            if step == 0:
                first = metrics
                known = keys(torch.from_numpy(ids_RS[:, int(sampled_S.argmax()) :]))
                logprobs = [row.trainer_logprobs for row in rows]
                sums = [(key, 0.0 if x is None else float(x.sum())) for key, x in zip(known, logprobs, strict=True)]
            say(f"artnb: {case.name} step {step}: {seconds[-1]:.2f} s, peak {peaks[-1] / GIB:.1f} GiB")
        found[case.name] = {
            "seconds": seconds[1:],
            "first": seconds[0],
            "peak": max(peaks),
            "entropy": first["entropy"],
            "grad_norm": first["grad_norm"],
            "sums": sorted(sums),
            "weights": weights,
            "unique": first["unique_tokens"],
            "row": first["row_tokens"],
            "packs": first["packs"],
        }
    return found


def run_trl(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    chosen = cases(args)
    for together in ([c for c in chosen if not c.turns], [c for c in chosen if c.turns]):
        rows_at_once = 32 if together and not together[0].turns else GROUP
        while together:
            rows_at_once = math.gcd(rows_at_once, together[0].rows)
            try:
                found |= _train_trl(folder, together, rows_at_once, args)
                break
            except torch.OutOfMemoryError:
                if rows_at_once == 1:
                    raise
            say(f"TRL: {rows_at_once} rows at once do not fit; half of that")
            rows_at_once //= 2
            gc.collect()
            torch.cuda.empty_cache()
    return found


def _train_trl(folder: Path, together: list[Case], rows_at_once: int, args: argparse.Namespace) -> dict[str, Any]:
    from datasets import Dataset  # type: ignore[import-untyped]
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    cuda = args.device != "cpu"
    plan = [case for case in together for _ in range(args.steps + 1)]
    rows = together[0].rows
    seconds: list[float] = []
    peaks: list[int] = []
    sums: dict[str, list[tuple[int, float]]] = {}  # of a case's first step: its rows' keys and log-probs
    passes: dict[str, float] = {}

    class Prepared(GRPOTrainer):
        """TRL's trainer, which is given its batches."""

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            step = self.state.global_step
            case = plan[step]
            ids_RS, sampled_S, advantage_R = case.batch(vocabulary(folder))
            at = int(sampled_S.argmax())
            where = self.accelerator.device
            ids, sampled = torch.from_numpy(ids_RS).to(where), torch.from_numpy(sampled_S).to(where)
            mask = sampled[at:].long().expand(rows, -1).contiguous()
            batch = {
                "prompt_ids": ids[:, :at].contiguous(),
                "prompt_mask": torch.ones_like(ids[:, :at]),
                "completion_ids": ids[:, at:].contiguous(),
                "completion_mask": torch.ones_like(mask),
                "tool_mask": mask,
                "advantages": torch.from_numpy(advantage_R).to(where),
                "num_items_in_batch": mask.sum(),
            }
            if args.old_logprobs and (step + 1) % (args.steps + 1) == 0:
                began = now()
                with torch.no_grad(), self._not_checkpointed():
                    self._get_per_token_logps_and_entropies(
                        self.model, ids, torch.ones_like(ids), mask.shape[1], batch_size=rows_at_once
                    )
                passes[case.name] = now() - began
                Peak.start()
            return batch

        def _not_checkpointed(self) -> Any:
            from trl.models.utils import disable_gradient_checkpointing

            return disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs)

        def _compute_loss(self, model: Any, inputs: Any) -> Any:
            self.seen = inputs
            return super()._compute_loss(model, inputs)  # type: ignore[no-untyped-call]

        def _get_per_token_logps_and_entropies(self, *given: Any, **more: Any) -> Any:
            out = super()._get_per_token_logps_and_entropies(*given, **more)
            if more.get("compute_entropy") and self.state.global_step % (args.steps + 1) == 0:
                name = plan[self.state.global_step].name
                row_sums = (out[0].detach().float() * self.seen["tool_mask"]).sum(-1).tolist()
                sums.setdefault(name, []).extend(zip(keys(self.seen["completion_ids"]), row_sums, strict=True))
            return out

    class Clock(TrainerCallback):  # type: ignore[misc]
        began = 0.0

        def on_step_begin(self, *given: Any, **more: Any) -> None:
            Peak.start()
            self.began = now()

        def on_step_end(self, options: Any, state: Any, *given: Any, **more: Any) -> None:
            case = plan[state.global_step - 1]
            extra = passes.get(case.name, 0.0) if state.global_step % (args.steps + 1) == 0 else 0.0
            seconds.append(now() - self.began - extra)
            peaks.append(Peak.bytes())
            say(f"TRL: {case.name}: {seconds[-1]:.2f} s, peak {peaks[-1] / GIB:.1f} GiB")

    with tempfile.TemporaryDirectory() as scratch:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16 if cuda else torch.float32)
        trainer = Prepared(
            model=model.to(args.device),
            reward_funcs=lambda completions, **more: [0.0] * len(completions),
            args=GRPOConfig(
                output_dir=scratch,
                per_device_train_batch_size=rows_at_once,
                gradient_accumulation_steps=rows // rows_at_once,
                num_generations=GROUP,
                max_steps=len(plan),
                learning_rate=RATE,
                bf16=cuda,
                use_cpu=not cuda,
                gradient_checkpointing=True,
                report_to=[],
                save_strategy="no",
                logging_steps=1,
                disable_tqdm=True,
            ),
            train_dataset=Dataset.from_dict({"prompt": ["go"] * rows}),
            processing_class=AutoTokenizer.from_pretrained(folder),
            peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
            callbacks=[Clock()],
        )
        trainer.remove_callback(PrinterCallback)
        say(f"TRL: loaded; {rows_at_once} rows at once, {rows // rows_at_once} times")
        trainer.train()
    logged = [entry for entry in trainer.state.log_history if "entropy" in entry]
    found = {}
    for index, case in enumerate(together):
        start = index * (args.steps + 1)
        found[case.name] = {
            "seconds": seconds[start + 1 : start + args.steps + 1],
            "first": seconds[start],
            "peak": max(peaks[start : start + args.steps + 1]),
            "entropy": logged[start]["entropy"],
            "grad_norm": float(logged[start]["grad_norm"]),
            "sums": sorted(sums[case.name]),
            "rows_at_once": rows_at_once,
            "old_logprobs": passes.get(case.name),
        }
    return found


def same_rows(ours: dict[str, Any], trl: dict[str, Any]) -> str:
    """Whether both sides saw the same rows: their tokens, the log-prob of each row, and the size of the gradient.

    The sum over 120 or more sampled tokens of a random model spreads by several nats from row to row, and bf16 moves it
    by tenths. The gradients differ by the adapters' random initial values.
    """
    (ours_keys, a), (trl_keys, b) = (np.array(one["sums"]).T for one in (ours, trl))
    apart = float(np.abs(a - b).mean()) if np.array_equal(ours_keys, trl_keys) else float("inf")
    ratio = ours["grad_norm"] / trl["grad_norm"] if trl["grad_norm"] else float("inf")
    same = apart < 0.1 * float(a.std()) + 1e-3 and abs(ours["entropy"] - trl["entropy"]) < 1e-2 and 0.8 < ratio < 1.25
    return (
        f"{'the same rows' if same else 'NOT THE SAME ROWS'}: log-probs of rows {apart:.2g} nats apart where they "
        f"spread by {a.std():.2g}, entropy {ours['entropy']:.4f} and {trl['entropy']:.4f}, "
        f"gradients' norms 1 : {1 / ratio:.3f}"
    )


def report(folder: Path, ours: dict[str, Any] | None, trl: dict[str, Any] | None, names: list[str]) -> None:
    head: list[object] = [
        "",
        "artnb s",
        "TRL s",
        "TRL / artnb",
        "GiB artnb",
        "GiB TRL",
        "unique / row",
        "utilisation artnb",
        "TRL",
    ]
    rows: list[list[object]] = [head]
    notes = []
    for name in names:
        a, b = (ours or {}).get(name), (trl or {}).get(name)
        row: list[object] = [name, "–", "–", "–", "–", "–", "–", "–", "–"]
        if a:
            mine = statistics.median(a["seconds"])
            useful = 6 * a["weights"] * a["unique"] / DENSE_BF16
            row[1], row[4] = f"{mine:.2f}", f"{a['peak'] / GIB:.1f}"
            row[6], row[7] = f"{a['unique']:,.0f} / {a['row']:,.0f}", f"{useful / mine:.2f}"
        if b:
            row[2], row[5] = f"{statistics.median(b['seconds']):.2f}", f"{b['peak'] / GIB:.1f}"
        if a and b:
            row[3], row[8] = f"{statistics.median(b['seconds']) / mine:.2f}", f"{useful / float(str(row[2])):.2f}"
            taken = f"TRL took {b['rows_at_once']} rows at once, artnb {a['packs']:.0f} packs"
            notes.append(f"{name}: {same_rows(a, b)}; {taken}")
            if b["old_logprobs"] is not None:
                both = (statistics.median(b["seconds"]) + b["old_logprobs"]) / mine
                notes.append(f"{name}: with TRL's pass for old log-probs ({b['old_logprobs']:.2f} s): {both:.2f}")
        rows.append(row)
    print(f"\n{folder}: median seconds a step after one to warm up, peak of torch's memory", flush=True)
    table(rows)
    print("\n".join(notes), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, nargs="+", help="model folders")
    parser.add_argument("--cases", nargs="+", choices=("long", "short", "turns"), default=["long", "short", "turns"])
    parser.add_argument("--sides", nargs="+", choices=("artnb", "trl"), default=["artnb", "trl"])
    parser.add_argument("--steps", type=int, default=2, help="measured steps, after one to warm up")
    parser.add_argument("--quick", action="store_true", help="the same as --steps 1")
    parser.add_argument("--old-logprobs", action="store_true", help="time TRL's extra pass, too")
    parser.add_argument("--groups", type=int, default=32, help="of 8, single-turn")
    parser.add_argument("--prompt", type=int, default=1200, help="tokens of the long prompt")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu (in fp32) to try the script")
    parser.add_argument("--worker", choices=("artnb", "trl"), help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.quick:
        args.steps = 1
    if args.worker:
        found = {"artnb": run_artnb, "trl": run_trl}[args.worker](args.models[0], args)
        args.result.write_text(json.dumps(found))
        return
    print(f"{machine()}; LoRA r 16 on all linear layers", flush=True)
    failed = False
    for folder in args.models:
        results = {}
        for name in args.sides:
            given = ["--worker", name, "--cases", *args.cases, "--steps", args.steps, "--groups", args.groups]
            given += ["--prompt", args.prompt, "--device", args.device]
            given += ["--old-logprobs"] if args.old_logprobs else []
            results[name] = side(__file__, [folder, *given])
        report(folder, results.get("artnb"), results.get("trl"), args.cases)
        failed = failed or None in results.values()
    if failed:
        raise SystemExit("a side failed; what the other took is above")


if __name__ == "__main__":
    main()
