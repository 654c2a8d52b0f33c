"""An agent of the OpenAI Agents SDK in a process of its own: `agents` is also the name of a module of these tests.

Run with `python -P`. Prints what was recorded and which hosts were looked for, as JSON.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))  # behind the installed packages

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    RunConfig,
    Runner,
    flush_traces,
    function_tool,
)
from langgraph_agents import TWO_TURNS, assert_trained_once, shape
from scripted_backend import scripted_model

import artnb as art

looked_for: list[str] = []


def nowhere(host: Any, *args: Any, **options: Any) -> Any:
    looked_for.append(str(host))
    raise OSError(f"no network: {host}")


@function_tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@function_tool
def shout(text: str) -> str:
    """Say it louder."""
    return text.upper()


async def main() -> dict[str, Any]:
    said: dict[str, Any] = {}
    for how in ("whole", "streamed"):
        model, endpoint = await scripted_model(TWO_TURNS, chunk_size=3)
        agent = Agent(
            name="calculator",
            instructions="S",
            tools=[add, shout],
            model=OpenAIChatCompletionsModel(model.get_inference_name(), model.openai_client()),
            model_settings=ModelSettings(temperature=0.3, max_tokens=200),
        )
        config = RunConfig(tracing_disabled=True)
        async with art.trajectory() as t:
            if how == "whole":
                result: Any = await Runner.run(agent, "1 + 2?", run_config=config)
            else:
                result = Runner.run_streamed(agent, "1 + 2?", run_config=config)
                async for _ in result.stream_events():
                    pass
            t.reward = 1.0
        assert_trained_once(t, endpoint)
        assert not t.additional_histories and [tool["function"]["name"] for tool in t.tools or []] == ["add", "shout"]
        samplings = [(r.sampling.temperature, r.sampling.max_tokens) for r in endpoint.engine.requests]
        said[how] = {"output": result.final_output, "shape": shape(t.messages_and_choices), "samplings": samplings}
    flush_traces()
    said["looked for"] = list(looked_for)
    if "traced" in sys.argv:  # the SDK's default, to show that this would be seen
        model, _ = await scripted_model("hi")
        agent = Agent(name="x", model=OpenAIChatCompletionsModel(model.get_inference_name(), model.openai_client()))
        await Runner.run(agent, "hello")
        await asyncio.to_thread(flush_traces)
        said["looked for when traced"] = list(looked_for)
    return said


if __name__ == "__main__":
    socket.getaddrinfo = nowhere
    print(json.dumps(asyncio.run(main())))
