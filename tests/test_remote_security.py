"""Attempts on `artnb serve`: nobody gets in, nothing is lost, and the answer says what to do."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import hashlib
import http.client
import json
import logging
import pickle
import socket
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from agents import even_groups
from remote_server import FAST, KEY, LORA, Serving, client
from safetensors.torch import load_file, save_file

import artnb as art
from artnb.cli import main, parser
from artnb.errors import CheckpointError, ConfigError, ModelError, ServiceError
from artnb.remote.guard import Limits
from artnb.remote.hub import Hub
from artnb.remote.serve import find_key
from artnb.remote.uploads import Uploads
from artnb.tracking.history import History
from artnb.training.checkpoints import CheckpointStore, model_folder

# Sizes as they are by default; times short, so that slow clients are noticed while a test waits.
LIMITS = Limits(idle_s=0.3, send_s=0.5, header_s=0.3, linger_s=0.2)
MODEL = "/artnb/v1/models/tests/agent"
JOB = "/artnb/v1/jobs/" + "a" * 32
PATIENCE = 30.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("server") / "there"


@pytest.fixture(scope="module")
def serving(tiny_base: Path, folder: Path) -> Iterator[Serving]:
    """A server with a model `agent` at step 1."""
    with Serving(folder, tiny_base, limits=LIMITS) as server:

        async def prepare() -> None:
            model, backend = client(server.url, tiny_base, folder.parent / "here")
            async with backend:
                await model.register(backend)
                await model.train(await even_groups(model, 0, groups=1, size=3), FAST)

        asyncio.run(prepare())
        yield server


@pytest.fixture(autouse=True)
def nothing_changes(serving: Serving, folder: Path) -> Iterator[None]:
    """Whatever is tried: the model is where it was, and no file has come from anywhere."""

    def state() -> tuple[Any, list[str]]:
        kept = sorted(str(p.relative_to(folder.parent)) for p in folder.parent.rglob("*") if p.is_file())
        return serving.hub.hosted("tests", "agent").trained.step, kept

    before = state()
    yield
    assert state() == before
    assert get(serving, "/health", key=None) == (200, {"status": "ok", "version": art.__version__})


def connect(serving: Serving) -> http.client.HTTPConnection:
    host, port = serving.url.removeprefix("http://").split(":")
    return http.client.HTTPConnection(host, int(port), timeout=PATIENCE)


def get(
    serving: Serving,
    path: str,
    method: str = "GET",
    body: Any = None,
    *,
    key: str | None = KEY,
    headers: dict[str, str] | None = None,
) -> tuple[int, Any]:
    """(status, JSON) of a request whose path is sent as it is."""
    connection = connect(serving)
    try:
        sent = {"authorization": f"Bearer {key}"} if key is not None else {}
        connection.request(method, path, body, sent | {"content-type": "application/json"} | (headers or {}))
        response = connection.getresponse()
        data = response.read()
    finally:
        connection.close()
    assert KEY.encode() not in data
    return response.status, json.loads(data) if data.startswith(b"{") else data


def message(answer: tuple[int, Any]) -> str:
    """What an error says; each is in OpenAI's shape."""
    status, body = answer
    assert status >= 400 and body["error"]["message"], answer
    text: str = body["error"]["message"]
    return text


def raw(serving: Serving, data: bytes) -> bytes:
    """What comes back until the server closes the connection."""
    host, port = serving.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE) as line:
        line.sendall(data)
        got = b""
        with contextlib.suppress(ConnectionResetError):  # closed with bytes unread
            while part := line.recv(65536):
                got += part
        return got


async def job(serving: Serving, **request: Any) -> dict[str, Any]:
    """A job's end."""
    request = {"project": "tests", "name": "agent", **request}
    path = f"/artnb/v1/jobs/{uuid.uuid4().hex}"
    status, state = await asyncio.to_thread(get, serving, path, "PUT", json.dumps(request))
    assert status == 201, state
    while state["state"] == "running":
        await asyncio.sleep(0.01)
        _, state = await asyncio.to_thread(get, serving, path)
    return dict(state)


