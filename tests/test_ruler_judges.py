"""Whom RULER asks: an OpenAI-compatible endpoint, a LiteLLM name, a model of artnb; and what is said when they fail."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from endpoint_for_tests import Endpoint
from judge_server import JudgeServer, Refusal, by_length, scores
from test_ruler import conversations, group

import artnb as art
from artnb.errors import ConfigError, JudgeError
from artnb.rewards import Judge, ruler, ruler_score_group
from artnb.serving.server import Server

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else importing LiteLLM asks the network for prices


@pytest.fixture
def served() -> Iterator[Any]:
    """Start a judge's server on a port: `url = served(judge_server)`."""
    servers: list[Server] = []

    def start(judge: JudgeServer) -> str:
        server = Server(judge.app)
        servers.append(server)
        server.start()
        return f"{server.url}/v1"

    yield start
    for server in servers:
        server.close()


# Structured output ----------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [400, 422])
async def test_a_judge_without_json_mode_is_asked_without_and_that_is_remembered(status: int) -> None:
    def script(body: dict[str, Any]) -> str:
        if "response_format" in body:
            raise Refusal(status, "unknown field response_format")
        return by_length(body)

    server = JudgeServer(script)
    judge = Judge("judge", client=server.client())
    for _ in range(2):
        found = await ruler(conversations("a", "bb"), judge)
        assert None not in [s.score for s in found]
        assert found.usage.requests == 1
    assert ["response_format" in body for body in server.asked] == [True, False, False]


async def test_a_refusal_for_another_reason_is_told_and_not_remembered() -> None:
    refuse = True

    def script(body: dict[str, Any]) -> str:
        if refuse:
            raise Refusal(400, "this prompt has 9000 tokens, the context 8192")
        return by_length(body)

    server = JudgeServer(script)
    judge = Judge("judge", client=server.client())
    with pytest.raises(JudgeError, match=r"larger one.*9000 tokens"):
        await ruler(conversations("a", "bb"), judge)
    refuse = False
    await ruler(conversations("a", "bb"), judge)
    assert ["response_format" in body for body in server.asked] == [True, False, True]


async def test_the_users_own_response_format_is_kept() -> None:
    server = JudgeServer(by_length)
    judge = Judge("judge", client=server.client(), options={"temperature": 0.5, "max_tokens": 100})
    await ruler(conversations("a"), judge, {"response_format": {"type": "json_object"}, "max_tokens": 7})
    (body,) = server.asked
    assert body["response_format"] == {"type": "json_object"} and body["max_tokens"] == 7 and body["temperature"] == 0.5


# OpenAI-compatible endpoints ------------------------------------------------------------------------


def test_a_judge_on_a_port_outlives_its_event_loops(served: Any) -> None:
    """Two successive loops, and a key that is sent: what a notebook that calls asyncio.run twice does."""
    server = JudgeServer(by_length)
    judge = Judge("judge", base_url=served(server), api_key="any")
    for _ in range(2):
        found = asyncio.run(ruler(conversations("a", "bb"), judge))
        assert found[0].score < found[1].score  # type: ignore[operator]


@pytest.mark.parametrize(
    ("status", "says"),
    [
        (401, "refused the key"),
        (403, "refused the key"),
        (404, "name and the base_url"),
        (429, "fewer groups at once"),
        (500, "status 500"),
        (503, "status 503"),
    ],
)
async def test_each_failure_says_what_to_do(status: int, says: str) -> None:
    def script(body: dict[str, Any]) -> str:
        raise Refusal(status, "because I say so")

    server = JudgeServer(script)
    with pytest.raises(JudgeError, match=f"{says}.*because I say so"):
        await ruler(conversations("a"), Judge("judge", client=server.client()))
    assert len(server.asked) == 1


async def test_a_judge_that_is_not_there() -> None:
    client = openai.AsyncOpenAI(base_url="http://127.0.0.1:9/v1", api_key="x", max_retries=0)
    with pytest.raises(JudgeError, match="cannot be reached"):
        await ruler(conversations("a"), Judge("judge", client=client))
    await client.close()


