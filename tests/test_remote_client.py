"""RemoteBackend against servers that refuse, fail, cut off and lie: it says what happened and what to do."""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from remote_server import KEY, LORA, Line, client

import artnb as art
from artnb.capture import remove_server
from artnb.errors import ArtnbError, CheckpointError, ServiceError
from artnb.remote.connection import Connection
from artnb.serving.server import Server

STATE = {"project": "tests", "name": "agent", "base_model": "b", "step": 0, "checkpoints": [0], "context_tokens": 64}
GROUPS = [art.TrajectoryGroup([art.Trajectory(reward=1.0), art.Trajectory(reward=0.0)])]
RESULT = {"step": 1, "metrics": {"loss": 0.5}, "reasons": {}, "notes": [], "trained": True, "trainer_logprobs": []}
Answer = tuple[int, dict[str, str], bytes]


def said(status: int, body: Any, **headers: str) -> Answer:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return status, {"content-type": "application/json", **{k.replace("_", "-"): v for k, v in headers.items()}}, data


def error(status: int, text: str, code: str | None = None, **headers: str) -> Answer:
    return said(status, {"error": {"message": text, "type": "x", "param": None, "code": code}}, **headers)


def ended(**outcome: Any) -> Answer:
    """The events of a job that has ended."""
    data = json.dumps({"step": 1, "result": None, "error": None, **outcome})
    kind = "failed" if outcome.get("error") else "done"
    return said(200, f"id: 1\nevent: {kind}\ndata: {data}\n\n".encode(), content_type="text/event-stream")


