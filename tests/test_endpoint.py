"""The endpoint over the scripted engine: what OpenAI clients send and get, and what is refused."""

import asyncio
import json

import httpx
import openai
import pytest
from endpoint_for_tests import HELLO, KEY, TOOLS, Endpoint, calls, rebuild, until
from prometheus_client.parser import text_string_to_metric_families

from artnb.engines.scripted import ScriptedAnswer
from artnb.serving.transport import make_async_client

NASTY = [
    "",
    "plain",
    "emoji 👩‍👩‍👧 and 한글",
    "</think>",
    '{"nested": {"json": "}"}}',
    "  spaces  ",
    "<|im_start|>",
    "a\n\nb",
]


def http(endpoint: Endpoint, key: str | None = KEY) -> httpx.AsyncClient:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    return httpx.AsyncClient(transport=httpx.ASGITransport(endpoint.app), base_url="http://test", headers=headers)


async def refused(endpoint: Endpoint, **body) -> dict:
    """The error of a body that is refused with 400."""
    async with http(endpoint) as client:
        body = {"model": "base", "messages": HELLO, **body}
        response = await client.post("/v1/chat/completions", json=body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"
    assert not endpoint.engine.requests
    return error


# What a choice carries ---------------------------------------------------------------------------


@pytest.mark.parametrize("text", NASTY)
async def test_a_choice_always_carries_ids_and_logprobs(text):
    endpoint = Endpoint(text, chunk_size=2)
    answer = await endpoint.client.chat.completions.create(model="base", messages=HELLO, temperature=0.7)
    choice = answer.choices[0]
    sampled = [*endpoint.tokenizer.encode(text), endpoint.tokenizer.eos_token_id]
    extra = choice.model_extra
    assert extra["token_ids"] == sampled
    assert extra["prompt_token_ids"] == endpoint.engine.requests[0].prompt_ids
    assert endpoint.tokenizer.decode(extra["prompt_token_ids"]).endswith("hello<|im_end|>\n<|im_start|>assistant\n")
    assert (extra["temperature"], extra["policy"], answer.model) == (0.7, "base", "base")
    entries = choice.logprobs.content
    assert [e.logprob for e in entries] == [-0.5] * len(sampled)
    assert bytes(b for e in entries[:-1] for b in e.bytes).decode() == text
    assert all(e.top_logprobs == [] for e in entries)
    assert choice.finish_reason == "stop"
    assert answer.usage.completion_tokens == len(sampled)
    assert answer.usage.prompt_tokens == len(extra["prompt_token_ids"])
    if "<" not in text:
        assert choice.message.content == text.rstrip() or choice.message.content == text


@pytest.mark.parametrize(
    "script", [*NASTY, "<think>why</think>so", calls("{}"), "go " + calls('{"a": {"b": "}"}}', "{}")]
)
@pytest.mark.parametrize("chunk_size", [1, 7])
async def test_streamed_and_plain_answers_are_the_same(script, chunk_size):
    endpoint = Endpoint(script, chunk_size=chunk_size)
    plain = await endpoint.ask(tools=TOOLS, n=2)
    chunks = await endpoint.stream(tools=TOOLS, n=2)
    assert len({chunk.id for chunk in chunks}) == 1
    first, second = rebuild(chunks)
    assert first.model_dump(exclude_none=True) == plain.model_dump(exclude_none=True)
    assert second.index == 1 and second.message == first.message
    whole, streamed = endpoint.records[:2], sorted(endpoint.records[2:], key=lambda r: r.choice.index)
    assert [r.choice for r in whole] == [r.choice for r in streamed]
    assert whole[0].choice.model_dump(exclude_none=True) == plain.model_dump(exclude_none=True)


async def test_tool_calls_and_reasoning_are_parsed():
    endpoint = Endpoint("<think>hm</think>" + calls('{"x": 1}', "{}"))
    choice = await endpoint.ask(tools=TOOLS)
    assert choice.finish_reason == "tool_calls"
    assert [(c.function.name, json.loads(c.function.arguments)) for c in choice.message.tool_calls] == [
        ("f", {"x": 1}),
        ("f", {}),
    ]
    assert choice.message.content is None and choice.message.reasoning_content == "hm"
    assert len({c.id for c in choice.message.tool_calls}) == 2
    one = await endpoint.ask(tools=TOOLS, parallel_tool_calls=False)
    assert [json.loads(c.function.arguments) for c in one.message.tool_calls] == [{"x": 1}]
    assert one.token_ids == choice.token_ids
    streamed = rebuild(await endpoint.stream(tools=TOOLS, parallel_tool_calls=False))[0]
    assert streamed.message.tool_calls == one.message.tool_calls


async def test_tool_choice_none_offers_no_tools():
    endpoint = Endpoint(calls("{}"))
    choice = await endpoint.ask(tools=TOOLS, tool_choice="none")
    assert choice.message.tool_calls is None and choice.finish_reason == "stop"
    assert "# Tools" not in endpoint.engine.requests[0].prompt_text


async def test_a_call_in_a_cut_answer_still_counts_as_cut():
    text = calls("{}")
    choice = await Endpoint(text + "more").ask(tools=TOOLS, max_tokens=len(Endpoint("").tokenizer.encode(text)))
    assert choice.message.tool_calls and choice.finish_reason == "length"


async def test_openai_stream_helper_works():
    endpoint = Endpoint("<think>hm</think>hi " + calls("{}"), chunk_size=3)
    plain = await endpoint.ask(tools=TOOLS)
    async with endpoint.client.chat.completions.stream(model="base", messages=HELLO, tools=TOOLS) as stream:
        final = (await stream.get_final_completion()).choices[0]
    assert final.message.content == plain.message.content
    assert final.message.tool_calls[0].id == plain.message.tool_calls[0].id
    assert [e.logprob for e in final.logprobs.content] == [e.logprob for e in plain.logprobs.content]


async def test_stream_usage_and_end():
    endpoint = Endpoint("abc")
    chunks = await endpoint.stream(stream_options={"include_usage": True})
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 4
    assert "prompt_token_ids" in chunks[0].choices[0].model_extra
    assert all("prompt_token_ids" not in c.choices[0].model_extra for c in chunks[1:-1])
    async with http(endpoint) as client:
        body = {"model": "base", "messages": HELLO, "stream": True}
        response = await client.post("/v1/chat/completions", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.text.endswith("data: [DONE]\n\n") and response.text.count("[DONE]") == 1


async def test_logprobs_that_json_cannot_say():
    endpoint = Endpoint(lambda r: ScriptedAnswer([65, 66], [float("-inf"), -1.25]))
    assert [e.logprob for e in (await endpoint.ask()).logprobs.content[:2]] == [-9999.0, -1.25]
    endpoint = Endpoint(lambda r: ScriptedAnswer([65], [float("nan")]))
    with pytest.raises(openai.InternalServerError, match="NaN"):
        await endpoint.ask()


# What is honoured --------------------------------------------------------------------------------


async def test_the_engine_sees_what_was_asked_for():
    endpoint = Endpoint("abcdefghij")
    await endpoint.ask(
        temperature=0.3,
        top_p=0.9,
        seed=5,
        n=3,
        max_completion_tokens=4,
        extra_body={"top_k": 7, "min_p": 0.1, "stop_token_ids": [3], "ignore_eos": True},
    )
    seen = [r.sampling for r in endpoint.engine.requests]
    assert sorted(s.seed for s in seen) == [5, 6, 7]
    assert {(s.temperature, s.top_p, s.top_k, s.min_p, s.max_tokens, s.stop_token_ids, s.ignore_eos) for s in seen} == {
        (0.3, 0.9, 7, 0.1, 4, (3,), True)
    }
    await endpoint.ask(extra_body={"chat_template_kwargs": {"enable_thinking": False}})
    assert endpoint.engine.requests[-1].prompt_text.endswith("<think>\n\n</think>\n\n")


async def test_the_engine_need_not_hand_over_parts_of_an_answer_that_is_only_wanted_whole():
    endpoint = Endpoint("abc")
    await endpoint.ask(n=2)
    await endpoint.ask(stop="x")
    await endpoint.stream()
    assert [r.sampling.stream for r in endpoint.engine.requests] == [False, False, True, True]


async def test_max_tokens_defaults_to_the_rest_of_the_context_and_is_clamped_to_it():
    endpoint = Endpoint(lambda r: "x" * 1000, context_length=100)
    free = await endpoint.ask()
    room = 100 - len(free.prompt_token_ids)
    assert len(free.token_ids) == room and free.finish_reason == "length"
    assert "max_tokens_clamped" not in free.model_extra
    clamped = await endpoint.ask(max_tokens=4096)
    assert len(clamped.token_ids) == room and clamped.max_tokens_clamped == room
    assert (await endpoint.stream(max_tokens=4096))[0].choices[0].max_tokens_clamped == room
    within = await endpoint.ask(max_tokens=5)
    assert (len(within.token_ids), within.finish_reason) == (5, "length")
    assert "max_tokens_clamped" not in within.model_extra


async def test_a_prompt_that_fills_the_context_is_a_400():
    endpoint = Endpoint("a", context_length=30)
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as raised:
            await endpoint.ask([{"role": "user", "content": "x" * 100}], stream=stream)
        assert raised.value.code == "context_length_exceeded"


@pytest.mark.parametrize("stop", ["STOP", ["never", "STOP", "3", "4", "5"]])
async def test_a_stop_string_cancels_in_the_engine_and_keeps_the_sampled_ids(stop):
    endpoint = Endpoint("one two STOP " + "x" * 1000, chunk_size=5)
    choice = await endpoint.ask(stop=stop)
    assert choice.message.content == "one two " and choice.finish_reason == "stop"
    assert endpoint.tokenizer.decode(choice.token_ids) == "one two STOP xx"  # whole chunks of five
    assert len(choice.logprobs.content) == len(choice.token_ids)
    assert endpoint.engine.stats().extra["cancelled"] == 1
    streamed = rebuild(await endpoint.stream(stop=stop))[0]
    assert streamed.message == choice.message and streamed.token_ids == choice.token_ids
    assert endpoint.engine.stats().running == 0


async def test_harmless_fields_are_accepted():
    choice = await Endpoint("a").ask(
        user="me",
        store=False,
        metadata={"a": "b"},
        service_tier="auto",
        logprobs=True,
        top_logprobs=0,
        frequency_penalty=0,
        presence_penalty=0.0,
        response_format={"type": "text"},
        logit_bias={},
        tool_choice="auto",
        parallel_tool_calls=True,
        seed=None,
    )
    assert choice.message.content == "a"


# What is refused ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        {"logit_bias": {"5": 1}},
        {"frequency_penalty": 0.5},
        {"presence_penalty": -1},
        {"response_format": {"type": "json_object"}},
        {"audio": {"voice": "x"}},
        {"functions": [{"name": "f"}]},
        {"function_call": "auto"},
        {"top_logprobs": 3},
        {"reasoning_effort": "low"},
        {"n": 0},
        {"n": 10**9},
        {"n": "2"},
        {"n": True},
        {"temperature": -1},
        {"temperature": "hot"},
        {"temperature": 10**400},
        {"top_p": 0},
        {"top_p": 1.5},
        {"top_k": 1.5},
        {"min_p": 2},
        {"max_tokens": 0},
        {"max_completion_tokens": -5},
        {"seed": "x"},
        {"seed": 2**70},
        {"stop": [""]},
        {"stop": 5},
        {"stop": ["a"] * 65},
        {"stop_token_ids": ["a"]},
        {"stream": "yes"},
        {"stream_options": {"include_usage": True}},
        {"tools": [{"type": "function"}]},
        {"tools": {"name": "f"}},
        {"messages": []},
        {"messages": "hello"},
        {"model": 5},
        {"chat_template_kwargs": {"tools": []}},
        {"chat_template_kwargs": "x"},
        {"parallel_tool_calls": "no"},
    ],
    ids=str,
)
async def test_what_cannot_be_honoured_is_a_400_that_names_it(body):
    error = await refused(Endpoint("a"), **body)
    name = next(iter(body))
    assert error["param"].split("[")[0] == name and name in error["message"]


