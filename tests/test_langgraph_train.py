"""A LangGraph agent with two tools trains on the small model, on CPU, and its tool calls are in the trained rows."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("langgraph")
pytest.importorskip("langchain")
pytest.importorskip("langchain_openai")

from difflib import SequenceMatcher
from typing import Any

from langchain.agents import create_agent
from langchain.agents.middleware import wrap_model_call
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool

import artnb as art
from artnb.config import TrainConfig
from artnb.langgraph import init_chat_model, wrap_rollout
from artnb.training.rows import rows_from_groups

STEPS, GROUP_SIZE = 3, 4


@tool
def weather(city: str) -> str:
    """The weather of a city."""
    return "sunny"


@tool
def population(city: str) -> str:
    """How many people live in a city."""
    return "1 million"


def example(question: str, name: str, city: str, result: str) -> list[AnyMessage]:
    """A question and how it is answered: what a model of 135M parameters needs to see to call tools at all."""
    call = {"id": name, "name": name, "args": {"city": city}}
    return [
        HumanMessage(question),
        AIMessage("", tool_calls=[call]),
        ToolMessage(result, tool_call_id=name),
        AIMessage(f"It is {result}."),
    ]


EXAMPLES = [
    *example("What is the weather in Rome?", "weather", "Rome", "sunny"),
    *example("How many people live in Lima?", "population", "Lima", "1 million"),
]
TASKS = [("population", "How many people live in Paris?", "Paris"), ("weather", "What is the weather in Oslo?", "Oslo")]


@wrap_model_call
async def call_first(request: Any, handler: Any) -> Any:
    """LangChain's own way to ask for a call: the answer to the user begins as one; which and with what is sampled."""
    if isinstance(request.messages[-1], HumanMessage):
        request = request.override(tool_choice="any")
    return await handler(request)


async def rollout(step: int, attempt: int) -> art.Trajectory:
    wanted, question, city = TASKS[step % len(TASKS)]
    llm = init_chat_model(temperature=1.0, max_tokens=20, seed=100 * step + attempt)
    agent = create_agent(llm, [weather, population], middleware=[call_first])
    result = await agent.ainvoke({"messages": [*EXAMPLES, HumanMessage(question)]}, {"recursion_limit": 8})
    said = [message for message in result["messages"][len(EXAMPLES) :] if isinstance(message, AIMessage)]
    calls = [(call["name"], call["args"]) for message in said for call in message.tool_calls]
    right = (wanted, {"city": city}) in calls
    # Any call is better than none, the right one is best; words of the right one in the wrong place count a little.
    words = f"{said[0].text} {calls} {said[-1].text}"
    closeness = SequenceMatcher(None, words, f'"{wanted}" {{"city": "{city}"}}').ratio()
    return art.Trajectory(reward=0.3 * bool(calls) + 0.5 * right + 0.2 * closeness, metrics={"right": right})


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_an_agent_with_two_tools_trains_for_three_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = art.TrainableModel("tools", "tests", art.demo_model(), base_path=tmp_path / "art")
    total = 0
    async with art.LocalBackend(path=tmp_path / "art", device="cpu", verbose=False) as backend:
        await model.register(backend)
        wrapped = wrap_rollout(model, rollout)
        for step in range(STEPS):
            group = art.TrajectoryGroup(wrapped(step, attempt) for attempt in range(GROUP_SIZE))
            groups = await art.gather_trajectory_groups([group], pbar_desc=None, max_exceptions=GROUP_SIZE - 2)
            trained = rows_from_groups(groups, TrainConfig(), max_row_tokens=None)
            in_rows = 0
            for trajectory in groups[0]:
                assert trajectory.initial_policy_version == step, "each step samples with the adapter of the last one"
                for choice in trajectory.choices():
                    ids = choice.token_ids
                    found = any(holds(row, choice.prompt_token_ids, ids) for row in trained.rows)
                    assert found or trajectory.error is not None, "every answer is in a row, where it was sampled"
                    in_rows += len(choice.message.tool_calls or ()) if found else 0
            total += in_rows
            sampled = sum(len(c.token_ids) for t in groups[0] if t.error is None for c in t.choices())
            assert sum(int(row.sampled.sum()) for row in trained.rows) == sampled, "and nothing else is trained"
            result = await model.train(groups, art.TrainConfig(learning_rate=2e-4))
            assert result.step == step + 1 and result.trained and result.metrics["grad_norm"] > 0
            assert result.metrics["sampled_tokens"] == sampled
            right = sum(int(t.metrics.get("right", 0)) for t in groups[0])
            with capsys.disabled():
                print(
                    f"\nLangGraph step {result.step}: {in_rows} tool calls in the trained rows, {right} of "
                    f"{GROUP_SIZE} right, {sampled} tokens, reward {result.metrics['reward']:.3f}",
                    end="",
                )
        assert await model.get_step() == STEPS
    assert total >= STEPS, "tool calls were trained"


def holds(row: Any, prompt: list[int], ids: list[int]) -> bool:
    start, end = len(prompt), len(prompt) + len(ids)
    return row.token_ids[:end].tolist() == [*prompt, *ids] and bool(row.sampled[start:end].all())
