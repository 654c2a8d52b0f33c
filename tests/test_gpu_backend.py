"""LocalBackend with vLLM on a CUDA device: one copy of the weights, sleep and wake, recovery. Needs the card.

One backend serves all tests here (vLLM takes a minute to start); what a test does to it, the next one must not feel.
User reports: tests/REPORTS.md, section 4.
"""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import AsyncGenerator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

import artnb as art

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(400)]
GIB = 2**30


def used() -> int:
    import torch

    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return int(total - free)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def held(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[tuple[Any, Any]]:
    folder = tmp_path_factory.mktemp("gpu")
    backend = art.LocalBackend(
        path=folder,
        engine="vllm",
        enforce_eager=True,
        sleep="always",
        context_length=1024,
        max_running=64,
        verbose=False,
    )
    base = os.environ.get("ARTNB_TEST_MODEL") or art.demo_model()  # a folder, where the demo model cannot be fetched
    model = art.TrainableModel("agent", "gpu", base, lora=art.LoraConfig(r=8))
    await model.register(backend)
    yield model, backend
    await backend.close()


async def groups_of(model: Any, count: int = 4, tokens: int = 32) -> list[art.TrajectoryGroup]:
    async def rollout(question: str, reward: float) -> art.Trajectory:
        messages: list[Any] = [{"role": "user", "content": question}]
        completion = await model.openai_client().chat.completions.create(
            model=model.get_inference_name(), messages=messages, max_tokens=tokens, extra_body={"ignore_eos": True}
        )
        return art.Trajectory(messages_and_choices=[*messages, completion.choices[0]], reward=reward)

    return await art.gather_trajectory_groups(
        (art.TrajectoryGroup(rollout(f"Count from {g}.", float(i % 2)) for i in range(4)) for g in range(count)),
        pbar_desc=None,
    )


async def answer(model: Any, name: str | None = None) -> list[int]:
    completion = await model.openai_client().chat.completions.create(
        model=name or model.get_inference_name(),
        messages=[{"role": "user", "content": "Name a colour."}],
        temperature=0,
        max_tokens=12,
    )
    return list(completion.choices[0].model_extra["token_ids"])


def largest_tensors() -> str:
    """What is still on the GPU, and what holds it."""
    import torch

    held: dict[int, str] = {}
    for tensor in [o for o in gc.get_objects() if isinstance(o, torch.Tensor) and o.is_cuda]:
        storage = tensor.untyped_storage()
        holders = [
            type(r).__name__ + (f" {list(r)[:3]}" if isinstance(r, dict) else "") for r in gc.get_referrers(tensor)
        ]
        what = f"{storage.nbytes() >> 10} KiB {tuple(tensor.shape)} {tensor.dtype}: {holders[:6]}"
        held[storage.data_ptr()] = f"{storage.nbytes():15d} {what[:400]}"
    return "\n".join(sorted(held.values(), reverse=True)[:25])


def base_of(backend: Any) -> Any:
    return next(iter(backend._bases.values()))


async def test_the_trainers_weights_are_views_of_the_engines(held: tuple[Any, Any]) -> None:
    _, backend = held
    base = base_of(backend)
    theirs = {w.untyped_storage().data_ptr() for w in base.engine.module.parameters()}
    ours = {n: w for n, w in base.policy.base.named_parameters() if "lora_" not in n}
    assert ours and all(w.untyped_storage().data_ptr() in theirs for w in ours.values())


async def test_steps_sleep_wake_and_probe(held: tuple[Any, Any]) -> None:
    model, backend = held
    base = base_of(backend)
    before, first = await answer(model, base.name), await model.get_step()
    taken: list[int] = []
    for _ in range(4):
        result = await model.train(await groups_of(model), art.TrainConfig(learning_rate=1e-3))
        assert result.trained and result.metrics["probe_adapter"] < 0.1
        assert {"seconds_sleep", "seconds_wake", "seconds_swap", "seconds_probe"} <= result.metrics.keys()
        assert 0.98 < result.metrics["mismatch_ratio"] < 1.02
        taken.append(used())
    assert await model.get_step() == first + 4
    assert max(taken[1:]) - min(taken[1:]) < 64 << 20, taken
    assert await answer(model, base.name) == before, "the base answers as before"
    assert await answer(model) != before, "the newest adapter does not"
    assert await answer(model, f"{model.name}@0") == before, "checkpoint 0 is the base, beside the newest"


async def test_sleep_gives_the_cache_away_and_requests_wait(held: tuple[Any, Any]) -> None:
    model, backend = held
    engine = base_of(backend).engine
    awake = used()
    running = asyncio.create_task(groups_of(model, count=2, tokens=400))
    await asyncio.sleep(0.5)
    whole: list[Any] = []
    watch = lambda phase, info: whole.append(info) if info["generation"] == 2 else None  # noqa: E731
    gc.callbacks.append(watch)
    await engine.sleep()
    gc.callbacks.remove(watch)
    assert not whole, "no search for garbage among all rollouts"
    await engine.sleep()
    assert awake - used() > 0.9 * engine.cache_bytes > 0
    waiting = asyncio.create_task(groups_of(model, count=1))
    await asyncio.sleep(0.3)
    assert not running.done() and not waiting.done()
    await engine.wake()
    await engine.wake()
    groups = [*await running, *await waiting]
    lengths = {len(c.model_extra["token_ids"]) for g in groups for t in g for c in t.choices()}
    assert lengths == {400, 32}, "none is lost, none is cut"


async def test_a_wake_without_room_can_be_tried_again(held: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    model, backend = held
    step = await model.get_step()
    real = torch.cuda.mem_get_info
    groups = await groups_of(model)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *device: (GIB // 2, real()[1]))
    with pytest.raises(art.errors.TrainError, match=r"cannot wake.*phase: wake") as caught:
        await model.train(groups, art.TrainConfig(learning_rate=1e-5, max_tokens_per_pack=1024))
    assert "GiB" in str(caught.value) and base_of(backend).engine.state == "asleep"
    monkeypatch.undo()
    assert await answer(model), "the next request wakes it"
    assert await model.get_step() == step, "a step that was not served is not kept"
    assert (await model.train(groups, art.TrainConfig(learning_rate=1e-5))).step == step + 1


async def test_out_of_memory_names_phase_and_way_out_and_leaves_the_engine(held: tuple[Any, Any]) -> None:
    import torch

    model, _ = held
    step = await model.get_step()
    groups = await groups_of(model, count=16, tokens=256)
    before = used()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (300 << 20)) / total)
    try:
        with pytest.raises(art.errors.TrainError, match=r"max_tokens_per_pack=\d+.*phase: (forward|backward) pass"):
            await model.train(groups, art.TrainConfig(learning_rate=1e-5, max_tokens_per_pack=16384))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert await answer(model) and await model.get_step() == step
    assert used() - before < 128 << 20
    assert (await model.train(groups, art.TrainConfig(learning_rate=1e-5))).step == step + 1


async def test_an_interrupted_step_gives_memory_back_and_the_engine_answers(held: tuple[Any, Any]) -> None:
    model, _ = held
    step = await model.get_step()
    groups = await groups_of(model, count=8)
    before = used()
    slow = art.TrainConfig(learning_rate=1e-6, num_iterations=500, max_tokens_per_pack=256)
    task = asyncio.create_task(model.train(groups, slow))
    await asyncio.sleep(2.0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await answer(model) and await model.get_step() == step
    assert used() - before < 128 << 20


async def test_packs_give_the_log_probs_of_rows_alone(held: tuple[Any, Any]) -> None:
    from artnb.training.pack import build_packs
    from artnb.training.types import Row

    _, backend = held
    policy = base_of(backend).policy
    rng = np.random.default_rng(0)
    stem = rng.integers(100, 4000, 300)
    rows = []
    for size in (50, 180, 400):
        ids = np.concatenate([stem, rng.integers(100, 4000, size)])
        rows.append(Row(ids, np.arange(len(ids)) > 200, np.zeros(len(ids), np.float32), np.ones(len(ids), np.float32)))
    (together,) = build_packs(rows, 4096)
    whole, _ = policy.token_logprobs(together, adapter=None)
    for index, row in enumerate(rows):
        (alone,) = build_packs([row], 4096)
        single, _ = policy.token_logprobs(alone, adapter=None)
        length = int(row.sampled.sum())
        apart = (whole[together.rows.index(index), :length] - single[0, :length]).abs()
        # bf16, of random words, whose log-probs are around -10; a mask that is wrong moves them by whole nats.
        assert float(apart.mean()) < 0.06, float(apart.mean())


async def test_closing_leaves_no_memory_of_ours(held: tuple[Any, Any]) -> None:
    """The last one here: it closes the backend."""
    import torch

    _, backend = held
    await backend.close()
    await backend.close()
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated() < 64 << 20, largest_tensors()
