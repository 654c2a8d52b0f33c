"""What the engine sampled is what is trained: five tool-calling turns through the OpenAI client, under four templates.

The engine's own record (prompt ids in, ids and log-probs out) is compared with the rows, token by token and context by
context. Answers come whole, as the tokenizer would split them, or split as it never would.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import AsyncGenerator
from typing import Any

import numpy as np
import pytest
from endpoint_for_tests import rebuild
from openai.types.chat.chat_completion import Choice
from tokenizers_for_tests import make_tokenizer

import artnb as art
from artnb.config import TrainConfig
from artnb.engines.base import TokenChunk
from artnb.engines.scripted import ScriptedAnswer, ScriptedEngine, ScriptedRequest
from artnb.serving.app import StaticResolver, create_app
from artnb.serving.chat import ChatFormat
from artnb.serving.transport import make_async_client
from artnb.training.rows import rows_from_groups
from artnb.training.types import Row
from artnb.trajectories import messages_of

TURNS = 5
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
CITIES = ("Paris", "세계", "a}}b", "👩‍👩‍👧", "naïve café")
# Template → rows that one rollout makes of its ten answers when they are split as the tokenizer splits them, and
# why: how much of what was sampled the template repeats, to the token, in the next prompt.
KINDS = {
    "chatml": 1,  # everything: tools are text here, written into the system message (the Hermes fallback)
    "qwen3": 5,  # a thought is shown until the next user message, so each user message starts a row
    "llama3": 1,  # everything: one call as bare JSON
    "mistral": 6,  # the tools stand at the last message if that is the user's, and calls get an id that was not sampled
}


def bytewise(tokenizer: Any, ids: list[int]) -> list[int]:
    """The same text with every second ordinary token as its single bytes: a split that no tokenizer makes."""
    special = set(tokenizer.added_tokens_decoder)
    split: list[int] = []
    for i, token in enumerate(ids):
        pieces = list(tokenizer.convert_ids_to_tokens(token)) if i % 2 == 0 and token not in special else []
        split += tokenizer.convert_tokens_to_ids(pieces) or [token]
    assert tokenizer.decode(split) == tokenizer.decode(ids)
    return split


def answer_text(kind: str, city: str, call: bool, who: int) -> str:
    """An answer as the family writes it: a tool call, or what it says once the result is there."""
    thought = f"<think>\nhm {city} 👋 {who}\n</think>\n\n" if kind == "qwen3" else ""
    if not call:
        return f"{thought}fine in {city}, 안녕 {who}"
    arguments = json.dumps({"city": city}, ensure_ascii=False)
    if kind == "llama3":
        return f'{{"name": "get_weather", "parameters": {arguments}}}'
    if kind == "mistral":
        return f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {arguments}}}]'
    text = "" if kind == "qwen3" else "look:\n"
    return f'{thought}{text}<tool_call>\n{{"name": "get_weather", "arguments": {arguments}}}\n</tool_call>'


class WitnessedEngine(ScriptedEngine):
    """Notes what really went in and came out of each request, whatever is made of it later."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.witnessed: list[tuple[list[int], list[int], list[float]]] = []

    async def generate(self, prompt_ids: Any, sampling: Any, adapter: Any = None) -> AsyncGenerator[TokenChunk]:
        ids: list[int] = []
        logprobs: list[float] = []
        self.witnessed.append((list(prompt_ids), ids, logprobs))
        async with contextlib.aclosing(super().generate(prompt_ids, sampling, adapter)) as chunks:
            async for chunk in chunks:
                ids += chunk.token_ids
                logprobs += chunk.logprobs
                yield chunk

    def targets(self) -> Counter[Any]:
        """(context, token, log-prob) of everything that was sampled."""
        wholes = [(np.array(prompt + ids, np.int64), len(prompt), logprobs) for prompt, ids, logprobs in self.witnessed]
        return Counter(
            (whole[: start + i].tobytes(), int(whole[start + i]), logprob)
            for whole, start, logprobs in wholes
            for i, logprob in enumerate(logprobs)
        )