async def test_unknown_fields_name_the_nearest_known_one():
    error = await refused(Endpoint("a"), max_token=5)
    assert error["param"] == "max_token" and "'max_tokens'" in error["message"]
    error = await refused(Endpoint("a"), messages=[{"role": "user", "content": "a"}, {"content": "b"}])
    assert error["param"] == "messages[1].role"
    error = await refused(Endpoint("a"), max_tokens=5, max_completion_tokens=6)
    assert "max_completion_tokens" in error["message"]


async def test_messages_that_cannot_be_rendered_name_the_message():
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    assert (await refused(Endpoint("a"), messages=image))["param"] == "messages[0]"


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b'"text"', b"\xff\xfe", b"[" * 100_000, b'{"messages": [}', b'{"model": "base"}'],
)
async def test_a_malformed_body_is_a_400(body):
    async with http(Endpoint("a")) as client:
        response = await client.post("/v1/chat/completions", content=body)
    assert response.status_code == 400 and response.json()["error"]["message"]


async def test_half_a_surrogate_pair_does_not_break_the_server():
    async with http(Endpoint("a")) as client:
        body = b'{"model": "base", "messages": [{"role": "user", "content": "\\ud83d"}]}'
        response = await client.post("/v1/chat/completions", content=body)
    assert response.status_code == 400 and response.json()["error"]["param"].startswith("messages")


