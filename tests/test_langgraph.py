"""Agents as people write them, on the real libraries: what the engine is asked, and what is recorded and trained."""

from __future__ import annotations

import pytest

pytest.importorskip("langgraph")
pytest.importorskip("langchain")
pytest.importorskip("langchain_openai")

import asyncio
import subprocess
import sys
from typing import Any

import openai
from langchain.agents import create_agent
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.runnables import ConfigurableField
from langgraph_agents import (
    TWO_TURNS,
    TWO_TURNS_SAID,
    Point,
    add,
    answers,
    assert_trained_once,
    call,
    ending,
    shape,
    shout,
    sum_of,
)
from scripted_backend import ScriptedBackend, scripted_model

import artnb as art
from artnb.errors import ConfigError
from artnb.langgraph import init_chat_model, wrap_rollout
from artnb.training.rows import rows_from_trajectory

# An agent is asked, and the engine sees what it said ---------------------------------------------------------


async def test_an_agent_with_tools_is_recorded_and_trained_as_it_was_sampled():
    model, endpoint = await scripted_model(TWO_TURNS)

    async def rollout(question: str) -> art.Trajectory:
        agent = create_agent(init_chat_model(temperature=0.3, max_tokens=200, seed=7), [add, shout], system_prompt="S")
        result = await agent.ainvoke({"messages": [("user", question)]})
        assert result["messages"][-1].text == "it is 3, É"
        return art.Trajectory(reward=0.25, metadata={"question": question}, metrics={"mine": 2}, logs=["hello"])

    trajectory = await wrap_rollout(model, rollout)("1 + 2?")
    assert shape(trajectory.messages_and_choices) == ["system:S", *TWO_TURNS_SAID]
    assert not trajectory.additional_histories
    assert [t["function"]["name"] for t in trajectory.tools] == ["add", "shout"]
    assert (trajectory.reward, trajectory.metadata, trajectory.logs) == (0.25, {"question": "1 + 2?"}, ["hello"])
    assert trajectory.metrics["mine"] == 2 and trajectory.metrics["completion_tokens"] == sum(
        map(len, answers(endpoint))
    )
    assert trajectory.stop_reason is art.StopReason.FINISHED and trajectory.final_policy_version == 0
    (row,) = rows_from_trajectory(trajectory)
    assert_trained_once(trajectory, endpoint)
    calls = endpoint.tokenizer.encode('{"name": "shout", "arguments": {"text": "é"}}', add_special_tokens=False)
    sampled = row.token_ids[row.sampled].tolist()
    assert any(sampled[i : i + len(calls)] == calls for i in range(len(sampled))), "tool calls are in the trained row"


@pytest.mark.parametrize("how", ["ainvoke", "invoke", "astream", "stream", "abatch", "batch"])
async def test_what_is_asked_reaches_the_engine(how: str):
    """user-reports #76, and #474 there: model name, temperature, timeout and the rest were ignored."""
    model, endpoint = await scripted_model("hi")
    llm = init_chat_model(
        model, temperature=0.3, top_p=0.9, seed=5, max_tokens=11, stop=["zz"], timeout=30, top_k=4, min_p=0.1
    ).bind_tools([add, shout])
    if how == "ainvoke":
        said = [await llm.ainvoke("hello")]
    elif how == "invoke":
        said = [await asyncio.to_thread(llm.invoke, "hello")]
    elif how == "astream":
        said = [sum_of([chunk async for chunk in llm.astream("hello")])]
    elif how == "stream":
        said = [sum_of(await asyncio.to_thread(lambda: list(llm.stream("hello"))))]
    elif how == "abatch":
        said = await llm.abatch(["hello", "hello"])
    else:
        said = await asyncio.to_thread(llm.batch, ["hello", "hello"])
    assert [message.text for message in said] == ["hi"] * len(said)
    assert all(message.usage_metadata["output_tokens"] == 3 for message in said), "the end token counts"
    for request, record in zip(endpoint.engine.requests, endpoint.records, strict=True):
        sampling = request.sampling
        assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.3, 0.9, 4, 0.1)
        assert (sampling.seed, sampling.max_tokens) == (5, 11)
        assert '"add"' in request.prompt_text and '"shout"' in request.prompt_text
        assert record.choice.policy == "agent@0" and str(request.adapter) == "agent@0"