# Keys and paths -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer"},
        {"authorization": "Bearer "},
        {"authorization": f"Bearer {KEY[:-1]}"},
        {"authorization": f"Bearer {KEY}x"},
        {"authorization": f"Bearer {KEY.upper()}"},
        {"authorization": KEY},
        {"authorization": f"Basic {KEY}"},
        {"authorization": f"Bearer {KEY}, Bearer {KEY}"},
        {"authorization": "Bearer \u00e9\u00e8"},
        {"x-api-key": KEY},
        {"cookie": f"key={KEY}"},
    ],
)
def test_a_wrong_key_gets_nothing(serving: Serving, headers: dict[str, str]) -> None:
    for method, path in [
        ("GET", "/artnb/v1/server"), ("GET", MODEL), ("PUT", JOB), ("POST", "/v1/chat/completions"),
        ("GET", "/openapi.json"),
        ("GET", f"{MODEL}/checkpoints/1/files/adapter_config.json"), ("PUT", f"{MODEL}/adapters/{'0' * 64}"),
        ("GET", f"/artnb/v1/server?api_key={KEY}"), ("GET", "/health/../artnb/v1/server"), ("GET", "//health"),
        ("GET", "/no/such/path"), ("OPTIONS", MODEL), ("POST", f"{JOB}/cancel"),
    ]:  # fmt: skip
        answer = get(serving, path, method, "{}", key=None, headers=headers)
        assert answer[0] == 401 and "printed when `artnb serve` started" in message(answer), (method, path)


def test_two_keys_in_one_request_are_none(serving: Serving) -> None:
    request = f"GET {MODEL} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\nauthorization: Bearer no\r\n\r\n"
    assert raw(serving, request.encode()).startswith(b"HTTP/1.1 401")


@pytest.mark.parametrize(
    "path",
    [
        "/", "/v1", "/v2/models", "/artnb/v1", "/artnb/v1/models", "/artnb/v1/models/tests/nobody", "/etc/passwd",
        "/artnb/v1/models/../server/x", "/artnb/v1/models/tests/..", "/artnb/v1/models/%2e%2e/%2e%2e",
        f"{MODEL}/checkpoints/1/files/../trainer_state.json",
        f"{MODEL}/checkpoints/1/files/..%2f..%2f..%2frun.json",
        f"{MODEL}/checkpoints/1/files/%2e%2e%2frun.json",
        f"{MODEL}/checkpoints/1/files/..%5c..%5crun.json",
        f"{MODEL}/checkpoints/1/files/%2fetc%2fpasswd",
        f"{MODEL}/checkpoints/1/files/adapter_config.json%00.txt",
        f"{MODEL}/checkpoints/1/files/optimizer.safetensors",
        f"{MODEL}/checkpoints/1/files/trainer_state.json",
        f"{MODEL}/checkpoints/1/files/",
        f"{MODEL}/checkpoints/9/files/adapter_config.json", f"{MODEL}/checkpoints/99999999999",
        f"{MODEL}/checkpoints/../history", f"{MODEL}/history/..%2f..%2frun/1", f"{MODEL}/history/../1",
        f"{MODEL}/history/train/9", f"{MODEL}/history/tr%00ain/1", f"{MODEL}/adapters/..", f"/artnb/v1/jobs/{'b' * 32}",
    ],
)  # fmt: skip
def test_a_wrong_path_is_a_404_that_says_what_there_is(serving: Serving, path: str) -> None:
    answer = get(serving, path)
    # Not a whole number, or no 64 hexadecimal digits: that is said, too.
    assert answer[0] in (404, 405, 422), answer
    assert message(answer)


def test_the_optimizers_state_is_not_sent(serving: Serving) -> None:
    status, listed = get(serving, f"{MODEL}/checkpoints/1")
    assert status == 200
    assert [file["name"] for file in listed["files"]] == ["adapter_config.json", "adapter_model.safetensors"]
    answer = get(serving, f"{MODEL}/checkpoints/1/files/optimizer.safetensors")
    assert answer[0] == 404 and "it has: adapter_config.json, adapter_model.safetensors" in message(answer)


# Bodies --------------------------------------------------------------------------------------------------


