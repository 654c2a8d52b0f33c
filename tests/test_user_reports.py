"""Faults that people reported elsewhere and bad input, end to end: from the user's call to what was trained or why not.

REPORTS.md lists every report and the test that stands for it; those in the other files are not repeated here.
"""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from agents import even_groups, even_rollout
from endpoint_for_tests import Endpoint, rebuild
from openai.types.chat.chat_completion import Choice
from test_local_backend import FAST, LORA, make
from tokenizers_for_tests import make_tokenizer

import artnb as art
from artnb.collector import Collector
from artnb.config import TrainConfig, TrainSFTConfig
from artnb.engines.scripted import ScriptedAnswer, ScriptedEngine, ScriptedRequest
from artnb.errors import CheckpointError, TrainError
from artnb.serving.app import StaticResolver, create_app
from artnb.serving.chat import ChatFormat
from artnb.serving.transport import make_async_client
from artnb.training.rows import rows_from_groups
from artnb.training.types import Row, RowBatch

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def rows_of(*trajectories: art.Trajectory, **options: Any) -> RowBatch:
    return rows_from_groups([art.TrajectoryGroup(trajectories)], TrainConfig(**options), max_row_tokens=None)


def sampled(row: Row) -> list[int]:
    return [int(i) for i in row.token_ids[row.sampled]]


async def gathered(*rollouts: Any, **options: Any) -> list[art.TrajectoryGroup]:
    return await art.gather_trajectory_groups([art.TrajectoryGroup(rollouts)], pbar_desc=None, **options)


# Section 2: it runs but does not learn -----------------------------------------------------------


async def test_118_short_trajectories_do_not_become_118_padded_sequences(tiny_base: Path, tmp_path: Path) -> None:
    """#23, from the rollouts to the packs."""
    model, backend = make(tiny_base, tmp_path)
    async with backend:
        await model.register(backend)
        rng = random.Random(0)
        groups = await art.gather_trajectory_groups(
            (
                art.TrajectoryGroup(
                    even_rollout(model, "x" * rng.randrange(10, 60), seed=100 * g + i, turns=1) for i in range(size)
                )
                for g, size in enumerate([8] * 14 + [6])
            ),
            pbar_desc=None,
        )
        result = await model.train(groups, FAST)
    metrics = result.metrics
    assert metrics["rows"] > 100 and metrics["row_tokens"] / metrics["rows"] < 80, "no padding"
    assert metrics["packing_efficiency"] > 0.8 and metrics["packs"] < 10, metrics
    assert metrics["unique_tokens"] < metrics["row_tokens"], "what a group shares is computed once"


async def test_answers_that_are_all_cut_say_so_with_the_share(tiny_base: Path, tmp_path: Path) -> None:
    """#24, and #29: with such answers masked nothing is left, which is a step without NaN and with a reason."""
    model, backend = make(tiny_base, tmp_path)
    async with backend:
        await model.register(backend)
        groups = await even_groups(model, 0)
        for choice in (c for g in groups for t in g for c in t.choices()):
            choice.finish_reason = "length"
        result = await model.train(groups, FAST)
        assert result.trained and not any("max_tokens" in note for note in result.notes), "told apart by their rewards"
        masked = await model.train(groups, art.TrainConfig(mask_truncated_completions=True))
        assert not masked.trained and masked.reasons == {"truncated": 2}
        assert "100% of the answers were cut by length" in masked.notes[0] and "raise max_tokens" in masked.notes[0]
        assert all(value == value for value in masked.metrics.values()), "no NaN"
        assert await model.get_step() == 2


