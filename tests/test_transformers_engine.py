"""The embedded engine on tiny random models: what it says is what a plain forward pass says, whoever else is there."""

import asyncio
import contextlib
import gc
import random
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import VOCAB, make_model

from artnb.config import LoraConfig
from artnb.engines import scheduler
from artnb.engines.base import AdapterRef, SamplingParams
from artnb.engines.transformers import TransformersEngine
from artnb.errors import (
    AdapterNotFoundError,
    CheckpointError,
    ContextLengthError,
    EngineClosedError,
    EngineError,
    ModelError,
    RequestError,
)
from artnb.training.policy import Policy, load_policy

ANSWER = 12
GREEDY = SamplingParams(max_tokens=ANSWER, temperature=0)
ONE, TWO = AdapterRef("agent", 1), AdapterRef("agent", 2)
Answer = tuple[list[int], list[float], str]


def load(kind: str, folder: Path) -> Policy:
    return load_policy(make_model(kind, folder), lora=LoraConfig(r=4), device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Policy]:
    return {kind: load(kind, tmp_path_factory.mktemp(kind)) for kind in ("llama", "qwen3", "gemma3")}


@pytest.fixture(scope="module")
def policy(policies: dict[str, Policy]) -> Policy:
    return policies["llama"]


@pytest.fixture(scope="module")
def adapters(policy: Policy, tmp_path_factory: pytest.TempPathFactory) -> dict[AdapterRef, Path]:
    """Two adapter folders that differ clearly from the base and from each other."""
    folders = {}
    for ref in (ONE, TWO):
        policy.add_adapter("made")
        rng = torch.Generator().manual_seed(ref.step)
        with torch.no_grad():
            for weight in policy.adapter_parameters("made").values():
                weight.copy_(torch.randn(weight.shape, generator=rng) * 0.3)
        folders[ref] = tmp_path_factory.mktemp("adapter") / str(ref)
        policy.save_adapter("made", folders[ref])
        policy.drop_adapter("made")
    return folders


def make_engine(policy: Policy, **options: Any) -> TransformersEngine:
    return TransformersEngine(policy, **{"eos_token_ids": [], "context_length": 512, **options})


@contextlib.asynccontextmanager
async def running(policy: Policy, **options: Any) -> AsyncIterator[TransformersEngine]:
    engine = make_engine(policy, **options)
    try:
        yield engine
    finally:
        await engine.close()


async def ask(
    engine: TransformersEngine, prompt: list[int], params: SamplingParams = GREEDY, adapter: AdapterRef | None = None
) -> Answer:
    ids: list[int] = []
    logprobs: list[float] = []
    reason = ""
    async for chunk in engine.generate(prompt, params, adapter):
        assert not reason, "a chunk after the last one"
        ids += chunk.token_ids
        logprobs += chunk.logprobs
        reason = chunk.finish_reason or ""
    return ids, logprobs, reason


def make_prompts(count: int, seed: int = 0, shared: int = 60) -> list[list[int]]:
    """Half of them share a prefix."""
    rng = random.Random(seed)
    prefix = [rng.randrange(VOCAB) for _ in range(shared)]
    return [(prefix if i % 2 else []) + [rng.randrange(VOCAB) for _ in range(rng.randint(1, 40))] for i in range(count)]


def plain_logprobs(policy: Policy, prompt: list[int], answer: list[int], temperature: float = 1.0) -> list[float]:
    with torch.no_grad():
        logits = policy.base(input_ids=torch.tensor([prompt + answer]), use_cache=False).logits[0]
    logp = torch.log_softmax(logits / temperature, -1)[len(prompt) - 1 : -1]
    return logp[range(len(answer)), answer].tolist()


def greedy_alone(policy: Policy, prompt: list[int], tokens: int, adapter: str | None = None) -> list[int]:
    ids = torch.tensor([prompt])
    with policy.using(adapter), torch.no_grad():
        out = policy.base.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return out[0, len(prompt) :].tolist()


# What it says -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3"])
@pytest.mark.parametrize("batch_tokens", [2048, 70])
async def test_greedy_equals_generate_for_mixed_prompts(
    policies: dict[str, Policy], kind: str, batch_tokens: int
) -> None:
    policy = policies[kind]
    prompts = [*make_prompts(8), *make_prompts(2, seed=5, shared=150)]
    async with running(policy, max_batch_tokens=batch_tokens) as engine:
        answers = await asyncio.gather(*(ask(engine, prompt) for prompt in prompts))
    for prompt, (ids, logprobs, reason) in zip(prompts, answers, strict=True):
        assert reason == "length"
        assert ids == greedy_alone(policy, prompt, ANSWER)
        assert logprobs == pytest.approx(plain_logprobs(policy, prompt, ids), abs=1e-4)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
