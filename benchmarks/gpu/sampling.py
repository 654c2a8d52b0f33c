"""Sampling: chat requests through the OpenAI client and artnb's endpoint, against vLLM alone on the same requests.

    python benchmarks/gpu/sampling.py MODEL                  # 256 at once, 128 and 512 new tokens; then 2,000 at once
    python benchmarks/gpu/sampling.py MODEL --quick          # 128 new tokens only, each side once
    python benchmarks/gpu/sampling.py TINY --device cpu --requests 8 --new-tokens 16 --many 32

Both sides use one engine, the one that LocalBackend has started, with the same adapter: vLLM starts once. The raw side
is the loop of `LLM.generate` (vLLM 0.26, entrypoints/offline_utils.py: `add_request` for every prompt with
output_kind=FINAL_ONLY, then `step` until nothing is unfinished), with the prompts as token ids, in the engine's own
thread. It is timed with SamplingParams' defaults and with the log-probs of the sampled tokens, which every answer of
the endpoint carries because training needs them. No answer ends early (ignore_eos). The prefix cache is emptied
before each run.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from harness import Words, cpu_options, machine, say, table

import artnb as art
from artnb.engines.base import AdapterRef
from artnb.engines.vllm import VllmEngine

_numbers = itertools.count()


class Bench:
    """One model on one engine, and the two ways to ask it."""

    def __init__(self, model: art.TrainableModel, engine: VllmEngine, words: Words) -> None:
        self.model = model
        self.engine = engine
        self.words = words
        adapter = engine._adapters.use(AdapterRef(model.name, 0))
        adapter.users -= 1  # nothing is swapped while this measures
        self._lora = adapter.request

    async def empty_cache(self) -> None:
        await self.engine._call(lambda: self.engine._engine.reset_prefix_cache())

    async def raw(self, prompts: list[list[int]], new_tokens: int, *, logprobs: bool) -> float:
        """Seconds of what LLM.generate does with these prompts."""
        import vllm
        from vllm.sampling_params import RequestOutputKind

        def generate() -> tuple[float, int]:
            core = self.engine._engine
            ours, core.output_processor = core.output_processor, core.output_processor.original
            try:
                return loop(core)
            finally:
                core.output_processor = ours

        def loop(core: Any) -> tuple[float, int]:
            began = time.perf_counter()
            for ids in prompts:
                params = vllm.SamplingParams(
                    max_tokens=new_tokens,
                    ignore_eos=True,
                    logprobs=0 if logprobs else None,
                    output_kind=RequestOutputKind.FINAL_ONLY,
                )
                prompt = {"type": "token", "prompt_token_ids": ids}
                core.add_request(f"raw{next(_numbers)}", prompt, params, lora_request=self._lora)
            tokens = 0
            while core.has_unfinished_requests():
                for output in core.step():
                    if output.finished:
                        tokens += len(output.outputs[0].token_ids)
            return time.perf_counter() - began, tokens

        await self.empty_cache()
        seconds, tokens = await self.engine._call(generate)
        if tokens != len(prompts) * new_tokens:
            raise SystemExit(f"vLLM alone sampled {tokens} tokens, not {len(prompts) * new_tokens}")
        return seconds

    async def endpoint(self, chats: list[Any], prompts: list[list[int]], new_tokens: int) -> tuple[float, Counter[str]]:
        """Seconds of all requests at once through the client, and what went wrong with how many of them."""
        client = self.model.openai_client()
        wrong: Counter[str] = Counter()

        async def ask(messages: Any, prompt: list[int]) -> None:
            try:
                answer = await client.chat.completions.create(
                    model=self.model.get_inference_name(),
                    messages=messages,
                    max_tokens=new_tokens,
                    extra_body={"ignore_eos": True},
                )
            except Exception as error:
                wrong[f"{type(error).__name__}: {error}"[:200]] += 1
                return
            extra = answer.choices[0].model_extra or {}
            if len(extra["token_ids"]) != new_tokens:
                wrong["another number of tokens"] += 1
            if extra["prompt_token_ids"] != prompt:
                wrong["another prompt than the raw side's"] += 1

        await self.empty_cache()
        began = time.perf_counter()
        await asyncio.gather(*(ask(messages, prompt) for messages, prompt in zip(chats, prompts, strict=True)))
        return time.perf_counter() - began, wrong

    def requests(self, count: int, tokens: int, first: int) -> tuple[list[Any], list[list[int]]]:
        """Chats that share nothing, and their prompts."""
        chats = [self.words.chat(tokens, system=first + i, user=first + i) for i in range(count)]
        return chats, [self.words.render(messages) for messages in chats]


async def compare(bench: Bench, args: argparse.Namespace) -> list[list[object]]:
    head: list[object] = [
        "new tokens",
        "raw s",
        "raw, log-probs s",
        "endpoint s",
        "endpoint tok/s",
        "of raw",
        "of raw, log-probs",
    ]
    rows: list[list[object]] = [head]
    for new_tokens in args.new_tokens:
        chats, prompts = bench.requests(args.requests, args.prompt, 1000)
        seconds: dict[str, list[float]] = {"raw": [], "logprobs": [], "endpoint": []}
        for _ in range(args.repeats):
            seconds["raw"].append(await bench.raw(prompts, new_tokens, logprobs=False))
            seconds["logprobs"].append(await bench.raw(prompts, new_tokens, logprobs=True))
            took, wrong = await bench.endpoint(chats, prompts, new_tokens)
            seconds["endpoint"].append(took)
            if wrong:
                raise SystemExit(f"endpoint: {dict(wrong)}")
            say(f"{new_tokens} new tokens: " + ", ".join(f"{k} {v[-1]:.2f} s" for k, v in seconds.items()))
        raw, logprobs, ours = (statistics.median(seconds[k]) for k in ("raw", "logprobs", "endpoint"))
        rate = args.requests * new_tokens / ours
        times = [f"{raw:.2f}", f"{logprobs:.2f}", f"{ours:.2f}"]
        rows.append([new_tokens, *times, f"{rate:,.0f}", f"{raw / ours:.3f}", f"{logprobs / ours:.3f}"])
    return rows


async def run(args: argparse.Namespace, scratch: str) -> None:
    backend = art.LocalBackend(
        path=scratch,
        engine="vllm",
        device=args.device,
        context_length=args.prompt + max(args.new_tokens) + 64,
        max_running=args.requests,
        enforce_eager=args.eager,
        engine_options=cpu_options(args.device),
    )
    model = art.TrainableModel("sampling", "bench", args.model)
    await model.register(backend)
    say("vLLM has started")
    await measure(model, next(iter(backend._bases.values())), args)
    await backend.close()


async def measure(model: art.TrainableModel, base: Any, args: argparse.Namespace) -> None:
    """Compare on the engine of `base`, which serves `model` at step 0, and print the table."""
    assert isinstance(base.engine, VllmEngine)
    bench = Bench(model, base.engine, Words(base.policy.tokenizer))
    chats, prompts = bench.requests(min(16, args.requests), args.prompt, 0)
    await bench.raw(prompts, 8, logprobs=True)
    await bench.endpoint(chats, prompts, 8)
    say("warm")
    rows = await compare(bench, args)
    lost = None
    if args.many:
        chats, prompts = bench.requests(args.many, args.prompt, 100_000)
        seconds, wrong = await bench.endpoint(chats, prompts, args.many_tokens)
        lost = f"{args.many} requests at once, {args.many_tokens} new tokens each: {sum(wrong.values())} lost or wrong"
        lost += f" in {seconds:.1f} s {dict(wrong.most_common(3)) if wrong else ''}"
        say(lost)
    print(
        f"\n{machine()}; {args.model}\n{args.requests} requests at once, prompts of {args.prompt} tokens, an adapter on"
    )
    table(rows)
    if lost:
        print(lost, flush=True)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("model", type=Path, help="a model folder")
    made.add_argument("--requests", type=int, default=256, help="at once; vLLM runs all of them side by side")
    made.add_argument("--prompt", type=int, default=100, help="tokens of a prompt")
    made.add_argument("--new-tokens", type=int, nargs="+", default=[128, 512])
    made.add_argument("--repeats", type=int, default=2)
    made.add_argument("--many", type=int, default=2000, help="requests at once in the second part; 0 leaves it out")
    made.add_argument("--many-tokens", type=int, default=32)
    made.add_argument("--quick", action="store_true", help="the same as --new-tokens 128 --repeats 1")
    made.add_argument("--eager", action="store_true", help="without CUDA graphs")
    made.add_argument("--device", default="cuda")
    return made


def main() -> None:
    args = parser().parse_args()
    if args.quick:
        args.new_tokens, args.repeats = args.new_tokens[:1], 1
    with tempfile.TemporaryDirectory() as scratch:
        asyncio.run(run(args, scratch))


if __name__ == "__main__":
    main()
