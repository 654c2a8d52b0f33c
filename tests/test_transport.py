"""OpenAI clients on an app in the same process: streaming, leaving early, loops, threads, both httpx libraries."""

import asyncio
import contextvars
import inspect
import json
import threading

import httpx
import httpx2
import openai
import pytest
from endpoint_for_tests import HELLO, KEY, TOOLS, Endpoint, calls, rebuild, until
from openai.resources.chat import AsyncCompletions
from openai.types.chat import ChatCompletionMessage, ChatCompletionMessageFunctionToolCall
from openai.types.chat.chat_completion_message_function_tool_call import Function

from artnb.serving import transport
from artnb.serving.transport import InProcessTransport, client_library, make_async_client, make_client

CALL = ChatCompletionMessageFunctionToolCall(id="1", type="function", function=Function(name="f", arguments="{}"))
NAME = contextvars.ContextVar("name", default="unset")


async def echo_context(scope, receive, send):
    await receive()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]})
    await send({"type": "http.response.body", "body": NAME.get().encode()})


def test_the_library_is_the_one_openai_is_built_on():
    assert client_library() is httpx2
    assert issubclass(openai.DefaultAsyncHttpxClient, client_library().AsyncClient)


async def test_chunks_arrive_before_the_app_has_ended():
    endpoint = Endpoint("abc", chunk_size=1)
    stream = await endpoint.client.chat.completions.create(model="base", messages=HELLO, stream=True)
    first = await anext(stream)
    await endpoint.engine.sleep()
    assert first.choices[0].delta.content == "a"
    assert endpoint.engine.stats().generated_tokens < 4
    await endpoint.engine.wake()
    assert rebuild([first] + [c async for c in stream])[0].message.content == "abc"


async def test_closing_the_response_cancels_in_the_engine():
    endpoint = Endpoint("x" * 1000, chunk_size=1)
    stream = await endpoint.client.chat.completions.create(model="base", messages=HELLO, stream=True)
    await anext(stream)
    await stream.close()
    stats = endpoint.engine.stats()
    assert (stats.running, stats.extra["cancelled"]) == (0, 1)
    await stream.close()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("asleep", [False, True])