@pytest.mark.parametrize("options", [{"temperature": 0.6}, {"temperature": 0.6, "top_p": 0.5}, {"temperature": 1.7}])
async def test_sampler_and_trainer_agree_at_any_temperature(
    tiny_base: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    """#25: unchanged weights, so every ratio is 1; log-probs without the temperature would double the first token's."""
    model, backend = make(tiny_base, tmp_path)

    async def rollout(i: int) -> art.Trajectory:
        choices = await model.openai_client().chat.completions.create(
            model="agent", messages=[user("hello")], max_tokens=12, seed=i, **options
        )
        return art.Trajectory(messages_and_choices=[user("hello"), choices.choices[0]], reward=float(i % 2))

    async with backend:
        await model.register(backend)
        for _ in range(2):  # at step 0, and with an adapter that does something
            result = await model.train(await gathered(*(rollout(i) for i in range(8))), FAST)
            assert 0.95 <= result.metrics["mismatch_ratio"] <= 1.05, result.metrics
            assert result.metrics["mismatch_log_ratio_max"] < 1e-3


@pytest.mark.parametrize("shift", [3.0, 300.0], ids=["large", "beyond float32"])
async def test_three_steps_on_rollouts_of_another_policy_stop_the_run(
    tiny_base: Path, tmp_path: Path, shift: float
) -> None:
    """#31: the third such step in a row raises, is kept, and points at the best; fresh rollouts go on."""
    model, backend = make(tiny_base, tmp_path)
    async with backend:
        await model.register(backend)
        fresh = await even_groups(model, 0)
        stale = [group.model_copy(deep=True) for group in fresh]
        for choice in (c for g in stale for t in g for c in t.choices()):
            for entry in choice.logprobs.content:
                entry.logprob -= shift
        await model.train(stale, FAST)
        await model.train(fresh, FAST)  # interrupts the row of them
        await model.train(stale, FAST)
        await model.train(stale, FAST)
        with pytest.raises(TrainError, match=r"max_mismatch_kl=1.0.*best train/reward so far was at step \d"):
            await model.train(stale, FAST)
        assert await model.get_step() == 5 and list(model.history()["step"]) == [1, 2, 3, 4, 5]
        assert (await model.train(await even_groups(model, 6), FAST)).step == 6


async def test_a_context_filled_by_a_tool_result_ends_the_rollout_and_its_group_trains(
    tiny_base: Path, tmp_path: Path
) -> None:
    """#32, #33: 100,000 characters come back from a tool; before that, max_tokens is clamped to what is left."""
    model, backend = make(tiny_base, tmp_path)

    async def rollout(i: int) -> art.Trajectory:
        async with art.trajectory(group="g") as t:
            messages = [user(f"read file {i}")]
            try:
                for size in (3, 100_000 if i == 0 else 3):
                    answer = await model.openai_client().chat.completions.create(
                        model="agent", messages=messages, max_tokens=4096 if size > 3 else 5, seed=i, tools=[TOOL]
                    )
                    messages += [{"role": "assistant", "content": answer.choices[0].message.content or ""}]
                    messages += [{"role": "tool", "tool_call_id": "call_1", "content": "x" * size}]
                await model.openai_client().chat.completions.create(model="agent", messages=messages, max_tokens=5)
            except openai.BadRequestError as error:
                assert error.code == "context_length_exceeded"
            t.reward = float(i)
        return t

    async with backend:
        await model.register(backend)
        (group,) = await gathered(*(rollout(i) for i in range(4)))
        full, *others = group.trajectories
        assert full.stop_reason is art.StopReason.CONTEXT_FULL and full.error is None
        assert all(t.stop_reason is not art.StopReason.CONTEXT_FULL for t in others)
        clamped = full.choices()[1].model_extra
        assert clamped["max_tokens_clamped"] == 512 - len(clamped["prompt_token_ids"]) < 4096
        result = await model.train([group], FAST)
        assert result.trained and result.metrics["trajectories_trained"] == 4
        assert list(model.trajectories(split="train")["stop_reason"]).count("context_full") == 1


async def test_a_rollout_that_shortens_its_messages_goes_on() -> None:
    """#32: a refusal that is followed by an answer was not the end."""
    endpoint = Endpoint("ok", context_length=100)
    async with art.trajectory() as t:
        with pytest.raises(openai.BadRequestError):
            await endpoint.ask([user("x" * 1000)])
        await endpoint.ask([user("x")])
    assert t.stop_reason is art.StopReason.FINISHED and len(t.choices()) == 1


async def test_a_limit_for_each_turn_and_one_for_the_whole_rollout() -> None:
    """#34: max_tokens is the turn's, the context is the rollout's; neither stands for the other."""
    endpoint = Endpoint("y" * 500, context_length=300)
    lengths: list[int] = []
    async with art.trajectory() as t:
        messages = [user("go")]
        with pytest.raises(openai.BadRequestError):
            while True:
                choice = await endpoint.ask(messages, max_tokens=20)
                lengths.append(len(choice.token_ids))
                messages += [{"role": "assistant", "content": choice.message.content}, user("on")]
        t.reward = 1.0
    assert len(lengths) > 2 and set(lengths[:-1]) == {20}
    rows = rows_of(t, t.model_copy(update={"reward": 0.0}, deep=True)).rows
    assert max(len(row) for row in rows) <= 300
    assert t.stop_reason is art.StopReason.CONTEXT_FULL


async def test_one_cut_turn_of_three_is_one_flag_of_the_rollout() -> None:
    """#35."""
    endpoint = Endpoint("three words here")

    async def play(limits: tuple[int | None, ...], reward: float) -> art.Trajectory:
        async with art.trajectory() as t:
            messages = [user("go")]
            for limit in limits:
                choice = await endpoint.ask(messages, **({"max_tokens": limit} if limit else {}))
                messages += [{"role": "assistant", "content": choice.message.content}, user("on")]
            t.reward = reward
        return t

    cut, whole, other = await play((None, 4, None), 3.0), await play((None,) * 3, 1.0), await play((None,) * 3, 2.0)
    assert (cut.stop_reason, whole.stop_reason) == (art.StopReason.TRUNCATED, art.StopReason.FINISHED)
    batch = rows_of(cut, whole, other)
    assert {row.trajectory for row in batch.rows if row.truncated} == {0}
    assert {row.truncated for row in batch.rows if row.trajectory == 0} == {True}
    assert batch.metrics["trajectories_truncated"] == pytest.approx(1 / 3)
    masked = rows_of(cut, whole, other, mask_truncated_completions=True)
    assert {row.trajectory for row in masked.rows} == {1, 2}


async def test_a_failed_rollout_moves_no_weight(tiny_base: Path, tmp_path: Path) -> None:
    """#37: the step with it, in every form of failure, is the step without it."""
    model, backend = make(tiny_base, tmp_path)
    other = art.TrainableModel(name="other", project="tests", base_model=tiny_base, lora=LORA)
    async with backend:
        await model.register(backend)
        await other.register(backend)
        (group,) = await even_groups(model, 0, groups=1, size=6)
        clean = art.TrajectoryGroup(group.trajectories[:4])
        timeout, failed = (t.model_copy(deep=True) for t in group.trajectories[4:])
        timeout.stop_reason, timeout.reward = art.StopReason.TIMEOUT, 0.0
        failed.stop_reason, failed.reward = art.StopReason.FAILED, 0.0
        dirty = art.TrajectoryGroup([*clean.trajectories, timeout, failed, RuntimeError("gone")])
        left, right = await model.train([clean], FAST), await other.train([dirty], FAST)
        assert left.metrics["loss"] == right.metrics["loss"] and left.metrics["grad_norm"] == right.metrics["grad_norm"]
        mine, theirs = (
            backend._models[n].trainer.policy.adapter_parameters(f"train-{n}").values() for n in ("agent", "other")
        )
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
        assert len(other.trajectories(split="train")) == 6, "and nothing is lost"


async def test_groups_do_not_depend_on_who_finishes_first() -> None:
    """#38: captured rollouts of three scenarios finish in any order; each keeps its advantage."""
    expected: dict[tuple[str, int], float] = {}
    for seed in range(4):
        endpoint = Endpoint("answer")
        endpoint.captures.register_collector("base", Collector())
        rng = random.Random(seed)
        plan = [(scenario, i) for scenario in ("a", "b", "c") for i in range(4)]
        delays = dict(zip(plan, rng.sample(range(len(plan)), len(plan)), strict=True))

        async def play(scenario: str, i: int, endpoint: Endpoint = endpoint, delays: dict[Any, int] = delays) -> None:
            async with art.trajectory(metadata={"who": i}, group=scenario) as t:
                await endpoint.ask([user("the same question everywhere")])
                await asyncio.sleep(0.004 * delays[scenario, i])
                t.reward = float({"a": 1, "b": 2, "c": 5}[scenario] * i)

        await asyncio.gather(*(play(*who) for who in plan))
        collector = endpoint.captures.collector("base")
        assert collector is not None
        groups = collector.pop_all()
        batch = rows_from_groups(groups, TrainConfig(), max_row_tokens=None)
        found: dict[tuple[str, int], float] = {}
        for row in batch.rows:
            group = groups[row.group]
            found[str(group.metadata["group"]), int(group.trajectories[row.trajectory].metadata["who"])] = row.advantage
        assert len(found) == len(plan) and (not expected or found == pytest.approx(expected))
        expected = found


async def test_one_overlong_sft_row_is_dropped_and_counted(tiny_base: Path, tmp_path: Path) -> None:
    """#39, through train_sft."""
    model, backend = make(tiny_base, tmp_path)
    async with backend:
        await model.register(backend)
        texts = ["Paris", "x" * 200_000, "fine"]
        said = [
            art.Trajectory(messages_and_choices=[user("hello"), {"role": "assistant", "content": text}])
            for text in texts
        ]
        result = await model.train_sft(said, TrainSFTConfig(learning_rate=1e-3))
        assert result.trained and result.step == 1 and result.reasons == {"too long": 1}
        assert any("trajectory 1" in note and "512" in note for note in result.notes), result.notes


# Section 3: tokens, chat templates, tool calls ---------------------------------------------------


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])
@pytest.mark.parametrize("text", ["👋", "한글", "hello", "👩‍👩‍👧 naïve"])
@pytest.mark.parametrize("chunk_size", [1, 2])
async def test_a_split_that_no_tokenizer_makes_is_trained_as_it_was_sampled(
    text: str, chunk_size: int, stream: bool
) -> None:
    """#41; and no part of a character is shown, however the stream is cut."""
    tokenizer = make_tokenizer("chatml")
    whole = tokenizer.encode(text, add_special_tokens=False)
    split = tokenizer.convert_tokens_to_ids(list("".join(tokenizer.convert_ids_to_tokens(whole))))
    assert len(split) > len(whole)
    engine = ScriptedEngine(lambda request: list(split), tokenizer=tokenizer, chunk_size=chunk_size)
    client = make_async_client(create_app(engine, ChatFormat(tokenizer), StaticResolver("base"), api_key="k"), "k")
    made = []
    for reward in (0.0, 1.0):
        async with art.trajectory(reward=reward) as t:
            answer: Any = await client.chat.completions.create(model="base", messages=[user("say")], stream=stream)
            choice = rebuild([chunk async for chunk in answer])[0] if stream else answer.choices[0]
        assert choice.message.content == text
        made.append(t)
    for row in rows_of(*made).rows:
        assert sampled(row) == [*split, tokenizer.eos_token_id]