async def test_stop_and_the_name_reach_the_engine():
    model, endpoint = await scripted_model("one, two, three")
    assert (await init_chat_model(model, stop=[", tw"]).ainvoke("x")).text == "one"
    assert (await init_chat_model(model).ainvoke("x", stop=["ne"])).text == "o"
    await init_chat_model(model).ainvoke("x", model="base", temperature=0.5, max_tokens=2)
    last = endpoint.engine.requests[-1]
    assert last.adapter is None and (last.sampling.temperature, last.sampling.max_tokens) == (0.5, 2)

    async def rollout(name: str) -> art.Trajectory:
        await init_chat_model(name).ainvoke("x")
        return art.Trajectory(reward=0.0)

    for name, adapter in (("agent", "agent@0"), ("agent@0", "agent@0"), ("base", "None"), ("openai:base", "None")):
        await wrap_rollout(model, rollout)(name)
        assert str(endpoint.engine.requests[-1].adapter) == adapter
    with pytest.raises(openai.NotFoundError, match=r"'gpt-4.1'.*base"):
        await wrap_rollout(model, rollout)("gpt-4.1")


async def test_a_timeout_ends_the_request_in_the_engine():
    model, endpoint = await scripted_model("slow", delay=5.0)

    async def rollout() -> art.Trajectory:
        with pytest.raises(openai.APITimeoutError):
            await init_chat_model(timeout=0.05).ainvoke("x")
        with pytest.raises(openai.APITimeoutError):
            await asyncio.to_thread(init_chat_model(timeout=0.05).invoke, "x")
        with pytest.raises(openai.APITimeoutError):
            await init_chat_model(timeout=0.05, max_retries=1).ainvoke("x")
        return art.Trajectory(reward=0.0)

    trajectory = await wrap_rollout(model, rollout)()
    assert len(endpoint.engine.requests) == 4, "one attempt each, and a second one where it was asked for"
    assert endpoint.engine.stats().extra["cancelled"] == 4 and endpoint.engine.stats().running == 0
    assert not trajectory.choices(), "what was given up is not trained"


async def test_structured_output_is_a_call_that_the_model_is_made_to_begin():
    model, endpoint = await scripted_model(
        [ending('{"x": 1, "y": 2}'), ending('{"x": 3, "y": 4}'), ending('{"x": "no"}')]
    )

    async def rollout() -> art.Trajectory:
        structured = init_chat_model(temperature=0.3).with_structured_output(Point)
        assert await structured.ainvoke("where?") == Point(x=1, y=2)
        assert await asyncio.to_thread(structured.invoke, "and now?") == Point(x=3, y=4)
        raw = init_chat_model().with_structured_output(Point, include_raw=True)
        assert (await raw.ainvoke("hm?"))["parsing_error"] is not None
        return art.Trajectory(reward=1.0)

    trajectory = await wrap_rollout(model, rollout)()
    assert [r.sampling.temperature for r in endpoint.engine.requests] == [0.3, 0.3, 1.0]
    for request in endpoint.engine.requests:
        assert request.prompt_text.endswith('<tool_call>\n{"name": "Point", "arguments":')
    assert len(trajectory.choices()) == 3
    assert_trained_once(trajectory, endpoint)


async def test_an_agent_with_a_response_format():
    script = [
        call("add", '{"a": 1, "b": 2}').removeprefix('<tool_call>\n{"name":'),
        ' "Point", "arguments": {"x": 3, "y": 0}}\n</tool_call>',
    ]
    model, endpoint = await scripted_model(script)

    async def rollout() -> art.Trajectory:
        agent = create_agent(init_chat_model(), [add], response_format=Point)
        result = await agent.ainvoke({"messages": [("user", "go")]})
        assert result["structured_response"] == Point(x=3, y=0)
        return art.Trajectory(reward=1.0)

    trajectory = await wrap_rollout(model, rollout)()
    assert [len(c.message.tool_calls) for c in trajectory.choices()] == [1, 1]
    assert_trained_once(trajectory, endpoint)


