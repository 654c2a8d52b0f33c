"""RemoteBackend as a user meets it: a real server with a tiny model behind a line that can be cut."""

from __future__ import annotations

import asyncio
import gzip
import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from agents import even_groups, even_rollout
from openai.types.chat.chat_completion import Choice
from remote_server import FAST, KEY, LORA, Line, Serving, client

import artnb as art
from artnb.errors import CheckpointError, ConfigError, ModelError, ServiceError, TrainError
from artnb.remote import follow
from artnb.remote.hub import JOURNAL
from artnb.remote.wire import groups_json, pack
from artnb.tracking.history import History
from artnb.training.checkpoints import CheckpointStore, model_folder
from artnb.training.trainer import Trainer

HELLO: list[Any] = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def serving(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with Serving(tmp_path_factory.mktemp("server") / "there", tiny_base) as server:
        yield server


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A model of its own on the shared server."""
    return "m-" + uuid.uuid5(uuid.NAMESPACE_URL, request.node.name).hex[:12]


def folder_of(serving: Serving, name: str) -> Path:
    return model_folder(serving.folder, "tests", name)


def ids(choice: Choice) -> list[int]:
    return list((choice.model_extra or {})["token_ids"])


def shown(choice: Choice) -> dict[str, Any]:
    """All of a choice, log-probs without the rounding that depends on what was computed before."""
    made = choice.model_dump()
    for entry in made["logprobs"]["content"]:
        entry["logprob"] = round(entry["logprob"], 4)
    return made


async def few(model: art.TrainableModel, step: int) -> list[art.TrajectoryGroup]:
    """A group of three, where it does not matter what is learned."""
    return await even_groups(model, step, groups=1, size=3)


def by_hand(url: str) -> httpx2.AsyncClient:
    """Requests without the client's own care: bodies are packed ones."""
    headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json", "content-encoding": "gzip"}
    return httpx2.AsyncClient(base_url=url, headers=headers)


def train_body(name: str, config: dict[str, Any]) -> dict[str, Any]:
    return {"kind": "train", "project": "tests", "name": name, "from_step": 0, "config": config}


async def until(condition: Any) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.005)


# What a model offers ------------------------------------------------------------------------------------


async def test_steps_checkpoints_history_and_logs(serving: Serving, tiny_base: Path, tmp_path: Path, name: str) -> None:
    model, backend = client(serving.url, tiny_base, tmp_path, name)
    async with backend:
        await model.register(backend)
        assert await model.get_step() == 0 and backend.context_tokens(model) == 512
        groups = await even_groups(model, 0)
        result = await model.train(groups, FAST)
        assert (result.step, result.trained, await model.get_step()) == (1, True, 1)
        assert result.metrics["mismatch_log_ratio_max"] < 1e-3, "what was sampled here is what was trained there"
        written = [c.model_extra["trainer_logprobs"] for g in groups for t in g for c in t.choices()]
        assert [len(w) for w in written] == [len(ids(c)) for g in groups for t in g for c in t.choices()]
        assert list(model.history()["step"]) == [1] and len(model.trajectories(step=1, split="train")) == 8
        await model.log(groups, split="val")
        await model.log(None, metrics={"solved": 0.5}, step=1)
        await backend.flush()
        assert await backend.checkpoints(model) == [0, 1]
        await model.train(await even_groups(model, 1), FAST)
        assert await model.delete_checkpoints("val/reward") == [0], "the best so far and the newest stay"
        assert await backend.checkpoints(model) == [1, 2]
        with pytest.raises(ConfigError, match=r"newest and is served; it stays \(at http"):
            await backend.delete_checkpoints(model, [2])
        with pytest.raises(CheckpointError, match="no checkpoint 9"):
            await backend.delete_checkpoints(model, [9])
        here = model.history().set_index("step")
    there = History(folder_of(serving, name)).metrics().set_index("step")
    same = ["train/loss", "train/reward", "val/reward", "val/solved"]
    assert there[same].equals(here[same]) and here.loc[1, "val/solved"] == 0.5
    with pytest.raises(ConfigError, match="closed"):
        await backend.train(model, [])


