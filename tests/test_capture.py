"""What a rollout's client samples lands on the rollout's trajectory, and nowhere else."""

import asyncio
import contextvars
import subprocess
import sys
import threading

import httpx
import httpx2
import openai
import pytest
from endpoint_for_tests import HELLO, KEY, TOOLS, Endpoint, calls, until
from openai.types.chat.chat_completion import Choice

from artnb.capture import (
    Collector,
    auto_trajectory,
    capture_auto_trajectory,
    capture_headers,
    trajectory,
)
from artnb.errors import ConfigError, RolloutError
from artnb.serving.server import Server
from artnb.serving.transport import make_client
from artnb.trajectories import StopReason, Trajectory

SENDS = [(cls, cls.__dict__["send"]) for lib in (httpx, httpx2) for cls in (lib.AsyncClient, lib.Client)]


@pytest.fixture(autouse=True)
def _nothing_stays_wrapped():
    yield
    assert all(cls.__dict__["send"] is send for cls, send in SENDS)


def shape(items) -> list[str]:
    return [
        f"choice:{item.message.content}" if isinstance(item, Choice) else f"{item['role']}:{item['content']}"
        for item in items
    ]


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def says(choice: Choice) -> dict:
    return choice.message.model_dump(exclude_none=True)


# In this process ---------------------------------------------------------------------------------


async def test_a_conversation_becomes_one_history():
    endpoint = Endpoint(["one", "two", "three"])
    await endpoint.swap("agent", 4)
    async with trajectory(metadata={"level": 2}) as t:
        messages = [{"role": "system", "content": "S"}, user("a")]
        first = await endpoint.ask(messages, model="agent")
        messages += [says(first), user("b")]
        second = await endpoint.ask(messages, model="agent")
        await endpoint.swap("agent", 5)
        messages += [says(second), user("c")]
        await endpoint.ask(messages, model="agent")
        assert t.reward is None
    assert shape(t.messages_and_choices) == [
        "system:S", "user:a", "choice:one", "user:b", "choice:two", "user:c", "choice:three",
    ]  # fmt: skip
    assert not t.additional_histories
    recorded = t.choices()[0]
    assert recorded.model_dump(exclude_none=True) == first.model_dump(exclude_none=True)
    assert recorded.policy == "agent@4" and len(recorded.logprobs.content) == len(recorded.token_ids)
    assert (t.initial_policy_version, t.final_policy_version) == (4, 5)
    assert t.stop_reason is StopReason.FINISHED and t.metrics["duration"] >= 0 and t.metadata == {"level": 2}
    assert Trajectory.model_validate_json(t.model_dump_json()).choices() == t.choices()


async def test_streamed_choices_are_captured_whole_and_equal_plain_ones():
    endpoint = Endpoint("<think>hm</think>so " + calls("{}"), chunk_size=2)
    async with trajectory() as plain:
        await endpoint.ask(tools=TOOLS)
    async with trajectory() as streamed:
        await endpoint.stream(tools=TOOLS)
    assert plain.choices() == streamed.choices() and len(plain.choices()) == 1
    assert plain.tools == streamed.tools == TOOLS


async def test_a_stream_that_is_left_early_is_captured_as_far_as_it_went():
    endpoint = Endpoint("x" * 1000, chunk_size=1)
    async with trajectory() as t:
        stream = await endpoint.client.chat.completions.create(model="base", messages=HELLO, stream=True)
        await anext(stream)
        await anext(stream)
        await stream.close()
    (choice,) = t.choices()
    assert choice.message.content == "x" * len(choice.token_ids) and 2 <= len(choice.token_ids) < 1000
    assert choice.finish_reason == "length" and choice.cut_by_client
    assert t.stop_reason is StopReason.TRUNCATED


async def test_a_stream_that_is_read_to_its_finish_is_not_cut():
    endpoint = Endpoint("abc", chunk_size=1)
    async with trajectory() as t:
        stream = await endpoint.client.chat.completions.create(model="base", messages=HELLO, stream=True)
        async for chunk in stream:
            if chunk.choices[0].finish_reason:
                break
        await stream.close()
    (choice,) = t.choices()
    assert (choice.message.content, choice.finish_reason) == ("abc", "stop")
    assert "cut_by_client" not in choice.model_extra