@pytest.mark.parametrize("key", [None, "wrong", "", "secre", KEY + "x", "비밀"])
async def test_every_path_but_health_needs_the_key(key):
    endpoint = Endpoint("a")
    header = {} if key is None else {"authorization": f"Bearer {key}".encode()}
    async with http(endpoint, None) as client:
        for method, path in (
            ("POST", "/v1/chat/completions"),
            ("GET", "/v1/models"),
            ("GET", "/metrics"),
            ("GET", "/x"),
        ):
            response = await client.request(method, path, headers=header)
            assert response.status_code == 401 and response.json()["error"]["code"] == "invalid_api_key"
        assert (await client.get("/health")).status_code == 200
    with pytest.raises(openai.AuthenticationError):
        await make_async_client(endpoint.app, "wrong").models.list()


async def test_unknown_paths_and_methods_answer_in_the_same_shape():
    async with http(Endpoint("a")) as client:
        for response in (await client.get("/v1/nothing"), await client.get("/v1/chat/completions")):
            assert response.status_code in (404, 405) and response.json()["error"]["message"]


# Names, adapters, states -------------------------------------------------------------------------


async def test_names_choose_the_adapter():
    endpoint = Endpoint(lambda r: str(r.adapter))
    await endpoint.swap("agent", 2)
    endpoint.resolver.set_latest("agent", 1)
    await endpoint.swap("agent", 3)
    assert [m.id for m in (await endpoint.client.models.list()).data] == [
        "base",
        "agent",
        "agent@1",
        "agent@2",
        "agent@3",
    ]
    assert (await endpoint.client.models.retrieve("agent@2")).id == "agent@2"
    for name, content, policy in (
        ("agent", "agent@3", "agent@3"),
        ("agent@3", "agent@3", "agent@3"),
        ("base", "None", "base"),
    ):
        answer = await endpoint.client.chat.completions.create(model=name, messages=HELLO)
        assert (answer.choices[0].message.content, answer.choices[0].policy, answer.model) == (content, policy, policy)
    for unknown in ("agnt", "agent@9", "agent@", "agent@x", "@3", ""):
        with pytest.raises(openai.NotFoundError) as raised:
            await endpoint.ask(model=unknown)
        assert "agent@3" in str(raised.value) and raised.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        await endpoint.client.models.retrieve("agnt")