class Scripted:
    """A server that answers as the test says; without instructions, as a good one does to `register` and `train`."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []
        self.say: Callable[[str, str], Answer | None] = lambda method, path: None
        self.registered = False
        self.held = 0  # so many requests are answered together
        self._release: asyncio.Event | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        method, path = scope["method"], scope["path"]
        self.seen.append((method, path))
        self.range = dict(scope["headers"]).get(b"range")
        assert dict(scope["headers"])[b"authorization"] == f"Bearer {KEY}".encode()
        if self.held:
            self._release = self._release or asyncio.Event()
            self.held -= 1
            if not self.held:
                self._release.set()
            await self._release.wait()
        status, headers, body = self.say(method, path) or self._usual(method, path)
        declared = headers.pop("cut", None)
        sent = [(k.encode(), v.encode()) for k, v in headers.items()]
        if declared:
            sent.append((b"content-length", declared.encode()))
        await send({"type": "http.response.start", "status": status, "headers": sent})
        await send({"type": "http.response.body", "body": body, "more_body": bool(declared)})
        if declared:
            raise ConnectionError("the test cuts the line here")

    def _usual(self, method: str, path: str) -> Answer:
        if method == "PUT":
            return said(201, {"state": "running"})
        if path.endswith("/events"):
            result = RESULT if self.registered else STATE
            self.registered = True
            return ended(result=result)
        if path.endswith("/server"):
            return said(200, {"max_body_bytes": 1 << 20})
        return said(200, {**STATE, "metrics": [], "trajectories": []})


@asynccontextmanager
async def scripted(tmp_path: Path, *, registers: bool = True) -> AsyncIterator[tuple[Any, art.TrainableModel, Any]]:
    script = Scripted()
    with Server(script) as server:
        remove_server("127.0.0.1", int(server.url.rpartition(":")[2]))  # it is none of this process's, for capture
        model, backend = client(server.url, Path("b"), tmp_path, reconnect_seconds=0.2)
        async with backend:
            if registers:
                await model.register(backend)
            yield script, model, backend


async def test_the_script_is_understood(tmp_path: Path) -> None:
    async with scripted(tmp_path) as (script, model, backend):
        assert (await model.train(GROUPS)).metrics == {"loss": 0.5}
        assert backend.context_tokens(model) == 64 and list(model.history()["train/loss"]) == [0.5]
        assert [method for method, _ in script.seen] == ["GET", "PUT", "GET", "GET", "PUT", "GET"]


@pytest.mark.parametrize(
    ("answer", "status", "words"),
    [
        (
            error(401, "wrong or missing API key", "invalid_api_key"),
            401,
            r"401: wrong or missing API key. Give RemoteBa",
        ),
        (error(403, "not from here"), 403, "403: not from here"),
        (error(404, "no such path"), 404, r"404: no such path. Is the url the one that `artnb serve` printed\?"),
        (said(404, b"<html>nginx</html>", content_type="text/html"), 404, "404: <html>nginx</html>. Is the url"),
        (error(409, "agent is at step 5 here", "stale_step"), 409, "409: agent is at step 5 here"),
        (error(413, "the body is larger than 64 MiB; send fewer", "body_too_large"), 413, "413: .* send fewer"),
        (error(422, "body.config: wrong"), 422, "422: body.config: wrong"),
        (error(429, "slow down"), 429, r"429: slow down\. It was tried for 0.2 s"),
        (error(500, "the server failed"), 500, r"500: the server failed\. Its log has the traceback; the model is at"),
        (error(502, "bad gateway"), 502, r"502: bad gateway\. It was tried for 0.2 s"),
        (said(302, b"", location="http://elsewhere/"), 302, "302. Give the url that it leads to; redirects are not"),
        (said(200, b"<html>hello</html>", content_type="text/html"), None, "answered no JSON .* is it an artnb server"),
        (error(400, f"you sent {KEY}"), 400, r"400: you sent \*\*\*"),
    ],
)
async def test_statuses_are_named_with_what_to_do(
    tmp_path: Path, answer: Answer, status: int | None, words: str
) -> None:
    async with scripted(tmp_path) as (script, model, _):
        script.say = lambda method, path: answer if method == "PUT" else None
        with pytest.raises(ServiceError, match=words) as told:
            await model.train(GROUPS)
        assert told.value.status == status and str(told.value).startswith("train of agent: http://127.0.0.1:")
        assert KEY not in str(told.value)
        script.say = lambda method, path: None
        assert (await model.train(GROUPS)).step == 1, "and the next call works"


async def test_statuses_while_registering(tmp_path: Path) -> None:
    async with scripted(tmp_path, registers=False) as (script, model, backend):
        script.say = lambda method, path: error(401, "wrong or missing API key", "invalid_api_key")
        with pytest.raises(ServiceError, match=r"looking at \S+ \S+ answered 401"):
            await model.register(backend)
        script.say = lambda method, path: None
        await model.register(backend)


async def test_a_step_that_is_too_large_is_not_sent(tmp_path: Path) -> None:
    async with scripted(tmp_path) as (script, model, _):
        text = random.Random(0).randbytes(1 << 20).hex()
        large = [art.TrajectoryGroup([art.Trajectory(reward=1.0, logs=[text])])]
        sent = len(script.seen)
        with pytest.raises(ServiceError, match=r"packed it takes \d\.\d MiB, and \S+ takes 1: train on fewer") as told:
            await model.train(large)
        assert told.value.status == 413 and len(script.seen) == sent
        assert (await model.train(GROUPS)).step == 1


async def test_statuses_that_pass_are_waited_for(tmp_path: Path) -> None:
    async with scripted(tmp_path) as (script, model, backend):
        backend._connection._reconnect_s = 60.0
        for first in (
            [error(429, "later", retry_after="0"), error(503, "starting"), error(502, "x")],
            [said(200, b"{", cut="100"), said(200, b"", cut="5")],
        ):
            for hit in ("PUT", "GET"):
                left = list(first)
                script.say = lambda method, path, hit=hit, left=left: left.pop(0) if left and method == hit else None
                assert (await model.train(GROUPS)).step == 1
                assert not left


async def test_a_stream_of_events_that_is_cut_torn_or_repeated(tmp_path: Path) -> None:
    def progress(number: int, done: int) -> bytes:
        data = {"phase": "train", "desc": "d", "unit": "pack", "done": done, "total": 3, "closed": False, "shown": {}}
        return f"id: {number}\nevent: progress\ndata: {json.dumps(data)}\n\n".encode()

    asked: list[str] = []
    events = {"content_type": "text/event-stream"}
    streams = [
        said(200, b": still running\n\n" + progress(1, 1) + progress(2, 2)[:20], **events, cut="10000"),
        said(200, progress(2, 2), **events),  # it ends, but not with the job
        said(200, b"", **events),
        said(200, progress(3, 3)[:-2], **events),
    ]

    async with scripted(tmp_path) as (script, model, backend):
        seen: list[Any] = []
        stop = art.events.EVENTS.subscribe(lambda event: seen.append(event.data.get("done")))
        backend._connection._reconnect_s = 60.0

        def say(method: str, path: str) -> Answer | None:
            return streams.pop(0) if path.endswith("/events") and streams else None

        script.say = say
        assert (await model.train(GROUPS)).step == 1
        stop()
        assert [number for number in seen if number] == [1, 2, 2], "the last is the bar's end"
        asked = [path for method, path in script.seen if path.endswith("/events")]
        assert len(asked) == 6 and len(set(asked[1:])) == 1


@pytest.mark.parametrize(
    "body",
    [
        b"id: x\nevent: done\ndata: {}\n\n", b"id: 1\nevent: done\ndata: {\n\n", b"id: 1\nevent: done\ndata: []\n\n",
        b'id: 1\nevent: done\ndata: {"step": 1}\n\n', b'id: 1\nevent: done\ndata: {"step": 1, "result": {}}\n\n',
        b'id: 1\nevent: failed\ndata: {"step": 1, "error": {}}\n\n', b'id: 1\nevent: failed\ndata: {"step": 1}\n\n',
    ],
)  # fmt: skip
async def test_events_that_are_none_of_ours(tmp_path: Path, body: bytes) -> None:
    async with scripted(tmp_path) as (script, model, _):
        script.say = lambda method, path: said(200, body) if path.endswith("/events") else None
        with pytest.raises(ServiceError):
            await model.train(GROUPS)
        assert list(model.history()["step"]) == []


async def test_states_that_are_none_of_ours(tmp_path: Path) -> None:
    async with scripted(tmp_path, registers=False) as (script, model, backend):
        for state in ({}, {"step": "x", "context_tokens": 1}, {"step": None, "context_tokens": 1}):
            script.say = lambda method, path, state=state: ended(result=state) if path.endswith("/events") else None
            with pytest.raises(ServiceError, match="install the same version of artnb on both sides"):
                await model.register(backend)
        script.say = lambda method, path: said(200, {"metrics": [{}]}) if path.endswith("/history") else None
        with pytest.raises(ServiceError, match="install the same version"):
            await model.register(backend)


async def test_errors_of_a_job_are_the_same_here() -> None:
    from artnb.errors import NonFiniteGradientError, RequestError, TrainError
    from artnb.remote.wire import error_json, read_error

    for raised in (
        TrainError("no memory left", phase="forward pass", memory="1 of 2 GB"),
        NonFiniteGradientError("too many", phase="update"),
        RequestError("wrong", param="messages"),
        CheckpointError("no space left"),
    ):
        back = read_error(json.loads(json.dumps(error_json(raised))), "http://x")
        assert type(back) is type(raised) and str(back) == f"{raised} (at http://x)"
        assert {k: v for k, v in vars(raised).items() if v} == {k: v for k, v in vars(back).items() if v}
    for other in (KeyError("x"), {"type": "SystemExit", "message": "x"}, {"type": "nearest"}, {"type": 3}):
        data = other if isinstance(other, dict) else error_json(other)
        back = read_error(data, "http://x")
        assert type(back) is ServiceError and "log has the traceback" in str(back)


# Chat ----------------------------------------------------------------------------------------------------


async def ask(model: art.TrainableModel, **options: Any) -> Any:
    return await model.openai_client().chat.completions.create(
        model="agent", messages=[{"role": "user", "content": "hi"}], **options
    )


async def test_chat_passes_errors_on_and_waits_for_what_passes(tmp_path: Path) -> None:
    async with scripted(tmp_path) as (script, model, backend):
        backend._connection._reconnect_s = 60.0
        for answer, kind in [
            (error(400, "logit_bias is not supported"), openai.BadRequestError),
            (error(401, "wrong or missing API key"), openai.AuthenticationError),
            (error(404, "no model is served as 'agent'"), openai.NotFoundError),
            (error(500, "engine_error"), openai.InternalServerError),
        ]:
            script.say = lambda method, path, answer=answer: answer if path.startswith("/v1") else None
            with pytest.raises(kind):
                await ask(model)
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "ok"}}
        whole = said(200, {"id": "1", "object": "chat.completion", "created": 1, "model": "agent", "choices": [choice]})
        left = [error(503, "starting"), error(429, "later", retry_after="0"), said(200, b'{"id"', cut="100"), whole]
        script.say = lambda method, path: left.pop(0) if path.startswith("/v1") else None
        async with art.trajectory() as t:
            assert (await ask(model)).choices[0].message.content == "ok"
        assert len(t.choices()) == 1, "an answer that was cut off is none"


async def test_a_streamed_answer_that_is_cut_fails_and_is_not_captured(tmp_path: Path) -> None:
    event = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "agent"}
    part = {"index": 0, "delta": {"content": "a"}, "finish_reason": None, "token_ids": [1], "policy": "agent@0"}
    data = f"data: {json.dumps({**event, 'choices': [part]})}\n\n".encode()
    async with scripted(tmp_path) as (script, model, _):
        script.say = lambda method, path: (
            said(200, data, content_type="text/event-stream", cut="1000") if path.startswith("/v1") else None
        )
        with pytest.raises(openai.APIConnectionError):
            async with art.trajectory() as t:
                stream = await ask(model, stream=True)
                got = [chunk.choices[0].delta.content async for chunk in stream]
                raise AssertionError(got)
        assert t.choices() == [] and t.stop_reason is art.StopReason.FAILED


async def test_150_requests_reach_the_server_at_once(tmp_path: Path) -> None:
    """user-reports #10: a pool of 100 would hold the others back, and nobody is answered before all have asked."""
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "ok"}}
    whole = said(200, {"id": "1", "object": "chat.completion", "created": 1, "model": "agent", "choices": [choice]})
    async with scripted(tmp_path) as (script, model, _):
        script.say = lambda method, path: whole if path.startswith("/v1") else None
        script.held = 150
        answers = await asyncio.gather(*(ask(model) for _ in range(150)))
        assert {answer.choices[0].message.content for answer in answers} == {"ok"} and script.held == 0


