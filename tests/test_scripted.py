"""The scripted engine keeps the whole contract of engines/base.py; the byte tokenizer is exact."""

import asyncio
import threading
from pathlib import Path

import pytest

from artnb.engines.base import AdapterRef, Engine, SamplingParams, TokenChunk
from artnb.engines.byte_tokenizer import ByteTokenizer
from artnb.engines.scripted import SCRIPTED_LOGPROB, ScriptedAnswer, ScriptedEngine, ScriptedRequest
from artnb.errors import AdapterNotFoundError, ConfigError, ContextLengthError, EngineClosedError, RequestError

TOKENIZER = ByteTokenizer()
EOS = TOKENIZER.eos_token_id
PROMPT = TOKENIZER.encode("hello")


async def ask(engine: Engine, prompt=PROMPT, adapter=None, **sampling) -> TokenChunk:
    """The whole answer as one chunk."""
    whole = TokenChunk([], [])
    sampling.setdefault("max_tokens", 1000)
    async for chunk in engine.generate(prompt, SamplingParams(**sampling), adapter):
        whole = TokenChunk(
            whole.token_ids + chunk.token_ids,
            whole.logprobs + chunk.logprobs,
            chunk.finish_reason or whole.finish_reason,
        )
    return whole


async def until(condition) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0)


async def test_answers_a_text_with_its_end_token_and_the_documented_logprob():
    engine: Engine = ScriptedEngine("hi 👋 한글")
    answer = await ask(engine)
    assert answer.token_ids == [*"hi 👋 한글".encode(), EOS]
    assert answer.logprobs == [SCRIPTED_LOGPROB] * len(answer.token_ids)
    assert answer.finish_reason == "stop"


async def test_a_list_is_answered_in_order_and_the_last_repeats():
    engine = ScriptedEngine(["a", "b"])
    assert [TOKENIZER.decode((await ask(engine)).token_ids[:-1]) for _ in range(4)] == ["a", "b", "b", "b"]


async def test_a_callable_sees_the_request_and_may_be_async():
    seen: list[ScriptedRequest] = []

    async def script(request: ScriptedRequest) -> ScriptedAnswer:
        seen.append(request)
        await asyncio.sleep(0)
        return ScriptedAnswer([65, 66], [-1.0, -2.0])

    engine = ScriptedEngine(script)
    ref = AdapterRef("agent", 2)
    await engine.load_adapter(ref, Path("unused"))
    answer = await ask(engine, adapter=ref, temperature=0.3)
    assert answer == TokenChunk([65, 66, EOS], [-1.0, -2.0, SCRIPTED_LOGPROB], "stop")
    assert (seen[0].prompt_text, seen[0].adapter, seen[0].index) == ("hello", ref, 0)
    assert seen[0].sampling.temperature == 0.3
    assert engine.requests == seen
    assert (await ask(ScriptedEngine(lambda r: [67]), PROMPT)).token_ids == [67, EOS]


async def test_a_given_finish_reason_adds_no_end_token():
    answer = await ask(ScriptedEngine(lambda r: ScriptedAnswer([65], finish_reason="length")))
    assert answer == TokenChunk([65], [SCRIPTED_LOGPROB], "length")


@pytest.mark.parametrize(
    ("sampling", "text", "finish"),
    [
        ({"max_tokens": 2}, "ab", "length"),
        ({"max_tokens": 4}, "abc", "stop"),  # three letters and the end token fit exactly
        ({"max_tokens": 3}, "abc", "length"),
        ({"stop_token_ids": (ord("b"),)}, "ab", "stop"),
        ({"max_tokens": 7, "ignore_eos": True}, "abcabca", "length"),
        ({"stop_token_ids": (ord("b"),), "ignore_eos": True}, "ab", "stop"),
    ],
)
async def test_limits_and_ends(sampling, text, finish):
    answer = await ask(ScriptedEngine("abc", chunk_size=2), **sampling)
    assert TOKENIZER.decode(answer.token_ids, skip_special_tokens=True) == text
    assert answer.finish_reason == finish