@pytest.mark.parametrize("spelling", ["plain", "object", "parts", "null"])
async def test_a_history_is_recognised_however_the_client_spells_it(spelling):
    script = ["<think>hm</think>one " + calls('{"a": "é"}'), "two"] if spelling != "null" else [calls("{}"), "two"]
    endpoint = Endpoint(script)
    async with trajectory() as t:
        choice = await endpoint.ask(tools=TOOLS)
        call = choice.message.tool_calls[0]
        tool_calls = [call.model_dump()]
        answer = {
            "plain": {"role": "assistant", "content": choice.message.content, "tool_calls": tool_calls},
            "object": choice.message,
            "parts": {
                "role": "assistant",
                "content": [{"type": "text", "text": choice.message.content}],
                "tool_calls": tool_calls,
            },
            "null": {"role": "assistant", "content": None, "tool_calls": tool_calls},
        }[spelling]
        result = {"role": "tool", "tool_call_id": call.id, "content": "42"}
        await endpoint.ask([*HELLO, answer, result], tools=TOOLS)
    assert shape(t.messages_and_choices)[2:] == ["tool:42", "choice:two"]
    assert not t.additional_histories


async def test_the_name_that_a_framework_gives_its_agent_makes_no_other_conversation():
    endpoint = Endpoint(["one", "two"])
    async with trajectory() as t:
        first = await endpoint.ask()
        await endpoint.ask([*HELLO, {**says(first), "name": "supervisor"}, user("b")])
    assert shape(t.messages_and_choices) == ["user:hello", "choice:one", "user:b", "choice:two"]
    assert not t.additional_histories


async def test_other_conversations_become_further_histories():
    endpoint = Endpoint(["a1", "b1", "a2", "b2", "t1", "again"])
    async with trajectory() as t:
        a = [user("A")]
        b = [user("B")]
        a += [says(await endpoint.ask(a)), user("A2")]
        b += [says(await endpoint.ask(b)), user("B2")]
        await endpoint.ask(a)
        await endpoint.ask(b)
        await endpoint.ask([user("A")], tools=TOOLS)
        await endpoint.ask([user("A")])  # the same request again: another sample of the same prompt
    assert shape(t.messages_and_choices) == ["user:A", "choice:a1", "user:A2", "choice:a2"]
    assert [shape(h.messages_and_choices) for h in t.additional_histories] == [
        ["user:B", "choice:b1", "user:B2", "choice:b2"],
        ["user:A", "choice:t1"],
        ["user:A", "choice:again"],
    ]
    assert [h.tools for h in t.additional_histories] == [None, TOOLS, None]


async def test_a_conversation_that_goes_on_with_other_tools_is_another_history():
    endpoint = Endpoint(["one", "two"])
    async with trajectory() as t:
        first = await endpoint.ask()
        await endpoint.ask([*HELLO, says(first), user("b")], tools=TOOLS)
    assert shape(t.messages_and_choices) == ["user:hello", "choice:one"] and t.tools is None
    assert t.additional_histories[0].tools == TOOLS


async def test_every_one_of_n_choices_is_kept():
    endpoint = Endpoint(["one", "two", "three", "four"])
    async with trajectory() as t:
        answer = await endpoint.client.chat.completions.create(model="base", messages=HELLO, n=3)
        texts = [c.message.content for c in answer.choices]
        await endpoint.ask([*HELLO, says(answer.choices[1]), user("go on")])
    assert [c.message.content for c in t.choices()] == [texts[0], texts[1], "four", texts[2]]
    assert shape(t.additional_histories[0].messages_and_choices)[-1] == "choice:four"


async def test_a_rewritten_history_starts_a_new_one():
    endpoint = Endpoint(["one", "two"])
    async with trajectory() as t:
        await endpoint.ask()
        await endpoint.ask([*HELLO, {"role": "assistant", "content": "edited"}, user("go on")])
    assert shape(t.additional_histories[0].messages_and_choices) == [
        "user:hello", "assistant:edited", "user:go on", "choice:two",
    ]  # fmt: skip


async def test_interleaved_rollouts_with_the_same_text_are_never_mixed():
    endpoint = Endpoint(lambda r: "same", chunk_size=1)

    async def rollout(turns: int) -> Trajectory:
        async with trajectory() as t:
            messages = list(HELLO)
            for _ in range(turns):
                messages += [says(await endpoint.ask(messages)), user("same")]
        return t

    trajectories = await asyncio.gather(*(rollout(1 + i % 3) for i in range(30)))
    assert [len(t.choices()) for t in trajectories] == [1 + i % 3 for i in range(30)]
    assert not any(t.additional_histories for t in trajectories)


