"""Whole graphs and their rollouts: branches, threads, retries, nodes that raise, and what wrap_rollout returns."""

from __future__ import annotations

import pytest

pytest.importorskip("langgraph")
pytest.importorskip("langchain")
pytest.importorskip("langchain_openai")

import asyncio
import operator
from pathlib import Path
from typing import Annotated, Any, TypedDict

from endpoint_for_tests import Endpoint
from langchain.agents import create_agent
from langchain_core.messages import AIMessage, HumanMessage
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph_agents import TWO_TURNS, TWO_TURNS_SAID, Point, add, assert_trained_once, ending, shape, shout, text_of
from scripted_backend import scripted_model

import artnb as art
from artnb.capture import remove_server
from artnb.config import TrainConfig
from artnb.engines.scripted import ScriptedRequest
from artnb.errors import ConfigError, TooManyExceptionsError
from artnb.langgraph import init_chat_model, wrap_rollout
from artnb.serving.server import Server
from artnb.tracking.summary import summarize
from artnb.training.rows import rows_from_groups, rows_from_trajectory

# Graphs ------------------------------------------------------------------------------------------------------


async def test_the_older_prebuilt_agent():
    from langgraph.prebuilt import create_react_agent

    model, endpoint = await scripted_model(TWO_TURNS)

    async def rollout() -> art.Trajectory:
        with pytest.warns(DeprecationWarning, match="create_react_agent"):
            agent = create_react_agent(init_chat_model(model.name, temperature=1.0), [add, shout], name="supervisor")
        await agent.ainvoke({"messages": [("user", "1 + 2?")]})
        return art.Trajectory(reward=1.0)

    trajectory = await wrap_rollout(model, rollout)()
    assert shape(trajectory.messages_and_choices) == TWO_TURNS_SAID
    assert not trajectory.additional_histories, "the name that the framework gives its agent is not the model's"
    assert_trained_once(trajectory, endpoint)


class Notes(TypedDict):
    topic: str
    notes: Annotated[list[str], operator.add]
    summary: str


def research_graph(llm: Any) -> Any:
    """Two branches side by side, one of them a synchronous node and the other a graph of its own; then a summary."""

    def history(state: Notes) -> dict[str, Any]:
        return {"notes": [llm.invoke(f"history of {state['topic']}").text]}

    async def draft(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await llm.ainvoke(state["messages"])]}

    inner = StateGraph(MessagesState)
    for name in ("draft", "revise"):
        inner.add_node(name, draft)
    inner.add_edge(START, "draft")
    inner.add_edge("draft", "revise")
    inner.add_edge("revise", END)
    drafting = inner.compile()

    async def future(state: Notes) -> dict[str, Any]:
        done = await drafting.ainvoke({"messages": [("user", f"future of {state['topic']}")]})
        return {"notes": [done["messages"][-1].text]}

    async def summarize(state: Notes) -> dict[str, Any]:
        return {"summary": (await llm.ainvoke("sum up: " + "; ".join(sorted(state["notes"])))).text}

    graph = StateGraph(Notes)
    graph.add_node("history", history)
    graph.add_node("future", future)
    graph.add_node("summarize", summarize)
    graph.add_edge(START, "history")
    graph.add_edge(START, "future")
    graph.add_edge(["history", "future"], "summarize")
    graph.add_edge("summarize", END)
    return graph.compile()


GRAPH = research_graph(init_chat_model())  # as in an app: compiled once, when its module is imported


def scribe(request: ScriptedRequest) -> str:
    turns = request.prompt_text.count("<|im_start|>assistant") - 1
    return f"<{text_of(request)}|{turns}>"


def assert_research(trajectory: art.Trajectory, topic: str) -> None:
    histories = sorted(["|".join(shape(items)) for items, _ in trajectory.histories()])
    past, later = f"<history of {topic}|0>", f"<future of {topic}|1>"
    asked = "sum up: " + "; ".join(sorted([past, later]))
    assert histories == sorted(
        [
            f"user:history of {topic}|choice:{past}0",
            f"user:future of {topic}|choice:<future of {topic}|0>0|choice:{later}0",
            f"user:{asked}|choice:<{asked}|0>0",
        ]
    )