async def test_an_end_token_in_the_script_ends_the_answer():
    assert (await ask(ScriptedEngine("ab<|im_end|>cd"))).token_ids == [97, 98, EOS]


async def test_the_context_is_a_limit():
    engine = ScriptedEngine("abcdef", context_length=8)
    answer = await ask(engine)  # five tokens of prompt leave three
    assert (answer.token_ids, answer.finish_reason) == ([97, 98, 99], "length")
    with pytest.raises(ContextLengthError):
        await ask(engine, prompt=[1] * 8)
    with pytest.raises(RequestError):
        await ask(engine, prompt=[])


async def test_chunks_have_the_asked_size_and_only_the_last_is_finished():
    chunks = [c async for c in ScriptedEngine("abcde", chunk_size=2).generate(PROMPT, SamplingParams(max_tokens=99))]
    assert [c.token_ids for c in chunks] == [[97, 98], [99, 100], [101, EOS]]
    assert [c.finish_reason for c in chunks] == [None, None, "stop"]


async def test_a_request_during_sleep_waits_and_a_running_one_goes_on_after_wake():
    engine = ScriptedEngine("abcdef", chunk_size=1)
    running = engine.generate(PROMPT, SamplingParams(max_tokens=99))
    await anext(running)
    await engine.sleep()
    await engine.sleep()
    assert engine.state == "asleep"
    new, rest = asyncio.create_task(ask(engine)), asyncio.create_task(anext(running))
    await until(lambda: engine.stats().waiting == 2)
    assert not new.done() and not rest.done()
    await engine.wake()
    await engine.wake()
    assert (await rest).token_ids == [98]
    assert (await new).finish_reason == "stop"
    await running.aclose()
    assert engine.stats().running == engine.stats().waiting == 0


async def test_close_aborts_what_runs_and_refuses_what_comes():
    engine = ScriptedEngine("abcdef", chunk_size=1, delay=3600)
    task = asyncio.create_task(ask(engine))
    await until(lambda: engine.stats().running == 1)
    await engine.close()
    await engine.close()
    assert (await task).finish_reason == "abort"
    with pytest.raises(EngineClosedError):
        await ask(engine)
    for method in (engine.sleep, engine.wake):
        with pytest.raises(EngineClosedError):
            await method()
    with pytest.raises(EngineClosedError):
        await engine.load_adapter(AdapterRef("a", 1), Path("x"))


async def test_closing_the_generator_cancels():
    engine = ScriptedEngine("abcdef", chunk_size=1)
    generator = engine.generate(PROMPT, SamplingParams(max_tokens=99))
    await anext(generator)
    assert engine.stats().running == 1
    await generator.aclose()
    stats = engine.stats()
    assert (stats.running, stats.extra["cancelled"], stats.generated_tokens) == (0, 1, 1)


async def test_an_adapter_is_kept_until_its_last_request_has_ended():
    engine = ScriptedEngine(lambda r: f"step {r.adapter.step}", chunk_size=1)
    old, new = AdapterRef("agent", 1), AdapterRef("agent", 2)
    await engine.load_adapter(old, Path("1"))
    await engine.load_adapter(old, Path("1"))
    running = engine.generate(PROMPT, SamplingParams(max_tokens=99), old)
    await anext(running)
    await engine.load_adapter(new, Path("2"))
    await engine.drop_adapter(old)
    await engine.drop_adapter(AdapterRef("nobody", 7))
    assert engine.adapters() == [new]
    assert old in engine._adapters  # still in use
    with pytest.raises(AdapterNotFoundError, match=r"agent@1.*agent@2"):
        await ask(engine, adapter=old)
    rest = [t async for chunk in running for t in chunk.token_ids]
    assert TOKENIZER.decode(rest[:-1]) == "tep 1"
    assert old not in engine._adapters
    assert TOKENIZER.decode((await ask(engine, adapter=new)).token_ids[:-1]) == "step 2"


async def test_loading_again_what_was_dropped_in_use_keeps_it():
    engine, ref = ScriptedEngine("ab", chunk_size=1), AdapterRef("agent", 1)
    await engine.load_adapter(ref, Path("1"))
    running = engine.generate(PROMPT, SamplingParams(max_tokens=99), ref)
    await anext(running)
    await engine.drop_adapter(ref)
    await engine.load_adapter(ref, Path("1"))
    await running.aclose()
    assert engine.adapters() == [ref]