async def test_what_the_real_engine_sampled_is_what_the_real_trainer_gets(tiny_base: Path, tmp_path: Path) -> None:
    """#41: random weights sample splits of every kind. Noted where the engine gives them out and where rows go in."""
    model, backend = make(tiny_base, tmp_path)
    async with backend:
        await model.register(backend)
        trained = backend._models["agent"]
        engine, trainer = trained.base.engine, trained.trainer
        generate, step = engine.generate, trainer.step
        witnessed: list[tuple[list[int], list[int]]] = []
        batches: list[RowBatch] = []

        async def witness(prompt_ids: Any, *rest: Any) -> Any:
            ids: list[int] = []
            witnessed.append((list(prompt_ids), ids))
            async for chunk in generate(prompt_ids, *rest):
                ids += chunk.token_ids
                yield chunk

        def note(batch: RowBatch, *rest: Any, **options: Any) -> Any:
            batches.append(batch)
            return step(batch, *rest, **options)

        engine.generate, trainer.step = witness, note
        result = await model.train(await even_groups(model, 0), FAST)
        assert result.trained
    went_in = sorted(
        (row.token_ids[:i].tolist(), int(row.token_ids[i]))
        for row in batches[0].rows
        for i in row.sampled.nonzero()[0].tolist()
    )
    assert went_in == sorted((prompt + ids[:i], ids[i]) for prompt, ids in witnessed for i in range(len(ids)))