def test_a_body_of_100_mb(serving: Serving) -> None:
    """Declared, or come in pieces; to every kind of route, with the key and without."""
    part = b" " * (1 << 20)
    for path, method, key, status in [
        (JOB, "PUT", KEY, 413),
        ("/v1/chat/completions", "POST", KEY, 413),
        (f"{MODEL}/adapters/{'0' * 64}", "PUT", KEY, 413),
        (MODEL, "GET", KEY, 413),
        ("/health", "GET", None, 413),
        (JOB, "PUT", None, 401),
        ("/v1/chat/completions", "POST", "x" * 20, 401),
    ]:
        for declared in (True, False):
            connection = connect(serving)
            connection.putrequest(method, path)
            connection.putheader("content-type", "application/json")
            if key is not None:
                connection.putheader("authorization", f"Bearer {key}")
            connection.putheader(*("content-length", str(100 << 20)) if declared else ("transfer-encoding", "chunked"))
            connection.endheaders()
            try:
                for _ in range(100):
                    connection.send(part if declared else b"%x\r\n%s\r\n" % (len(part), part))
            except OSError:
                pass  # the server has closed it already; its answer may be there all the same
            try:
                response = connection.getresponse()
                body = json.loads(response.read())
                assert response.status == status, (path, declared, body)
                assert response.getheader("connection") == "close"
                if path == JOB and status == 413:
                    assert "larger than 64 MiB; send fewer or shorter rollouts" in body["error"]["message"]
                    assert "--max-body-mb" in body["error"]["message"]
            except (ConnectionError, http.client.HTTPException):
                assert not declared, f"{path}: what is declared is refused before it is sent"
            finally:
                connection.close()
    assert serving.server.guard.held == 0


def test_packed_bodies_that_are_bombs_torn_or_none(serving: Serving) -> None:
    def put(data: bytes, encoding: str = "gzip") -> tuple[int, Any]:
        return get(serving, "/v1/chat/completions", "POST", data, headers={"content-encoding": encoding})

    bomb = gzip.compress(b"[" + b" " * (170 << 20), compresslevel=1)
    assert len(bomb) < 1 << 20
    answer = put(bomb)
    assert answer[0] == 413 and "larger than 160 MiB" in message(answer)
    whole = gzip.compress(b"{}")
    for data, said in [(b"no gzip", "not gzip"), (whole[:-4], "not whole gzip"), (b"\x1f\x8b", "not whole gzip")]:
        answer = put(data)
        assert answer[0] == 400 and said in message(answer)
    answer = put(whole, "br")
    assert answer[0] == 415 and "content-encoding may be gzip" in message(answer)
    assert put(whole + whole)[0] in (400, 422)


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[" * 100_000, b'{"a":' * 100_000, b"[" * 500 + b"]" * 500, b"\xff\xfe", b'{"kind": "train"}',
        b"[]", b"null", b'"text"', b'{"from_step": 1' + b"0" * 5000 + b"}", b'{"model": "agent", "messages": [NaN]}',
        json.dumps({"model": "agent", "messages": [{"role": "user", "content": json.loads("[" * 300 + "]" * 300)}]}),
        json.dumps({"model": "agent", "messages": [{"role": "user", "content": "\ud83d"}]}),
        json.dumps({"model": ["agent"], "messages": []}), json.dumps({"model": "agent", "messages": {"0": 1}}),
    ],
)  # fmt: skip
def test_json_that_is_none_or_too_deep(serving: Serving, body: Any) -> None:
    for path, method in [(JOB, "PUT"), ("/v1/chat/completions", "POST")]:
        answer = get(serving, path, method, body)
        assert answer[0] in (400, 422) and message(answer), (path, answer)


def test_heads_that_are_none(serving: Serving) -> None:
    for data in [
        b"GET / HTTP/1.1\r\nhost: x\r\nx: " + b"a" * 200_000 + b"\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 50 + b"\r\n\r\n",
        b"PUT / HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\n",
        b"PUT / HTTP/1.1\r\nhost: x\r\ncontent-length: -5\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n",
    ]:
        got = raw(serving, data)
        assert not got or got.startswith(b"HTTP/1.1 400")


# Slow clients --------------------------------------------------------------------------------------------