# Reaching it ---------------------------------------------------------------------------------------------


async def test_a_server_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    for url in (f"http://127.0.0.1:{port}", "http://no-such-host.invalid:1"):
        model, backend = client(url, Path("b"), tmp_path, reconnect_seconds=1.5, verbose=True)
        async with backend:
            with pytest.raises(ServiceError, match=r"looking at \S+ \S+ cannot be reached .*Check the url") as told:
                await model.register(backend)
            assert told.value.status is None
        assert "cannot be reached" in capsys.readouterr().out


async def test_tls_is_not_spoken_there(tmp_path: Path) -> None:
    async with scripted(tmp_path) as (_, _, backend):
        secure, other = client(backend._connection.url.replace("http", "https"), Path("b"), tmp_path / "s")
        async with other:
            with pytest.raises(ServiceError, match="the url begins with http://, not https://"):
                await secure.register(other)


def test_a_first_contact_is_not_tried_for_long_and_a_proxy_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    from artnb.remote.connection import FIRST_CONTACT_S, _proxy

    connection = Connection("http://127.0.0.1:1/gpu/", KEY)
    assert connection.url == "http://127.0.0.1:1/gpu" and connection.limit_s == FIRST_CONTACT_S
    connection.reached = True
    assert connection.limit_s == 600.0
    monkeypatch.setenv("https_proxy", "http://proxy:3128")
    monkeypatch.setenv("no_proxy", "inside.example")
    assert _proxy("https://gpu.example", False) == "http://proxy:3128"
    assert _proxy("https://gpu.example", True) is None and _proxy("https://inside.example", False) is None
    assert _proxy("http://gpu.example", False) is None
    connection.close()


