"""The embedded engine's life: endings, sleep, full pools, faults, foreign loops and the trainer beside it."""

import asyncio
import contextlib
import gc
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from embedded_engine import (
    ANSWER,
    GREEDY,
    ONE,
    TWO,
    Answer,
    ask,
    greedy_alone,
    load,
    make_adapters,
    make_engine,
    make_prompts,
    running,
)
from tiny_models import VOCAB

from artnb.engines import scheduler
from artnb.engines.base import AdapterRef, SamplingParams
from artnb.errors import (
    AdapterNotFoundError,
    ContextLengthError,
    EngineClosedError,
    EngineError,
    ModelError,
    RequestError,
)
from artnb.training.policy import Policy


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    return load("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def adapters(policy: Policy, tmp_path_factory: pytest.TempPathFactory) -> dict[AdapterRef, Path]:
    return make_adapters(policy, tmp_path_factory.mktemp("adapters"))


# Endings ------------------------------------------------------------------------------------------


async def test_stop_tokens_and_limits(policy: Policy) -> None:
    prompt = make_prompts(1)[0]
    full = greedy_alone(policy, prompt, 24)
    end = full[5]
    upto = full[: full.index(end) + 1]
    async with running(policy, eos_token_ids=[end], context_length=len(prompt) + 10) as engine:
        ids, logprobs, reason = await ask(engine, prompt)
        assert (ids, reason, len(logprobs)) == (upto, "stop", len(upto))
        ignoring = SamplingParams(max_tokens=4000, temperature=0, ignore_eos=True)
        assert (await ask(engine, prompt, ignoring))[::2] == (full[:10], "length"), "clamped to the context"
        own = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True, stop_token_ids=(full[2],))
        assert (await ask(engine, prompt, own))[0] == full[: full.index(full[2]) + 1]


@pytest.mark.parametrize(
    ("prompt", "error"),
    [([], RequestError), ([VOCAB], RequestError), ([-1], RequestError), ([1] * 64, ContextLengthError)],
)
async def test_prompts_that_cannot_be(policy: Policy, prompt: list[int], error: type[Exception]) -> None:
    async with running(policy, context_length=64) as engine:
        with pytest.raises(error):
            await ask(engine, prompt)
        assert len((await ask(engine, [1] * 63))[0]) == 1
        assert engine.stats().requests == 1


async def test_closing_the_generator_cancels_and_frees(policy: Policy) -> None:
    async with running(policy) as engine:
        streams = [engine.generate([i, 2, 3], SamplingParams(max_tokens=400)) for i in range(8)]
        for stream in streams:
            await anext(stream)
        assert engine.stats().running == 8
        for stream in streams[1:]:
            await stream.aclose()
        while engine.stats().running > 1:
            await asyncio.sleep(0.001)
        task = asyncio.create_task(ask(engine, [1, 2], SamplingParams(max_tokens=400)))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await streams[0].aclose()
        await ask(engine, [5], SamplingParams(max_tokens=1))
        assert engine.stats().running == engine.stats().waiting == 0
        await engine.sleep()  # with nothing under way the cache goes, too
        assert engine.stats().extra["kv_tokens_used"] == engine.stats().extra["kv_bytes"] == 0


async def test_a_cancelled_leader_leaves_its_prefix_to_the_followers(policy: Policy) -> None:
    prompt = [i % VOCAB for i in range(400)]
    async with running(policy, max_batch_tokens=64) as engine:
        leader = asyncio.create_task(ask(engine, prompt))
        followers = [asyncio.create_task(ask(engine, [*prompt[:300], i])) for i in range(3)]
        while engine.stats().running < 4:
            await asyncio.sleep(0)
        leader.cancel()
        answers = await asyncio.gather(*followers)
    for i, (ids, _, _) in enumerate(answers):
        assert ids == greedy_alone(policy, [*prompt[:300], i], ANSWER)