async def test_a_streamed_rollout_trains_like_a_plain_one(tiny_base: Path, tmp_path: Path) -> None:
    """#51: the same seeds, streamed and whole; two fresh adapters take the same step."""
    model, backend = make(tiny_base, tmp_path)
    other = art.TrainableModel(name="streamed", project="tests", base_model=tiny_base, lora=LORA)

    async def play(who: art.TrainableModel, i: int) -> None:
        async with art.trajectory(group="g") as t:
            messages = [user("hello")]
            for turn in range(2):
                answer: Any = await who.openai_client().chat.completions.create(
                    model=who.name, messages=messages, max_tokens=8, seed=10 * i + turn, stream=who is other
                )
                choice = rebuild([chunk async for chunk in answer])[0] if who is other else answer.choices[0]
                messages += [{"role": "assistant", "content": choice.message.content}, user("on")]
            t.reward = float(i)

    async with backend:
        await model.register(backend)
        await other.register(backend)
        results = []
        for who in (model, other):
            for i in range(4):
                await play(who, i)
            results.append(await who.train(config=FAST))
        plain, streamed = (r.metrics for r in results)
        for key in ("rows", "sampled_tokens", "row_tokens", "loss", "grad_norm"):
            assert plain[key] == streamed[key], key
        mine, theirs = (
            backend._models[n].trainer.policy.adapter_parameters(f"train-{n}").values() for n in ("agent", "streamed")
        )
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


