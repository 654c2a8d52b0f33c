"""How often a judge ranks the clearly better of two answers first, on the pairs that come with artnb.

    python benchmarks/judge.py                                        # base weights of the demo model, by likelihood
    python benchmarks/judge.py --words 12                             # and, for comparison, asked in words
    python benchmarks/judge.py --base-model Qwen/Qwen2.5-7B-Instruct --words 96
    python benchmarks/judge.py --judge qwen3:8b --base-url http://localhost:11434/v1
    python benchmarks/judge.py --judge openai/gpt-5-mini              # a LiteLLM name
    python benchmarks/judge.py --pairs mine.jsonl                     # task, better, worse a line

Chance is 50 %. The formula of the likelihood judge was chosen on the half called "tuning", so its accuracy is that on
"held_out". Ties and missing scores count as not right.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from typing import Any

import artnb as art
from artnb.rewards import Judge, LikelihoodJudge
from artnb.rewards.accuracy import JudgePair, judge_accuracy, judge_pairs, longer_wins


def spread(pairs: list[JudgePair], count: int) -> list[JudgePair]:
    """`count` of them, evenly over all kinds."""
    return pairs if count >= len(pairs) else [pairs[i * len(pairs) // count] for i in range(count)]


async def measure(judge: Any, pairs: list[JudgePair], label: str, **options: Any) -> None:
    began, cpu = time.monotonic(), time.process_time()
    result = await judge_accuracy(judge, pairs, **options)
    print(f"[{label}] {result}")
    print(f"  {time.monotonic() - began:.0f} s, {time.process_time() - cpu:.0f} CPU s", flush=True)


async def local(args: argparse.Namespace, halves: dict[str, list[JudgePair]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        base = args.base_model or str(art.demo_model())
        model = art.TrainableModel(name="judge", project="benchmark", base_model=base)
        async with art.LocalBackend(path=folder) as backend:
            await model.register(backend)
            for label, pairs in halves.items():
                await measure(LikelihoodJudge(model), pairs, label)
            if args.words:
                pairs = spread([pair for part in halves.values() for pair in part], args.words)
                options = {"temperature": 0, "max_tokens": args.max_tokens}
                await measure(model, pairs, "base weights, in words", extra_litellm_params=options, timeout=None)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-model", help="folder or Hugging Face id; default: the demo model")
    parser.add_argument("--words", type=int, default=0, help="of so many pairs ask the base weights in words, too")
    parser.add_argument("--max-tokens", type=int, default=200, help="of an answer in words")
    parser.add_argument("--judge", help="measure this judge instead: a LiteLLM name, or a model at --base-url")
    parser.add_argument("--base-url", help="an OpenAI-compatible endpoint; its key is taken from OPENAI_API_KEY")
    parser.add_argument("--pairs", help="JSON lines with task, better and worse, instead of artnb's pairs")
    args = parser.parse_args()
    if args.pairs:
        halves = {"all": judge_pairs(path=args.pairs)}
    else:
        halves = {"tuning": judge_pairs("tuning"), "held_out": judge_pairs("held_out")}
    for label, pairs in halves.items():
        print(f"[{label}] {longer_wins(pairs)}")
    if args.judge is None:
        await local(args, halves)
        return
    key = os.environ.get("OPENAI_API_KEY", "none")
    judge: Any = Judge(args.judge, base_url=args.base_url, api_key=key) if args.base_url else args.judge
    for label, pairs in halves.items():
        await measure(judge, pairs, label)


if __name__ == "__main__":
    asyncio.run(main())