async def test_sleep_stops_between_tokens_and_wake_goes_on(policy: Policy) -> None:
    params = SamplingParams(max_tokens=40, temperature=0)
    prompts = make_prompts(6)
    async with running(policy) as engine:
        tasks = [asyncio.create_task(ask(engine, prompt, params)) for prompt in prompts]
        while engine.stats().generated_tokens < 20:
            await asyncio.sleep(0.001)
        for _ in range(2):
            await engine.sleep()
        assert engine.state == "asleep"
        made = engine.stats().generated_tokens
        late = asyncio.create_task(ask(engine, prompts[0], params))
        await asyncio.sleep(0.05)
        assert engine.stats().generated_tokens == made and not late.done()
        assert policy.lock.acquire(blocking=False), "asleep, the engine leaves the model alone"
        policy.lock.release()
        for _ in range(2):
            await engine.wake()
        answers = await asyncio.gather(*tasks, late)
        assert engine.state == "awake"
    assert [ids for ids, _, _ in answers[:-1]] == [greedy_alone(policy, prompt, 40) for prompt in prompts]
    assert answers[-1][0] == answers[0][0]


async def test_adapters_come_and_go_while_it_sleeps(policy: Policy, adapters: dict[AdapterRef, Path]) -> None:
    async with running(policy) as engine:
        await engine.load_adapter(ONE, adapters[ONE])
        for _ in range(5):
            await engine.sleep()
            await engine.load_adapter(TWO, adapters[TWO])
            await engine.drop_adapter(TWO)
            await engine.wake()
        base, one = await ask(engine, [4, 5]), await ask(engine, [4, 5], GREEDY, ONE)
        assert base[0] != one[0] and base[0] == greedy_alone(policy, [4, 5], ANSWER)
        assert len(policy.adapters()) == 1
        await engine.drop_adapter(ONE)