async def test_rollouts_with_the_same_text_are_never_mixed() -> None:
    """#52: every message and token is equal, only the log-probs tell who sampled it; requests come interleaved."""

    def script(request: ScriptedRequest) -> ScriptedAnswer:
        ids = request.tokenizer.encode("same", add_special_tokens=False)
        return ScriptedAnswer(ids, [-float(request.sampling.seed or 0)] * len(ids))

    endpoint = Endpoint(script, chunk_size=1)

    async def play(who: int) -> tuple[art.Trajectory, art.Trajectory]:
        kept: list[Any] = [user("hi")]
        async with art.trajectory(reward=float(who)) as t:
            for _ in range(3):
                choice = await endpoint.ask(art.Trajectory(messages_and_choices=kept).messages(), seed=who)
                kept += [choice, user("on")]
        return t, art.Trajectory(messages_and_choices=kept, reward=float(who))

    pairs = await asyncio.gather(*(play(who) for who in range(1, 9)))
    for made in zip(*pairs, strict=True):
        batch = rows_of(*made)
        assert batch.metrics["trajectories_trained"] == 8
        for row in batch.rows:
            # All but the end token, whose log-prob the scripted engine gives itself.
            ends = row.token_ids == endpoint.tokenizer.eos_token_id
            assert set(row.logprobs[row.sampled & ~ends].tolist()) == {-float(row.trajectory + 1)}


# Section 5 and bad input: rollouts that fail, and what they leave ---------------------------------


async def test_rollouts_that_raise_hang_or_are_cancelled_leave_a_group_that_trains(
    tiny_base: Path, tmp_path: Path
) -> None:
    """#65, #68, #69 and bad input, up to the trained step and the history."""
    model, backend = make(tiny_base, tmp_path)

    async def raises() -> art.Trajectory:
        await even_rollout(model, "scenario", seed=90, turns=1)
        raise LookupError("the tool broke")

    async def hangs() -> art.Trajectory:
        await even_rollout(model, "scenario", seed=91, turns=1)
        await asyncio.Event().wait()
        raise AssertionError("never reached")

    async def cancelled() -> art.Trajectory:
        raise asyncio.CancelledError

    async def late() -> art.Trajectory:
        try:
            return await hangs()
        except asyncio.CancelledError:
            return art.Trajectory(reward=9.0)

    async with backend:
        await model.register(backend)
        await even_groups(model, 0, groups=1)  # warm, so that the limit below is the hanging ones' only
        good = (even_rollout(model, "scenario", seed=i) for i in range(4))
        (group,) = await gathered(*good, raises(), hangs(), cancelled(), late(), timeout=3.0, max_exceptions=4)
        assert len(group) == 4 and group.metrics["late_results"] == 1
        assert {e.type.rpartition(".")[2] for e in group.exceptions} == {
            "LookupError", "RolloutTimeoutError", "CancelledError"
        }  # fmt: skip
        result = await model.train([group], FAST)
        assert result.trained and result.metrics["trajectories_trained"] == 4
        assert any("the tool broke" in note for note in result.notes)
        assert len(model.trajectories(split="train")) == 4
        alone = await model.train([art.TrajectoryGroup(exceptions=group.exceptions)], FAST)
        assert alone.reasons == {"failed": 1} and "tracebacks" in alone.notes[0]