def test_slow_heads_and_slow_bodies_are_answered_and_closed(serving: Serving) -> None:
    head = f"PUT {JOB} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\ncontent-type: application/json\r\n"
    for begun in (b"", b"GET /hea", head.encode()):
        assert raw(serving, begun).startswith(b"HTTP/1.1 408"), begun
    for length in ("content-length: 1000\r\n\r\n{", "transfer-encoding: chunked\r\n\r\n1\r\n{\r\n"):
        got = raw(serving, (head + length).encode())
        assert got.startswith(b"HTTP/1.1 408") and b"came too slowly (1 bytes so far)" in got
    upload = head.replace(JOB, f"{MODEL}/adapters/{'0' * 64}") + "content-length: 1000\r\n\r\nx"
    assert raw(serving, upload.encode()).startswith(b"HTTP/1.1 408")


def test_a_body_that_drips_is_not_waited_for(serving: Serving) -> None:
    host, port = serving.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE) as line:
        line.sendall(
            f"PUT {JOB} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\ncontent-length: 100000\r\n\r\n".encode()
        )
        line.settimeout(0.05)
        for _ in range(1000):
            try:
                if got := line.recv(1000):
                    break
            except TimeoutError:
                line.sendall(b" ")  # a byte well within every time limit between two
    assert got.startswith(b"HTTP/1.1 408")


def test_many_slow_clients_keep_nobody_else_waiting(serving: Serving) -> None:
    host, port = serving.url.removeprefix("http://").split(":")
    slow = [socket.create_connection((host, int(port))) for _ in range(200)]
    try:
        for line in slow:
            line.sendall(b"GET /health HT")
        ask = json.dumps({"model": "agent", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2})
        assert get(serving, "/v1/chat/completions", "POST", ask)[0] == 200
    finally:
        for line in slow:
            line.close()