async def test_it_counts():
    engine = ScriptedEngine("ab")
    await asyncio.gather(*(ask(engine) for _ in range(20)))
    stats = engine.stats()
    assert (stats.requests, stats.prompt_tokens, stats.generated_tokens) == (20, 100, 60)
    assert (stats.running, stats.extra["peak_running"]) == (0, 20)


async def test_it_is_driven_from_several_loops_at_once():
    engine = ScriptedEngine("answer", chunk_size=1)
    await engine.sleep()
    answers: list[TokenChunk] = []
    threads = [threading.Thread(target=lambda: answers.append(asyncio.run(ask(engine)))) for _ in range(4)]
    for thread in threads:
        thread.start()
    while engine.stats().waiting < 4:
        await asyncio.sleep(0.001)
    await engine.wake()
    for thread in threads:
        await asyncio.to_thread(thread.join)
    assert [a.finish_reason for a in answers] == ["stop"] * 4


async def test_what_the_script_raises_comes_out():
    def script(request: ScriptedRequest) -> str:
        raise LookupError("no such scene")

    engine = ScriptedEngine(script)
    with pytest.raises(LookupError, match="no such scene"):
        await ask(engine)
    assert engine.stats().running == 0


@pytest.mark.parametrize("options", [{"script": []}, {"script": 3}, {"script": "a", "chunk_size": 0}])
def test_wrong_options_are_refused(options):
    with pytest.raises(ConfigError):
        ScriptedEngine(**options)
    with pytest.raises(ConfigError):
        ScriptedAnswer([1, 2], [0.0])


@pytest.mark.parametrize(
    "text", ["", "plain", "👩‍👩‍👧 한글 é", "<think>x</think><tool_call>{}</tool_call>", "<|im_start|>"]
)
def test_bytes_go_there_and_back(text):
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


def test_special_tokens_are_skipped_and_markup_is_not():
    ids = TOKENIZER.encode("<|im_start|>a<think>b</think><|im_end|>")
    assert TOKENIZER.decode(ids, skip_special_tokens=True) == "a<think>b</think>"
    assert TOKENIZER.decode([0xED, 0x95]) == "\ufffd"
    assert TOKENIZER.convert_tokens_to_ids(TOKENIZER.convert_ids_to_tokens(ids)) == ids
    assert TOKENIZER.get_vocab()["<|im_end|>"] == EOS == len(TOKENIZER.encode("x")) + 256


def test_the_template_is_chatml_with_hermes_tools():
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": [{"type": "text", "text": "U"}]},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "R"},
        {"role": "tool", "content": "2", "tool_call_id": "1"},
    ]
    tools = [{"type": "function", "function": {"name": "add"}}]
    text = TOKENIZER.apply_chat_template(messages, tools, tokenize=False, add_generation_prompt=True)
    assert text.startswith("<|im_start|>system\nS\n\n# Tools") and '{"name": "add"}' in text
    assert text.endswith(
        "<|im_start|>user\nU<|im_end|>\n"
        "<|im_start|>assistant\n<think>\nR\n</think>\n\n"
        '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
        "<|im_end|>\n<|im_start|>user\n<tool_response>\n2\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    assert TOKENIZER.apply_chat_template(messages, tools, add_generation_prompt=True) == TOKENIZER.encode(text)
    assert "<think>" not in ByteTokenizer(strip_thinking=True).apply_chat_template(messages, tokenize=False)


def test_a_next_turn_extends_the_last_one():
    first = [{"role": "user", "content": "1"}]
    sampled = TOKENIZER.apply_chat_template(first, add_generation_prompt=True) + TOKENIZER.encode("2<|im_end|>")
    longer = [*first, {"role": "assistant", "content": "2"}, {"role": "user", "content": "3"}]
    assert TOKENIZER.apply_chat_template(longer, add_generation_prompt=True)[: len(sampled)] == sampled
