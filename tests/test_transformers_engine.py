"""The embedded engine says what a plain forward pass says, whoever else is there."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from embedded_engine import (
    ANSWER,
    GREEDY,
    ONE,
    TWO,
    ask,
    greedy_alone,
    load,
    make_adapters,
    make_prompts,
    plain_logprobs,
    running,
)
from tiny_models import make_model

from artnb.config import LoraConfig
from artnb.engines.base import AdapterRef, SamplingParams
from artnb.errors import AdapterNotFoundError, CheckpointError
from artnb.training.policy import Policy, load_policy


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Policy]:
    return {kind: load(kind, tmp_path_factory.mktemp(kind)) for kind in ("llama", "qwen3", "gemma3")}


@pytest.fixture(scope="module")
def policy(policies: dict[str, Policy]) -> Policy:
    return policies["llama"]


@pytest.fixture(scope="module")
def adapters(policy: Policy, tmp_path_factory: pytest.TempPathFactory) -> dict[AdapterRef, Path]:
    return make_adapters(policy, tmp_path_factory.mktemp("adapters"))


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


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_on_cuda(adapters: dict[AdapterRef, Path], tmp_path: Path, dtype: str) -> None:
    policy = load_policy(make_model("llama", tmp_path / "base"), lora=LoraConfig(r=4), device="cuda", dtype=dtype)
    prompts = make_prompts(40)
    async with running(policy, max_batch_tokens=128) as engine:
        await engine.load_adapter(ONE, adapters[ONE])
        asked = [(prompt, ref) for prompt in prompts for ref in (None, ONE)]
        params = SamplingParams(max_tokens=ANSWER, temperature=0.8, top_p=0.9, seed=1)
        answers = await asyncio.gather(*(ask(engine, prompt, params, ref) for prompt, ref in asked))
        await engine.drop_adapter(ONE)
        policy.load_adapter("check", adapters[ONE])
        for (prompt, ref), (ids, logprobs, _) in zip(asked, answers, strict=True):
            with policy.using(ref and "check"), torch.no_grad():
                logits = policy.base(input_ids=torch.tensor([prompt + ids], device="cuda")).logits[0].float()
            wanted = torch.log_softmax(logits / 0.8, -1)[len(prompt) - 1 : -1][range(len(ids)), ids]
            assert logprobs == pytest.approx(wanted.tolist(), abs=1e-4 if dtype == "float32" else 0.3)