def test_a_client_that_reads_nothing_is_cut_off(
    serving: Serving, tiny_base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = serving.hub.hosted("tests", "agent").trained.history
    text = art.Trajectory(messages_and_choices=[{"role": "user", "content": "x" * (30 << 20)}])
    kept.log_trajectories(0, "large", [art.TrajectoryGroup([text])])
    host, port = serving.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as line:
        line.sendall(f"GET {MODEL}/history/large/0 HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\n\r\n".encode())
        deadline = time.monotonic() + PATIENCE
        while "left its answer unread" not in caplog.text and time.monotonic() < deadline:
            assert get(serving, MODEL)[0] == 200
    assert "left its answer unread; it is cut off" in caplog.text
    (kept.trajectories_folder / "large-0000.jsonl").unlink()


def test_too_many_large_bodies_at_once_are_asked_to_come_later(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving.server.guard, "held", 10**12)
    connection = connect(serving)
    connection.request("PUT", JOB, "{}", {"authorization": f"Bearer {KEY}"})
    response = connection.getresponse()
    assert (response.status, response.getheader("retry-after")) == (429, "2")
    assert "send it again" in json.loads(response.read())["error"]["message"]
    connection.close()


# What is asked for ---------------------------------------------------------------------------------------


async def test_names_and_values_that_lead_elsewhere(serving: Serving, folder: Path, tiny_base: Path) -> None:
    lora = {"r": 4, "alpha": 32.0, "target_modules": "all-linear", "seed": 0}
    register = {"kind": "register", "base_model": str(tiny_base), "lora": lora}
    for name in ("..", "a/b", "a\\b", "../../x", "a\0b", "", " ", "a@1", "x" * 300):
        state = await job(serving, **{**register, "name": name})
        assert state["error"]["type"] == "ConfigError" and "name=" in state["error"]["message"], name
        state = await job(serving, **{**register, "project": name.replace("@", "/")})
        assert state["error"]["type"] == "ConfigError" and "project=" in state["error"]["message"], name
    for base in ("/etc", ".", "..", str(tiny_base.parent), f"{tiny_base}/../tiny-llama", "gpt2", "http://x/y"):
        state = await job(serving, **{**register, "name": "other", "base_model": base})
        assert state["error"]["type"] == "ModelError" and "is not offered by this server" in state["error"]["message"]
    log: dict[str, Any] = {"kind": "log", "step": 0, "metrics": {"a": 1.0}, "groups": []}
    for split in ("../x", "/x", "", "a/b", "a b"):
        state = await job(serving, **{**log, "split": split})
        assert state["error"]["type"] == "ConfigError" and "split=" in state["error"]["message"]
    step: dict[str, Any] = {"kind": "train", "from_step": 1, "groups": [], "config": {}}
    for config in ({"learning_rate": "x"}, {"loss_type": "x"}, {"__class__": 1}, {"learning_rate": [[[]]]}):
        state = await job(serving, **{**step, "config": config})
        assert state["error"]["type"] == "ConfigError" and state["step"] == 1, state
    for groups in ([{"group": {}, "trajectories": []}], [{"group": {"metadata": 3}, "trajectories": [{}]}]):
        state = await job(serving, **{**step, "groups": groups})
        assert state["error"]["type"] == "ConfigError" and "not as artnb writes it" in state["error"]["message"]


def test_a_server_without_a_list_takes_names_of_the_hub_and_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "owner" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    hub = Hub(art.LocalBackend(path=tmp_path, device="cpu", verbose=False))
    hub._check_offered("Qwen/Qwen3-0.6B")
    for base in ("owner/name", "/etc/passwd", "../x/y", "a/..", "./x/y", "a/b/c", "x", "", "~/x", "a/b\n"):
        with pytest.raises(ModelError, match="is not a name on the Hugging Face hub"):
            hub._check_offered(base)
    asyncio.run(hub.close())


async def test_adapters_that_are_none(serving: Serving, folder: Path, tiny_base: Path, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "ran",))

    own = CheckpointStore(model_folder(folder, "tests", "agent")).path(1)
    good = (own / "adapter_model.safetensors").read_bytes()
    config = json.loads((own / "adapter_config.json").read_text())
    uploads = Uploads(model_folder(folder, "tests", "agent"))

    def put(data: bytes, sha256: str = "") -> tuple[int, Any]:
        sha256 = sha256 or hashlib.sha256(data).hexdigest()
        return get(
            serving, f"{MODEL}/adapters/{sha256}", "PUT", data, headers={"content-type": "application/octet-stream"}
        )

    for data, said in [
        (pickle.dumps(Evil()), "not a safetensors file"),
        (b"", "not a safetensors file"),
        ((1 << 40).to_bytes(8, "little") + b"{}", "its header does not fit"),
        ((2).to_bytes(8, "little") + b"{}", "its tensors take 0 bytes"),
        ((9).to_bytes(8, "little") + b'{"a": [] }', "header is damaged"),
        ((100_000).to_bytes(8, "little") + b"[" * 100_000, "header is damaged"),
        (good[:-8], "is damaged"),
        (good + b"more", "is damaged"),
    ]:
        answer = put(data)
        assert answer[0] == 409 and said in message(answer), data[:20]
    answer = put(good, "0" * 64)
    assert answer[0] == 409 and "is not" not in message(answer)[:3] and "SHA-256 of what came" in message(answer)
    answer = put(b"x" * (4 << 20))
    assert answer[0] == 413 and "has at most" in message(answer)
    assert not (tmp_path / "ran").exists() and (not uploads.folder.exists() or list(uploads.folder.iterdir()) == [])

    state = await job(serving, kind="push", from_step=1, adapter="0" * 64, adapter_config=config)
    assert state["error"]["type"] == "CheckpointError" and "push it again" in state["error"]["message"]
    weights = load_file(own / "adapter_model.safetensors")
    first = next(iter(weights))
    for made, given, said in [
        ({**weights, first: torch.full_like(weights[first], float("nan"))}, config, "NaN or infinite weights"),
        ({**weights, first: weights[first][:1]}, config, "other shapes"),
        ({first: weights[first]}, config, "it lacks"),
        (weights, {**config, "lora_alpha": 7}, "its alpha is 7"),
        (weights, {**config, "peft_type": "IA3"}, "only LoRA adapters"),
        (weights, {**config, "modules_to_save": ["lm_head"]}, "modules_to_save"),
        (weights, {}, "only LoRA adapters"),
    ]:
        save_file(made, tmp_path / "made.safetensors")
        data = (tmp_path / "made.safetensors").read_bytes()
        assert put(data)[0] == 200
        sha256 = hashlib.sha256(data).hexdigest()
        state = await job(serving, kind="push", from_step=1, adapter=sha256, adapter_config=given)
        assert state["state"] == "failed" and said in state["error"]["message"], state
        uploads.path(sha256).unlink()
    before = load_file(own / "adapter_model.safetensors")
    trained = serving.hub.hosted("tests", "agent").trained
    held = trained.trainer.policy.adapter_parameters(trained.adapter)
    assert all(torch.isfinite(p).all() for p in held.values()) and len(held) == len(before)


