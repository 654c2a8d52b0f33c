"""A scripted engine behind the real endpoint, and clients for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from openai.types.chat import ChatCompletionMessage
from openai.types.chat.chat_completion import Choice

from artnb.capture import CaptureRegistry
from artnb.engines.base import AdapterRef
from artnb.engines.byte_tokenizer import ByteTokenizer
from artnb.engines.scripted import Script, ScriptedEngine
from artnb.serving.app import StaticResolver, create_app
from artnb.serving.chat import ChatFormat
from artnb.serving.transport import make_async_client

KEY = "secret"
HELLO = [{"role": "user", "content": "hello"}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]


def calls(*arguments: str) -> str:
    """Tool calls of `f` as the byte tokenizer's template writes them."""
    return "\n".join(f'<tool_call>\n{{"name": "f", "arguments": {a}}}\n</tool_call>' for a in arguments)


class Endpoint:
    """Engine, app and client of one test."""

    def __init__(self, script: Script, **options: Any) -> None:
        self.records: list[Any] = []
        self.engine = ScriptedEngine(script, **options)
        self.resolver = StaticResolver("base")
        self.captures = CaptureRegistry()
        self.tokenizer = ByteTokenizer()
        self.app = create_app(
            self.engine,
            ChatFormat(self.tokenizer),
            self.resolver,
            api_key=KEY,
            on_choice=self.records.append,
            captures=self.captures,
        )
        self.client = make_async_client(self.app, KEY)

    async def ask(self, messages: Any = HELLO, model: str = "base", **options: Any) -> Choice:
        answer = await self.client.chat.completions.create(model=model, messages=messages, **options)
        return answer.choices[0]

    async def stream(self, messages: Any = HELLO, model: str = "base", **options: Any) -> list[Any]:
        stream = await self.client.chat.completions.create(model=model, messages=messages, stream=True, **options)
        return [chunk async for chunk in stream]

    async def swap(self, name: str, step: int) -> None:
        """Serve a newer adapter, and drop the older ones, the way a backend does."""
        new = AdapterRef(name, step)
        await self.engine.load_adapter(new, Path("unused"))
        self.resolver.set_latest(name, step)
        for old in self.engine.adapters():
            if old.name == name and old != new:
                await self.engine.drop_adapter(old)


def rebuild(chunks: list[Any]) -> list[Choice]:
    """Whole choices from a stream, by what a client can see."""
    made: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for part in chunk.choices:
            choice = made.setdefault(part.index, {"index": part.index, "content": None, "reasoning": None, "calls": []})
            delta = part.delta.model_dump(exclude_none=True)
            for key, source in (("content", "content"), ("reasoning", "reasoning_content")):
                if source in delta:
                    choice[key] = (choice[key] or "") + delta[source]
            for call in delta.get("tool_calls", []):
                assert call.pop("index") == len(choice["calls"])
                choice["calls"].append(call)
            extra = part.model_extra
            choice.setdefault("ids", []).extend(extra["token_ids"])
            choice.setdefault("entries", []).extend(part.logprobs.content)
            choice.setdefault("extras", {}).update({k: v for k, v in extra.items() if k != "token_ids"})
            choice["finish"] = part.finish_reason or choice.get("finish")
    return [
        Choice.model_validate(
            {
                "index": c["index"],
                "finish_reason": c["finish"],
                "message": ChatCompletionMessage.model_validate(
                    {"role": "assistant", "content": c["content"]}
                    | ({"reasoning_content": c["reasoning"]} if c["reasoning"] else {})
                    | ({"tool_calls": c["calls"]} if c["calls"] else {})
                ),
                "logprobs": {"content": [e.model_dump() for e in c["entries"]]},
                "token_ids": c["ids"],
                **c["extras"],
            }
        )
        for _, c in sorted(made.items())
    ]


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop turn until `condition` holds; fails after five seconds."""
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.001)
