"""The endpoint over a real socket: ports, threads, leaving clients, many connections."""

import asyncio
import socket
import sys
import threading
from contextlib import contextmanager

import httpx2
import openai
import pytest
from endpoint_for_tests import HELLO, KEY, Endpoint, rebuild, until

from artnb.errors import ConfigError
from artnb.serving.server import Server, listen


def our_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "artnb-server"]


@contextmanager
def served(endpoint: Endpoint):
    with Server(endpoint.app) as server:
        yield server


def client_of(server: Server) -> openai.AsyncOpenAI:
    http = httpx2.AsyncClient(timeout=None, limits=httpx2.Limits(max_connections=None))
    return openai.AsyncOpenAI(api_key=KEY, base_url=f"{server.url}/v1", http_client=http, max_retries=0)


def test_start_and_close_may_be_repeated_and_leave_no_thread():
    server = Server(Endpoint("a").app)
    with pytest.raises(ConfigError, match="not running"):
        _ = server.url
    server.close()
    server.start()
    url = server.url
    server.start()
    assert server.url == url and len(our_threads()) == 1
    assert not server.url.endswith(":0")
    server.close()
    server.close()
    assert not our_threads()
    server.start()
    with openai.OpenAI(api_key=KEY, base_url=f"{server.url}/v1") as client:
        assert client.models.list().data[0].id == "base"
    server.close()
    assert not our_threads()


async def test_connections_send_small_answers_at_once():
    """asyncio sets TCP_NODELAY where a socket says that it is TCP; without, each answer waited for 40 ms."""
    found = []

    class Look(asyncio.Protocol):
        def connection_made(self, transport):
            found.append(transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            transport.close()

    listener = listen("127.0.0.1", 0)
    server = await asyncio.get_running_loop().create_server(Look, sock=listener)
    reader, writer = await asyncio.open_connection(*listener.getsockname())
    await reader.read()
    writer.close()
    server.close()
    await server.wait_closed()
    assert found and all(found)


def test_a_port_in_use_says_so_and_what_to_do():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port {port} .* in use.*port=0"):
            Server(Endpoint("a").app, port=port).start()
    assert not our_threads()
    with Server(Endpoint("a").app) as server, pytest.raises(ConfigError, match="in use"):
        Server(Endpoint("a").app, port=int(server.url.rsplit(":", 1)[1])).start()
    with pytest.raises(ConfigError, match="cannot listen"):
        Server(Endpoint("a").app, host="192.0.2.1").start()


def test_a_port_can_be_taken_again_at_once():
    with served(Endpoint("a")) as server:
        port = int(server.url.rsplit(":", 1)[1])
        with openai.OpenAI(api_key=KEY, base_url=f"{server.url}/v1") as client:
            client.models.list()
    with Server(Endpoint("a").app, port=port) as again:
        assert again.url == server_url(port)


def server_url(port: int) -> str:
    return f"http://127.0.0.1:{port}"


def test_stdout_without_a_file_number(monkeypatch):
    class Notebook:
        """A stdout as notebooks have it."""

        def write(self, text: str) -> int:
            return len(text)

        def flush(self) -> None: ...

    monkeypatch.setattr(sys, "stdout", Notebook())
    monkeypatch.setattr(sys, "stderr", Notebook())
    with served(Endpoint("a")) as server, openai.OpenAI(api_key=KEY, base_url=f"{server.url}/v1") as client:
        assert client.chat.completions.create(model="base", messages=HELLO).choices[0].message.content == "a"


async def test_plain_and_streamed_answers_over_http():
    endpoint = Endpoint("한글 👋", chunk_size=1)
    with served(endpoint) as server:
        async with client_of(server) as client:
            plain = (await client.chat.completions.create(model="base", messages=HELLO)).choices[0]
            stream = await client.chat.completions.create(model="base", messages=HELLO, stream=True)
            assert rebuild([c async for c in stream])[0].message == plain.message
        assert plain.message.content == "한글 👋"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_cancels_its_request(stream):
    endpoint = Endpoint("x" * 100_000, chunk_size=1, context_length=200_000, delay=0.001)
    with served(endpoint) as server:
        async with client_of(server) as client:
            asking = asyncio.create_task(client.chat.completions.create(model="base", messages=HELLO, stream=stream))
            await until(lambda: endpoint.engine.stats().generated_tokens > 3)
            assert endpoint.engine.stats().running == 1
            if stream:
                response = await asking
                await anext(response)
                await response.close()
            else:
                asking.cancel()
            await until(lambda: endpoint.engine.stats().running == 0)
    assert endpoint.engine.stats().extra["cancelled"] == 1


async def test_closing_the_engine_ends_requests_over_http():
    endpoint = Endpoint("abc", delay=3600)
    with served(endpoint) as server:
        async with client_of(server) as client:
            asking = asyncio.create_task(client.chat.completions.create(model="base", messages=HELLO))
            await until(lambda: endpoint.engine.stats().running == 1)
            await endpoint.engine.close()
            with pytest.raises(openai.InternalServerError, match="closed"):
                await asyncio.wait_for(asking, 5)


async def test_closing_the_server_ends_requests_that_hang(caplog):
    endpoint = Endpoint("abc", delay=3600)
    server = Server(endpoint.app, grace=0)
    server.start()
    async with client_of(server) as client:
        asking = asyncio.create_task(client.chat.completions.create(model="base", messages=HELLO))
        await until(lambda: endpoint.engine.stats().running == 1)
        await asyncio.wait_for(asyncio.to_thread(server.close), 10)
        with pytest.raises(openai.InternalServerError) as raised:
            await asyncio.wait_for(asking, 5)
    assert raised.value.status_code == 503 and raised.value.code == "endpoint_closed"
    assert "Traceback" not in caplog.text
    assert not our_threads() and endpoint.engine.stats().running == 0


async def test_two_servers_are_independent():
    one, two = Endpoint("one"), Endpoint("two")
    with served(two) as second:
        with served(one) as first:
            assert first.url != second.url
        async with client_of(second) as client:
            answer = await client.chat.completions.create(model="base", messages=HELLO)
    assert answer.choices[0].message.content == "two"


async def test_300_requests_over_http_reach_the_engine_at_once():
    endpoint = Endpoint("answer")
    await endpoint.engine.sleep()
    with served(endpoint) as server:
        async with client_of(server) as client:
            asking = [
                asyncio.create_task(client.chat.completions.create(model="base", messages=HELLO)) for _ in range(300)
            ]
            async with asyncio.timeout(60):
                while endpoint.engine.stats().waiting < 300:
                    await asyncio.sleep(0.01)
            await endpoint.engine.wake()
            answers = await asyncio.gather(*asking)
    assert [a.choices[0].message.content for a in answers] == ["answer"] * 300