@pytest.mark.parametrize("how", ["async", "sync"])
async def test_branches_subgraphs_and_threads_of_many_rollouts_are_never_mixed(how: str):
    """Synchronous nodes run in threads of an executor, and branches side by side: each lands on its own rollout."""
    model, endpoint = await scripted_model(scribe, chunk_size=3)

    async def rollout(topic: str) -> art.Trajectory:
        await GRAPH.ainvoke({"topic": topic, "notes": []})
        return art.Trajectory(reward=1.0)

    def synchronous(topic: str) -> art.Trajectory:
        from langchain_core.messages import convert_to_messages

        llm = init_chat_model()
        past = llm.invoke(f"history of {topic}").text
        messages = convert_to_messages([("user", f"future of {topic}")])
        messages.append(llm.invoke(messages))
        later = "".join(chunk.text for chunk in llm.stream(messages))
        llm.batch(["sum up: " + "; ".join(sorted([past, later]))])
        return art.Trajectory(reward=1.0)

    wrapped = wrap_rollout(model, rollout if how == "async" else synchronous)
    (group,) = await art.gather_trajectory_groups(
        [art.TrajectoryGroup(wrapped(f"topic {i}") for i in range(6))], pbar_desc=None
    )
    for i, trajectory in enumerate(group):
        assert_research(trajectory, f"topic {i}")
        rows = rows_from_trajectory(trajectory)
        assert sum(int(r.sampled.sum()) for r in rows) == sum(len(c.token_ids) for c in trajectory.choices())
    assert len(endpoint.records) == 24


async def test_the_real_engine_answers_threads_and_loops_at_once(tiny_base: Path, tmp_path: Path):
    """Synchronous rollouts, asynchronous ones, and one whose synchronous call blocks the loop they run on."""
    model = art.TrainableModel("agent", "tests", tiny_base, lora=art.LoraConfig(r=4))
    asked = [HumanMessage("go")]

    def in_a_thread() -> art.Trajectory:
        llm = init_chat_model(max_tokens=6)
        return art.Trajectory(reward=len([*llm.stream(asked), llm.invoke(asked)]))

    async def on_the_loop() -> art.Trajectory:
        await init_chat_model(max_tokens=6).ainvoke(asked)
        return art.Trajectory(reward=0.0)

    async def blocking() -> art.Trajectory:
        init_chat_model(max_tokens=6).invoke(asked)
        return art.Trajectory(reward=1.0)

    async with art.LocalBackend(path=tmp_path / "art", device="cpu", verbose=False) as backend:
        await model.register(backend)
        for step in range(2):
            rollouts = [wrap_rollout(model, fn)() for fn in (in_a_thread, on_the_loop, blocking) for _ in range(3)]
            (group,) = await art.gather_trajectory_groups([art.TrajectoryGroup(rollouts)], pbar_desc=None)
            assert [len(t.choices()) for t in group] == [2, 2, 2, 1, 1, 1, 1, 1, 1]
            assert {t.final_policy_version for t in group} == {step}
            result = await model.train([group], art.TrainConfig(learning_rate=1e-3))
            sampled = sum(len(c.token_ids) for t in group for c in t.choices())
            assert result.trained and result.metrics["sampled_tokens"] == sampled


async def test_a_graph_that_was_compiled_before_asks_the_rollouts_model():
    first, first_endpoint = await scripted_model("1", name="first")
    second, second_endpoint = await scripted_model("2", name="second")

    async def rollout() -> art.Trajectory:
        result = await GRAPH.ainvoke({"topic": "t", "notes": []})
        return art.Trajectory(reward=float(result["summary"]))

    both = await asyncio.gather(*(wrap_rollout(m, rollout)() for m in (first, second)))
    assert [t.reward for t in both] == [1.0, 2.0]
    assert {r.name for r in first_endpoint.records} == {"first"} and {r.name for r in second_endpoint.records} == {
        "second"
    }
    with pytest.raises(ConfigError, match=r"init_chat_model\(model\)"):
        await GRAPH.ainvoke({"topic": "t", "notes": []})


# Retries, failures -------------------------------------------------------------------------------------------


async def test_a_retry_goes_on_and_what_was_thrown_away_is_a_row_of_its_own():
    """The policy sampled it, and the reward is of all that the rollout did."""
    bad, broken, good = ending('{"x": "bad"}'), ending('{"x": 0'), ending('{"x": 3, "y": 0}')
    model, endpoint = await scripted_model(["hm", bad, broken, good, "fine"])

    async def rollout() -> art.Trajectory:
        free, forced = (init_chat_model().bind_tools([Point], tool_choice=choice) for choice in (None, "Point"))
        messages: list[Any] = [HumanMessage("go")]
        messages += [await free.ainvoke(messages), HumanMessage("where?")]
        checked = forced | (lambda said: (Point(**said.tool_calls[0]["args"]), said))
        point, said = await checked.with_retry(wait_exponential_jitter=False).ainvoke(messages)
        await free.ainvoke([*messages, said, HumanMessage("thanks")])
        return art.Trajectory(reward=float(point == Point(x=3, y=0)))

    trajectory = await wrap_rollout(model, rollout)()
    assert trajectory.reward == 1.0
    assert shape(trajectory.messages_and_choices) == [
        "user:go", "choice:hm0", "user:where?", "choice:1", "user:thanks", "choice:fine0",
    ]  # fmt: skip
    dropped = [history.messages_and_choices[-1].message for history in trajectory.additional_histories]
    assert sorted(len(message.tool_calls or ()) for message in dropped) == [0, 1]
    assert_trained_once(trajectory, endpoint)