async def test_tool_choice_and_parallel_calls_are_the_endpoints():
    model, endpoint = await scripted_model([ending('{"a": 1, "b": 2}') + "\n" + call("add", '{"a": 3, "b": 4}')])
    llm = init_chat_model(model).bind_tools([add, shout], tool_choice="add", parallel_tool_calls=False)
    assert [c["args"] for c in (await llm.ainvoke("x")).tool_calls] == [{"a": 1, "b": 2}]
    llm = init_chat_model(model).bind_tools([add, shout], tool_choice="none")
    assert not (await llm.ainvoke("x")).tool_calls
    assert '"add"' not in endpoint.engine.requests[-1].prompt_text


@pytest.mark.parametrize("options", [{}, {"streaming": True}, {"streaming": False}])
async def test_a_streamed_agent_is_trained_like_one_that_is_not(options: dict[str, Any]):
    model, endpoint = await scripted_model(TWO_TURNS, chunk_size=2)

    async def rollout() -> art.Trajectory:
        agent = create_agent(init_chat_model(**options), [add, shout], system_prompt="S")
        seen = []
        async for chunk, meta in agent.astream({"messages": [("user", "1 + 2?")]}, stream_mode="messages"):
            if isinstance(chunk, AIMessage):
                seen.append(chunk.text)
                assert "logprobs" not in chunk.response_metadata and meta["langgraph_node"] == "model"
        assert "".join(seen) == "soit is 3, É" and (len(seen) > 4) is (options != {"streaming": False})
        return art.Trajectory(reward=1.0)

    trajectory = await wrap_rollout(model, rollout)()
    assert shape(trajectory.messages_and_choices) == ["system:S", *TWO_TURNS_SAID]
    assert_trained_once(trajectory, endpoint)


async def test_log_probs_are_in_a_message_where_they_were_asked_for_and_else_not():
    model, _ = await scripted_model("hi")
    plain = await init_chat_model(model).ainvoke("x")
    assert "logprobs" not in plain.response_metadata and len(repr(plain)) < 2000
    for llm in (init_chat_model(model, logprobs=True), init_chat_model(model).bind(logprobs=True)):
        assert len((await llm.ainvoke("x")).response_metadata["logprobs"]["content"]) == 3
        streamed = sum_of([chunk async for chunk in llm.astream("x")])
        assert len(streamed.response_metadata["logprobs"]["content"]) == 3


async def test_reasoning_is_in_the_message_and_goes_back():
    model, endpoint = await scripted_model("<think>hm</think>yes", chunk_size=2)
    llm = init_chat_model(model)
    first = await llm.ainvoke("x")
    streamed = sum_of([chunk async for chunk in llm.astream("x")])
    for message in (first, streamed):
        assert message.text == "yes" and message.additional_kwargs["reasoning_content"] == "hm"
    await llm.ainvoke([HumanMessage("x"), first, HumanMessage("and?")])
    assert endpoint.records[-1].messages[1] == {"role": "assistant", "content": "yes", "reasoning_content": "hm"}


async def test_langchains_cache_gives_no_answers():
    from langchain_core.caches import InMemoryCache
    from langchain_core.globals import get_llm_cache, set_llm_cache

    model, endpoint = await scripted_model("hi")
    before = get_llm_cache()
    set_llm_cache(InMemoryCache())
    try:
        await init_chat_model(model).ainvoke("x")
        await init_chat_model(model).ainvoke("x")
    finally:
        set_llm_cache(before)
    assert len(endpoint.engine.requests) == 2, "a cached answer is not sampled, and all of a group would be the same"


