"""64 chat requests with a common prompt: artnb's endpoint against `transformers.generate`, in one run.

    python benchmarks/generate.py                        # SmolLM2-135M's shape, random weights
    python benchmarks/generate.py --model FOLDER         # a real model
    python benchmarks/generate.py --layers 4 --new 16    # a quick look

Both sides get the same model, prompts (a system prompt of about 265 tokens and a short question each) and number
of new tokens, sample at temperature 1, and go on past end tokens, so that they do equal work.
transformers.generate gets all prompts in one left-padded batch, tokenized beforehand. artnb gets 64 concurrent
requests through an OpenAI client and the endpoint, chat template and JSON included; then the same prompts go straight
to the engine, and the difference is the endpoint's share.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from artnb.config import LoraConfig
from artnb.engines.base import SamplingParams
from artnb.engines.transformers import TransformersEngine
from artnb.serving.app import StaticResolver, create_app
from artnb.serving.chat import ChatFormat
from artnb.serving.transport import make_async_client
from artnb.training.policy import Policy, load_policy

SHAPE = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WORDS = [
    "game",
    "board",
    "move",
    "player",
    "row",
    "column",
    "corner",
    "win",
    "lose",
    "draw",
    "turn",
    "rule",
    "mark",
    "line",
]


def make_model(folder: Path, layers: int) -> Path:
    """SmolLM2-135M's shape with random weights and a byte-level tokenizer of whole words."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(num_hidden_layers=layers, bos_token_id=0, eos_token_id=1, **SHAPE)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<s>", "<|im_end|>", "<|im_start|>", *alphabet])}
    merges: list[tuple[str, str]] = []
    for word in WORDS:  # a word with its leading space becomes one token
        parts = ["Ġ", *word]
        while len(parts) > 1:
            merged = parts[0] + parts[1]
            if merged not in vocabulary:
                merges.append((parts[0], parts[1]))
                vocabulary[merged] = len(vocabulary)
            parts[:2] = [merged]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="<|im_end|>",
        pad_token="<s>",
        additional_special_tokens=["<|im_start|>"],
    )
    fast.chat_template = CHATML
    fast.save_pretrained(folder)
    return folder


def make_conversations(tokenizer: Any, count: int, shared: int) -> list[list[Any]]:
    rng = random.Random(0)
    system = "You"
    while len(tokenizer.apply_chat_template([{"role": "system", "content": system}], return_dict=False)) < shared:
        system += " " + rng.choice(WORDS)
    return [
        [
            {"role": "system", "content": system},
            {"role": "user", "content": "Say" + "".join(f" {rng.choice(WORDS)}" for _ in range(rng.randint(8, 14)))},
        ]
        for _ in range(count)
    ]


def generate_padded(policy: Policy, prompts: list[list[int]], new: int) -> Callable[[], None]:
    width = max(map(len, prompts))
    ids = torch.zeros(len(prompts), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for i, prompt in enumerate(prompts):
        ids[i, width - len(prompt) :] = torch.tensor(prompt)
        mask[i, width - len(prompt) :] = 1
    ids, mask = ids.to(policy.device), mask.to(policy.device)

    def run() -> None:
        with policy.without_adapter(), torch.no_grad():
            out = policy.base.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=new,
                min_new_tokens=new,
                do_sample=True,
                top_k=0,
                pad_token_id=0,
            )
        assert out.shape[1] == width + new

    return run


async def through_endpoint(
    engine: TransformersEngine, tokenizer: Any, conversations: list[list[Any]], new: int
) -> float:
    """Seconds until the last answer."""
    app = create_app(engine, ChatFormat(tokenizer), StaticResolver("base"), api_key="bench")
    async with make_async_client(app, "bench") as client:
        started = time.perf_counter()
        answers = await asyncio.gather(
            *(
                client.chat.completions.create(model="base", messages=messages, max_tokens=new, temperature=1.0)
                for messages in conversations
            )
        )
        seconds = time.perf_counter() - started
    made = [answer.usage.completion_tokens if answer.usage else 0 for answer in answers]
    assert made == [new] * len(conversations), f"the sides do unequal work: {made}"
    return seconds


async def straight(engine: TransformersEngine, prompts: list[list[int]], new: int) -> float:
    async def one(prompt: list[int]) -> int:
        chunks = engine.generate(prompt, SamplingParams(max_tokens=new, ignore_eos=True))
        return sum([len(chunk.token_ids) async for chunk in chunks])

    started = time.perf_counter()
    made = await asyncio.gather(*(one(prompt) for prompt in prompts))
    seconds = time.perf_counter() - started
    assert made == [new] * len(prompts)
    return seconds


async def clear(engine: TransformersEngine) -> None:
    """Forget the cache: asleep with nothing under way, the engine gives it back."""
    await engine.sleep()
    await engine.wake()


async def measure(args: argparse.Namespace, policy: Policy) -> None:
    tokenizer = policy.tokenizer
    conversations = make_conversations(tokenizer, args.requests, args.shared)
    prompts = [
        tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        for messages in conversations
    ]
    lengths = [len(prompt) for prompt in prompts]
    print(f"{args.requests} requests, prompts of {min(lengths)}–{max(lengths)} tokens, {args.new} new tokens each")
    padded = generate_padded(policy, prompts, args.new)
    # No end tokens in the engine: the client cannot ask the endpoint to go on past them.
    engine = TransformersEngine(policy, eos_token_ids=[], context_length=policy.context_length)
    print(f"{engine.description}, {torch.get_num_threads()} threads; random weights: {args.model is None}")
    await straight(engine, prompts[:2], 2)
    times: dict[str, list[float]] = {"generate": [], "endpoint": [], "engine": []}
    for _ in range(args.repeats):
        await clear(engine)
        times["endpoint"].append(await through_endpoint(engine, tokenizer, conversations, args.new))
        await clear(engine)
        times["engine"].append(await straight(engine, prompts, args.new))
        started = time.perf_counter()
        await asyncio.to_thread(padded)
        times["generate"].append(time.perf_counter() - started)
        print("  " + ", ".join(f"{name} {values[-1]:.2f} s" for name, values in times.items()))
    stats = engine.stats()
    await engine.close()
    middle = {name: statistics.median(values) for name, values in times.items()}
    tokens = args.requests * args.new
    print(f"transformers.generate  {middle['generate']:7.2f} s  {tokens / middle['generate']:7.0f} tokens/s")
    print(f"artnb endpoint         {middle['endpoint']:7.2f} s  {tokens / middle['endpoint']:7.0f} tokens/s")
    print(f"artnb engine alone     {middle['engine']:7.2f} s  {tokens / middle['engine']:7.0f} tokens/s")
    share = 1 - middle["engine"] / middle["endpoint"]
    print(f"endpoint's share of its time: {share:.1%} (below the noise if negative)")
    print(f"prompt tokens not computed again: {stats.cached_prompt_tokens / stats.prompt_tokens:.1%}")
    print(f"ratio generate / endpoint: {middle['generate'] / middle['endpoint']:.2f}×")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or name of a chat model; default: random weights")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--new", type=int, default=64, help="new tokens of each request")
    parser.add_argument("--shared", type=int, default=265, help="tokens of the common system prompt")
    parser.add_argument("--layers", type=int, default=30, help="layers of the random model")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        where = args.model or str(make_model(Path(folder), args.layers))
        policy = load_policy(where, lora=LoraConfig(), device=args.device)
        asyncio.run(measure(args, policy))


if __name__ == "__main__":
    main()