async def test_tasks_of_a_rollout_record_on_it_and_scopes_nest():
    endpoint = Endpoint(lambda r: r.prompt_text[-40:].split("user\n")[-1][0])
    async with trajectory() as outer:
        async with trajectory() as inner:
            await asyncio.gather(endpoint.ask([user("1")]), endpoint.ask([user("2")]))
        await endpoint.ask([user("3")])
    await endpoint.ask([user("4")])
    assert {c.message.content for c in inner.choices()} == {"1", "2"}
    assert [c.message.content for c in outer.choices()] == ["3"]


async def test_a_late_choice_is_dropped_and_counted():
    endpoint = Endpoint("late", delay=0.05)
    async with trajectory() as t:
        late = asyncio.create_task(endpoint.ask())
        await until(lambda: endpoint.engine.stats().running == 1)
    assert (await late).message.content == "late"
    assert not t.choices() and t.messages_and_choices == []
    assert endpoint.captures.dropped_late == 1


async def test_failures_are_recorded_and_pass():
    endpoint = Endpoint("one", context_length=60)
    async with trajectory() as t:
        pass
    assert t.stop_reason is StopReason.FINISHED and t.error is None
    with pytest.raises(LookupError):
        async with trajectory() as t:
            await endpoint.ask()
            raise LookupError("lost")
    assert t.stop_reason is StopReason.FAILED and t.error.type == "LookupError" and "lost" in t.error.traceback
    assert len(t.choices()) == 1
    with pytest.raises(openai.BadRequestError):
        async with trajectory() as t:
            await endpoint.ask([user("x" * 100)])
    assert t.stop_reason is StopReason.CONTEXT_FULL
    with pytest.raises(TimeoutError):
        async with trajectory() as t:
            raise TimeoutError
    assert t.stop_reason is StopReason.TIMEOUT
    with pytest.raises(asyncio.CancelledError):
        async with trajectory() as t:
            raise asyncio.CancelledError
    assert t.stop_reason is StopReason.CANCELLED
    async with trajectory(stop_reason=StopReason.TIMEOUT) as t:
        await endpoint.ask(max_tokens=1)
    assert t.stop_reason is StopReason.TIMEOUT
    async with trajectory() as t:
        await endpoint.ask(max_tokens=1)
    assert t.stop_reason is StopReason.TRUNCATED


def test_wrong_arguments_are_refused():
    with pytest.raises(ConfigError, match="did you mean 'metadata'"):
        trajectory(metdata={})
    with pytest.raises(ConfigError, match="hashable"):
        trajectory(group=[1])
    scope = trajectory()
    with scope, pytest.raises(RolloutError, match="once"):
        scope.__enter__()


async def test_the_names_art_has():
    endpoint = Endpoint("one")
    assert auto_trajectory() is None
    with pytest.raises(RolloutError, match="trajectory"):
        auto_trajectory(required=True)

    async def rollout() -> str:
        await endpoint.ask()
        auto_trajectory(required=True).reward = 0.5
        return "dropped"

    t = await capture_auto_trajectory(rollout())
    assert t.reward == 0.5 and len(t.choices()) == 1 and auto_trajectory() is None
    with trajectory() as t:
        assert auto_trajectory() is t


def test_a_scope_may_be_left_in_another_context():
    scope = trajectory()
    contextvars.copy_context().run(scope.__enter__)
    scope.__exit__(None, None, None)
    assert scope.trajectory.stop_reason is StopReason.FINISHED


def test_synchronous_rollouts():
    endpoint = Endpoint("one")
    with make_client(endpoint.app, KEY) as client, trajectory() as t:
        client.chat.completions.create(model="base", messages=HELLO)
        list(client.chat.completions.create(model="base", messages=[user("b")], stream=True))
    assert len(t.choices()) == 2


# Over HTTP ---------------------------------------------------------------------------------------


async def test_any_client_pointed_at_the_server_is_captured():
    endpoint = Endpoint("한글", chunk_size=1)
    with Server(endpoint.app) as server:
        for url in (server.url, server.url.replace("127.0.0.1", "localhost")):
            async with openai.AsyncOpenAI(api_key=KEY, base_url=f"{url}/v1") as client:
                async with trajectory() as plain:
                    await client.chat.completions.create(model="base", messages=HELLO)
                async with trajectory() as streamed:
                    stream = await client.chat.completions.create(model="base", messages=HELLO, stream=True)
                    async for _ in stream:
                        pass
                await client.chat.completions.create(model="base", messages=HELLO)
            assert plain.choices() == streamed.choices() and len(plain.choices()) == 1
            assert plain.choices()[0].message.content == "한글"

        def rollout() -> Trajectory:
            with openai.OpenAI(api_key=KEY, base_url=f"{server.url}/v1") as client, trajectory() as t:
                client.chat.completions.create(model="base", messages=HELLO)
            return t

        assert len((await asyncio.to_thread(rollout)).choices()) == 1


