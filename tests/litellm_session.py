"""LiteLLM as an agent's client, in a process of its own: its threads change the filters of warnings.

Run with `python -P`. Prints what was recorded, and which hosts were looked for, as JSON.
"""
# ruff: noqa: E402 - what is looked for while LiteLLM is imported counts, too

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it looks for prices on the web when it is imported

looked_for: list[str] = []
resolve = socket.getaddrinfo


def nowhere(host: Any, *args: Any, **options: Any) -> Any:
    if host in ("127.0.0.1", "localhost", b"127.0.0.1"):
        return resolve(host, *args, **options)
    looked_for.append(str(host))
    raise OSError(f"no network: {host}")


socket.getaddrinfo = nowhere

import litellm
from langchain_core.utils.function_calling import convert_to_openai_tool
from langgraph_agents import TWO_TURNS, add, assert_trained_once, shape, shout
from scripted_backend import scripted_model

import artnb as art

TOOLS = [convert_to_openai_tool(tool) for tool in (add, shout)]


async def rollout(over_http: bool, streamed: bool) -> dict[str, Any]:
    model, endpoint = await scripted_model(TWO_TURNS, chunk_size=3)
    options: dict[str, Any] = {"model": f"openai/{model.get_inference_name()}", "temperature": 0.3, "max_tokens": 200}
    if over_http:
        url = await asyncio.to_thread(lambda: model.inference_base_url)
        options |= {"api_base": url, "api_key": model.inference_api_key}
    else:
        options["client"] = model.openai_client()

    async def ask(messages: list[Any]) -> Any:
        answer: Any = await litellm.acompletion(messages=messages, tools=TOOLS, stream=streamed, **options)
        if streamed:
            answer = litellm.stream_chunk_builder([chunk async for chunk in answer], messages=messages)
        return answer.choices[0].message

    async with art.trajectory() as t:
        messages: list[Any] = [{"role": "system", "content": "S"}, {"role": "user", "content": "1 + 2?"}]
        said = await ask(messages)
        messages.append(said.model_dump())
        for call, result in zip(said.tool_calls, ("3", "É"), strict=True):
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        last = await ask(messages)
        t.reward = 1.0
    await model.backend().close()
    assert_trained_once(t, endpoint)
    assert not t.additional_histories and t.tools == TOOLS
    samplings = [(r.sampling.temperature, r.sampling.max_tokens) for r in endpoint.engine.requests]
    return {"output": last.content, "shape": shape(t.messages_and_choices), "samplings": samplings}


async def synchronous() -> dict[str, Any]:
    """From a thread, over HTTP: a rollout that is not a coroutine."""
    model, _ = await scripted_model("hi")

    def ask() -> art.Trajectory:
        options = {"api_base": model.inference_base_url, "api_key": model.inference_api_key}
        with art.trajectory() as t:
            litellm.completion(model="openai/agent", messages=[{"role": "user", "content": "x"}], **options)
        return t

    t = await asyncio.to_thread(ask)
    await model.backend().close()
    return {"shape": shape(t.messages_and_choices)}


async def main() -> dict[str, Any]:
    ways = [(over_http, streamed) for over_http in (False, True) for streamed in (False, True)]
    said = {f"{over_http} {streamed}": await rollout(over_http, streamed) for over_http, streamed in ways}
    return {**said, "synchronous": await synchronous(), "looked for": looked_for}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main())))