async def test_cancelling_the_caller_cancels_in_the_engine(stream, asleep):
    endpoint = Endpoint("abc", delay=3600)
    if asleep:
        await endpoint.engine.sleep()
    task = asyncio.create_task(
        endpoint.client.chat.completions.create(model="base", messages=HELLO, stream=stream, n=2)
    )
    await until(lambda: len(endpoint.engine.requests) == 2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    stats = endpoint.engine.stats()
    assert (stats.running, stats.waiting, stats.extra["cancelled"]) == (0, 0, 2)
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert not endpoint.records


def test_one_client_under_successive_loops_and_from_threads():
    endpoint = Endpoint("hi")
    client = make_async_client(endpoint.app, KEY)

    async def ask() -> str:
        answer = await client.chat.completions.create(model="base", messages=HELLO)
        return answer.choices[0].message.content

    answers = [asyncio.run(ask()) for _ in range(2)]
    threads = [threading.Thread(target=lambda: answers.append(asyncio.run(ask()))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == ["hi"] * 6


def test_the_synchronous_client_answers_and_streams_and_its_thread_ends():
    endpoint = Endpoint("abc", chunk_size=1)
    before = set(threading.enumerate())
    with make_client(endpoint.app, KEY) as client:
        assert client.chat.completions.create(model="base", messages=HELLO).choices[0].message.content == "abc"
        stream = client.chat.completions.create(model="base", messages=HELLO, stream=True)
        assert rebuild(list(stream))[0].message.content == "abc"
        early = client.chat.completions.create(model="base", messages=HELLO, stream=True)
        next(early)
        early.close()
        assert endpoint.engine.stats().running == 0
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(model="nobody", messages=HELLO)
    assert not [t for t in set(threading.enumerate()) - before if t.name.startswith("artnb")]


async def test_the_synchronous_client_works_inside_a_running_loop():
    with make_client(Endpoint("abc").app, KEY) as client:
        assert client.chat.completions.create(model="base", messages=HELLO).choices[0].message.content == "abc"


@pytest.mark.parametrize("library", [httpx, httpx2])
async def test_both_libraries_are_supported(library, monkeypatch):
    monkeypatch.setattr(transport, "client_library", lambda: library)
    endpoint = Endpoint("abc", chunk_size=1)
    http = library.AsyncClient(transport=InProcessTransport(endpoint.app))
    client = openai.AsyncOpenAI(api_key=KEY, base_url="http://artnb.local/v1", http_client=http)
    answer = await client.chat.completions.create(model="base", messages=HELLO)
    assert answer.choices[0].message.content == "abc"
    stream = await client.chat.completions.create(model="base", messages=HELLO, stream=True)
    assert rebuild([c async for c in stream])[0].message.content == "abc"


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"messages": ({"role": "user", "content": "a"}, *HELLO)},
        {"messages": [{"role": "user", "content": ({"type": "text", "text": "a"},)}]},
        {"messages": [ChatCompletionMessage(role="assistant", content="a"), *HELLO]},
        {"messages": [{"role": "assistant", "content": None, "tool_calls": [CALL]}, *HELLO]},
        {"tools": TOOLS, "tool_choice": "auto", "parallel_tool_calls": False, "metadata": {"a": "b"}},
        {"stop": ["a", "b"], "seed": 3, "max_tokens": None, "temperature": 0.5, "top_p": openai.omit, "n": 2},
        {"extra_headers": {"x-a": "b"}, "extra_query": {"q": "1"}, "extra_body": {"top_k": 3}, "timeout": 9.0},
        {"extra_headers": None, "extra_query": None, "extra_body": None, "timeout": None},
        {"extra_body": {"model": "other"}, "stream": False},
        {"stream": True, "stream_options": {"include_usage": True}},
    ],
    ids=lambda options: "-".join(options) or "none",
)
async def test_the_client_sends_what_openais_own_sends(options):
    seen = []

    async def app(scope, receive, send):
        headers = dict(scope["headers"])
        del headers[b"user-agent"]  # the client's class
        seen.append((scope["path"], scope["query_string"], headers, json.loads((await receive())["body"])))
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
        await send({"type": "http.response.body", "body": b"{}"})

    http = client_library().AsyncClient(transport=InProcessTransport(app))
    own = openai.AsyncOpenAI(
        api_key=KEY, base_url=transport.IN_PROCESS_URL, http_client=http, max_retries=0, timeout=None
    )
    ours = make_async_client(app, KEY)
    asked = {"model": "base", "messages": HELLO, **options}
    answers = []
    for client in (own, ours, ours.with_options(max_retries=1)):
        answers.append(type(await client.chat.completions.create(**asked)))
        await client.chat.completions.with_raw_response.create(**asked)
    assert len(set(answers)) == 1
    assert seen[0] == seen[2] == seen[4] and seen[1] == seen[3] == seen[5]
    assert "x-stainless-raw-response" not in {k.decode() for k in seen[0][2]}