async def test_swapping_under_load_fails_no_request_and_each_says_its_step():
    endpoint = Endpoint(lambda r: f"{r.adapter}, " + "x" * 50, chunk_size=4)
    await endpoint.swap("agent", 0)

    async def swaps() -> None:
        for step in range(1, 6):
            await until(lambda step=step: endpoint.engine.stats().requests >= 20 * step)
            await endpoint.swap("agent", step)

    async def one() -> tuple[str, str]:
        choice = await endpoint.ask(model="agent")
        return choice.message.content.split(",")[0], choice.policy

    swapping = asyncio.create_task(swaps())
    answers = [await asyncio.gather(*(one() for _ in range(20))) for _ in range(6)]
    await swapping
    flat = [answer for batch in answers for answer in batch]
    assert len(flat) == 120 and all(content == policy for content, policy in flat)
    assert len({policy for _, policy in flat}) >= 5


async def test_a_running_request_keeps_its_adapter():
    endpoint = Endpoint(lambda r: f"{r.adapter}", chunk_size=1)
    await endpoint.swap("agent", 1)
    stream = await endpoint.client.chat.completions.create(model="agent", messages=HELLO, stream=True)
    first = await anext(stream)
    await endpoint.swap("agent", 2)
    assert rebuild([first] + [c async for c in stream])[0].message.content == "agent@1"
    assert (await endpoint.ask(model="agent")).policy == "agent@2"