def test_wrong_judges_say_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    client = openai.OpenAI(api_key="x")
    cases: list[tuple[dict[str, Any], str]] = [
        ({"model": ""}, "model="),
        ({"model": "m", "client": client}, "AsyncOpenAI, not the synchronous"),
        ({"model": "m", "client": client, "api_key": "x"}, "either client, or"),
        ({"model": "m", "price": 3}, "price is a pair"),
        ({"model": "m", "price": (1, -1)}, "price"),
    ]
    for options, says in cases:
        with pytest.raises(ConfigError, match=says):
            Judge(**options)
    client.close()
    with pytest.raises(ConfigError, match=r"no API key; give api_key="):
        asyncio.run(ruler(conversations("a"), Judge("gpt-5-mini")))


async def test_a_model_that_is_not_trained_judges(served: Any) -> None:
    server = JudgeServer(by_length)
    model = art.Model(
        name="large",
        project="p",
        inference_base_url=served(server),
        inference_api_key="x",
        inference_model_name="large-1",
    )
    found = await ruler(conversations("a", "bb"), model)
    assert found[0].score < found[1].score  # type: ignore[operator]
    assert server.asked[0]["model"] == "large-1"


# artnb's own endpoint, which has no JSON mode -------------------------------------------------------


async def test_the_own_endpoint_judges_and_writes_nothing_on_the_rollout() -> None:
    endpoint = Endpoint(lambda request: scores(*([0.5] * request.prompt_text.count("<trajectory id"))))
    judge = Judge("base", client=endpoint.client)
    found = await ruler(conversations("a", "bb"), judge)
    assert [s.score for s in found] == [0.5, 0.5]
    assert len(endpoint.engine.requests) == 1  # the format was refused before the engine was asked
    assert found.usage.prompt_tokens == len(endpoint.engine.requests[0].prompt_ids)


# LiteLLM --------------------------------------------------------------------------------------------


@pytest.fixture
def litellm() -> Any:
    return pytest.importorskip("litellm")


# Its modules are loaded when they are first used, and pydantic then warns of their types.
loads_litellm = pytest.mark.filterwarnings("ignore")


@loads_litellm
async def test_a_litellm_name_reaches_any_endpoint(served: Any, litellm: Any) -> None:
    server = JudgeServer(by_length, takes_schema=False)
    options = {"api_base": served(server), "api_key": "x", "temperature": 0.25}
    for _ in range(2):
        judged = await ruler_score_group(group("a", "bb"), "openai/test-judge-of-artnb", options)
        assert judged.trajectories[0].reward < judged.trajectories[1].reward  # type: ignore[operator]
        assert judged.metrics["judge/prompt_tokens"] == 100
        assert "judge/cost" not in judged.metrics  # LiteLLM has no price for it
    assert [("response_format" in body, body["temperature"]) for body in server.asked] == [
        (True, 0.25), (False, 0.25), (False, 0.25),
    ]  # fmt: skip
    assert server.asked[0]["model"] == "test-judge-of-artnb"


@loads_litellm
async def test_litellms_prices_are_counted(served: Any, litellm: Any) -> None:
    server = JudgeServer(by_length)
    options = {"api_base": served(server), "api_key": "x"}
    judged = await ruler_score_group(group("a", "bb"), "openai/gpt-4o-mini", options)
    prompt, sampled = litellm.cost_per_token(model="gpt-4o-mini", prompt_tokens=100, completion_tokens=20)
    assert judged.metrics["judge/cost"] == pytest.approx(prompt + sampled) and prompt > 0


@loads_litellm
async def test_litellms_errors_are_a_judges(served: Any, litellm: Any) -> None:

    def script(body: dict[str, Any]) -> str:
        raise Refusal(401, "bad key")

    options = {"api_base": served(JudgeServer(script)), "api_key": "x", "max_retries": 0}
    with pytest.raises(JudgeError, match=r"refused the key.*bad key"):
        await ruler(conversations("a"), "openai/test-judge-of-artnb", options)
    with pytest.raises(JudgeError, match=r"provider/model"):
        await ruler(conversations("a"), "a-name-of-no-provider")


async def test_without_litellm_the_extra_and_the_way_round_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "litellm", None)
    with pytest.raises(ConfigError, match=r"artnb\[litellm\].*art\.rewards\.Judge\(model, base_url="):
        await ruler(conversations("a"), "openai/some-judge-that-was-not-asked-before")