@pytest.mark.parametrize("library", [httpx, httpx2])
async def test_clients_on_either_httpx_are_captured(library):
    endpoint = Endpoint("hi")
    body = {"model": "base", "messages": HELLO}
    with Server(endpoint.app) as server:
        options = {"base_url": server.url, "headers": {"authorization": f"Bearer {KEY}"}}
        async with library.AsyncClient(**options) as client, trajectory() as t:
            await client.post("/v1/chat/completions", json=body)

        def rollout() -> Trajectory:
            with library.Client(**options) as client, trajectory() as t:
                client.post("/v1/chat/completions", json=body)
            return t

        synchronous = await asyncio.to_thread(rollout)
    assert len(t.choices()) == len(synchronous.choices()) == 1


async def test_the_hook_gets_every_choice_with_its_request():
    endpoint = Endpoint("one")
    await endpoint.swap("agent", 3)
    await endpoint.ask(model="agent", tools=TOOLS)
    async with trajectory():
        await endpoint.ask()
        headers = capture_headers()
    outside, inside = endpoint.records
    assert (outside.messages, outside.tools, outside.name, outside.step) == (HELLO, TOOLS, "agent", 3)
    assert outside.trajectory_id is None and outside.choice.policy == "agent@3"
    assert (inside.name, inside.step, inside.trajectory_id) == ("base", None, headers["x-artnb-trajectory"])


async def test_a_stream_over_http_that_is_left_early_is_captured():
    endpoint = Endpoint("x" * 100_000, chunk_size=1, context_length=200_000, delay=0.001)
    with Server(endpoint.app) as server:
        async with openai.AsyncOpenAI(api_key=KEY, base_url=f"{server.url}/v1") as client, trajectory() as t:
            stream = await client.chat.completions.create(model="base", messages=HELLO, stream=True)
            await anext(stream)
            await stream.close()
        (choice,) = t.choices()
    assert choice.cut_by_client and choice.finish_reason == "length" and choice.message.content.startswith("x")


async def test_interleaved_rollouts_over_http_are_never_mixed():
    endpoint = Endpoint("same", delay=0.001)
    with Server(endpoint.app) as server:
        async with openai.AsyncOpenAI(api_key=KEY, base_url=f"{server.url}/v1") as client:

            async def rollout(turns: int) -> Trajectory:
                async with trajectory() as t:
                    messages = list(HELLO)
                    for _ in range(turns):
                        answer = await client.chat.completions.create(model="base", messages=messages)
                        messages += [says(answer.choices[0]), user("same")]
                return t

            trajectories = await asyncio.gather(*(rollout(1 + i % 3) for i in range(12)))
    assert [len(t.choices()) for t in trajectories] == [1 + i % 3 for i in range(12)]


async def test_only_our_own_servers_get_the_header():
    seen: list[httpx2.Headers] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        seen.append(request.headers)
        return httpx2.Response(200)

    endpoint = Endpoint("a")
    with Server(endpoint.app) as server:
        url = f"{server.url}/v1"
        async with httpx2.AsyncClient(transport=httpx2.MockTransport(answer)) as client, trajectory():
            await client.get("https://example.com/v1")
            await client.get("http://127.0.0.1:1/v1")
            await client.get(url)
            await client.get(url, headers={"x-artnb-trajectory": "mine"})
            assert capture_headers()["x-artnb-trajectory"] == seen[2]["x-artnb-trajectory"]
    assert ["x-artnb-trajectory" in h for h in seen] == [False, False, True, True]
    assert seen[3]["x-artnb-trajectory"] == "mine" and capture_headers() == {}
    async with httpx2.AsyncClient(transport=httpx2.MockTransport(answer)) as client, trajectory():
        await client.get(url)
    assert "x-artnb-trajectory" not in seen[4]  # the server is closed: the address may be anybody's


async def test_clients_elsewhere_pass_the_headers_themselves():
    endpoint = Endpoint("a")
    async with trajectory() as t:
        headers = capture_headers()
        # As from a process or thread that knows nothing of the scope.
        fresh = contextvars.Context()
        task = fresh.run(lambda: asyncio.create_task(endpoint.ask(extra_headers=headers)))
        await task
        ignored = fresh.run(lambda: asyncio.create_task(endpoint.ask()))
        await ignored
    assert len(t.choices()) == 1
    await endpoint.ask(extra_headers=headers)
    await endpoint.ask(extra_headers={"x-artnb-trajectory": "unknown"})
    assert len(t.choices()) == 1 and endpoint.captures.dropped_late == 2