async def test_logprobs_equal_a_plain_forward_pass(policies: dict[str, Policy], temperature: float) -> None:
    for policy in policies.values():
        params = SamplingParams(max_tokens=16, temperature=temperature, top_p=0.9, seed=3)
        async with running(policy) as engine:
            prompts = make_prompts(8)
            answers = await asyncio.gather(*(ask(engine, prompt, params) for prompt in prompts))
        for prompt, (ids, logprobs, _) in zip(prompts, answers, strict=True):
            assert logprobs == pytest.approx(plain_logprobs(policy, prompt, ids, temperature), abs=1e-4)


async def test_reused_prefixes_change_nothing_and_are_counted(policy: Policy) -> None:
    prompt = make_prompts(2)[1]
    async with running(policy) as engine:
        first = await ask(engine, prompt)
        assert engine.stats().cached_prompt_tokens == 0
        assert (await ask(engine, prompt))[0] == first[0]
        assert engine.stats().cached_prompt_tokens == len(prompt) - 1
        # The next turn of the same conversation: prompt and answer are there already, but for the last token.
        turn = [*prompt, *first[0], 7, 8, 9]
        again = await ask(engine, turn)
        assert again[0] == greedy_alone(policy, turn, ANSWER)
        assert engine.stats().cached_prompt_tokens == len(prompt) - 1 + len(turn) - 4
        assert engine.stats().prompt_tokens == 2 * len(prompt) + len(turn)


async def test_prompts_that_arrive_together_are_prefilled_once(policy: Policy) -> None:
    prompt = list(range(2, 202))
    computed: list[int] = []
    async with running(policy) as engine:
        run = engine._forward.run

        def counting(batch: Any, pool: Any) -> Any:
            computed.append(sum(work.new for work in batch))
            return run(batch, pool)

        engine._forward.run = counting  # type: ignore[method-assign]
        identical = [ask(engine, prompt, SamplingParams(max_tokens=1, seed=i)) for i in range(16)]
        forked = [ask(engine, [*prompt[:150], 300 + i, 5], SamplingParams(max_tokens=1)) for i in range(16)]
        await asyncio.gather(*identical, *forked)
    # The prompt's 200 tokens; one each for the other identical ones; two each for the forks.
    assert sum(computed) <= 200 + 15 + 16 * 2
    assert engine.stats().cached_prompt_tokens >= 15 * 199 + 16 * 150


# Seeds --------------------------------------------------------------------------------------------


async def test_a_seed_gives_the_same_tokens_alone_and_in_company(policy: Policy) -> None:
    prompts = make_prompts(10)
    seeded = SamplingParams(max_tokens=20, seed=11)
    async with running(policy, seed=1) as engine:
        alone = [await ask(engine, prompt, seeded) for prompt in prompts]
    async with running(policy, seed=2) as engine:
        others = [ask(engine, prompt, SamplingParams(max_tokens=33)) for prompt in make_prompts(12, seed=9)]
        together = await asyncio.gather(*(ask(engine, prompt, seeded) for prompt in prompts), *others)
    assert [ids for ids, _, _ in together[: len(prompts)]] == [ids for ids, _, _ in alone]


async def test_requests_without_a_seed_differ_and_the_engine_seed_repeats_them(policy: Policy) -> None:
    prompt = make_prompts(1)[0]
    runs = []
    for seed in (1, 1, 2):
        async with running(policy, seed=seed) as engine:
            answers = await asyncio.gather(*(ask(engine, prompt, SamplingParams(max_tokens=20)) for _ in range(4)))
        runs.append([ids for ids, _, _ in answers])
    assert len({tuple(ids) for ids in runs[0]}) == 4
    assert runs[0] == runs[1] != runs[2]


async def test_sampled_tokens_follow_the_distribution(policy: Policy) -> None:
    """Chi-square over a wide cut, so that every cell has enough: 20 tokens, 1,000 draws."""
    prompt = make_prompts(1)[0]
    params = SamplingParams(max_tokens=1, temperature=2.0, top_k=20)
    async with running(policy) as engine:
        answers = await asyncio.gather(*(ask(engine, prompt, params) for _ in range(1000)))
    with torch.no_grad():
        logits = policy.base(input_ids=torch.tensor([prompt]), use_cache=False).logits[0, -1] / 2.0
    kept, tokens = torch.softmax(logits, -1).topk(20)
    kept = kept / kept.sum()
    counts = {int(token): 0 for token in tokens}
    for ids, _, _ in answers:
        counts[ids[0]] += 1
    cells = [(counts[int(t)], float(p) * 1000) for t, p in zip(tokens, kept, strict=True) if p * 1000 >= 5]
    assert len(cells) >= 4
    chi2 = sum((seen - wanted) ** 2 / wanted for seen, wanted in cells)
    assert chi2 < 45, chi2  # 99.9 % at 19 degrees of freedom: 43.8