async def test_a_trajectory_longer_than_the_context_is_left_out_and_the_rest_trains(
    tiny_base: Path, tmp_path: Path
) -> None:
    model, backend = make(tiny_base, tmp_path, context_length=64)
    async with backend:
        await model.register(backend)
        (group,) = await even_groups(model, 0, groups=1)
        for trajectory, reward in zip(group, (0.0, 1.0, 2.0, 3.0), strict=True):
            trajectory.reward = reward
        long = group.trajectories[2].choices()[-1]
        long.model_extra["prompt_token_ids"] += [5] * 64  # e.g. sampled with a longer context than now
        result = await model.train([group], FAST)
        assert result.trained and result.metrics["trajectories_trained"] == 3
        assert result.metrics["left_out/too_long"] == 0.25
        assert any("trajectory 2" in note and "limit of 64" in note for note in result.notes), result.notes


ODD_RESULTS: list[Any] = [None, {"temperature": 21, "where": {"city": "파리"}}, ["sunny", {"wind": 3}], [], 7, "👩‍👩‍👧"]


@pytest.mark.parametrize("odd", ODD_RESULTS, ids=lambda odd: type(odd).__name__)
@pytest.mark.parametrize("arguments", ['{"city": "Par', '{"city": "한글 👋"}'], ids=["malformed", "fine"])
async def test_odd_tool_results_and_malformed_arguments_are_answered_trained_and_kept(
    odd: Any, arguments: str, shared: tuple[art.TrainableModel, Any]
) -> None:
    """#45, #46 and bad input: through the endpoint, the step, and the history."""
    model, _ = shared

    async def rollout(i: int) -> art.Trajectory:
        t = art.Trajectory(messages_and_choices=[user("weather?")], tools=[TOOL], reward=float(i))
        call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": arguments}}
        t.messages_and_choices += [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": odd},
        ]
        answer = await model.openai_client().chat.completions.create(
            model="agent", messages=t.messages(), tools=[TOOL], max_tokens=4, seed=i
        )
        t.messages_and_choices.append(answer.choices[0])
        return t

    (group,) = await gathered(rollout(0), rollout(1))
    prompt = model._backend._models["agent"].base.policy.tokenizer.decode(  # type: ignore[union-attr]
        group.trajectories[0].choices()[0].model_extra["prompt_token_ids"]
    )
    shown = "" if odd in (None, []) else odd if isinstance(odd, str) else json.dumps(odd, ensure_ascii=False)
    assert f"<tool_response>\n{shown}\n</tool_response>" in prompt and arguments in prompt
    result = await model.train([group], FAST)
    assert result.trained and result.metrics["context_assistant_messages"] == 2
    kept = model._history().load_groups(result.step, "train")[0].trajectories[0].messages_and_choices
    assert kept[2] == {"role": "tool", "tool_call_id": "call_1", "content": odd}
    assert kept[1]["tool_calls"][0]["function"]["arguments"] == arguments and isinstance(kept[3], Choice)


@pytest.fixture(scope="module")
def shared(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    model, backend = make(tiny_base, tmp_path_factory.mktemp("shared"))
    asyncio.run(_wait(model.register(backend)))
    yield model, backend
    asyncio.run(backend.close())


async def _wait(registration: Any) -> None:
    await registration


@pytest.mark.parametrize(
    ("name", "content"),
    [("run.json", "this is somebody's notes"), ("run.json", "[1, 2]"), ("checkpoints", "a file, not a folder")],
)
async def test_a_model_folder_that_is_not_ours_is_refused_and_left_alone(
    tiny_base: Path, tmp_path: Path, name: str, content: str
) -> None:
    folder = tmp_path / "art" / "tests" / "models" / "agent"
    folder.mkdir(parents=True)
    (folder / name).write_text(content)
    model, backend = make(tiny_base, tmp_path)
    async with backend:
        with pytest.raises(CheckpointError, match=r"agent"):
            await model.register(backend)
    assert (folder / name).read_text() == content


async def test_max_tokens_beyond_the_context_is_clamped_by_the_real_engine(
    shared: tuple[art.TrainableModel, Any],
) -> None:
    """#33 and bad input."""
    client = shared[0].openai_client()
    answer = await client.chat.completions.create(
        model="agent", messages=[user("x" * 300)], max_tokens=4096, extra_body={"ignore_eos": True}
    )
    extra = answer.choices[0].model_extra or {}
    room = 512 - len(extra["prompt_token_ids"])
    assert len(extra["token_ids"]) == extra["max_tokens_clamped"] == room
    assert answer.choices[0].finish_reason == "length"