async def test_fields_that_are_configured_later():
    model, endpoint = await scripted_model("hi")
    llm = init_chat_model(model, max_tokens=9).configurable_fields(temperature=ConfigurableField(id="t"))
    await llm.with_config(configurable={"t": 0.2}).ainvoke("x")
    sampling = endpoint.engine.requests[-1].sampling
    assert (sampling.temperature, sampling.max_tokens) == (0.2, 9)


async def test_outside_of_a_rollout_it_asks_the_model_that_was_given():
    model, _ = await scripted_model("hi")
    llm = init_chat_model(model)
    assert (await llm.ainvoke("x")).text == "hi"
    async with art.trajectory() as t:
        await llm.ainvoke("y")
    assert shape(t.messages_and_choices) == ["user:y", "choice:hi0"]


async def test_the_http_endpoint_does_for_an_agent_that_keeps_langchains_own_chat_model():
    """Not everything can be changed: a ChatOpenAI pointed at the endpoint is captured as well."""
    from langchain_openai import ChatOpenAI

    model, endpoint = await scripted_model(TWO_TURNS)
    async with ScriptedBackend(endpoint) as backend:
        url, key = backend.endpoint(model)
        llm = ChatOpenAI(base_url=url, api_key=key, model="agent", temperature=0.3, use_responses_api=False)

        async def rollout() -> art.Trajectory:
            await create_agent(llm, [add, shout]).ainvoke({"messages": [("user", "1 + 2?")]})
            return art.Trajectory(reward=1.0)

        trajectory = await wrap_rollout(model, rollout)()
    assert shape(trajectory.messages_and_choices) == TWO_TURNS_SAID
    assert_trained_once(trajectory, endpoint)
    assert {r.sampling.temperature for r in endpoint.engine.requests} == {0.3}


# Arguments ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"temprature": 1.0}, "did you mean 'temperature'"),
        ({"base_url": "http://x"}, "comes from the model"),
        ({"api_key": "x"}, "comes from the model"),
        ({"model_provider": "anthropic"}, "model_provider='anthropic'"),
        ({"configurable_fields": "any"}, "configurable_fields"),
        ({"config_prefix": "x"}, "config_prefix"),
        ({"use_responses_api": True}, "Responses API"),
        ({"model_name": "x"}, "first argument"),
        ({"model": 3}, "int"),
    ],
)
def test_what_cannot_be_honoured_is_refused(options: dict[str, Any], words: str):
    with pytest.raises(ConfigError, match=words):
        init_chat_model(**options)


async def test_a_model_that_is_not_registered_says_so():
    model = art.TrainableModel(name="new", project="tests", base_model="none")
    with pytest.raises(ConfigError, match=r"new is not registered; call `await model.register"):
        await init_chat_model(model).ainvoke("x")
    with pytest.raises(ConfigError, match="new is not registered"):
        init_chat_model(model).invoke("x")


async def test_methods_that_would_constrain_sampling_are_refused_and_parameters_are_the_endpoints():
    model, _ = await scripted_model("hi")
    for method in ("json_schema", "json_mode"):
        with pytest.raises(ConfigError, match=method):
            init_chat_model(model).with_structured_output(Point, method=method)
    with pytest.raises(openai.BadRequestError, match="frequency_penalty is not supported"):
        await init_chat_model(model, frequency_penalty=1.0).ainvoke("x")
    with pytest.raises(ConfigError, match="model first"):
        wrap_rollout(lambda: None, model)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="do not call it yourself"):
        wrap_rollout(model, "rollout")  # type: ignore[arg-type]


def test_importing_it_needs_no_langchain_and_using_it_says_what_to_install():
    code = (
        "import sys\n"
        "for name in ('langchain', 'langchain_openai', 'langgraph'): sys.modules[name] = None\n"
        "from artnb.langgraph import init_chat_model, wrap_rollout\n"
        "from artnb.errors import ConfigError\n"
        "assert 'torch' not in sys.modules\n"
        "try: init_chat_model()\n"
        "except ConfigError as error: assert 'artnb[langgraph]' in str(error), error\n"
        "else: raise SystemExit('no error')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
