"""Answers of every model family with two parallel calls, and a way to read them whole and in pieces."""

from __future__ import annotations

import functools
import itertools
import json
from typing import Any

from tokenizers_for_tests import make_tokenizer

from artnb.engines.byte_tokenizer import ByteTokenizer
from artnb.serving.chat import ChatFormat, ParsedMessage, accumulate

USER = {"role": "user", "content": "hello"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "where": {"type": "object"}},
            },
        },
    },
    {"type": "function", "function": {"name": "ping", "parameters": {"type": "object", "properties": {}}}},
]
WEATHER = {"city": "Par}}is 한글👋", "where": {"a": {"b": [{"c": "}"}]}}}
NESTED = json.dumps(WEATHER, ensure_ascii=False)

# kind → (text before calls, a call of get_weather(WEATHER) and one of ping() in parallel)
ANSWERS = {
    "qwen3": (
        "<think>\nhm 👋\n</think>\n\nlook:",
        '\n<tool_call>\n{"name": "get_weather", "arguments": ' + NESTED + "}\n</tool_call>"
        '\n<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>',
    ),
    "qwen3_coder": (
        "hm 👋\n</think>\n\nlook:",
        "\n<tool_call>\n<function=get_weather>\n<parameter=city>\n" + WEATHER["city"] + "\n</parameter>\n"
        "<parameter=where>\n" + json.dumps(WEATHER["where"]) + "\n</parameter>\n</function>\n</tool_call>"
        "\n<tool_call>\n<function=ping>\n</function>\n</tool_call>",
    ),
    "llama3": (
        "look:",
        '{"name": "get_weather", "parameters": ' + NESTED + '}; {"name": "ping", "parameters": {}}',
    ),
    "mistral": (
        "look:",
        '[TOOL_CALLS][{"name": "get_weather", "arguments": ' + NESTED + '}, {"name": "ping"}]',
    ),
}  # fmt: skip
ANSWERS["bytes"] = ANSWERS["qwen3"]
for _kind in ("chatml", "gemma"):
    ANSWERS[_kind] = ("look:", ANSWERS["qwen3"][1])


def tokenizer_of(kind: str) -> Any:
    return ByteTokenizer() if kind == "bytes" else make_tokenizer(kind)


@functools.cache
def chat_of(kind: str, parser: str | None = None) -> ChatFormat:
    return ChatFormat(tokenizer_of(kind), parser=parser)


class Case:
    """A model's format, its prompt, and sampled ids with their end token."""

    def __init__(
        self, kind: str, text: str, *, tools: Any = TOOLS, end: bool = True, parser: str | None = None
    ) -> None:
        self.tools = tools
        self.chat = chat_of(kind, parser)
        tokenizer: Any = self.chat.tokenizer
        self.prompt = self.chat.render([USER], tools)
        self.ids = tokenizer.encode(text, add_special_tokens=False) + ([tokenizer.eos_token_id] if end else [])

    def parse(self) -> ParsedMessage:
        return self.chat.parse(self.ids, prompt_ids=self.prompt, tools=self.tools)

    def streamed(self, cuts: list[int]) -> ParsedMessage:
        """The message from the ids cut at the given positions."""
        stream = self.chat.stream(self.prompt, self.tools)
        edges = [0, *sorted(cuts), len(self.ids)]
        deltas = []
        for start, end in itertools.pairwise(edges):
            deltas += stream.push(self.ids[start:end])
        deltas += stream.finish()
        for delta in deltas:
            assert sum(part is not None for part in (delta.content, delta.reasoning_content, delta.tool_call)) == 1
        return accumulate(deltas)

    def check(self) -> ParsedMessage:
        """parse() equals the stream at every split point and token by token."""
        whole = self.parse()
        assert self.streamed(list(range(1, len(self.ids)))) == whole
        for at in range(len(self.ids) + 1):
            assert self.streamed([at]) == whole
        return whole


def calls_of(message: ParsedMessage) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in message.tool_calls]
