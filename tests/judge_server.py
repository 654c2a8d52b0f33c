"""A judge behind an OpenAI-compatible endpoint: what it says is scripted, and what it was asked is kept."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
from collections.abc import Callable
from typing import Any

from openai import AsyncOpenAI
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from artnb.serving.transport import make_async_client


class Refusal(Exception):
    """Answer with this HTTP status."""

    def __init__(self, status: int, message: str = "no") -> None:
        super().__init__(message)
        self.status = status


class JudgeServer:
    """`script(body)` gives the answer's text, or raises Refusal; it may be async. `takes_schema=False`: 400 for one."""

    def __init__(self, script: Callable[[dict[str, Any]], Any], *, takes_schema: bool = True, finish: str = "stop"):
        self.script = script
        self.takes_schema = takes_schema
        self.finish = finish
        self.asked: list[dict[str, Any]] = []
        self.app = Starlette(routes=[Route("/v1/chat/completions", self._answer, methods=["POST"])])

    def client(self) -> AsyncOpenAI:
        return make_async_client(self.app)

    async def _answer(self, request: Request) -> JSONResponse:
        body = await request.json()
        self.asked.append(body)
        try:
            if not self.takes_schema and "response_format" in body:
                raise Refusal(400, "response_format is not supported")
            text = self.script(body)
            text = await text if inspect.isawaitable(text) else text
        except Refusal as refusal:
            return JSONResponse({"error": {"message": str(refusal), "type": "x"}}, refusal.status)
        choice = {"index": 0, "finish_reason": self.finish, "message": {"role": "assistant", "content": text}}
        usage = {"prompt_tokens": 100, "completion_tokens": 20, "total_tokens": 120}
        head = {"id": "1", "object": "chat.completion", "created": 1, "model": body["model"]}
        return JSONResponse({**head, "choices": [choice], "usage": usage})


def shown(body: dict[str, Any]) -> list[str]:
    """The trajectories of a question, as they are written there, in the order in which they are shown."""
    return re.findall(r'<trajectory id="\d+">\n(.*?)\n</trajectory>', body["messages"][1]["content"], flags=re.DOTALL)


def scores(*values: float, first: int = 1) -> str:
    """A whole answer: the scores of trajectories `first`, `first` + 1, …"""
    entries = [
        {"trajectory_id": str(number), "explanation": f"reason {number}", "score": value}
        for number, value in enumerate(values, start=first)
    ]
    return json.dumps({"scores": entries})


def by_length(body: dict[str, Any]) -> str:
    """A judge that likes what is longer, wherever it stands."""
    lengths = [len(text) for text in shown(body)]
    return scores(*(length / (1 + max(lengths)) for length in lengths))


def prefers_first(body: dict[str, Any]) -> str:
    """A judge that gives 1 to what is listed first and 0 to the rest."""
    return scores(*(float(number == 0) for number in range(len(shown(body)))))


async def never(body: dict[str, Any]) -> str:
    await asyncio.Event().wait()
    return ""