# Adapters -----------------------------------------------------------------------------------------


async def test_two_adapters_and_the_base_at_once_give_each_its_own_answer(
    policy: Policy, adapters: dict[AdapterRef, Path]
) -> None:
    prompts = make_prompts(6)
    asked = [(prompt, ref) for prompt in prompts for ref in (None, ONE, TWO)]
    async with running(policy) as engine:
        for ref, path in adapters.items():
            await engine.load_adapter(ref, path)
            await engine.load_adapter(ref, path)  # idempotent
        assert engine.adapters() == [ONE, TWO]
        answers = await asyncio.gather(*(ask(engine, prompt, GREEDY, ref) for prompt, ref in asked))
        await engine.drop_adapter(ONE)
        assert engine.adapters() == [TWO]
        with pytest.raises(AdapterNotFoundError, match=r"agent@1.*agent@2"):
            await ask(engine, prompts[0], GREEDY, ONE)
        await engine.drop_adapter(TWO)
        await engine.drop_adapter(TWO)
        await ask(engine, prompts[0])
    assert policy.adapters() == [], "a dropped adapter stays in the model"
    for ref, path in adapters.items():
        policy.load_adapter(str(ref), path)
    for (prompt, ref), (ids, _, _) in zip(asked, answers, strict=True):
        assert ids == greedy_alone(policy, prompt, ANSWER, ref and str(ref))
    for ref in adapters:
        policy.drop_adapter(str(ref))
    assert answers[0][0] != answers[1][0] != answers[2][0] != answers[0][0]


async def test_no_keys_and_values_pass_between_adapters(policy: Policy, adapters: dict[AdapterRef, Path]) -> None:
    prompt = make_prompts(2)[1]
    async with running(policy) as engine:
        await ask(engine, prompt)
        await engine.load_adapter(ONE, adapters[ONE])
        under_one = await ask(engine, prompt, GREEDY, ONE)
        assert engine.stats().cached_prompt_tokens == 0
        # The same ref with other weights, as after a step that was undone and made again.
        await engine.drop_adapter(ONE)
        await engine.load_adapter(ONE, adapters[TWO])
        other = await ask(engine, prompt, GREEDY, ONE)
        assert engine.stats().cached_prompt_tokens == 0
        assert other[0] != under_one[0]
        await engine.drop_adapter(ONE)


async def test_swap_under_load_fails_no_request(policy: Policy, adapters: dict[AdapterRef, Path]) -> None:
    params = SamplingParams(max_tokens=20, temperature=0)
    prompts = make_prompts(20)
    async with running(policy, max_running=16) as engine:
        await engine.load_adapter(ONE, adapters[ONE])
        before = [asyncio.create_task(ask(engine, prompt, params, ONE)) for prompt in prompts]
        while engine.stats().generated_tokens < 20:
            await asyncio.sleep(0.002)
        await engine.load_adapter(TWO, adapters[TWO])
        await engine.drop_adapter(ONE)
        after = [asyncio.create_task(ask(engine, prompt, params, TWO)) for prompt in prompts]
        old, new = await asyncio.gather(*before), await asyncio.gather(*after)
        assert engine.adapters() == [TWO]
        await ask(engine, prompts[0])  # the loop has dropped ONE by then
        assert len(policy.adapters()) == 1
        await engine.drop_adapter(TWO)
        await ask(engine, prompts[0])
    for prompt, (ids, _, _), (other, _, _) in list(zip(prompts, old, new, strict=True))[:4]:
        assert ids != other
        for ref, got in ((ONE, ids), (TWO, other)):
            policy.load_adapter("check", adapters[ref])
            assert got == greedy_alone(policy, prompt, 20, "check")
            policy.drop_adapter("check")


async def test_an_adapter_that_does_not_load_leaves_the_engine_as_it_was(policy: Policy, tmp_path: Path) -> None:
    async with running(policy) as engine:
        with pytest.raises(CheckpointError):
            await engine.load_adapter(ONE, tmp_path / "nothing")
        assert engine.adapters() == []
        assert len((await ask(engine, [1, 2, 3]))[0]) == ANSWER


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
    params = SamplingParams(max_tokens=20, temperature=0)
    monkeypatch.setattr(scheduler, "TAIL_TOKENS", 4)
    async with running(policy, kv_tokens=300, max_running=16) as engine:
        assert engine.context_length == 300
        answers = await asyncio.gather(*(ask(engine, prompt, params) for prompt in prompts))
        assert engine.stats().extra["preemptions"] > 0
    assert all(reason == "length" and len(ids) == 20 for ids, _, reason in answers)
    for prompt, (ids, _, _) in list(zip(prompts, answers, strict=True))[::25]:
        assert ids == greedy_alone(policy, prompt, 20)


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

        assert await asyncio.to_thread(train) < 600
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
