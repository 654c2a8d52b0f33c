"""What each status and a cut connection of the training service become: its words, what to do, how often it asks."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from training_service import KEY, Fault, TrainingService, make_backend, make_model, registered, rollouts, running

from artnb.errors import ServiceError

ADVICE = {
    400: "not what the service expects",
    401: "WANDB_API_KEY",
    403: "entity= and project=",
    404: "registered again",
    409: "take another name or wait",
    413: "train on fewer or shorter ones",
    418: "the service refused it",
    422: "a value is not one that the service takes",
    429: "wait, and ask with fewer",
    500: "the service failed",
    503: "the service failed",
}
RETRIED = (409, 429, 500, 503)


@pytest.fixture(scope="module")
def running_service() -> Iterator[TrainingService]:
    with running() as made:
        yield made


@pytest.fixture
def service(running_service: TrainingService) -> Iterator[TrainingService]:
    yield running_service
    running_service.models.clear()
    running_service.checkpoints.clear()
    running_service.calls.clear()
    assert not any(running_service.faults.values()), "a fault that no call met"


@pytest.mark.parametrize("status", ADVICE)
async def test_a_post_is_sent_once_whatever_comes(service: TrainingService, tmp_path: Path, status: int) -> None:
    async with registered(service, tmp_path) as (model, backend):
        service.fail("POST /training-jobs", Fault(status, {"message": "words of the server"}))
        with pytest.raises(ServiceError) as raised:
            await backend.train(model, rollouts(0, 1))
        assert service.count("POST", "/training-jobs") == 1
        assert raised.value.status == status
        message = str(raised.value)
        assert message.startswith(f"starting a training job: HTTP {status}: words of the server; ")
        assert ADVICE[status] in message
        # Whether it was carried out is known for what was refused, not for what failed inside.
        assert ("may have been carried out" in message) == (status >= 500)
        assert message.endswith("The rollouts are kept: backend.history(model).load_groups(1, 'train')")
        assert [t.reward for t in backend.history(model).load_groups(1, "train")[0]] == [0, 1]
        assert (await backend.train(model, rollouts(0, 1))).step == 1


@pytest.mark.parametrize("status", ADVICE)
async def test_other_calls_are_tried_four_times_where_that_can_help(
    service: TrainingService, tmp_path: Path, status: int
) -> None:
    async with registered(service, tmp_path) as (model, _):
        tries = 4 if status in RETRIED else 1
        asked = service.count("GET", "/checkpoints")
        service.fail("GET /checkpoints", Fault(status), times=tries)
        with pytest.raises(ServiceError) as raised:
            await model.get_step()
        assert service.count("GET", "/checkpoints") - asked == tries
        assert raised.value.status == status
        assert ADVICE[status] in str(raised.value)
        assert (", 4 times" in str(raised.value)) == (status in RETRIED)
        service.fail("GET /checkpoints", Fault(503), times=3)
        assert await model.get_step() == 0


async def test_rollouts_are_kept_when_the_service_cannot_be_asked(service: TrainingService, tmp_path: Path) -> None:
    async with registered(service, tmp_path) as (model, backend):
        assert (await backend.train(model, rollouts(0, 1))).step == 1
        service.fail("GET /checkpoints", Fault(500), times=4)
        with pytest.raises(
            ServiceError, match=r"The rollouts are kept: backend\.history\(model\)\.load_groups\(2, 'train'\)"
        ):
            await backend.train(model, rollouts(0.5, 0.25))
        kept = backend.history(model).load_groups(2, "train")
        assert (await backend.train(model, kept)).step == 2


async def test_a_wrong_key_names_where_the_right_one_is(service: TrainingService, tmp_path: Path) -> None:
    async with make_backend(service, api_key="wrong-key-0123456789") as backend:
        with pytest.raises(
            ServiceError, match=r"registering demo/agent: HTTP 401: invalid api key; .*wandb\.ai"
        ) as raised:
            await make_model(tmp_path).register(backend)
        assert "wrong-key" not in str(raised.value)
    assert service.count("POST", "/models") == 1


async def test_a_refusal_says_how_long_to_wait(service: TrainingService, tmp_path: Path) -> None:
    async with registered(service, tmp_path) as (model, backend):
        service.fail("POST /training-jobs", Fault(429, "quota used up", {"retry-after": "37"}))
        with pytest.raises(ServiceError, match=r"quota used up.*it asks for 37 s"):
            await backend.train(model, rollouts(0, 1))


async def test_a_stream_that_is_cut(service: TrainingService, tmp_path: Path) -> None:
    async with registered(service, tmp_path) as (model, backend):
        service.fail("GET /checkpoints", Fault(200, cut=True))
        assert await model.get_step() == 0  # asked again
        service.fail("POST /training-jobs", Fault(200, cut=True, carried_out=True))
        with pytest.raises(
            ServiceError, match=r"no answer from .*sent once and may have been carried out.*get_step"
        ) as raised:
            await backend.train(model, rollouts(0, 1))
        assert raised.value.status is None
        assert service.count("POST", "/training-jobs") == 1
        assert not (model.folder / "serverless-job.json").exists()
        service.fail("GET /events", Fault(200, cut=True), times=2)
        assert (await backend.train(model, rollouts(0, 1))).metrics["gradient_steps"] == 2.0


async def test_answers_that_are_not_what_was_agreed(service: TrainingService, tmp_path: Path) -> None:
    async with registered(service, tmp_path) as (model, backend):
        for body, words in (
            (b"{broken", "is no JSON"),
            (b'["a"]', "is no page of a list"),
            (b'{"data": [{"id": "c", "step": "first"}]}', r"not what it was when this was written \(step\)"),
        ):
            service.fail("GET /checkpoints", Fault(200, body=body, headers={}))
            with pytest.raises(ServiceError, match=words):
                await model.get_step()
        service.fail("POST /training-jobs", Fault(200, body=b'{"job": 7}', headers={}))
        with pytest.raises(ServiceError, match=r"\(id\): \{'job': 7\}\. Is base_url="):
            await backend.train(model, rollouts(0, 1))
        service.fail("POST /training-jobs", Fault(500, {"detail": "x" * 5000}))
        with pytest.raises(ServiceError) as raised:
            await backend.train(model, rollouts(0, 1))
        assert len(str(raised.value)) < 1200


async def test_nobody_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.001)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    backend = make_backend(TrainingService(), base_url=f"http://127.0.0.1:{port}/v1")
    with pytest.raises(ServiceError) as raised:
        await make_model(tmp_path).register(backend)
    message = str(raised.value)
    assert f"no answer from http://127.0.0.1:{port}/v1" in message and "check the network" in message
    assert "carried out" not in message  # it was never sent
    assert KEY not in message
    await backend.close()