async def test_a_name_is_looked_up_again_when_its_adapter_went_meanwhile():
    endpoint = Endpoint(lambda r: f"{r.adapter}")
    await endpoint.swap("agent", 1)
    resolve, found = endpoint.resolver.resolve, []

    async def slow(model: str):
        found.append(await resolve(model))
        if len(found) == 1:
            await endpoint.swap("agent", 2)
        return found[-1]

    endpoint.resolver.resolve = slow
    choice = await endpoint.ask(model="agent")
    assert choice.message.content == choice.policy == "agent@2" and len(found) == 2


async def test_two_steps_are_served_at_once():
    endpoint = Endpoint(lambda r: f"{r.adapter}")
    for step in (1, 2):
        from artnb.engines.base import AdapterRef

        await endpoint.engine.load_adapter(AdapterRef("agent", step), "unused")
        endpoint.resolver.set_latest("agent", step)
    names = ["agent@1", "agent@2"] * 10
    assert [c.message.content for c in await asyncio.gather(*(endpoint.ask(model=n) for n in names))] == names


async def test_a_request_during_sleep_waits_and_is_answered():
    endpoint = Endpoint("awake")
    await endpoint.engine.sleep()
    async with http(endpoint) as client:
        health = await client.get("/health")
        assert health.status_code == 200 and health.json()["phase"] == "asleep"
    waiting = [asyncio.create_task(endpoint.ask()) for _ in range(5)]
    await until(lambda: endpoint.engine.stats().waiting == 5)
    await endpoint.engine.wake()
    assert [(await w).message.content for w in waiting] == ["awake"] * 5


@pytest.mark.parametrize("stream", [False, True])
async def test_closing_the_engine_is_an_error_not_a_hang(stream):
    endpoint = Endpoint("abcdef", chunk_size=1, delay=0.001)
    ask = endpoint.stream if stream else endpoint.ask
    task = asyncio.create_task(ask())
    await until(lambda: endpoint.engine.stats().generated_tokens >= 2)
    await endpoint.engine.close()
    with pytest.raises(openai.APIError, match="closed"):
        await asyncio.wait_for(task, 5)
    with pytest.raises(openai.InternalServerError) as raised:
        await ask()
    assert raised.value.status_code == 503 and raised.value.code == "engine_closed"
    async with http(endpoint) as client:
        health = await client.get("/health")
    assert health.status_code == 503 and health.json()["phase"] == "closed"
    assert not endpoint.records


async def test_what_a_script_raises_is_a_500_with_its_message(caplog):
    def script(request):
        raise LookupError("no such scene")

    with pytest.raises(openai.InternalServerError, match="LookupError: no such scene"):
        await Endpoint(script).ask()
    assert "a chat completion failed" in caplog.text
    with pytest.raises(openai.InternalServerError, match="no such scene"):
        await Endpoint(script).ask(n=3)
    with pytest.raises(openai.InternalServerError, match="no such scene"):
        await Endpoint(script).stream(n=3)


async def test_300_requests_reach_the_engine_at_once():
    endpoint = Endpoint("answer", delay=0.02)
    await endpoint.engine.sleep()
    tasks = [asyncio.create_task(endpoint.ask()) for _ in range(300)]
    await until(lambda: endpoint.engine.stats().waiting == 300)
    await endpoint.engine.wake()
    assert len(await asyncio.gather(*tasks)) == 300
    assert endpoint.engine.stats().extra["peak_running"] == 300


async def test_an_engine_that_serves_eight_answers_all_of_many():
    places = asyncio.Semaphore(8)

    async def script(request):
        async with places:
            await asyncio.sleep(0.001)
        return "served"

    endpoint = Endpoint(script)
    answers = await asyncio.gather(*(endpoint.ask() for _ in range(200)))
    assert [a.message.content for a in answers] == ["served"] * 200


async def test_metrics_count():
    endpoint = Endpoint("abc")
    await endpoint.ask()
    await endpoint.stream()
    with pytest.raises(openai.BadRequestError):
        await endpoint.ask(n=0)
    async with http(endpoint) as client:
        text = (await client.get("/metrics")).text
    values = {
        (s.name, *s.labels.values()): s.value for family in text_string_to_metric_families(text) for s in family.samples
    }
    assert values["artnb_requests_total", "200"] == 2 and values["artnb_requests_total", "400"] == 1
    assert values["artnb_generated_tokens_total",] == 8
    assert values["artnb_requests_in_flight",] == 0 and values["artnb_request_seconds_count",] == 3
    Endpoint("b")  # a second app in the process has a registry of its own
