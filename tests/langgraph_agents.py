"""Tools, scripts and checks that the tests of LangGraph and of other frameworks share."""

from __future__ import annotations

from typing import Any

from endpoint_for_tests import Endpoint
from langchain_core.tools import tool
from openai.types.chat.chat_completion import Choice
from pydantic import BaseModel

import artnb as art
from artnb.engines.scripted import ScriptedRequest
from artnb.training.rows import rows_from_trajectory


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@tool
def shout(text: str) -> str:
    """Say it louder."""
    return text.upper()


class Point(BaseModel):
    """A place in the plane."""

    x: int
    y: int


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def ending(arguments: str) -> str:
    """The rest of a call whose name and beginning were given."""
    return f" {arguments}}}\n</tool_call>"


TWO_TURNS = ["so\n" + call("add", '{"a": 1, "b": 2}') + "\n" + call("shout", '{"text": "é"}'), "it is 3, É"]
TWO_TURNS_SAID = ["user:1 + 2?", "choice:so2", "tool:3", "tool:É", "choice:it is 3, É0"]
"""The `shape` of a conversation with an agent that calls both tools."""


def shape(items: Any) -> list[str]:
    return [
        f"choice:{item.message.content or ''}{len(item.message.tool_calls or ())}"
        if isinstance(item, Choice)
        else f"{item['role']}:{item['content'] or ''}"
        for item in items
    ]


def text_of(request: ScriptedRequest) -> str:
    """The last user message that the engine saw."""
    return request.prompt_text.rsplit("<|im_start|>user\n", 1)[1].split("<|im_end|>")[0]


def answers(endpoint: Endpoint) -> list[list[int]]:
    """Every sampled answer, as token ids."""
    return [record.choice.token_ids for record in endpoint.records]


def assert_trained_once(trajectory: art.Trajectory, endpoint: Endpoint) -> None:
    """Each sampled token is in one row, in the context in which it was sampled; nothing else is trained."""
    rows = rows_from_trajectory(trajectory)
    assert isinstance(rows, list)
    asked = [
        (list(request.prompt_ids), ids)
        for request, ids in zip(endpoint.engine.requests, answers(endpoint), strict=True)
    ]
    found = 0
    for prompt, ids in asked:
        for row in rows:
            start, end = len(prompt), len(prompt) + len(ids)
            if row.token_ids[:end].tolist() == prompt + ids and row.sampled[start:end].all():
                found += 1
                break
    assert found == len(endpoint.records)
    assert sum(int(row.sampled.sum()) for row in rows) == sum(map(len, answers(endpoint)))


def sum_of(chunks: list[Any]) -> Any:
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole = whole + chunk
    return whole