@pytest.mark.parametrize("goes_on", [False, True])
async def test_the_main_history_is_the_conversation_that_went_on(goes_on: bool):
    model, endpoint = await scripted_model(["hello", "no", "nope", "yes", "bye"])

    async def rollout() -> art.Trajectory:
        llm = init_chat_model()
        messages: list[Any] = [HumanMessage("a")]
        messages += [await llm.ainvoke(messages), HumanMessage("b")]

        def check(message: AIMessage) -> AIMessage:
            if message.text != "yes":
                raise ValueError(message.text)
            return message

        messages.append(await (llm | check).with_retry(wait_exponential_jitter=False).ainvoke(messages))
        if goes_on:
            await llm.ainvoke([*messages, HumanMessage("c")])
        return art.Trajectory(reward=1.0)

    trajectory = await wrap_rollout(model, rollout)()
    last = ["user:c", "choice:bye0"] if goes_on else []
    assert shape(trajectory.messages_and_choices) == ["user:a", "choice:hello0", "user:b", "choice:yes0", *last]
    assert sorted(shape(h.messages_and_choices)[-1] for h in trajectory.additional_histories) == [
        "choice:no0",
        "choice:nope0",
    ]
    assert all(shape(h.messages_and_choices)[1] == "assistant:hello" for h in trajectory.additional_histories)
    assert_trained_once(trajectory, endpoint)


class Lost(Exception):
    pass


def failing_graph(llm: Any) -> Any:
    async def ask(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await llm.ainvoke(state["messages"])]}

    def use(state: MessagesState) -> dict[str, Any]:
        if state["messages"][0].text == "1":
            raise Lost("the answer was useless")
        return {}

    graph = StateGraph(MessagesState)
    graph.add_node("ask", ask)
    graph.add_node("use", use)
    graph.add_edge(START, "ask")
    graph.add_edge("ask", "use")
    return graph.compile()


async def test_a_node_that_raises_leaves_its_trajectory_with_the_traceback_and_the_group_trains():
    model, _ = await scripted_model(lambda r: f"re {text_of(r)}")

    async def rollout(i: int) -> art.Trajectory:
        await failing_graph(init_chat_model()).ainvoke({"messages": [("user", str(i))]})
        return art.Trajectory(reward=float(i))

    wrapped = wrap_rollout(model, rollout)
    (group,) = await art.gather_trajectory_groups(
        [art.TrajectoryGroup(wrapped(i) for i in range(4))], pbar_desc=None, max_exceptions=0.5
    )
    assert [t.reward for t in group] == [0.0, None, 2.0, 3.0] and not group.exceptions
    failed = group.trajectories[1]
    assert failed.error.type.endswith("Lost") and "the answer was useless" in failed.error.traceback
    assert "in use" in failed.error.traceback and "'use'" in failed.error.traceback, "the node is named"
    assert failed.stop_reason is art.StopReason.FAILED
    assert shape(failed.messages_and_choices) == ["user:1", "choice:re 10"], "what was sampled is not lost"
    assert art.TrajectoryGroup.model_validate_json(group.model_dump_json()).trajectories[1].error == failed.error
    batch = rows_from_groups([group], TrainConfig(), max_row_tokens=None)
    assert len(batch.rows) == 3 and {row.trajectory for row in batch.rows} == {0, 2, 3}
    assert batch.trajectory_reasons == {"failed": 1} and "Lost: the answer was useless" in batch.notes[0]

    assert summarize([group])["exceptions"] == 1

    with pytest.raises(TooManyExceptionsError) as caught:  # and without max_exceptions it ends the gather, as ever
        await art.gather_trajectory_groups([art.TrajectoryGroup(wrapped(i) for i in range(4))], pbar_desc=None)
    assert isinstance(caught.value.__cause__, Lost)
    with pytest.raises(Lost):
        await wrapped(1)