# The key itself ------------------------------------------------------------------------------------------


def test_where_the_key_comes_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("ARTNB_API_KEY", raising=False)
    made, source = find_key(None)
    assert len(made) >= 40 and source == "" and find_key(None)[0] != made
    monkeypatch.setenv("ARTNB_API_KEY", " from-the-environment \n")
    assert find_key(None) == ("from-the-environment", "$ARTNB_API_KEY")
    file = tmp_path / "key"
    file.write_text("from-a-file-of-mine\n")
    file.chmod(0o644)
    assert find_key(file) == ("from-a-file-of-mine", str(file))
    assert "can be read by others" in caplog.text and "from-a-file" not in caplog.text
    for weak in ("", "short", "with a space in it all", "ключ-ключ-ключ-ключ", "line\nbreak-in-the-key"):
        file.write_text(weak)
        with pytest.raises(ConfigError, match="at least 16 characters, ASCII and without spaces") as told:
            find_key(file)
        assert not weak or weak not in str(told.value)
    with pytest.raises(ConfigError, match="cannot be read"):
        find_key(tmp_path / "none")


def test_the_command_line_takes_no_key_and_listens_here() -> None:
    options = parser().parse_args(["serve"])
    assert options.host == "127.0.0.1" and not any(
        "key" in name and "file" not in name for name in vars(options) if name != "tls_key"
    )
    with pytest.raises(SystemExit):
        parser().parse_args(["serve", "--api-key", "x"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--port", "70000"], "port=70000 must be >= 0 and <= 65535"),
        (["--max-body-mb", "0"], "max_body_mb=0 must be >= 1"),
        (["--base-model", " "], "--base-model must be a folder or a Hugging Face id"),
        (["--host", "no-such-host.invalid"], "cannot listen on no-such-host.invalid"),
        (["--api-key-file", "/no/such/file"], "/no/such/file cannot be read"),
        (["--dtype", "flot32"], "did you mean 'float32'?"),
        (["--tls-cert", "/no/such.pem", "--tls-key", "/no/such.pem"], "No such file"),
    ],
)
def test_a_server_that_cannot_start_says_why(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--path", str(tmp_path), *arguments]) == 1
    told = capsys.readouterr()
    assert told.err.startswith("artnb: ") and words in told.err and told.out == ""


def test_the_key_is_in_no_log(serving: Serving, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        for key in (KEY, f"{KEY}x", None):
            get(serving, MODEL, key=key)
            get(serving, "/no/such/path", key=key)
        raw(serving, f"GET / HTTP/1.1\r\nauthorization: Bearer {KEY}\r\nhost: a\r\nhost: b\r\n\r\n".encode())
    assert KEY not in caplog.text


# TLS -----------------------------------------------------------------------------------------------------


def make_certificate(folder: Path) -> tuple[Path, Path]:
    x509 = pytest.importorskip("cryptography.x509")
    from datetime import UTC, datetime, timedelta
    from ipaddress import ip_address

    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "artnb test")])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    cert, secret = folder / "cert.pem", folder / "key.pem"
    cert.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    plain = serialization.NoEncryption()
    secret.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain))
    return cert, secret


