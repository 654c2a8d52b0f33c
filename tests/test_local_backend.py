"""LocalBackend as a user meets it: tiny random model, real engine, real training, real folders."""

from __future__ import annotations

import asyncio
import errno
import json
import multiprocessing
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from agents import even_groups, even_rollout

import artnb as art
from artnb.errors import CheckpointError, ConfigError, EngineError, ModelError, TrainError
from artnb.local import backend as local_backend
from artnb.local import served, trained
from artnb.training.checkpoints import CheckpointStore

LORA = art.LoraConfig(r=4)
FAST = art.TrainConfig(learning_rate=5e-3)


def make(tiny_base: Path, tmp_path: Path, name: str = "agent", **options: Any) -> tuple[art.TrainableModel, Any]:
    # fp32 everywhere: where a CPU computes bf16 natively, the default, rounding depends on who is computed beside whom.
    backend = art.LocalBackend(path=tmp_path / "art", device="cpu", verbose=False, **{"dtype": "float32", **options})
    model = art.TrainableModel(name=name, project="tests", base_model=tiny_base, lora=LORA)
    return model, backend


async def greedy(model: art.TrainableModel, name: str | None = None) -> list[int]:
    answer = await model.openai_client().chat.completions.create(
        model=name or model.get_inference_name(),
        messages=[{"role": "user", "content": "hello"}],
        temperature=0,
        max_tokens=12,
        extra_body={"ignore_eos": True},
    )
    return list(answer.choices[0].model_extra["token_ids"])


async def test_a_step_trains_saves_serves_and_is_in_the_history(tiny_base: Path, tmp_path: Path) -> None:
    model, backend = make(tiny_base, tmp_path)
    async with backend:
        await model.register(backend)
        before, base_before = await greedy(model), await greedy(model, str(tiny_base))
        assert before == base_before  # checkpoint 0 is the untouched adapter
        for step in range(3):
            result = await model.train(await even_groups(model, step), FAST)
            assert result.step == step + 1 == await model.get_step()
            assert result.trained and result.metrics["grad_norm"] > 0
        assert await greedy(model) != before, "after steps with a large learning rate the greedy answer changes"
        assert await greedy(model, str(tiny_base)) == base_before, "the base answers as before"
        assert await greedy(model, "agent@0") == before, "older checkpoints are served beside the newest"

        history = model.history()
        assert list(history["step"]) == [1, 2, 3]
        assert history["train/reward"].between(0, 1).all()
        frame = model.trajectories(step=2, split="train")
        assert len(frame) == 8 and set(frame["group"]) == {0, 1}

    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(tiny_base)
    adapted = PeftModel.from_pretrained(plain, result.checkpoint_path)
    assert any(p.abs().max() > 0 for n, p in adapted.named_parameters() if "lora_B" in n)


@pytest.mark.slow
async def test_learning_is_real(tiny_base: Path, tmp_path: Path) -> None:
    model, backend = make(tiny_base, tmp_path)
    async with backend:
        await model.register(backend)
        rewards = []
        for step in range(20):
            groups = await even_groups(model, step, groups=2, size=16)
            rewards.append(sum(t.reward for g in groups for t in g) / 32)
            await model.train(groups, art.TrainConfig(learning_rate=1e-2))
        # Half of all ids are even. Random weights learn slowly; chance moves a mean of 1,900 tokens by 0.011.
        assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.03, rewards


async def test_sampler_and_trainer_agree(tiny_base: Path, tmp_path: Path) -> None:
    model, backend = make(tiny_base, tmp_path)
    async with backend:
        await model.register(backend)
        await model.train(await even_groups(model, 0), FAST)
        result = await model.train(await even_groups(model, 1), FAST)
    assert result.metrics["mismatch_log_ratio_max"] < 1e-3, result.metrics