def test_a_key_in_the_clear_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    for url, warned in [
        ("http://gpu.example:1", True),
        ("https://gpu.example:1", False),
        ("http://localhost:1", False),
    ]:
        caplog.clear()
        asyncio.run(art.RemoteBackend(url, KEY).close())
        assert ("is not encrypted" in caplog.text) == warned and KEY not in caplog.text


def test_one_connection_under_many_loops_and_closed_in_use(tmp_path: Path) -> None:
    async def first() -> tuple[Any, Any]:
        script = Scripted()
        server = Server(script)
        server.start()
        model, backend = client(server.url, Path("b"), tmp_path)
        await model.register(backend)
        return server, (model, backend)

    server, (model, backend) = asyncio.run(first())
    with Line(server.url):
        for step in range(3):
            assert asyncio.run(model.train(GROUPS)).step == 1, step
    asyncio.run(backend.close())
    asyncio.run(backend.close())
    server.close()


@pytest.mark.parametrize(
    ("trajectories", "lines", "words"),
    [
        ([{"step": 1, "split": "../../evil"}], b"", "split='../../evil' becomes part of a file's name"),
        ([{"step": -1, "split": "train"}], b"", "a step must be a whole number"),
        ([{"step": 1, "split": "train"}], b'{"v":1,"kind":"trajectory","group":0}\n', "install the same version"),
        ([{"step": "x"}], b"", "install the same version"),
    ],
)
async def test_histories_that_lie_are_not_kept(tmp_path: Path, trajectories: Any, lines: bytes, words: str) -> None:
    (tmp_path / "in").mkdir()
    head = b'{"v":1,"kind":"file","step":1,"split":"train","session":"x","made":"x"}\n'
    async with scripted(tmp_path / "in", registers=False) as (script, model, backend):

        def say(method: str, path: str) -> Answer | None:
            if path.endswith("/history"):
                return said(200, {"metrics": [], "trajectories": trajectories})
            return said(200, head + lines) if "/history/" in path else None

        script.say = say
        with pytest.raises(ArtnbError, match=words):
            await model.register(backend)
    assert [p.name for p in tmp_path.iterdir()] == ["in"] and model.history().empty