async def test_a_rollout_past_its_limit_keeps_what_it_sampled():
    model, _ = await scripted_model("hi")

    async def rollout(i: int) -> art.Trajectory:
        await init_chat_model().ainvoke(str(i))
        if i == 1:
            await asyncio.sleep(60)
        return art.Trajectory(reward=float(i))

    (group,) = await art.gather_trajectory_groups(
        [art.TrajectoryGroup(wrap_rollout(model, rollout)(i) for i in range(3))],
        pbar_desc=None, max_exceptions=1, timeout=1.0,
    )  # fmt: skip
    late = group.trajectories[1]
    assert late.stop_reason is art.StopReason.TIMEOUT and "past its limit" in late.error.message
    assert shape(late.messages_and_choices) == ["user:1", "choice:hi0"]


# wrap_rollout ------------------------------------------------------------------------------------------------


class Graded(art.Trajectory):
    answer: str | None = None


async def test_the_returned_trajectory_is_the_users_own_object():
    model, _ = await scripted_model("hi")
    made: list[Any] = []

    async def rollout(scenario: str, *, extra: int) -> Graded:
        """Its doc."""
        graded = Graded(reward=0.5, answer=scenario, metadata={"extra": extra}, messages_and_choices=[])
        graded.messages_and_choices.append({"role": "user", "content": "a note of mine"})
        await init_chat_model().ainvoke(scenario)
        made.append(graded)
        return graded

    wrapped = wrap_rollout(model, rollout)
    assert wrapped.__name__ == "rollout" and wrapped.__doc__ == "Its doc."
    trajectory = await wrapped("q", extra=3)
    assert trajectory is made[0] and (trajectory.answer, trajectory.metadata) == ("q", {"extra": 3})
    assert shape(trajectory.messages_and_choices) == ["user:q", "choice:hi0"]


async def test_a_rollout_that_asks_nobody_keeps_its_messages_and_one_may_return_the_recorded_trajectory():
    model, _ = await scripted_model("hi")

    async def silent() -> art.Trajectory:
        return art.Trajectory(messages_and_choices=[{"role": "user", "content": "mine"}], reward=1.0)

    assert shape((await wrap_rollout(model, silent)()).messages_and_choices) == ["user:mine"]

    async def recorded() -> art.Trajectory:
        await init_chat_model().ainvoke("q")
        trajectory = art.auto_trajectory(required=True)
        trajectory.reward = 0.75
        return trajectory

    trajectory = await wrap_rollout(model, recorded)()
    assert trajectory.reward == 0.75 and shape(trajectory.messages_and_choices) == ["user:q", "choice:hi0"]

    def forgetful() -> Any:
        return 3.0

    with pytest.raises(TypeError, match=r"float, not a Trajectory"):
        await wrap_rollout(model, forgetful)()


async def test_a_model_that_artnb_does_not_serve_is_recorded_without_tokens():
    """The same rollout of a larger model, to compare with; and a judge inside of a rollout stays out of it."""
    other = Endpoint(lambda r: TWO_TURNS["<tool_response>" in r.prompt_text], chunk_size=2)
    model, _ = await scripted_model("mine")
    with Server(other.app) as server:
        big = art.Model(
            name="big", project="tests", inference_model_name="base",
            inference_base_url=f"{server.url}/v1", inference_api_key="secret",
        )  # fmt: skip

        async def rollout(streaming: bool) -> art.Trajectory:
            agent = create_agent(init_chat_model(temperature=0.4, streaming=streaming), [add, shout])
            await agent.ainvoke({"messages": [("user", "1 + 2?")]})
            return art.Trajectory(reward=1.0)

        def synchronous() -> art.Trajectory:
            init_chat_model().invoke("x")
            list(init_chat_model().stream("y"))
            return art.Trajectory(reward=1.0)

        async def judged() -> art.Trajectory:
            await init_chat_model().ainvoke("q")
            await init_chat_model(big).ainvoke("is it good?")
            return art.Trajectory(reward=1.0)

        ours = await wrap_rollout(big, rollout)(False)  # a server of this process records with tokens, and only once
        assert all(c.token_ids for c in ours.choices()) and len(ours.choices()) == 2
        host, port = server.url.removeprefix("http://").split(":")
        remove_server(host, int(port))  # from now on it might as well be elsewhere
        for streaming in (False, True):
            trajectory = await wrap_rollout(big, rollout)(streaming)
            assert not trajectory.additional_histories
            assert shape(trajectory.messages_and_choices) == TWO_TURNS_SAID
            assert [t["function"]["name"] for t in trajectory.tools] == ["add", "shout"]
            assert not any((c.model_extra or {}).get("token_ids") for c in trajectory.choices())
        assert {r.sampling.temperature for r in other.engine.requests} == {0.4}
        assert len((await wrap_rollout(big, synchronous)()).choices()) == 2
        assert shape((await wrap_rollout(model, judged)()).messages_and_choices) == ["user:q", "choice:mine0"]
