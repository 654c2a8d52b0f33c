"""The service's endpoint behind model.openai_client(): names, log-probs, capture, streams, errors."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from training_service import KEY, Fault, TrainingService, registered, rollouts, running

import artnb as art
from artnb.trajectories import StopReason

HELLO: Any = [{"role": "user", "content": "hello"}]


@pytest.fixture
def service() -> Iterator[TrainingService]:
    with running() as made:
        yield made


def asked(service: TrainingService) -> Any:
    return service.sent("POST", "/chat/completions")[-1]


async def test_names_here_are_the_services_names_there(service: TrainingService, tmp_path: Path) -> None:
    full = "wandb-artifact:///team/demo/agent"
    async with registered(service, tmp_path) as (model, backend):
        client = model.openai_client()
        await backend.train(model, rollouts(0, 1))
        for name, there in (
            ("agent", full),
            ("agent@1", f"{full}:step1"),
            (model.get_inference_name(), full),
            (model.get_inference_name(step=1), f"{full}:step1"),
        ):
            completion = await client.chat.completions.create(model=name, messages=HELLO, temperature=0.5)
            assert completion.choices[0].message.content == "left 0"
            assert asked(service)["model"] == there
        assert asked(service) == {
            "model": f"{full}:step1",
            "messages": HELLO,
            "temperature": 0.5,
            "logprobs": True,
        }
        assert completion.choices[0].logprobs is not None
        await client.chat.completions.create(model="agent", messages=HELLO, logprobs=False)
        assert asked(service)["logprobs"] is False  # who says so gets none
        with pytest.raises(openai.NotFoundError, match="model other/base not found"):
            await client.chat.completions.create(model="other/base", messages=HELLO)


async def test_a_client_of_the_users_own(service: TrainingService, tmp_path: Path) -> None:
    async with (
        registered(service, tmp_path) as (model, _),
        openai.AsyncOpenAI(base_url=model.inference_base_url, api_key=model.inference_api_key) as client,
    ):
        answer = await client.chat.completions.create(
            model=model.get_inference_name(await model.get_step()), messages=HELLO, logprobs=True
        )
        assert answer.choices[0].message.content == "left 0"
        assert asked(service)["model"].endswith(":step0")


async def test_asking_from_a_cell_without_await(service: TrainingService, tmp_path: Path) -> None:
    async with registered(service, tmp_path) as (model, _):
        assert model.chat(HELLO, seed=4).choices[0].message.content == "left 4"
        assert model.chat(HELLO, step=2).model.endswith(":step2")


@pytest.mark.parametrize("stream", [False, True])
async def test_scopes_record_and_train(service: TrainingService, tmp_path: Path, stream: bool) -> None:
    async def play(seed: int, model: art.TrainableModel) -> None:
        answer = await model.openai_client().chat.completions.create(
            model="agent", messages=HELLO, seed=seed, stream=stream
        )
        if stream:
            said = [chunk.choices[0].delta.content async for chunk in answer if chunk.choices]  # type: ignore[union-attr]
            assert "".join(filter(None, said)) == f"left {seed}"

    async with registered(service, tmp_path) as (model, backend):
        await backend.train(model, rollouts(0, 1))
        for seed in range(2):
            async with art.trajectory(group="task") as t:
                await play(seed, model)
                t.reward = float(seed)
            assert t.stop_reason is StopReason.FINISHED
            assert t.initial_policy_version == t.final_policy_version == 1
        (choice,) = t.choices()
        assert choice.message.content == "left 1" and choice.finish_reason == "stop"
        assert [e.token for e in choice.logprobs.content or []] == ["left", "1"]  # type: ignore[union-attr]
        assert "token_ids" not in (choice.model_extra or {})  # those of a stream's events are parts
        assert t.messages()[0] == HELLO[0]
        result = await model.train()
        assert result.step == 2
        (_, sent) = service.sent("POST", "/training-jobs")
        (group,) = sent["trajectory_groups"]
        assert [x["reward"] for x in group["trajectories"]] == [0.0, 1.0] and group["metadata"] == {"group": "task"}
        assert group["trajectories"][1]["messages_and_choices"][1]["message"]["content"] == "left 1"


async def test_a_stream_that_is_cut_is_an_error_and_not_recorded(service: TrainingService, tmp_path: Path) -> None:
    async with registered(service, tmp_path) as (model, _):
        service.fail("stream", Fault(cut=True))
        async with art.trajectory() as t:
            stream = await model.openai_client().chat.completions.create(model="agent", messages=HELLO, stream=True)
            with pytest.raises(openai.APIError, match="gave no whole answer"):
                async for _ in stream:
                    pass
        assert t.choices() == []
        service.fail("POST /chat/completions", Fault(200, cut=True))
        with pytest.raises(openai.APIStatusError, match="gave no whole answer") as raised:
            model.chat(HELLO)
        assert raised.value.status_code == 502
        assert service.count("POST", "/chat/completions") == 2  # neither was sent again


@pytest.mark.parametrize(
    "status, kind",
    [
        (401, openai.AuthenticationError),
        (404, openai.NotFoundError),
        (409, openai.ConflictError),
        (429, openai.RateLimitError),
        (500, openai.InternalServerError),
    ],
)
async def test_the_services_errors_reach_the_client(
    service: TrainingService, tmp_path: Path, status: int, kind: type[openai.APIStatusError]
) -> None:
    async with registered(service, tmp_path) as (model, _):
        service.fail("POST /chat/completions", Fault(status, {"message": "not now"}, {"retry-after": "9"}))
        with pytest.raises(kind, match="not now") as raised:
            model.chat(HELLO)
        assert raised.value.response.headers["retry-after"] == "9"
        assert service.count("POST", "/chat/completions") == 1
        assert KEY not in str(raised.value)


@pytest.mark.parametrize(
    "error", [{"code": "context_length_exceeded", "message": "too long"}, "maximum context length is 512 tokens"]
)
async def test_a_full_context_ends_the_rollout(service: TrainingService, tmp_path: Path, error: Any) -> None:
    async with registered(service, tmp_path) as (model, _):
        service.fail("POST /chat/completions", Fault(400, error))
        async with art.trajectory() as t:
            with pytest.raises(openai.BadRequestError):
                await model.openai_client().chat.completions.create(model="agent", messages=HELLO)
        assert t.stop_reason is StopReason.CONTEXT_FULL


async def test_answers_that_are_no_completions_are_passed_on(
    service: TrainingService, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with registered(service, tmp_path) as (model, _):
        client = model.openai_client()
        service.fail("POST /chat/completions", Fault(200, body=b'{"choices": "none"}', headers={}))
        async with art.trajectory() as t:
            await client.chat.completions.create(model="agent", messages=HELLO)
        assert t.choices() == [] and "was not recorded" in caplog.text
        with pytest.raises(openai.NotFoundError):  # a path that the service has not
            await client.models.list()


async def test_many_requests_at_once(service: TrainingService, tmp_path: Path) -> None:
    async with registered(service, tmp_path) as (model, _):
        client = model.openai_client()
        answers = await asyncio.gather(
            *(client.chat.completions.create(model="agent", messages=HELLO, seed=seed) for seed in range(150))
        )
        assert [a.choices[0].message.content for a in answers] == [f"left {seed}" for seed in range(150)]
