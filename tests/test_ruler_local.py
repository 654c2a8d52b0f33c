"""A model's own base weights as the judge: asked in words, or by likelihood; and how often judges are right."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from endpoint_for_tests import Endpoint
from judge_server import JudgeServer, prefers_first, scores, shown
from scripted_backend import ScriptedBackend
from test_ruler import conversations, group

import artnb as art
from artnb.errors import ConfigError, JudgeError
from artnb.rewards import Judge, JudgePair, LikelihoodJudge, judge_accuracy, judge_pairs, ruler, ruler_score_group
from artnb.rewards.accuracy import longer_wins


@pytest.fixture
async def local(tiny_base: Path, tmp_path: Path) -> AsyncIterator[art.TrainableModel]:
    model = art.TrainableModel(name="agent", project="tests", base_model=tiny_base)
    async with art.LocalBackend(path=tmp_path, device="cpu", dtype="float32", verbose=False) as backend:
        await model.register(backend)
        yield model


# In words -------------------------------------------------------------------------------------------


async def test_a_trainable_model_judges_with_its_base_and_records_nothing() -> None:
    endpoint = Endpoint(lambda request: scores(*(0.5 for _ in range(request.prompt_text.count("<trajectory id")))))
    model = art.TrainableModel(name="agent", project="tests", base_model="base")
    await model.register(ScriptedBackend(endpoint))  # type: ignore[arg-type]
    async with art.trajectory() as rollout:
        judged = await ruler_score_group(group("a", "bb"), model)
    assert [t.reward for t in judged] == [0.5, 0.5]
    assert rollout.choices() == []
    (request,) = endpoint.engine.requests  # refused formats do not reach the engine
    assert request.adapter is None
    assert judged.metrics["judge/prompt_tokens"] == len(request.prompt_ids)
    assert "judge/cost" not in judged.metrics


async def test_a_question_longer_than_the_local_context_says_so(local: Any) -> None:
    """The base is found by its name at the endpoint, and the tiny one has 512 tokens."""
    with pytest.raises(JudgeError, match=r"refused the question; if it is too long .* of the context's 512 tokens"):
        await ruler(conversations("a", "bb"), local)


# By likelihood --------------------------------------------------------------------------------------


def by_hand(base: Path, messages: list[dict[str, Any]]) -> float:
    """Mean log-prob of the last message and its end token, by transformers alone."""
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    network = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)

    def ids(items: list[dict[str, Any]], **options: Any) -> list[int]:
        return list(tokenizer.apply_chat_template(items, return_dict=False, **options))

    prompt, whole = ids(messages[:-1], add_generation_prompt=True), ids(messages)
    ends = [i for i, token in enumerate(whole) if token in tokenizer.all_special_ids]
    whole = whole[: ends[-1] + 1]
    assert whole[: len(prompt)] == prompt
    with torch.no_grad():
        logp_SV = network(input_ids=torch.tensor([whole])).logits[0].log_softmax(-1)
    return float(np.mean([logp_SV[i - 1, whole[i]].item() for i in range(len(prompt), len(whole))]))


async def test_the_score_is_what_the_task_adds_to_the_likelihood(local: Any, tiny_base: Path) -> None:
    lists = conversations("Qh8#", "I resign", "Qh8#")
    found = await ruler(lists, LikelihoodJudge(local))
    for score, messages in zip(found, lists, strict=True):
        gain = by_hand(tiny_base, messages) - by_hand(tiny_base, [{"role": "user", "content": ""}, messages[-1]])
        assert score.score == pytest.approx(1 / (1 + np.exp(-gain)), abs=1e-4)
        assert f"{gain:+.2f} nats" in score.explanation
    assert found[0].score == found[2].score != found[1].score
    assert found.usage.requests == 3 and found.usage.prompt_tokens > 0 and found.usage.cost == 0.0


async def test_the_adapter_is_off_and_order_and_neighbours_do_not_matter(local: Any) -> None:
    lists = conversations("Qh8#", "I resign", "e4")
    before = [s.score for s in await ruler(lists, LikelihoodJudge(local))]
    policy = local.backend()._trained(local).served().policy
    import torch

    with torch.no_grad():
        for name in policy.adapters():
            for weight in policy.adapter_parameters(name).values():
                weight.add_(0.3)
    after = [s.score for s in await ruler(lists, LikelihoodJudge(local))]
    turned = [s.score for s in await ruler(lists[::-1], LikelihoodJudge(local))]
    assert before == pytest.approx(after, abs=1e-6) and before == pytest.approx(turned[::-1], abs=1e-5)


async def test_several_turns_tools_and_what_cannot_be_scored(local: Any) -> None:
    turns = [
        {"role": "user", "content": "look it up"},
        {"role": "assistant", "content": "one"},
        {"role": "user", "content": "and?"},
        {"role": "assistant", "content": "two"},
    ]
    lists = [
        turns,
        [{"role": "user", "content": "x" * 5000}, {"role": "assistant", "content": "too long for the context"}],
        [{"role": "user", "content": "nobody answered"}],
        [{"role": "assistant", "content": "answers nothing"}],
        [],
    ]
    found = await ruler(lists, LikelihoodJudge(local))
    assert [s.score is None for s in found] == [False, True, True, True, True]
    (alone,) = await ruler([turns], LikelihoodJudge(local))
    assert alone.score == pytest.approx(found[0].score, abs=1e-5)
    judged = await ruler_score_group(group("a", "bb"), LikelihoodJudge(local))
    assert all(t.reward is not None and t.reward == t.metrics["ruler_score"] for t in judged)


async def test_wrong_likelihood_judges_say_what_to_do(local: Any) -> None:
    with pytest.raises(ConfigError, match=r"takes an art\.TrainableModel"):
        LikelihoodJudge("openai/o3")  # type: ignore[arg-type]
    elsewhere = art.TrainableModel(name="agent", project="tests", base_model="base")
    await elsewhere.register(ScriptedBackend(Endpoint("x")))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="needs the weights in this process"):
        await ruler(conversations("a"), LikelihoodJudge(elsewhere))
    with pytest.raises(JudgeError, match=r"cannot be rendered.*has no role"):
        await ruler([[{"content": "hi"}, {"role": "assistant", "content": "a"}]], LikelihoodJudge(local))
    with pytest.raises(ConfigError, match="takes no options"):
        await ruler(conversations("a"), LikelihoodJudge(local), {"temperature": 0})
    with pytest.raises(ConfigError, match="reads no rubric"):
        await ruler(conversations("a"), LikelihoodJudge(local), rubric="Shorter is better.")
    with pytest.raises(JudgeError, match="was not done within 1e-09 s"):
        await ruler(conversations("a"), LikelihoodJudge(local), timeout=1e-9)
    for judge in (LikelihoodJudge, lambda model: model):
        with pytest.raises(ConfigError, match="is not registered"):
            await ruler(conversations("a"), judge(art.TrainableModel(name="new", project="tests", base_model="base")))


# How often judges are right -------------------------------------------------------------------------


def test_the_shipped_pairs_are_whole_and_length_decides_nothing() -> None:
    pairs = judge_pairs()
    assert len(pairs) == len({pair.task for pair in pairs}) == 96
    for half in ("tuning", "held_out"):
        part = judge_pairs(half)  # type: ignore[arg-type]
        assert len(part) == 48 and len({pair.kind for pair in part}) == 6
        assert 0.4 <= longer_wins(part).share <= 0.6
    assert all(pair.better.strip() and pair.worse.strip() and pair.better != pair.worse for pair in pairs)


async def test_accuracy_counts_right_tied_and_unscored() -> None:
    pairs = judge_pairs("held_out")[:10]
    rank = {pair.better: 0.9 for pair in pairs}

    def knows(body: dict[str, Any]) -> str:
        return scores(*(rank.get(json.loads(text)[0]["content"], 0.1) for text in shown(body)))

    result = await judge_accuracy(Judge("oracle", client=JudgeServer(knows).client()), pairs)
    assert result.right == 10 and result.share == 1.0 and "oracle: 100.0% of 10 pairs right" in str(result)
    result = await judge_accuracy(Judge("first", client=JudgeServer(prefers_first).client()), pairs)
    assert result.right == 0 and "10 tied" in str(result)
    result = await judge_accuracy(Judge("mute", client=JudgeServer(lambda body: "?").client()), pairs)
    assert result.right == 0 and "10 unscored" in str(result) and result.interval[0] == 0.0


async def test_pairs_of_ones_own_and_wrong_ones(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text('{"task": "q", "better": "한글 🎉", "worse": "b"}\n\n{"task": "q"}\n', encoding="utf-8")
    with pytest.raises(ConfigError, match=r"mine\.jsonl, line 3"):
        judge_pairs(path=file)
    file.write_text('{"task": "q", "better": "한글 🎉", "worse": "b"}\n', encoding="utf-8")
    assert judge_pairs(path=file) == [JudgePair(kind="pairs", task="q", better="한글 🎉", worse="b")]
    with pytest.raises(ConfigError, match="did you mean 'held_out'"):
        judge_pairs("heldout")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no pairs"):
        await judge_accuracy(Judge("judge", api_key="x"), [])


@pytest.mark.model
@pytest.mark.slow
async def test_the_small_models_base_weights_rank_better_above_worse(tmp_path: Path, capsys: Any) -> None:
    """Chance is 24 of 48, and 33 or more have a probability of 0.7 % under it."""
    model = art.TrainableModel(name="judge", project="tests", base_model=str(art.demo_model()))
    async with art.LocalBackend(path=tmp_path, verbose=False) as backend:
        await model.register(backend)
        result = await judge_accuracy(LikelihoodJudge(model), judge_pairs("held_out"))
    with capsys.disabled():
        print(f"\n{result}")
    assert result.right >= 33