async def test_supervised_steps_and_steps_without_a_signal(
    serving: Serving, tiny_base: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model, backend = client(serving.url, tiny_base, tmp_path, name, verbose=True)
    async with backend:
        await model.register(backend)
        rows = [{"messages": [*HELLO, {"role": "assistant", "content": "hello world"}]} for _ in range(4)]
        result = await model.train_sft(rows, art.TrainSFTConfig(learning_rate=1e-2, epochs=2, batch_size=2))
        assert result.step == 1 and result.metrics["loss"] > 0
        assert len(model.trajectories(step=1, split="sft")) == 4
        groups = await even_groups(model, 0)
        for trajectory in (t for group in groups for t in group):
            trajectory.reward = 0.25
        result = await model.train(groups)
        assert (result.step, result.trained, result.reasons) == (2, False, {"all rewards equal": 2})
    assert result.notes[0] in capsys.readouterr().out
    with pytest.raises(ConfigError, match="TrainConfig has no option 'learning_rat'; did you mean"):
        await backend.train(model, groups, learning_rat=1)


async def test_what_is_sampled_there_is_captured_here(
    serving: Serving, tiny_base: Path, tmp_path: Path, name: str
) -> None:
    model, backend = client(serving.url, tiny_base, tmp_path, name)
    options: Any = {"model": name, "messages": HELLO, "max_tokens": 6, "seed": 3, "extra_body": {"ignore_eos": True}}
    async with backend:
        model.register(backend)
        recorded = []
        for streamed in (False, True):
            async with art.trajectory(group="one") as t:
                answer = await model.openai_client().chat.completions.create(**options, stream=streamed)
                if streamed:
                    got = [i async for chunk in answer for i in chunk.choices[0].model_extra["token_ids"]]
                else:
                    got = ids(answer.choices[0])
                t.reward = float(streamed)
            assert ids(t.choices()[0]) == got and len(got) == 6
            assert t.messages_and_choices[0] == HELLO[0] and t.initial_policy_version == 0
            recorded.append(shown(t.choices()[0]))
        assert recorded[0] == recorded[1], "streamed or not, the same is recorded"

        # Clients that go there by themselves, as an agent framework's do.
        plain = {"base_url": model.inference_base_url, "api_key": model.inference_api_key}
        assert plain["base_url"] == f"{serving.url}/v1"
        async with art.trajectory(group="two") as t, openai.AsyncOpenAI(**plain) as asked:
            one = await asked.chat.completions.create(**options)
            t.reward = 0.0
        assert [ids(c) for c in t.choices()] == [ids(one.choices[0])]
        with art.trajectory(group="two") as t, openai.OpenAI(**plain) as asked_sync:
            for _ in asked_sync.chat.completions.create(**options, stream=True):
                pass
            t.reward = 1.0
        assert [shown(c) for c in t.choices()] == [recorded[0]]
        async with art.trajectory(group="early") as t:
            stream = await model.openai_client().chat.completions.create(**(options | {"max_tokens": 200}), stream=True)
            first = await anext(stream)
            await stream.close()
        assert ids(t.choices()[0])[: len(first.choices[0].model_extra["token_ids"])] == ids(first.choices[0])
        assert t.choices()[0].finish_reason == "length" and t.choices()[0].model_extra["cut_by_client"]
        async with art.trajectory(group="full") as t:
            with pytest.raises(openai.BadRequestError, match="context"):
                await model.openai_client().chat.completions.create(
                    model=name, messages=[{"role": "user", "content": "word " * 600}]
                )
        assert t.stop_reason is art.StopReason.CONTEXT_FULL
        assert len(model.collector()) == 4
        result = await model.train(config=FAST)
        assert result.step == 1 and result.metrics["trajectories_trained"] == 4


async def test_names_and_synchronous_chat(serving: Serving, tiny_base: Path, tmp_path: Path, name: str) -> None:
    model, backend = client(serving.url, tiny_base, tmp_path, name)
    greedy: dict[str, Any] = {"temperature": 0, "max_tokens": 8, "extra_body": {"ignore_eos": True}}
    async with backend:
        await model.register(backend)
        before = ids(model.chat(HELLO, **greedy).choices[0])
        for step in range(3):
            await model.train(await few(model, step), FAST)
        assert ids(model.chat(HELLO, **greedy).choices[0]) != before
        assert ids(model.chat(HELLO, step=0, **greedy).choices[0]) == before
        asked = await model.openai_client().chat.completions.create(model=str(tiny_base), messages=HELLO, **greedy)
        assert ids(asked.choices[0]) == before, "the base answers as the untouched adapter"
        with pytest.raises(openai.NotFoundError, match="no model is served as 'nobody'"):
            await model.openai_client().chat.completions.create(model="nobody", messages=HELLO)
        with pytest.raises(openai.BadRequestError, match="logit_bias is not supported"):
            await model.openai_client().chat.completions.create(model=name, messages=HELLO, logit_bias={"1": 1})
        listed = [card.id async for card in await model.openai_client().models.list()]
        assert {name, f"{name}@3", str(tiny_base)} <= set(listed)
        # Under any number of event loops, and many at a time.
        await asyncio.to_thread(lambda: asyncio.run(even_rollout(model, "x", 1)))
        await asyncio.gather(*(even_rollout(model, f"{i}", i, turns=1) for i in range(110)))


async def test_a_fork_and_the_bases_own_log_probs(serving: Serving, tiny_base: Path, tmp_path: Path, name: str) -> None:
    model, backend = client(serving.url, tiny_base, tmp_path, name)
    async with backend:
        await model.register(backend)
        for step in range(2):
            await model.train(await few(model, step), FAST)
        fork = art.TrainableModel(f"{name}-fork", "tests", tiny_base, lora=LORA, base_path=tmp_path)
        assert await backend.fork_checkpoint(fork, from_model=name, step=1) == 1
        await fork.register(backend)
        asked: dict[str, Any] = {"temperature": 0, "max_tokens": 8, "extra_body": {"ignore_eos": True}}
        assert await fork.get_step() == 1
        assert ids(fork.chat(HELLO, **asked).choices[0]) == ids(model.chat(HELLO, step=1, **asked).choices[0])
        assert (await fork.train(await few(fork, 1), FAST)).step == 2 and list(fork.history()["step"]) == [2]
        for wrong, error in [({"from_model": "nobody"}, CheckpointError), ({"from_model": "../x"}, ConfigError)]:
            with pytest.raises(error, match=r"\(at http"):
                await backend.fork_checkpoint(art.TrainableModel("new", "tests", tiny_base, lora=LORA), **wrong)

        rows = [
            art.Trajectory(messages_and_choices=[*HELLO, {"role": "assistant", "content": "hello world"}]),
            art.Trajectory(messages_and_choices=HELLO),
        ]
        there = await backend.base_logprobs(model, rows)
        handle = serving.hub.hosted("tests", name).model
        here = asyncio.run_coroutine_threadsafe(serving.hub.backend.base_logprobs(handle, rows), serving.loop)
        own = await asyncio.wrap_future(here)
        assert there[1] is None and own[1] is None
        assert there[0].values.dtype == own[0].values.dtype and there[0].row_tokens == own[0].row_tokens
        assert there[0].values == pytest.approx(own[0].values, abs=1e-5) and len(own[0].values) > 1


# A step is made once ------------------------------------------------------------------------------------


async def test_any_cut_leaves_one_step(serving: Serving, tiny_base: Path, tmp_path: Path, name: str) -> None:
    with Line(serving.url) as line:
        model, backend = client(line.url, tiny_base, tmp_path, name)
        async with backend:
            await model.register(backend)
            for step, (where, mark) in enumerate(
                [
                    ("request", b"PUT /artnb/v1/jobs/"),  # while it is sent
                    ("answer", b'"state":"running"'),  # when it was accepted, and nobody here knows
                    ("answer", b'"train step 3"'),  # while it is made
                    ("answer", b"event: done"),  # when it was made, and nobody here knows
                    ("request", b"POST /v1/chat/completions"),  # while rollouts are sampled
                ]
            ):
                cuts = line.cuts

                def watch(data: bytes, mark: bytes = mark, cuts: int = cuts) -> None:
                    if mark in data and line.cuts == cuts:
                        line.refuse = 1
                        line.cut()

                line.on_request, line.on_answer = (watch, line.ignore) if where == "request" else (line.ignore, watch)
                groups = await few(model, step)
                assert (await model.train(groups, FAST)).step == step + 1
                assert line.cuts == cuts + 1, f"{mark!r} was never seen"
    assert CheckpointStore(folder_of(serving, name)).steps() == [0, 1, 2, 3, 4, 5]


async def test_a_request_that_is_replayed_is_done_once(
    serving: Serving, tiny_base: Path, tmp_path: Path, name: str
) -> None:
    model, backend = client(serving.url, tiny_base, tmp_path, name)
    async with backend:
        await model.register(backend)
        groups = await few(model, 0)
        body = train_body(name, FAST.to_dict())
        packed, job = pack({**body, "groups": groups_json(groups)}), uuid.uuid4().hex
        async with by_hand(serving.url) as http:
            first, *others = await asyncio.gather(
                *(http.put(f"/artnb/v1/jobs/{job}", content=packed) for _ in range(5))
            )
            assert sorted(r.status_code for r in (first, *others)) == [200, 200, 200, 200, 201]
            while (state := (await http.get(f"/artnb/v1/jobs/{job}")).json())["state"] == "running":
                await asyncio.sleep(0.02)
            assert (state["state"], state["step"], await model.get_step()) == ("done", 1, 1)
            again = (await http.put(f"/artnb/v1/jobs/{job}", content=packed)).json()
            assert again == state
            other = await http.put(f"/artnb/v1/jobs/{job}", content=pack({**body, "groups": []}))
            assert other.status_code == 409 and "was another request" in other.json()["error"]["message"]
            stale = await http.put(f"/artnb/v1/jobs/{uuid.uuid4().hex}", content=packed)
            assert stale.status_code == 409 and "is at step 1 here" in stale.json()["error"]["message"]
            # Events are had again from any of them on.
            events = (await http.get(f"/artnb/v1/jobs/{job}/events")).text
            last = int(events.rsplit("id: ", 1)[1].split()[0])
            rest = (await http.get(f"/artnb/v1/jobs/{job}/events", headers={"last-event-id": str(last - 1)})).text
            assert events.endswith(rest) and rest.startswith(f"id: {last}\nevent: done")
            assert (await http.get(f"/artnb/v1/jobs/{job}/events", headers={"last-event-id": str(last)})).text == ""
    assert CheckpointStore(folder_of(serving, name)).steps() == [0, 1]


async def test_two_clients_cannot_train_over_each_other(
    serving: Serving, tiny_base: Path, tmp_path: Path, name: str
) -> None:
    one, first = client(serving.url, tiny_base, tmp_path / "one", name)
    two, second = client(serving.url, tiny_base, tmp_path / "two", name)
    async with first, second:
        await asyncio.gather(one.register(first).wait(), two.register(second).wait())
        groups = await few(one, 0)
        others = await few(two, 0)
        with serving.held(name) as begun:
            slow = asyncio.create_task(one.train(groups, FAST))
            await until(begun.is_set)
            with pytest.raises(
                ServiceError, match=r"409: step 1 of \S+ is being made by another call or client"
            ) as busy:
                await two.train(others, FAST)
        assert busy.value.status == 409
        assert (await slow).step == 1
        with pytest.raises(ServiceError, match=r"is at step 1 here, and this step starts from 0: another client"):
            await two.train(others, FAST)
        assert list(two.history()["step"]) == [], "nothing of the refused step is in the history"
        assert await two.get_step() == 1
        assert (await two.train(await few(two, 1), FAST)).step == 2
        assert list(two.history()["step"]) == [1, 2], "what the other client trained is in the history, too"
        with pytest.raises(ServiceError, match="is at step 2 here, and this step starts from 1"):
            await one.train(groups, FAST)
        await first.register(one)
        assert list(one.history()["step"]) == [1, 2] and len(one.trajectories(step=2)) == 3
    store = CheckpointStore(folder_of(serving, name))
    assert store.steps() == [0, 1, 2]
    for step in store.steps():
        store.verify(step)


async def test_steps_of_one_client_take_turns(serving: Serving, tiny_base: Path, tmp_path: Path, name: str) -> None:
    model, backend = client(serving.url, tiny_base, tmp_path, name)
    async with backend:
        await model.register(backend)
        groups = [await few(model, step) for step in range(3)]
        results = await asyncio.gather(*(model.train(g, FAST) for g in groups))
        assert sorted(r.step for r in results) == [1, 2, 3]


async def test_an_interrupt_ends_the_step_there(serving: Serving, tiny_base: Path, tmp_path: Path, name: str) -> None:
    model, backend = client(serving.url, tiny_base, tmp_path, name)
    async with backend:
        await model.register(backend)
        groups = await few(model, 0)
        with serving.held(name) as begun:
            step = asyncio.create_task(model.train(groups, FAST))
            await until(begun.is_set)
            step.cancel()
            with pytest.raises(asyncio.CancelledError):
                await step
            assert serving.changing(name) is None, "it had ended when the interrupt was passed on"
        assert await model.get_step() == 0
        assert (await model.train(groups, FAST)).step == 1
    assert CheckpointStore(folder_of(serving, name)).steps() == [0, 1]


async def test_a_step_that_was_interrupted_while_the_server_was_away_is_not_made_later(
    serving: Serving, tiny_base: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow, "CANCEL_S", 0.2)
    with Line(serving.url) as line:
        model, backend = client(line.url, tiny_base, tmp_path, name)
        async with backend:
            await model.register(backend)
            groups = [await few(model, step) for step in range(3)]
            # Before it has reached the server, and after.
            line.cut()
            line.refuse = 10**6
            task = asyncio.create_task(model.train(groups[0], FAST))
            await asyncio.sleep(0.2)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            line.refuse = 0
            assert (await model.train(groups[1], FAST)).step == 1
            with serving.held(name) as begun:
                task = asyncio.create_task(model.train(groups[0], FAST))
                await until(begun.is_set)
                line.refuse = 10**6
                line.cut()
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                assert serving.changing(name) is not None, "the server does not know"
                line.refuse = 0
                second = asyncio.create_task(model.train(groups[2], FAST))
                await until(lambda: serving.changing(name) is None or second.done())
            assert (await second).step == 2
    assert CheckpointStore(folder_of(serving, name)).steps() == [0, 1, 2]


async def test_a_job_that_comes_after_it_was_cancelled_is_refused(
    serving: Serving, tiny_base: Path, tmp_path: Path, name: str
) -> None:
    """The two may overtake each other on the way."""
    model, backend = client(serving.url, tiny_base, tmp_path, name)
    async with backend:
        await model.register(backend)
        body = train_body(name, FAST.to_dict())
        packed = pack({**body, "groups": groups_json(await few(model, 0))})
        async with by_hand(serving.url) as http:
            job = f"/artnb/v1/jobs/{uuid.uuid4().hex}"
            cancelled = await http.post(f"{job}/cancel")
            assert (cancelled.status_code, cancelled.json()["error"]["code"]) == (404, "job_not_found")
            refused = await http.put(job, content=packed)
            assert (refused.status_code, refused.json()["error"]["code"]) == (409, "job_cancelled")
            other = await http.put(f"/artnb/v1/jobs/{uuid.uuid4().hex}", content=packed)
            assert other.status_code == 201


async def test_a_server_that_is_away_too_long_and_the_same_call_again(
    serving: Serving, tiny_base: Path, tmp_path: Path, name: str
) -> None:
    with Line(serving.url) as line:
        model, backend = client(line.url, tiny_base, tmp_path, name, reconnect_seconds=0.3)
        async with backend:
            await model.register(backend)

            def cut(data: bytes) -> None:
                if b"event: progress" in data and not line.refuse:
                    line.refuse = 10**6
                    line.cut()

            for again in ("the same", "another"):
                step = await model.get_step()
                line.on_answer = cut
                groups = await few(model, step)
                with pytest.raises(ServiceError, match=r"cannot be reached .*tried for 0\.3 s.* is not lost"):
                    await model.train(groups, FAST)
                line.on_answer, line.refuse = line.ignore, 0
                groups = groups if again == "the same" else await few(model, 10)
                result = await model.train(groups, FAST)
                assert result.step == step + (1 if again == "the same" else 2)
            assert list(model.history()["step"]) == [1, 2, 3], "the step that was waited for is in the history, too"
    assert CheckpointStore(folder_of(serving, name)).steps() == [0, 1, 2, 3]


async def test_a_kernel_that_was_killed_finds_its_step(
    serving: Serving, tiny_base: Path, tmp_path: Path, name: str
) -> None:
    with Line(serving.url) as line:
        model, backend = client(line.url, tiny_base, tmp_path, name, reconnect_seconds=0.1)
        async with backend:
            await model.register(backend)
            await model.train(await few(model, 0), FAST)
            await model.log(await few(model, 5), split="val")
            await backend.flush()
            groups = await few(model, 1)

            def cut(data: bytes) -> None:
                if b"event: progress" in data:
                    line.refuse = 10**6  # nobody says anything to the server any more
                    line.cut()

            line.on_answer = cut
            with pytest.raises(ServiceError):
                await model.train(groups, FAST)
    await until(lambda: serving.changing(name) is None)
    for folder in (tmp_path, tmp_path / "elsewhere"):
        model, backend = client(serving.url, tiny_base, folder, name)
        async with backend:
            await model.register(backend)
            assert await model.get_step() == 2
            assert list(model.history()["step"]) == [1, 2] and model.history()["val/reward"].notna().sum() == 1
            assert len(model.trajectories(step=2, split="train")) == 3
    loaded = History(model.folder).load_groups(2, "train")
    assert [ids(c) for g in loaded for t in g for c in t.choices()] == [
        ids(c) for g in groups for t in g for c in t.choices()
    ]


async def test_a_server_that_is_restarted_during_a_step(tiny_base: Path, tmp_path: Path) -> None:
    there = tmp_path / "there"
    server = Serving(there, tiny_base)
    model, backend = client(server.url, tiny_base, tmp_path / "here")
    try:
        await model.register(backend)
        groups = await few(model, 0)
        port = int(server.url.rpartition(":")[2])
        with server.held("agent") as begun:
            step = asyncio.create_task(model.train(groups, FAST))
            await until(begun.is_set)
            await asyncio.to_thread(server.close)
        assert CheckpointStore(model_folder(there, "tests", "agent")).steps() == [0], "it was ended in the middle"
        server = await asyncio.to_thread(Serving, there, tiny_base, port=port)
        assert (await step).step == 1
        # Its clients ask on, whoever they are: the model is brought back by the first of them.
        await asyncio.to_thread(server.close)
        asked = asyncio.gather(*(even_rollout(model, f"{i}", i, turns=1) for i in range(4)))
        server = await asyncio.to_thread(Serving, there, tiny_base, port=port)
        assert len(await asked) == 4 and await model.get_step() == 1
    finally:
        await backend.close()
        await asyncio.to_thread(server.close)


async def test_a_server_that_died_between_the_step_and_its_answer(tiny_base: Path, tmp_path: Path) -> None:
    there = tmp_path / "there"
    body = train_body("agent", {})
    job = uuid.uuid4().hex
    states = []
    for life in range(3):
        with Serving(there, tiny_base) as server:
            model, backend = client(server.url, tiny_base, tmp_path / "here")
            async with backend, by_hand(server.url) as http:
                await model.register(backend)
                if not life:
                    packed = pack({**body, "groups": groups_json(await few(model, 0))})
                answer = await http.put(f"/artnb/v1/jobs/{job}", content=packed)
                assert answer.status_code == (200 if life else 201)
                while (state := (await http.get(f"/artnb/v1/jobs/{job}")).json())["state"] == "running":
                    await asyncio.sleep(0.02)
                states.append(state)
                other = await http.put(f"/artnb/v1/jobs/{job}", content=pack({**body, "groups": []}))
                assert other.status_code == 409
        if life == 1:  # killed after the checkpoint's rename, before the answer was written down
            journal = model_folder(there, "tests", "agent") / JOURNAL
            journal.write_text(json.dumps(json.loads(journal.read_text()) | {"result": None}))
    assert states[0] == states[1]
    assert states[2]["result"]["metrics"]["loss"] == states[0]["result"]["metrics"]["loss"]
    assert "restarted" in states[2]["result"]["notes"][0]
    assert CheckpointStore(model_folder(there, "tests", "agent")).steps() == [0, 1]


# Errors --------------------------------------------------------------------------------------------------


async def test_what_the_server_raises_is_raised_here(
    serving: Serving, tiny_base: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere, backend = client(serving.url, tmp_path / "secret", tmp_path, name)
    async with backend:
        with pytest.raises(
            ModelError, match=r"secret' is not offered by this server; offered: .*tiny-llama.*\(at http"
        ):
            await elsewhere.register(backend)
        model = art.TrainableModel(name, "tests", tiny_base, lora=LORA, base_path=tmp_path / "a")
        await model.register(backend)
        other = art.TrainableModel(name, "tests", tiny_base, lora=art.LoraConfig(r=8), base_path=tmp_path / "b")
        with pytest.raises(ConfigError, match="the new handle differs"):
            await other.register(backend)
        with pytest.raises(ConfigError, match="not registered here"):
            await backend.get_step(art.TrainableModel("x", "tests", tiny_base))
        groups = await few(model, 0)

        def breaks(*_: Any, **__: Any) -> None:
            raise TrainError("out of memory", phase="backward pass", memory="79 of 80 GB")

        with monkeypatch.context() as patch:
            patch.setattr(Trainer, "step", breaks)
            with pytest.raises(
                TrainError, match=r"out of memory \(phase: backward pass; 79 of 80 GB\) \(at http"
            ) as told:
                await model.train(groups, FAST)
            assert (told.value.phase, told.value.memory) == ("backward pass", "79 of 80 GB")
            patch.setattr(Trainer, "step", lambda *_, **__: {}["no such key"])
            with pytest.raises(ServiceError, match=r"KeyError: 'no such key'.*log has the traceback"):
                await model.train(groups, FAST)
        assert (await model.train(groups, FAST)).step == 1, "and the model is usable"


async def test_a_run_that_is_stopped_after_a_step_that_was_kept(
    serving: Serving, tiny_base: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, backend = client(serving.url, tiny_base, tmp_path, name)
    async with backend:
        await model.register(backend)
        trained = serving.hub.hosted("tests", name).trained

        def stop(result: Any, config: Any) -> None:
            raise TrainError("the rollouts are not this policy's", phase="check")

        monkeypatch.setattr(trained, "check_mismatch", stop)
        with pytest.raises(TrainError, match="not this policy's"):
            await model.train(await few(model, 0), FAST)
        assert list(model.history()["step"]) == [1] and model.history()["train/loss"].notna().all()
        monkeypatch.undo()
        assert (await model.train(await few(model, 1), FAST)).step == 2


async def test_a_folder_is_of_one_run(serving: Serving, tiny_base: Path, tmp_path: Path, name: str) -> None:
    model, backend = client(serving.url, tiny_base, tmp_path, name)
    async with backend:
        await model.register(backend)
        await model.train(await few(model, 0), FAST)
    local = art.LocalBackend(path=tmp_path, device="cpu", verbose=False)
    with pytest.raises(ConfigError, match=r"holds a run at http://\S+, whose history would be mixed"):
        await art.TrainableModel(name, "tests", tiny_base, lora=LORA).register(local)
    await local.close()
    with Serving(tmp_path / "new", tiny_base) as fresh:
        again, other = client(fresh.url, tiny_base, tmp_path, name)
        async with other:
            with pytest.raises(ConfigError, match=r"goes up to step 1, and \S+ is at step 0.*another server"):
                await again.register(other)
    assert list(model.history()["step"]) == [1], "nothing is lost"


def test_bad_options() -> None:
    for url in ("gpu:8765", "ftp://gpu", "", None, "http://gpu/v1", "http://user:pw@gpu", "http://gpu?key=1"):
        with pytest.raises(ConfigError, match="RemoteBackend: "):
            art.RemoteBackend(url, KEY)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"pass api_key= or set \$ARTNB_API_KEY"):
        art.RemoteBackend("http://127.0.0.1:1", "  ")
    with pytest.raises(ConfigError, match="ca_file"):
        art.RemoteBackend("https://127.0.0.1:1", KEY, ca_file="/no/such/file")
    backend = art.RemoteBackend("http://127.0.0.1:1", KEY)
    assert KEY not in repr(backend) and KEY not in repr(vars(backend))
    asyncio.run(backend.close())


def test_a_log_that_does_not_arrive_is_a_warning_and_is_here(
    serving: Serving, tiny_base: Path, tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        with Line(serving.url) as line:
            model, backend = client(line.url, tiny_base, tmp_path, name, reconnect_seconds=0.2)
            async with backend:
                await model.register(backend)
                line.refuse = 10**6
                line.cut()
                await model.log(None, metrics={"solved": 1.0}, step=0)
                assert list(model.history()["val/solved"]) == [1.0]

    asyncio.run(run())
    assert "val of step 0 is in the history here, but not at the server" in caplog.text


def test_groups_as_they_go_over_the_line_come_back_exactly() -> None:
    from artnb.remote.wire import read_groups

    class Mine(art.Trajectory):
        note: str = "x"

    choice = Choice.model_validate(
        {
            "index": 0,
            "finish_reason": "stop",
            "message": {"role": "assistant", "content": "한 \ud83d"},
            "logprobs": {"content": [{"token": "a", "bytes": [0, 255], "logprob": -1.5, "top_logprobs": []}]},
            "token_ids": [1, 2**40],
        }
    )
    mine = Mine(messages_and_choices=[*HELLO, choice], reward=float("nan"), metrics={"x": float("inf")}, note="kept")
    group = art.TrajectoryGroup([mine, ValueError("broke")], metadata={"k": None}, logs=["l"])
    (back,) = read_groups(json.loads(gzip.decompress(pack({"groups": groups_json([group])})))["groups"])
    assert back.trajectories[0].choices() == [choice] and back.trajectories[0].note == "kept"  # type: ignore[attr-defined]
    assert str(back.trajectories[0].reward) == "nan" and back.trajectories[0].metrics == {"x": float("inf")}
    assert back.exceptions == group.exceptions and back.metadata == {"k": None} and back.logs == ["l"]
    with pytest.raises(ConfigError, match=r"groups\[0\].trajectories\[1\] is not as artnb writes it"):
        read_groups([{"group": {}, "trajectories": [groups_json([group])[0]["trajectories"][0], {"fields": 3}]}])