async def test_a_batch_without_signal_is_a_step_that_says_why(
    tiny_base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, backend = make(tiny_base, tmp_path)
    async with backend:
        await model.register(backend)
        groups = await even_groups(model, 0)
        for group in groups:
            for trajectory in group:
                trajectory.reward = 0.25
        before = await greedy(model)
        result = await model.train(groups)
        assert (result.step, result.trained) == (1, False)
        assert result.reasons == {"all rewards equal": 2}
        assert "all" in result.notes[0] and "equal" in result.notes[0]
        assert result.notes[0] in capsys.readouterr().out
        assert await greedy(model) == before
        assert await model.get_step() == 1


@pytest.mark.parametrize("bad", [None, float("nan"), float("inf")])
async def test_bad_rewards_are_left_out_and_counted(tiny_base: Path, tmp_path: Path, bad: float | None) -> None:
    model, backend = make(tiny_base, tmp_path)
    async with backend:
        await model.register(backend)
        groups = await even_groups(model, 0)
        for trajectory in groups[0]:
            trajectory.reward = bad
        groups[1].trajectories[0].reward = bad
        groups.append(art.TrajectoryGroup([]))
        groups.append(art.TrajectoryGroup([ValueError("rollout broke")]))
        result = await model.train(groups, FAST)
        assert result.trained and sum(result.reasons.values()) == 3, result.reasons
        assert len(model.trajectories(split="train")) == 8, "nothing is lost"


async def test_choices_without_logprobs_and_dict_messages(tiny_base: Path, tmp_path: Path) -> None:
    model, backend = make(tiny_base, tmp_path)
    async with backend:
        await model.register(backend)
        groups = await even_groups(model, 0, groups=1)
        for trajectory in groups[0]:
            for choice in trajectory.choices():
                choice.logprobs = None
        dicts = [
            art.Trajectory(
                messages_and_choices=[{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}],
                reward=float(i),
            )
            for i in range(2)
        ]
        result = await model.train([*groups, art.TrajectoryGroup(dicts)])
        assert not result.trained
        assert any("log-prob" in note for note in result.notes), result.notes
        assert result.metrics["context_assistant_messages"] == 2


async def test_two_models_share_a_base_and_steps_differ(tiny_base: Path, tmp_path: Path) -> None:
    model, backend = make(tiny_base, tmp_path)
    other = art.TrainableModel(name="other.v2", project="tests", base_model=tiny_base, lora=LORA)
    async with backend:
        await model.register(backend)
        await other.register(backend)
        assert len(backend._bases) == 1
        for step in range(2):
            await model.train(await even_groups(model, step), art.TrainConfig(learning_rate=2e-2))
        answers = {n: await greedy(model, n) for n in ("agent", "agent@1", "agent@2", "agent@0", "other.v2")}
        assert answers["agent"] == answers["agent@2"] != answers["agent@0"] == answers["other.v2"]
        assert await other.get_step() == 0
        served = await model.openai_client().models.list()
        assert {"agent", "agent@1", "other.v2", str(tiny_base)} <= {m.id for m in served.data}


async def test_swap_under_load_fails_no_request(tiny_base: Path, tmp_path: Path) -> None:
    model, backend = make(tiny_base, tmp_path)
    async with backend:
        await model.register(backend)
        groups = await even_groups(model, 0)
        client = model.openai_client()

        async def ask(i: int) -> str:
            await asyncio.sleep(0.01 * i)
            answer = await client.chat.completions.create(
                model="agent",
                messages=[{"role": "user", "content": f"request {i}"}],
                max_tokens=40,
                extra_body={"ignore_eos": True},
            )
            assert len(answer.choices[0].model_extra["token_ids"]) == 40
            return str(answer.choices[0].model_extra["policy"])

        asked = [asyncio.create_task(ask(i)) for i in range(40)]
        for _ in range(3):
            await model.train(groups, FAST)
        used = set(await asyncio.gather(*asked))
        assert used <= {f"agent@{n}" for n in range(4)} and "agent@0" in used


async def run_steps(model: art.TrainableModel, until: int) -> list[float]:
    losses = []
    for step in range(await model.get_step(), until):
        result = await model.train(await even_groups(model, step), FAST)
        losses.append(result.metrics["loss"])
    return losses


async def test_same_seed_same_losses_and_a_resumed_run_equals_an_uninterrupted_one(
    tiny_base: Path, tmp_path: Path
) -> None:
    model, backend = make(tiny_base, tmp_path / "a")
    async with backend:
        await model.register(backend)
        whole = await run_steps(model, 4)
        expected = model.history()

    parts = []
    for until in (2, 4):
        model, backend = make(tiny_base, tmp_path / "b")
        async with backend:
            await model.register(backend)
            parts += await run_steps(model, until)
            resumed = model.history()
    assert parts == pytest.approx(whole, abs=1e-6)
    for column in ("train/reward", "train/loss", "train/grad_norm", "train/entropy"):
        assert list(resumed[column]) == pytest.approx(list(expected[column]), abs=1e-5), column


async def test_cells_are_run_again(tiny_base: Path, tmp_path: Path) -> None:
    model, backend = make(tiny_base, tmp_path)
    async with backend:
        await model.register(backend)
        await model.register(backend)
        again = art.TrainableModel(name="agent", project="tests", base_model=tiny_base, lora=LORA)
        await again.register(backend)
        assert len(backend._models) == 1
        await again.train(await even_groups(again, 0), FAST)
        assert await model.get_step() == 1
        differs = art.TrainableModel(name="agent", project="tests", base_model=tiny_base, lora=art.LoraConfig(r=8))
        with pytest.raises(ConfigError, match="differs"):
            await differs.register(backend)
    await backend.close()
    with pytest.raises(ConfigError, match="closed"):
        await art.TrainableModel(name="n", project="p", base_model=tiny_base).register(backend)


async def test_a_cell_that_changes_the_working_folder_splits_no_run(
    tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model, backend = make(tiny_base, Path())
    async with backend:
        await model.register(backend)
        await model.train(await even_groups(model, 0), FAST)
        (tmp_path / "other").mkdir()
        monkeypatch.chdir("other")
        result = await model.train(await even_groups(model, 1), FAST)
        assert list(model.history()["step"]) == [1, 2]
        assert result.checkpoint_path is not None and (tmp_path / "art") in Path(result.checkpoint_path).parents
        await greedy(model, "agent@1")  # an older checkpoint is found again, too
    assert not list((tmp_path / "other").iterdir())
    assert art.Model("asked", "tests", base_path="~/art").folder.is_relative_to(Path.home())


async def test_register_without_await_and_synchronous_chat(tiny_base: Path, tmp_path: Path) -> None:
    model, backend = make(tiny_base, tmp_path)
    model.register(backend)  # as in a cell, without await
    answer = model.chat([{"role": "user", "content": "hi"}], max_tokens=4)
    assert answer.choices[0].message.role == "assistant"
    assert await model.get_step() == 0
    await backend.close()


async def test_cancelling_a_step_keeps_the_last_one(tiny_base: Path, tmp_path: Path) -> None:
    model, backend = make(tiny_base, tmp_path)
    async with backend:
        await model.register(backend)
        groups = await even_groups(model, 0)
        await model.train(groups, FAST)
        before = await greedy(model)
        config = art.TrainConfig(learning_rate=1e-2, num_iterations=50, max_tokens_per_pack=64)
        task = asyncio.create_task(model.train(groups, config))
        await asyncio.sleep(0.3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await model.get_step() == 1
        assert await greedy(model) == before
        result = await model.train(groups, FAST)
        assert result.step == 2 and list(model.history()["step"]) == [1, 2]


async def test_a_full_disk_fails_the_step_and_nothing_else(
    tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, backend = make(tiny_base, tmp_path)
    async with backend:
        await model.register(backend)
        groups = await even_groups(model, 0)
        await model.train(groups, FAST)
        weights = {
            n: p.clone() for n, p in backend._models["agent"].trainer.policy.adapter_parameters("train-agent").items()
        }

        def full(*args: Any, **options: Any) -> None:
            raise OSError(28, "No space left on device")

        engine = next(iter(backend._bases.values())).engine
        with monkeypatch.context() as patch, pytest.raises(CheckpointError, match="space"):
            patch.setattr(trained, "write_state", full)
            await model.train(groups, FAST)
        assert [ref.step for ref in engine.adapters()] == [1], "the adapter that could not be kept is not served"
        now = backend._models["agent"].trainer.policy.adapter_parameters("train-agent")
        assert all(torch.equal(weights[n], now[n]) for n in weights), "the trainer is back at the last complete step"
        assert await model.get_step() == 1 and list(model.history()["step"]) == [1]
        assert (await model.train(groups, FAST)).step == 2


async def test_more_models_are_kept_at_once_than_the_loop_has_threads(tiny_base: Path, tmp_path: Path) -> None:
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
    first, backend = make(tiny_base, tmp_path)
    async with backend:
        models = [first, *(art.TrainableModel(f"other{i}", "tests", tiny_base, lora=LORA) for i in range(3))]
        for model in models:
            await model.register(backend)
        groups = [await even_groups(model, 0) for model in models]
        base = next(iter(backend._bases.values()))
        written, save = asyncio.Barrier(len(models)), base.engine.load_adapter

        async def load(*args: Any) -> None:
            if args[1].name.startswith("."):  # not yet renamed: everybody's is being written now
                await asyncio.wait_for(written.wait(), 60)
            await save(*args)

        base.engine.load_adapter = load
        done = await asyncio.gather(*(m.train(g, FAST) for m, g in zip(models, groups, strict=True)))
    assert [result.step for result in done] == [1] * len(models)


async def test_delete_checkpoints_keeps_the_best_and_the_newest(tiny_base: Path, tmp_path: Path) -> None:
    model, backend = make(tiny_base, tmp_path)
    async with backend:
        await model.register(backend)
        groups = await even_groups(model, 0)
        for reward in (0.1, 0.9, 0.2, 0.3):
            await model.train(groups, FAST)
            await model.log([art.Trajectory(reward=reward)], split="val")
        assert await backend.checkpoints(model) == [0, 1, 2, 3, 4]
        assert await model.delete_checkpoints() == [0, 1, 3]
        assert await backend.checkpoints(model) == [2, 4]
        with pytest.raises(Exception, match=r"agent@1|checkpoint 1"):
            await greedy(model, "agent@1")
        assert await model.delete_checkpoints() == []


async def test_captured_trajectories_are_collected_and_trained(tiny_base: Path, tmp_path: Path) -> None:
    model, backend = make(tiny_base, tmp_path)
    async with backend:
        await model.register(backend)
        with pytest.raises(ConfigError, match="nothing collected"):
            await model.train()

        async def play(group: str, seed: int, stream: bool) -> None:
            async with art.trajectory(group=group) as t:
                answer: Any = await model.openai_client().chat.completions.create(
                    model="agent", messages=[{"role": "user", "content": group}], max_tokens=6, seed=seed, stream=stream
                )
                if stream:
                    async for _ in answer:
                        pass
                t.reward = float(seed % 3)

        await asyncio.gather(*(play(g, s, stream=s % 2 == 1) for g in ("a", "b") for s in range(4)))
        result = await model.train(config=FAST)
        assert result.trained and result.metrics["rows"] == 8

        auto = model.auto_train(groups_per_step=2, group_size=3, config=FAST)
        await asyncio.gather(*(play(g, s, stream=False) for g in ("c", "d", "e") for s in range(6)))
        results = await auto.wait(steps=3)
        auto.stop()
        assert [r.step for r in results] == [2, 3, 4]
        assert await model.get_step() == 4


async def test_sft_teaches_an_answer(tiny_base: Path, tmp_path: Path) -> None:
    model, backend = make(tiny_base, tmp_path)
    async with backend:
        await model.register(backend)
        say = art.Trajectory(
            messages_and_choices=[
                {"role": "user", "content": "hello"},
                {"role": "assistant", "content": "Paris is fine"},
            ]
        )
        result = await model.train_sft([say] * 8, art.TrainSFTConfig(learning_rate=5e-3, batch_size=4, epochs=12))
        assert result.step == 1
        answer = await model.openai_client().chat.completions.create(
            model="agent", messages=[{"role": "user", "content": "hello"}], temperature=0, max_tokens=24
        )
        assert answer.choices[0].message.content == "Paris is fine"


async def test_wrong_input_says_what_to_do(tiny_base: Path, tmp_path: Path) -> None:
    model, backend = make(tiny_base, tmp_path)
    async with backend:
        with pytest.raises(ConfigError, match="register"):
            await model.train([])
        await model.register(backend)
        with pytest.raises(ConfigError, match="did you mean 'learning_rate'"):
            await model.train([], learning_rat=1e-5)
        with pytest.raises(ConfigError, match=r"must be an art\.TrajectoryGroup"):
            await model.train([art.Trajectory()])  # type: ignore[list-item]
        with pytest.raises(ConfigError, match="not both"):
            await model.train([], FAST, learning_rate=1.0)
        result = await model.train([])
        assert not result.trained and result.notes
        nowhere = art.TrainableModel(name="x", project="tests", base_model=tmp_path / "nowhere")
        with pytest.raises(ModelError, match="no such folder"):
            await nowhere.register(backend)
    with pytest.raises(ConfigError, match=r"has no option .run_nam."):
        art.TrainableModel(name="x", project="p", base_model="b", run_nam="y")
    for name in ("../x", "a/b", "", "a@3"):
        with pytest.raises(ConfigError):
            art.TrainableModel(name=name, project="p", base_model="b")
    with pytest.raises(ConfigError, match="unknown"):
        art.LocalBackend(engine="vlm")  # type: ignore[arg-type]


async def test_a_folder_of_another_base_and_a_damaged_checkpoint(tiny_base: Path, tmp_path: Path) -> None:
    model, backend = make(tiny_base, tmp_path)
    async with backend:
        await model.register(backend)
        groups = await even_groups(model, 0)
        await model.train(groups, FAST)
        path = (await model.train(groups, FAST)).checkpoint_path
    assert path is not None
    (path / "adapter_model.safetensors").unlink()
    model, backend = make(tiny_base, tmp_path)
    async with backend:
        await model.register(backend)
        assert await model.get_step() == 1, "the half-written one is skipped"
        with pytest.raises(CheckpointError, match="left as it is"):
            await model.train(groups, FAST)
        assert await model.get_step() == 1
    run = tmp_path / "art" / "tests" / "models" / "agent" / "run.json"
    run.write_text(json.dumps({**json.loads(run.read_text()), "base_model": "other/base"}))
    model, backend = make(tiny_base, tmp_path)
    async with backend:
        with pytest.raises(ConfigError, match="other/base"):
            await model.register(backend)


def _hold(base: str, path: str, ready: Any, done: Any) -> None:
    async def hold() -> None:
        backend = art.LocalBackend(path=path, device="cpu", verbose=False)
        model = art.TrainableModel(name="agent", project="tests", base_model=base, lora=LORA)
        await model.register(backend)
        ready.set()
        await asyncio.to_thread(done.wait, 60)
        await backend.close()

    asyncio.run(hold())


async def test_two_processes_on_one_folder(tiny_base: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ready, done = context.Event(), context.Event()
    child = context.Process(target=_hold, args=(str(tiny_base), str(tmp_path / "art"), ready, done))
    child.start()
    try:
        assert await asyncio.to_thread(ready.wait, 60)
        model, backend = make(tiny_base, tmp_path)
        async with backend:
            with pytest.raises(CheckpointError, match=str(child.pid)):
                await model.register(backend)
    finally:
        done.set()
        child.join(30)
    model, backend = make(tiny_base, tmp_path)
    async with backend:
        await model.register(backend)  # the other has let go
        assert await model.get_step() == 0


async def test_http_endpoint_and_a_port_in_use(tiny_base: Path, tmp_path: Path) -> None:
    from openai import AsyncOpenAI, AuthenticationError

    model, backend = make(tiny_base, tmp_path)
    async with backend:
        await model.register(backend)
        url = await asyncio.to_thread(lambda: model.inference_base_url)
        client = AsyncOpenAI(base_url=url, api_key=model.inference_api_key)
        async with client, art.trajectory(group="http") as t:
            await client.chat.completions.create(
                model="agent", messages=[{"role": "user", "content": "over http"}], max_tokens=3
            )
            t.reward = 1.0
        assert len(t.choices()) == 1 and t.initial_policy_version == 0
        async with AsyncOpenAI(base_url=url, api_key="wrong") as client:
            with pytest.raises(AuthenticationError):
                await client.models.list()
        port = int(url.split(":")[2].split("/")[0])
        second, taken = make(tiny_base, tmp_path, name="second", port=port)
        async with taken:
            await second.register(taken)
            with pytest.raises(ConfigError, match=str(port)):
                await asyncio.to_thread(lambda: second.inference_base_url)


async def test_rollouts_may_call_from_any_loop(tiny_base: Path, tmp_path: Path) -> None:
    model, backend = make(tiny_base, tmp_path)
    await model.register(backend)
    alone = await even_rollout(model, "same", seed=7)

    def elsewhere() -> art.Trajectory:
        return asyncio.run(even_rollout(model, "same", seed=7))

    for _ in range(2):
        other = await asyncio.to_thread(elsewhere)
        assert other.messages() == alone.messages()
    await backend.close()


async def test_a_run_whose_sampler_is_another_policy_stops(tiny_base: Path, tmp_path: Path) -> None:
    model, backend = make(tiny_base, tmp_path)
    async with backend:
        await model.register(backend)
        groups = await even_groups(model, 0)
        for choice in (c for g in groups for t in g for c in t.choices()):
            for token in choice.logprobs.content:
                token.logprob -= 5.0
        config = art.TrainConfig(learning_rate=1e-4, importance_correction="none")
        for _ in range(2):
            await model.train(groups, config)
        with pytest.raises(TrainError, match=r"not this policy's.*best train/reward so far was at step"):
            await model.train(groups, config)
        assert await model.get_step() == 3, "the step itself is kept"


@pytest.mark.parametrize(
    "option",
    [
        {"sleep": "always"},
        {"enforce_eager": True},
        {"load_in_4bit": True},
        {"load_in_fp8": True},
        {"gpu_memory_utilization": 0.5},
        {"engine_options": {"max_num_seqs": 4}},
    ],
    ids=lambda option: next(iter(option)),
)
async def test_the_embedded_engine_refuses_what_it_cannot_honour(
    tiny_base: Path, tmp_path: Path, option: dict[str, Any]
) -> None:
    model, backend = make(tiny_base, tmp_path, **option)
    async with backend:
        with pytest.raises(ConfigError, match=f"{next(iter(option))} is for engine='vllm'"):
            await model.register(backend)


@pytest.mark.parametrize("where", ["base", "adapter"])
async def test_an_interrupted_registration_leaves_nothing_that_nobody_owns(
    where: str, tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads cannot be stopped: what they load would stay in memory, or write into a folder whose lock is released."""
    reached, may_go_on = threading.Event(), threading.Event()
    owner, name = (local_backend, "load_base") if where == "base" else (trained.TrainedModel, "_resume")
    original = getattr(owner, name)

    def held(*arguments: Any) -> Any:
        reached.set()
        assert may_go_on.wait(60)
        return original(*arguments)

    monkeypatch.setattr(owner, name, held)
    model, backend = make(tiny_base, tmp_path)
    async with backend:
        registering = asyncio.create_task(backend.register(model))
        assert await asyncio.to_thread(reached.wait, 60)
        for _ in range(2):  # a person presses the button again
            registering.cancel()
            await asyncio.sleep(0.02)
        assert not registering.done()
        may_go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await registering
        (base,) = backend._bases.values()
        assert base.engine.state == "awake" and sorted(backend._models) == ["agent"]
        await model.register(backend)
        assert backend._bases[str(tiny_base)] is base, "the cell that is run again finds what the first one loaded"
        assert (await model.train(await even_groups(model, 0), FAST)).step == 1
    assert base.engine.state == "closed"


async def test_an_older_checkpoint_whose_request_went_away_is_still_one_of_those_that_are_dropped(
    tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, backend = make(tiny_base, tmp_path, served_checkpoints=1)
    async with backend:
        await model.register(backend)
        for step in range(3):
            await model.train(await even_groups(model, step), FAST)
        (base,) = backend._bases.values()
        original, reached = base.engine.load_adapter, asyncio.Event()

        async def slow(*arguments: Any) -> None:
            reached.set()
            await original(*arguments)

        monkeypatch.setattr(base.engine, "load_adapter", slow)
        asked = asyncio.create_task(greedy(model, "agent@1"))
        await reached.wait()
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        monkeypatch.setattr(served, "JUST_ASKED_S", 0.0)
        await greedy(model, "agent@2")
        assert [str(ref) for ref in base.engine.adapters()] == ["agent@3", "agent@2"]


async def test_an_interrupted_deletion_does_not_go_on_serving_what_is_gone(
    tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, backend = make(tiny_base, tmp_path)
    async with backend:
        await model.register(backend)
        for step in range(2):
            await model.train(await even_groups(model, step), FAST)
        await greedy(model, "agent@1")
        original, reached = CheckpointStore.delete, threading.Event()

        def slow(*arguments: Any) -> None:
            reached.set()
            original(*arguments)

        monkeypatch.setattr(CheckpointStore, "delete", slow)
        deleting = asyncio.create_task(backend.delete_checkpoints(model, [1]))
        assert await asyncio.to_thread(reached.wait, 60)
        deleting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await deleting
        with pytest.raises(openai.NotFoundError):
            await greedy(model, "agent@1")


async def test_a_step_that_fails_after_its_checkpoint_was_written_is_undone(
    tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, backend = make(tiny_base, tmp_path)
    async with backend:
        await model.register(backend)
        groups, other = await even_groups(model, 0), await even_groups(model, 1)
        (base,) = backend._bases.values()
        original, calls = base.engine.load_adapter, 0

        async def fails_at_last(*arguments: Any) -> None:
            nonlocal calls
            calls += 1
            if calls == 2:  # the first is of the files while they are written
                raise EngineError("no more adapters")
            await original(*arguments)

        with monkeypatch.context() as patch, pytest.raises(EngineError, match="no more"):
            patch.setattr(base.engine, "load_adapter", fails_at_last)
            await model.train(groups, FAST)
        assert await model.checkpoints() == [0] and len(model.history()) == 0
        assert [str(ref) for ref in base.engine.adapters()] == ["agent@0"]
        assert (await model.train(other, FAST)).step == 1
        asked = await even_groups(model, 2)
        result = await model.train(asked, FAST)
        assert result.metrics["mismatch_log_ratio_max"] < 1e-3, "what is served is what was trained, not what failed"


async def test_an_interrupted_close_closes_all(
    tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, backend = make(tiny_base, tmp_path)
    await model.register(backend)
    (base,) = backend._bases.values()
    original, reached = trained.TrainedModel.end_step, asyncio.Event()

    async def slow(self: trained.TrainedModel) -> None:
        reached.set()
        await asyncio.sleep(0.1)
        await original(self)

    monkeypatch.setattr(trained.TrainedModel, "end_step", slow)
    closing = asyncio.create_task(backend.close())
    await reached.wait()
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert base.engine.state == "closed"
    monkeypatch.undo()
    model, backend = make(tiny_base, tmp_path, kv_tokens=512)
    async with backend:
        await model.register(backend)  # the folder was given back, too


async def test_a_base_without_models_makes_way_for_another_backend(
    tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A registration fails after its base was loaded, the cell is run again with other options: one base in memory."""

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    model, first = make(tiny_base, tmp_path)
    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"):
        patch.setattr(CheckpointStore, "save", full)
        await model.register(first)
    (base,) = first._bases.values()
    assert base.engine.state == "awake" and not first._models
    other, second = make(tiny_base, tmp_path, "other", kv_tokens=512)
    async with second:
        await other.register(second)
        assert base.engine.state == "closed"
        await model.register(art.LocalBackend(path=tmp_path / "more", device="cpu", verbose=False))
        assert (await other.train(await even_groups(other, 0), FAST)).step == 1, "one that has models stays"
        await model.backend().close()