async def test_a_small_pool_serves_many(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = make_prompts(200, shared=30)
    params = SamplingParams(max_tokens=10, temperature=0)
    monkeypatch.setattr(scheduler, "TAIL_TOKENS", 4)
    async with running(policy, kv_tokens=250, max_running=16) as engine:
        assert engine.context_length == 250
        answers = await asyncio.gather(*(ask(engine, prompt, params) for prompt in prompts))
        assert engine.stats().extra["preemptions"] > 0
    assert all(reason == "length" and len(ids) == 10 for ids, _, reason in answers)
    for prompt, (ids, _, _) in list(zip(prompts, answers, strict=True))[::25]:
        assert ids == greedy_alone(policy, prompt, 10)


async def test_many_more_requests_than_places(policy: Policy) -> None:
    async with running(policy, max_running=8) as engine:
        tasks = [asyncio.create_task(ask(engine, [i % VOCAB, 3], SamplingParams(max_tokens=2))) for i in range(500)]
        await asyncio.sleep(0)
        assert engine.stats().requests == 500, "all of them reach the engine at once"
        answers = await asyncio.gather(*tasks)
    assert all(len(ids) == 2 for ids, _, _ in answers)


@pytest.mark.parametrize("seed", range(2))
async def test_random_life(
    policy: Policy, adapters: dict[AdapterRef, Path], monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Cancelled requests, swaps and sleep at random moments in a small pool: nobody hangs, nothing leaks."""
    rng = random.Random(seed)
    monkeypatch.setattr(scheduler, "TAIL_TOKENS", 4)
    prefixes = [[rng.randrange(VOCAB) for _ in range(60)] for _ in range(2)]
    answers: list[tuple[list[int], AdapterRef | None, list[int]]] = []
    async with running(policy, kv_tokens=200, max_running=6, max_batch_tokens=40) as engine:
        await engine.load_adapter(ONE, adapters[ONE])

        async def client() -> None:
            await asyncio.sleep(rng.random() * 0.3)
            prompt = [*rng.choice(prefixes)[: rng.randint(1, 60)], *range(rng.randint(0, 20))]
            ref = rng.choice([None, ONE, TWO])
            params = SamplingParams(max_tokens=rng.randint(1, 20), temperature=0)
            limit = rng.random() * 0.05 if rng.random() < 0.2 else None
            with contextlib.suppress(TimeoutError, AdapterNotFoundError):
                ids, _, _ = await asyncio.wait_for(ask(engine, prompt, params, ref), limit)
                answers.append((prompt, ref, ids))

        async def disturb() -> None:
            for _ in range(6):
                await asyncio.sleep(rng.random() * 0.05)
                await engine.load_adapter(TWO, adapters[TWO])
                await engine.sleep()
                await engine.wake()
                await engine.drop_adapter(TWO)

        await asyncio.gather(disturb(), *(client() for _ in range(40)))
        while engine.stats().running + engine.stats().waiting:
            await asyncio.sleep(0.001)
        await engine.sleep()
        assert engine.stats().extra["kv_tokens_used"] == 0
    assert policy.adapters() == []
    for ref in (None, ONE, TWO):
        if ref is not None:
            policy.load_adapter("check", adapters[ref])
        for prompt, _, ids in [answer for answer in answers if answer[1] == ref][:4]:
            assert ids == greedy_alone(policy, prompt, len(ids), ref and "check")
        policy.drop_adapter("check")


async def test_close_ends_running_requests_and_refuses_later_ones(policy: Policy) -> None:
    engine = make_engine(policy, max_running=2)
    tasks = [asyncio.create_task(ask(engine, [i, 1], SamplingParams(max_tokens=500))) for i in range(5)]
    while engine.stats().generated_tokens < 4:
        await asyncio.sleep(0.001)
    await engine.close()
    await engine.close()
    answers = await asyncio.gather(*tasks)
    assert [reason for _, _, reason in answers] == ["abort"] * 5
    assert engine.state == "closed"
    with pytest.raises(EngineClosedError):
        await ask(engine, [1])
    await engine.sleep()
    await engine.wake()
    assert engine.state == "closed"


async def test_close_while_asleep(policy: Policy) -> None:
    engine = make_engine(policy)
    await engine.sleep()
    task = asyncio.create_task(ask(engine, [1, 2]))
    await asyncio.sleep(0)
    await engine.close()
    assert (await task)[2] == "abort"


# Faults -------------------------------------------------------------------------------------------


async def test_a_failing_forward_pass_fails_only_its_requests(policy: Policy, adapters: dict[AdapterRef, Path]) -> None:
    async with running(policy) as engine:
        await engine.load_adapter(ONE, adapters[ONE])
        run = engine._forward.run

        def failing(batch: Any, pool: Any) -> Any:
            if batch[0].sequence.adapter is not None and batch[0].sequence.sampled == 3:
                raise RuntimeError("a kernel broke")
            return run(batch, pool)

        engine._forward.run = failing  # type: ignore[method-assign]
        good = [ask(engine, prompt) for prompt in make_prompts(4)]
        bad = [ask(engine, prompt, GREEDY, ONE) for prompt in make_prompts(4)]
        answers = await asyncio.gather(*good, *bad, return_exceptions=True)
        for prompt, answer in zip(make_prompts(4), answers[:4], strict=True):
            assert not isinstance(answer, BaseException) and answer[0] == greedy_alone(policy, prompt, ANSWER)
        for answer in answers[4:]:
            assert isinstance(answer, EngineError) and "RuntimeError: a kernel broke" in str(answer)
        engine._forward.run = run  # type: ignore[method-assign]
        assert len((await ask(engine, [1, 2], GREEDY, ONE))[0]) == ANSWER, "the engine lives on"
        await engine.drop_adapter(ONE)


async def test_out_of_memory_is_tried_again_in_halves(policy: Policy) -> None:
    async with running(policy) as engine:
        run = engine._forward.run
        failures = 0

        def short_of_memory(batch: Any, pool: Any) -> Any:
            nonlocal failures
            if sum(work.new for work in batch) > 40:
                failures += 1
                raise torch.OutOfMemoryError("CUDA out of memory")
            return run(batch, pool)

        engine._forward.run = short_of_memory  # type: ignore[method-assign]
        prompts = [[i] * 30 for i in range(1, 3)] + [[9] * 70]
        for prompt in prompts:
            assert (await ask(engine, prompt))[0] == greedy_alone(policy, prompt, ANSWER)
        assert failures == 1
        with pytest.raises(EngineError, match="out of memory"):
            await ask(engine, [8] * 200)
        assert len((await ask(engine, [1, 2]))[0]) == ANSWER


async def test_a_fault_of_its_own_does_not_stop_the_engine(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(policy) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(engine._scheduler, "next", lambda: 1 / 0)
            with pytest.raises(EngineError, match="ZeroDivisionError"):
                await ask(engine, [1, 2])
        assert len((await ask(engine, [1, 2]))[0]) == ANSWER


async def test_a_dead_event_loop_does_not_hold_places(policy: Policy) -> None:
    engine = make_engine(policy)

    def abandoned() -> None:
        loop = asyncio.new_event_loop()
        stream = engine.generate([1, 2], SamplingParams(max_tokens=500))
        loop.run_until_complete(anext(stream))
        loop.close()

    await asyncio.to_thread(abandoned)
    gc.collect()
    while engine.stats().running:
        await asyncio.sleep(0.001)
    assert len((await ask(engine, [1, 2]))[0]) == ANSWER
    await engine.close()


def test_requests_from_two_loops_in_threads(policy: Policy) -> None:
    engine = make_engine(policy)
    prompts = make_prompts(10)
    answers: dict[int, list[Answer]] = {}

    async def session() -> list[Answer]:
        return await asyncio.gather(*(ask(engine, prompt) for prompt in prompts))

    def work(number: int) -> None:
        answers[number] = asyncio.run(session())

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [ids for ids, _, _ in answers[0]] == [ids for ids, _, _ in answers[1]]
    assert answers[0][3][0] == greedy_alone(policy, prompts[3], ANSWER)
    asyncio.run(engine.close())


async def test_a_trainer_gets_the_lock_while_the_engine_is_busy(policy: Policy) -> None:
    async with running(policy) as engine:
        tasks = [asyncio.create_task(ask(engine, [i, 1], SamplingParams(max_tokens=400))) for i in range(4)]
        while not engine.stats().generated_tokens:
            await asyncio.sleep(0.001)

        def train() -> int:
            for _ in range(3):
                with policy.lock:
                    made = engine.stats().generated_tokens
            return made

        assert await asyncio.to_thread(train) < 240
        await asyncio.gather(*tasks)


async def test_training_mode_and_gradients_are_left_alone(policy: Policy) -> None:
    async with running(policy) as engine:
        policy.model.train()
        before = [(name, p.requires_grad) for name, p in policy.model.named_parameters()]
        ids, _, _ = await ask(engine, [1, 2, 3])
        assert policy.model.training
        assert before == [(name, p.requires_grad) for name, p in policy.model.named_parameters()]
        policy.model.eval()
        assert ids == greedy_alone(policy, [1, 2, 3], ANSWER)
        assert not any(p.is_inference() for p in policy.model.parameters())
        assert not any(b.is_inference() for b in policy.model.buffers())


@pytest.fixture
def odd_policy(policy: Policy) -> Iterator[Policy]:
    config = policy.base.config
    kept, config.layer_types = getattr(config, "layer_types", None), ["linear_attention"] * 3
    yield policy
    config.layer_types = kept


def test_a_model_that_it_cannot_run_is_refused_at_the_start(odd_policy: Policy) -> None:
    with pytest.raises(ModelError, match="linear_attention"):
        make_engine(odd_policy)