@pytest.mark.parametrize("script", ["abc", "", "<think>hm</think>" + calls('{"x": 1}', "{}"), "</think> 👩‍👩‍👧 ha"])
async def test_the_client_reads_what_openais_own_reads(script):
    endpoint = Endpoint(script, chunk_size=2)
    http = client_library().AsyncClient(transport=InProcessTransport(endpoint.app))
    own = openai.AsyncOpenAI(api_key=KEY, base_url=transport.IN_PROCESS_URL, http_client=http)
    asked = {"model": "base", "messages": HELLO, "tools": TOOLS, "n": 2, "max_tokens": 5000, "seed": 1}
    expected = await own.chat.completions.create(**asked)
    ours = await endpoint.client.chat.completions.create(**asked)
    assert ours._request_id is None is expected._request_id
    raw = (await endpoint.client.chat.completions.with_raw_response.create(**asked)).parse()
    for answer in (ours, raw):
        answer.id, answer.created = expected.id, expected.created
        assert type(answer) is type(expected) and answer == expected and repr(answer) == repr(expected)
        assert answer.model_dump() == expected.model_dump() and answer.to_json() == expected.to_json()
        assert answer.model_dump(exclude_unset=True) == expected.model_dump(exclude_unset=True)


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (b"application/json", b'{"id": 5, "choices": [{"finish_reason": "odd", "index": 0}], "more": [1]}'),
        (b"application/json", b'["a"]'),
        (b"application/json", b"null"),
        (b"text/plain", b'{"choices": []}'),
        (b"text/plain", b"sorry"),
        (b"application/json", b"sorry"),
    ],
)
async def test_the_client_reads_any_apps_answers_as_openais_own_does(kind, body):
    async def app(scope, receive, send):
        headers = [(b"content-type", kind), (b"x-request-id", b"7")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    http = client_library().AsyncClient(transport=InProcessTransport(app))
    results = []
    for client in (
        openai.AsyncOpenAI(api_key=KEY, base_url=transport.IN_PROCESS_URL, http_client=http),
        make_async_client(app, KEY),
    ):
        try:
            answer = await client.chat.completions.create(model="base", messages=HELLO)
            results.append((type(answer), answer, getattr(answer, "_request_id", None)))
        except ValueError as error:
            results.append((type(error), str(error), None))
    assert results[0] == results[1]


async def test_the_client_refuses_what_openais_own_refuses():
    create = Endpoint("a").client.chat.completions.create
    for wrong in ({"model": "base"}, {"messages": HELLO}, {"messages": HELLO, "model": "base", "max_token": 2}):
        with pytest.raises(TypeError):
            await create(**wrong)
    assert inspect.signature(create).parameters.keys() >= {"messages", "model", "extra_body"}


async def test_a_tracing_library_sees_the_requests(monkeypatch):
    original, seen = AsyncCompletions.create, []

    async def traced(self, **options):
        seen.append(options["messages"])
        return await original(self, **options)

    monkeypatch.setattr(AsyncCompletions, "create", traced)
    assert (await Endpoint("abc").ask()).message.content == "abc"
    assert seen == [HELLO]


async def test_the_app_runs_in_the_callers_context():
    NAME.set("caller")
    async with client_library().AsyncClient(transport=InProcessTransport(echo_context)) as client:
        assert (await client.get("http://x/")).text == "caller"

    def synchronous() -> str:
        NAME.set("thread")
        with client_library().Client(transport=transport.InProcessSyncTransport(echo_context)) as client:
            return client.get("http://x/").text

    assert await asyncio.to_thread(synchronous) == "thread"


async def test_no_time_limit_unless_the_caller_asks_for_one():
    endpoint = Endpoint("abc")
    assert endpoint.client.timeout is None and endpoint.client.max_retries == 0
    await endpoint.engine.sleep()
    with pytest.raises(openai.APITimeoutError):
        await endpoint.client.chat.completions.create(model="base", messages=HELLO, timeout=0.05)
    assert endpoint.engine.stats().running == endpoint.engine.stats().waiting == 0


async def test_an_app_that_never_looks_for_a_disconnect_is_cancelled_too():
    ended = []

    async def deaf(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"first", "more_body": True})
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    client = client_library().AsyncClient(transport=InProcessTransport(deaf))
    async with client, client.stream("GET", "http://x/") as response:
        assert await anext(response.aiter_bytes()) == b"first"
    assert ended == [True]


async def test_what_the_app_raises_comes_out():
    async def broken(scope, receive, send):
        raise LookupError("before the response")

    async def unfinished(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"half", "more_body": True})
        raise LookupError("in the middle")

    async def silent(scope, receive, send):
        return None

    for app, error in ((broken, LookupError), (unfinished, LookupError), (silent, RuntimeError)):
        async with client_library().AsyncClient(transport=InProcessTransport(app)) as client:
            with pytest.raises(error):
                await client.get("http://x/")