def test_clients_are_wrapped_only_while_a_scope_is_open():
    original = httpx2.Client.__dict__["send"]
    with trajectory():
        assert httpx2.Client.__dict__["send"] is not original
        with trajectory():
            pass
        wrapped = httpx2.Client.__dict__["send"]
        assert wrapped is not original
    assert httpx2.Client.__dict__["send"] is original


def test_somebody_elses_wrapper_around_ours_stays(monkeypatch):
    original = httpx2.Client.__dict__["send"]
    counted = []
    with trajectory():
        ours = httpx2.Client.__dict__["send"]

        def theirs(self, request, **options):
            counted.append(request)
            return ours(self, request, **options)

        httpx2.Client.send = theirs
    assert httpx2.Client.__dict__["send"] is theirs
    with httpx2.Client(transport=httpx2.MockTransport(lambda r: httpx2.Response(200))) as client:
        with trajectory():
            assert httpx2.Client.__dict__["send"] is theirs
            client.get("http://x/")
        client.get("http://x/")
    assert len(counted) == 2
    httpx2.Client.send = ours
    with trajectory():
        pass
    assert httpx2.Client.__dict__["send"] is original


def test_importing_it_loads_no_torch_and_wraps_nothing():
    code = (
        "import sys, openai, httpx2; send = httpx2.AsyncClient.send; import artnb.capture, artnb.engines.scripted; "
        "assert httpx2.AsyncClient.send is send; "
        "bad = {'torch', 'transformers', 'fastapi', 'uvicorn'} & set(sys.modules); assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# Collecting --------------------------------------------------------------------------------------


async def test_scored_trajectories_reach_the_collector_of_the_model_that_answered():
    endpoint = Endpoint("one")
    await endpoint.swap("agent", 1)
    mine, other, added = Collector(), Collector(), []
    mine.on_add = lambda: added.append(len(mine))
    endpoint.captures.register_collector("agent", mine)
    endpoint.captures.register_collector("other", other)

    async def rollout(group, reward, model="agent", question="hello", fail=False) -> None:
        async with trajectory(group=group) as t:
            await endpoint.ask([user(question)], model=model)
            t.reward = reward
            if fail:
                raise LookupError

    for reward in (0.0, 1.0, 0.5):
        await rollout("g", reward)
    await rollout(None, 0.1)
    await rollout(None, 0.2)
    await rollout(None, 0.3, question="another")
    await rollout("g", None)  # unscored
    await rollout("g", 1.0, model="base")  # nobody collects for the base
    await rollout("g", 1.0, model="agent@1")
    with pytest.raises(LookupError):
        await rollout("g", 1.0, fail=True)
    async with trajectory(group="g") as t:
        t.reward = 1.0  # no choices
    assert len(mine) == 7 and len(other) == 0 and added == [1, 2, 3, 4, 5, 6, 7]
    assert mine.count_ready(2) == 3
    groups = mine.pop_ready(2, 2)
    assert [[t.reward for t in g] for g in groups] == [[0.0, 1.0], [0.5, 1.0]]
    assert groups[0].metadata == {"group": "g"}
    (group,) = mine.pop_all()
    assert [t.reward for t in group] == [0.1, 0.2] and group.metadata == {}
    assert len(mine) == 1 and mine.pop_all() == [] and mine.pop_ready(2) == []
    assert [t.reward for t in mine.pop_all(min_size=1)[0]] == [0.3]
    endpoint.captures.unregister_collector("agent")
    await rollout("g", 1.0)
    assert len(mine) == 0


async def test_a_trajectory_of_two_models_is_collected_once_and_says_so():
    endpoint = Endpoint("one")
    collectors = {}
    for name in ("agent", "rival"):
        await endpoint.swap(name, 1)
        collectors[name] = Collector()
        endpoint.captures.register_collector(name, collectors[name])
    async with trajectory() as t:
        await endpoint.ask(model="rival")
        await endpoint.ask([user("b")], model="agent")
        t.reward = 1.0
    assert (len(collectors["rival"]), len(collectors["agent"])) == (1, 0)
    assert "rival, agent" in t.logs[0]


def test_the_collector_is_safe_between_threads():
    collector, taken = Collector(), []

    def add() -> None:
        for i in range(200):
            collector.add(Trajectory(reward=1.0), group=i % 5)
            taken.extend(collector.pop_ready(4))

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(map(len, taken)) + len(collector) == 800
    assert len({id(t) for group in taken for t in group}) == sum(map(len, taken))