async def test_tls(tiny_base: Path, tmp_path: Path) -> None:
    cert, secret = make_certificate(tmp_path)
    with pytest.raises(ConfigError, match="both --tls-cert and --tls-key"):
        Serving(tmp_path / "there", tiny_base, tls_cert=cert)
    with pytest.raises(ConfigError, match=r"--tls-cert .* with --tls-key"):
        Serving(tmp_path / "there", tiny_base, tls_cert=cert, tls_key=cert)
    with Serving(tmp_path / "there", tiny_base, tls_cert=cert, tls_key=secret) as server:
        assert server.url.startswith("https://127.0.0.1:")
        model, backend = client(server.url, tiny_base, tmp_path / "here", ca_file=cert)
        async with backend:
            await model.register(backend)
            assert (await model.train(await even_groups(model, 0, groups=1, size=3), FAST)).step == 1
        for url, options, said in [
            (server.url, {}, "A certificate of your own needs ca_file="),
            (server.url.replace("https", "http"), {"reconnect_seconds": 0.1}, "cannot be reached"),
        ]:
            model, backend = client(url, tiny_base, tmp_path / "no", **options)
            async with backend:
                with pytest.raises(ServiceError, match=said):
                    await model.register(backend)


# Checkpoints over the line -------------------------------------------------------------------------------


async def test_checkpoints_pulled_and_pushed(tiny_base: Path, tmp_path: Path) -> None:
    ask: dict[str, Any] = {"temperature": 0, "max_tokens": 8, "extra_body": {"ignore_eos": True}}
    hello: list[Any] = [{"role": "user", "content": "hello"}]

    def says(model: art.TrainableModel, step: int | None = None) -> list[int]:
        return list(model.chat(hello, step=step, **ask).choices[0].model_extra["token_ids"])

    with Serving(tmp_path / "there", tiny_base) as server:
        model, backend = client(server.url, tiny_base, tmp_path / "here")
        async with backend:
            await model.register(backend)
            for step in range(3):
                await model.train(await even_groups(model, step, groups=1, size=3), FAST)
            pulled = await backend.pull_checkpoint(model, 2)
            assert pulled == model.folder / "checkpoints" / "0002"
            names = {p.name for p in pulled.iterdir()}
            assert names == {"adapter_model.safetensors", "adapter_config.json", "trainer_state.json"}
            CheckpointStore(model.folder).verify(2)
            own = CheckpointStore(model_folder(tmp_path / "there", "tests", "agent")).path(2)
            for name in ("adapter_model.safetensors", "adapter_config.json"):
                assert (pulled / name).read_bytes() == (own / name).read_bytes()
            assert (await backend.pull_checkpoint(model)).name == "0003"
            with pytest.raises(ServiceError, match="404: there is no checkpoint 9"):
                await backend.pull_checkpoint(model, 9)

            at_two, at_three = says(model, 2), says(model)
            assert at_two != at_three
            result = await backend.push_checkpoint(model, pulled)
            assert (result.step, await model.get_step()) == (4, 4)
            assert says(model) == at_two and says(model, 3) == at_three
            assert (await model.train(await even_groups(model, 4, groups=1, size=3), FAST)).step == 5
            assert list(model.history()["step"]) == [1, 2, 3, 4, 5]

            (tmp_path / "pickled").mkdir()
            (tmp_path / "pickled" / "adapter_config.json").write_text("{}")
            (tmp_path / "pickled" / "adapter_model.bin").write_bytes(b"\x80")
            with pytest.raises(CheckpointError, match="is a pickle, which can run code"):
                await backend.push_checkpoint(model, tmp_path / "pickled")
            with pytest.raises(CheckpointError, match=r"it has no adapter_config.json"):
                await backend.push_checkpoint(model, tmp_path)
            _, elsewhere = client(server.url, tiny_base, tmp_path / "other", "wide")
            async with elsewhere:
                wide = art.TrainableModel(
                    "wide", "tests", tiny_base, lora=art.LoraConfig(r=8), base_path=tmp_path / "o"
                )
                await wide.register(elsewhere)
                with pytest.raises(ConfigError, match=r"does not fit .*lora=art.LoraConfig\(r=4.*\(at http"):
                    await elsewhere.push_checkpoint(wide, pulled)
                assert await wide.get_step() == 0
    assert History(model.folder).saved()[-1] == (5, "train") and LORA.r == 4