def make(kind: str, split: str) -> tuple[WitnessedEngine, Any]:
    tokenizer = make_tokenizer(kind)

    def script(request: ScriptedRequest) -> ScriptedAnswer:
        who, turn = divmod(request.index // 2, TURNS)
        text = answer_text(kind, CITIES[turn], call=request.index % 2 == 0, who=who)
        ids = tokenizer.encode(text, add_special_tokens=False)
        if split == "bytewise":
            ids = bytewise(tokenizer, ids)
        ids.append(tokenizer.eos_token_id)
        # Each its own, and exact in 32 bits.
        return ScriptedAnswer(ids, [-(1 + (request.index * 37 + i) % 255) / 64 for i in range(len(ids))])

    engine = WitnessedEngine(script, tokenizer=tokenizer, context_length=65_536, chunk_size=3)
    app = create_app(engine, ChatFormat(tokenizer), StaticResolver("base"), api_key="key")
    return engine, make_async_client(app, "key")


async def ask(client: Any, messages: list[Any], stream: bool) -> Choice:
    options: dict[str, Any] = {"model": "base", "messages": messages, "tools": TOOLS, "temperature": 0.7}
    if not stream:
        return (await client.chat.completions.create(**options)).choices[0]
    return rebuild([chunk async for chunk in await client.chat.completions.create(stream=True, **options)])[0]


async def play(client: Any, stream: bool) -> list[Any]:
    """Five questions, each answered after a tool call; the messages and choices as a rollout keeps them."""
    kept: list[Any] = []
    for turn in range(TURNS):
        kept.append({"role": "user", "content": f"question {turn}: {CITIES[turn]}?"})
        choice = await ask(client, messages_of(kept), stream)
        (call,) = choice.message.tool_calls or ()
        assert json.loads(call.function.arguments) == {"city": CITIES[turn]}
        result = f"sunny {turn} ☀"
        kept += [choice, {"role": "tool", "tool_call_id": call.id, "content": result}]
        choice = await ask(client, messages_of(kept), stream)
        assert choice.message.content and CITIES[turn] in choice.message.content
        kept.append(choice)
    return kept


def trained(rows: list[Row]) -> Counter[Any]:
    """(context, token, log-prob) of everything that is trained."""
    return Counter(
        (row.token_ids[:i].tobytes(), int(row.token_ids[i]), float(row.logprobs[i]))
        for row in rows
        for i in row.sampled.nonzero()[0].tolist()
    )


@pytest.mark.parametrize("split", ["canonical", "bytewise"])
@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])
@pytest.mark.parametrize("kind", KINDS)
async def test_sampled_ids_are_trained_ids(kind: str, stream: bool, split: str) -> None:
    """user-reports #41, #42, #43, #51."""
    engine, client = make(kind, split)
    captured, by_hand = [], []
    for reward in (0.0, 1.0):
        async with art.trajectory() as t:
            kept = await play(client, stream)
            t.reward = reward
        captured.append(t)
        by_hand.append(art.Trajectory(messages_and_choices=kept, tools=TOOLS, reward=reward))

    assert len(engine.witnessed) == 2 * 2 * TURNS
    for trajectories in (captured, by_hand):
        batch = rows_from_groups([art.TrajectoryGroup(trajectories)], TrainConfig(), max_row_tokens=None)
        assert not batch.group_reasons and not batch.trajectory_reasons
        # Each sampled token once, with its own log-prob, after exactly the tokens it was sampled after; nothing else.
        assert trained(batch.rows) == engine.targets()
        assert all(row.temperatures[row.sampled] == pytest.approx(0.7) for row in batch.rows)
        # The next prompt is rendered from text, so a split of the model's own never comes back in it.
        expected = KINDS[kind] if split == "canonical" else 2 * TURNS
        assert batch.metrics["rows_per_trajectory"] == expected
    assert not any(t.additional_histories for t in captured), "one conversation stays one, also when it is rewritten"
    if kind == "qwen3":
        prompts = [engine.tokenizer.decode(prompt, skip_special_tokens=False) for prompt, _, _ in engine.witnessed]
        assert "<think>" in prompts[1] and "<think>" not in prompts[2], "the template strips thoughts from history"