# Checkpoints from a server that lies ---------------------------------------------------------------------


def listed(*files: tuple[str, bytes], **wrong: Any) -> dict[str, Any]:
    made = [{"name": n, "size": len(d), "sha256": hashlib.sha256(d).hexdigest(), **wrong} for n, d in files]
    return {"step": 1, "files": made}


TENSOR = json.dumps({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
SOUND = len(TENSOR).to_bytes(8, "little") + TENSOR + b"\0" * 4
CONFIG = b'{"peft_type": "LORA"}'


@pytest.mark.parametrize(
    ("listing", "bodies", "words"),
    [
        (listed(("../../evil.json", CONFIG)), {}, r"names a file '../../evil.json' of 21 bytes; it is not fetched"),
        (listed(("/etc/cron.d/x.json", CONFIG)), {}, "it is not fetched"),
        (listed(("a\\b.json", CONFIG)), {}, "it is not fetched"),
        (listed((".json", CONFIG)), {}, "it is not fetched"),
        (listed(("optimizer.safetensors", SOUND)), {}, "it is not fetched"),
        (listed(("optimizer.pt", CONFIG)), {}, "it is not fetched"),
        (listed(("adapter_model.bin", CONFIG)), {}, "it is not fetched"),
        (listed(("adapter_config.json", CONFIG), size=1 << 40), {}, "it is not fetched"),
        (listed(("adapter_model.safetensors", SOUND), size=0), {}, "it is not fetched"),
        (listed(("adapter_config.json", CONFIG)), {"adapter_config.json": CONFIG + b" "}, "longer than the server"),
        (listed(("adapter_config.json", CONFIG)), {"adapter_config.json": CONFIG[:-1] + b" "}, "arrived damaged"),
        (listed(("adapter_config.json", CONFIG)), {"adapter_config.json": CONFIG[:-1]}, "arrived damaged"),
        (listed(("adapter_config.json", b"{")), {"adapter_config.json": b"{"}, "is not JSON"),
        (listed(("adapter_config.json", CONFIG)), {"adapter_config.json": CONFIG}, "has no adapter_model.safetensors"),
        (listed(("adapter_model.safetensors", b"\x80\x04pickled...")),
         {"adapter_model.safetensors": b"\x80\x04pickled..."}, "is not a safetensors file"),
        ({"files": [{}]}, {}, "install the same version"),
        ({"files": 3}, {}, "install the same version"),
    ],
)  # fmt: skip
async def test_checkpoints_that_lie_are_not_kept(
    tmp_path: Path, listing: dict[str, Any], bodies: dict[str, bytes], words: str
) -> None:
    async with scripted(tmp_path) as (script, model, backend):

        def say(method: str, path: str) -> Answer | None:
            name = path.rpartition("/files/")[2]
            if name in bodies:
                return said(200, bodies[name], content_type="application/octet-stream")
            return said(200, listing) if "/checkpoints/" in path else None

        script.say = say
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(ArtnbError, match=words):
            await backend.pull_checkpoint(model, 1)
        assert sorted(p for p in tmp_path.rglob("*") if p.name != "checkpoints") == before


async def test_a_download_that_is_cut_goes_on_where_it_was(tmp_path: Path) -> None:
    files = (("adapter_config.json", CONFIG), ("adapter_model.safetensors", SOUND))
    async with scripted(tmp_path) as (script, model, backend):
        backend._connection._reconnect_s = 60.0
        ranges: list[bytes | None] = []
        parts = [
            said(200, SOUND[:5], content_type="application/octet-stream", cut=str(len(SOUND))),
            said(206, SOUND[5:], content_type="application/octet-stream"),
        ]

        def say(method: str, path: str) -> Answer | None:
            if path.endswith("safetensors"):
                ranges.append(script.range)
                return parts.pop(0)
            if path.endswith("/files/adapter_config.json"):
                return said(200, CONFIG)
            return said(200, listed(*files)) if "/checkpoints/" in path else None

        script.say = say
        folder = await backend.pull_checkpoint(model, 1)
        assert (folder / "adapter_model.safetensors").read_bytes() == SOUND and ranges == [None, b"bytes=5-"]
    assert LORA.r == 4
