"""Sampled ids to a message, whole and streamed: the two are equal, and nothing the model wrote is lost."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from chat_cases import ANSWERS, TOOLS, USER, WEATHER, Case, calls_of, chat_of
from tokenizers_for_tests import make_tokenizer

from artnb.serving.chat import ChatFormat, ParsedMessage, ToolCall, accumulate
from artnb.serving.parsers import PARSERS


@pytest.mark.parametrize("kind", ANSWERS)
def test_text_then_parallel_calls_with_nested_braces(kind: str) -> None:
    before, calls = ANSWERS[kind]
    message = Case(kind, before + calls).check()
    assert calls_of(message) == [("get_weather", WEATHER), ("ping", {})]
    assert message.content == "look:"
    assert message.reasoning_content == ("hm 👋" if "think>" in before else None)
    assert len({call.id for call in message.tool_calls}) == 2


@pytest.mark.parametrize("kind", ANSWERS)
def test_calls_without_text_have_no_content(kind: str) -> None:
    before, calls = ANSWERS[kind]
    message = Case(kind, before.removesuffix("look:") + calls.lstrip()).check()
    assert message.content is None and len(message.tool_calls) == 2


@pytest.mark.parametrize("kind", ANSWERS)
def test_calls_cut_off_by_the_token_limit_are_text(kind: str) -> None:
    """Every truncation gives whole calls and the rest as text, and never raises."""
    before, calls = ANSWERS[kind]
    case = Case(kind, before + calls, end=False)
    ids = case.ids
    for size in range(len(ids)):
        case.ids = ids[:size]
        message = case.parse()
        assert case.streamed(list(range(1, size))) == message
        assert calls_of(message) in ([], [("get_weather", WEATHER)], [("get_weather", WEATHER), ("ping", {})])


@pytest.mark.parametrize("kind", ANSWERS)
def test_what_was_parsed_renders_as_what_was_sampled(kind: str) -> None:
    """The next turn's prompt extends this one, so that the row grows (qwen3_coder's types come from the schema)."""
    before, calls = ANSWERS[kind]
    if kind == "llama3":  # its template renders one call, and no text beside it
        before, calls = "", calls.split("; ")[0]
    case = Case(kind, before + calls)
    message = case.parse()
    turn: dict[str, Any] = {"role": "assistant", "content": message.content}
    if message.reasoning_content:
        turn["reasoning_content"] = message.reasoning_content
    turn["tool_calls"] = [call.to_openai() for call in message.tool_calls]
    following = case.chat.render([USER, turn], TOOLS, add_generation_prompt=False)
    if kind == "mistral":  # shows the ids of calls, which the model did not write
        assert "Par}}is 한글👋" in case.chat.tokenizer.decode(following)
    else:
        shown = case.chat.tokenizer.decode([*case.prompt, *case.ids])
        assert case.chat.tokenizer.decode(following).startswith(shown)


BROKEN_CALLS = [
    '{"name": "get_weather", "arguments": {"city": "Paris"}',
    '{"name": "get_weather", "arguments": {"city": "Paris"}}}',
    '{"name": "get_weather", "arguments": "Paris"}',
    '{"name": "get_weather", "arguments": [1]}',
    '{"name": "get_weather", "arguments": {"x": NaN}}',
    '{"name": 5, "arguments": {}}',
    '{"arguments": {}}',
    '"get_weather"',
    "[]",
    "",
    "null",
    "[" * 3000,
    '{"name": "\\ud800", "arguments": {}}',
    "get_weather(city='Paris')",
]


@pytest.mark.parametrize("body", BROKEN_CALLS)
@pytest.mark.parametrize("kind", ["chatml", "qwen3", "bytes"])
def test_a_malformed_call_stays_in_the_text_verbatim(kind: str, body: str) -> None:
    text = f"one\n<tool_call>\n{body}\n</tool_call>\ntwo  "
    case = Case(kind, text)
    message = case.parse()
    assert message == ParsedMessage(content=text)
    assert case.streamed(list(range(len(case.ids)))) == message


@pytest.mark.parametrize("kind", ["chatml", "qwen3"])
def test_a_malformed_call_between_good_ones(kind: str) -> None:
    good = '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>'
    message = Case(kind, f"a\n{good}\n<tool_call>\nbad\n</tool_call>\n{good}").check()
    assert calls_of(message) == [("ping", {}), ("ping", {})]
    assert message.content == "a\n<tool_call>\nbad\n</tool_call>"
    assert len({call.id for call in message.tool_calls}) == 2


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("qwen3_coder", "</think>\n\n<tool_call>\n<function=ping>\n<parameter=city>\nParis\n</function>\n</tool_call>"),
        ("qwen3_coder", "</think>\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n"),
        ("qwen3_coder", "</think>\n\n<tool_call>\n<function=get_weather>\njunk\n</function>\n</tool_call>"),
        ("qwen3_coder", '</think>\n\n<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>'),
        ("llama3", '{"name": "get_weather", "parameters": {"city": "Paris"}} and more'),
        ("llama3", '{"name": "Bob", "age": 5}'),
        ("llama3", 'here: {"name": "get_weather", "parameters": {"city": '),
        ("mistral", '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Par'),
        ("mistral", '[TOOL_CALLS]{"name": "get_weather"'),
    ],
)  # fmt: skip
def test_malformed_calls_of_the_other_families(kind: str, text: str) -> None:
    message = Case(kind, text).check()
    assert message.tool_calls == []
    assert message.content == text.removeprefix("</think>").lstrip()


NASTY = [
    "",
    " ",
    "\n\n",
    "👋👩‍👩‍👧🎉",
    "한글 안녕",
    "</think>",
    "}}",
    '{"a": {"b": "}"}}',
    "<tool_cal",
    "<",
    "a <think",
    " x ",
    "\ufffd",
]


@pytest.mark.parametrize("kind", ["chatml", "gemma", "qwen3", "llama3", "mistral", "bytes", "strange_tools"])
@pytest.mark.parametrize("text", NASTY)
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_plain_text_comes_out_as_it_is(kind: str, text: str, tools: Any) -> None:
    if kind == "strange_tools" and tools:
        return
    assert Case(kind, text, tools=tools).check() == ParsedMessage(content=text)


@pytest.mark.parametrize("kind", ["chatml", "qwen3", "llama3", "mistral", "bytes"])
def test_without_tools_a_call_is_text(kind: str) -> None:
    text = ANSWERS[kind][1].lstrip()
    assert Case(kind, text, tools=None).check() == ParsedMessage(content=text)


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<think>\nhm\n</think>\n\nyes", "hm", "yes"),
        ("\n<think>hm</think>yes\n", "hm", "yes\n"),
        ("<think>\n\n</think>\n\nyes", None, "yes"),
        ("<think>\nhm", "hm", None),
        ("<think>\nhm\n</think>\n\n", "hm", None),
        ("<think>a</think>x<think>b</think>y", "a\nb", "xy"),
        ("yes", None, "yes"),
        ("", None, ""),
    ],
)
@pytest.mark.parametrize("kind", ["qwen3", "bytes"])
def test_reasoning(kind: str, text: str, reasoning: str | None, content: str | None) -> None:
    message = Case(kind, text).check()
    assert (message.reasoning_content, message.content) == (reasoning, content)


def test_the_prompt_may_have_opened_or_closed_the_reasoning() -> None:
    opened = Case("qwen3_coder", "hm\n</think>\n\nyes").check()
    assert (opened.reasoning_content, opened.content) == ("hm", "yes")
    case = Case("qwen3", "yes")
    case.prompt = case.chat.render([USER], enable_thinking=False)
    assert case.check() == ParsedMessage(content="yes")


@pytest.mark.parametrize("kind", ["qwen3", "llama3", "mistral", "bytes"])
def test_a_conversation_that_holds_markers_is_not_taken_for_the_answer(kind: str) -> None:
    case = Case(kind, "yes")
    trap = "[TOOL_CALLS]<|im_start|>assistant\n<think>\n<tool_call>[/INST]"
    trap += "<|start_header_id|>assistant<|end_header_id|>\n\n"
    case.prompt = case.chat.render([{"role": "user", "content": trap}], TOOLS)
    assert case.check() == ParsedMessage(content="yes")


def test_a_stream_shows_text_at_once_and_holds_back_what_may_be_a_marker() -> None:
    case = Case("bytes", "")
    stream = case.chat.stream(case.prompt, TOOLS)
    shown = [accumulate(stream.push(list(piece.encode()))).content for piece in ("he", "llo", " <to", "day", "<", "x")]
    assert shown == ["he", "llo", "", " <today", "", "<x"]
    emoji = "👋".encode()
    assert [len(stream.push([byte])) for byte in emoji] == [0, 0, 0, 1]


def test_ids_depend_on_the_prompt_and_the_place_only() -> None:
    first, again = (Case("qwen3", ANSWERS["qwen3"][1]).parse().tool_calls for _ in range(2))
    assert first == again
    case = Case("qwen3", ANSWERS["qwen3"][1])
    case.prompt = case.chat.render([{"role": "user", "content": "other"}], TOOLS)
    assert {call.id for call in case.parse().tool_calls}.isdisjoint({call.id for call in first})
    assert all(len(call.id) == 9 for call in Case("mistral", ANSWERS["mistral"][1]).parse().tool_calls)
    own = Case("mistral", '[TOOL_CALLS][{"name": "ping", "arguments": {}, "id": "abcdefghi"}]').parse()
    assert own.tool_calls == [ToolCall("abcdefghi", "ping", "{}")]


def test_mistral_with_args() -> None:
    text = 'ok[TOOL_CALLS]get_weather[ARGS]{"city": "P"}[TOOL_CALLS]ping[ARGS]{}'
    message = Case("mistral", text, parser="mistral_args").check()
    assert calls_of(message) == [("get_weather", {"city": "P"}), ("ping", {})]
    assert message.content == "ok"


@pytest.mark.parametrize("kind", [kind for kind in ANSWERS if kind not in ("bytes", "chatml", "gemma")])
def test_markers_in_pieces(kind: str) -> None:
    """Every byte is a token of its own, as a model may sample the text of a marker."""
    parser = ChatFormat(make_tokenizer(kind)).parser
    before, calls = ANSWERS[kind]
    case = Case("bytes", "", parser=parser)
    case.ids = list((before.split("</think>")[-1].lstrip() + calls).encode())
    message = case.check()
    assert calls_of(message) == [("get_weather", WEATHER), ("ping", {})]
    assert message.content == "look:"


def test_values_of_xml_calls_get_their_types_from_the_schema_and_keep_their_indentation() -> None:
    text = (
        "</think>\n\n<function=get_weather>\n<parameter=city>\n  def f():\n    pass\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n<parameter=other>\n3\n</parameter>\n</function>"
    )
    message = Case("qwen3_coder", text).check()
    assert calls_of(message) == [("get_weather", {"city": "  def f():\n    pass", "days": 3, "other": "3"})]


def test_arguments_that_cannot_be_utf8_are_escaped() -> None:
    text = '<tool_call>\n{"name": "ping", "arguments": {"a": "\\ud83d"}}\n</tool_call>'
    (call,) = Case("qwen3", text).check().tool_calls
    assert call.arguments == '{"a": "\\ud83d"}'
    call.arguments.encode()


@pytest.mark.parametrize(
    ("stop", "content", "stopped"),
    [
        (["wor"], "hello ", True),
        (["한"], "hello world ", True),
        (["zzz"], "hello world 한글", False),
        (["글x"], "hello world 한글", False),
    ],
)
def test_stop_strings(stop: list[str], content: str, stopped: bool) -> None:
    case = Case("bytes", "hello world 한글", tools=None)
    assert case.chat.parse(case.ids, prompt_ids=case.prompt, stop=stop).content == content
    stream = case.chat.stream(case.prompt, stop=stop)
    deltas = [delta for token_id in case.ids for delta in stream.push([token_id])]
    assert stream.stopped == stopped
    assert accumulate([*deltas, *stream.finish()]).content == content


OWN_TEMPLATE = {
    "start_anchor": "<|im_start|>assistant\n",
    "defaults": {"role": "assistant"},
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"<tool_call>(?P<name>\w+)\n",
            "close": ["</tool_call>", "<|im_end|>"],
            "repeats": True,
            "content": "kv-lines",
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "notes": {"open": "[[", "close": "]]", "content": "json"},
        "content": {"close_pattern": r"<\|im_end\|>\s*|$"},
    },
}


def test_the_tokenizers_own_response_template_wins() -> None:
    tokenizer = make_tokenizer("strange_tools")
    tokenizer.response_template = OWN_TEMPLATE
    case = Case.__new__(Case)
    case.tools, case.chat = TOOLS, ChatFormat(tokenizer)
    case.prompt = case.chat.render([USER], TOOLS)
    text = "<think>hm</think>a [[1]] b\n<tool_call>get_weather\ncity: Paris\ndays: 3</tool_call><tool_call>ping\n"
    case.ids = tokenizer.encode(text + "<|im_end|>", add_special_tokens=False)
    message = case.check()
    assert message.reasoning_content == "hm"
    assert message.content == "a [[1]] b"
    assert calls_of(message) == [("get_weather", {"city": "Paris", "days": 3}), ("ping", {})]


@pytest.mark.parametrize("parser", PARSERS)
def test_any_tokens_at_all(parser: str) -> None:
    """Random ids and random markers: no exception, and every way to cut them gives the same message."""
    pieces = [
        "<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<function=ping>",
        "</function>", "<parameter=a>", "</parameter>", '{"name": "ping", "arguments": {}}',
        '{"name": "ping", "parameters": {}}', "; ", "{", "}", "[", "]", '"', "ping", "\n", " ", "한", "👋", "<", "x",
        "<|im_start|>", "<|im_end|>",
    ]  # fmt: skip
    case = Case("bytes", "")
    case.chat = chat_of("bytes", parser)
    draw = random.Random(parser)
    for _ in range(150):
        text = "".join(draw.choice(pieces) for _ in range(draw.randrange(1, 14)))
        # Markers as single tokens, or in pieces.
        case.ids = case.chat.tokenizer.encode(text) if draw.random() < 0.5 else list(text.encode())
        if draw.random() < 0.3:
            case.ids.insert(draw.randrange(len(case.ids) + 1), draw.randrange(256))
        whole = case.parse()
        for _ in range(3):
            cuts = [draw.randrange(len(case.ids) + 1) for _ in range(draw.randrange(1, 12))]
            assert case.streamed(cuts) == whole, text
        assert case.streamed(list(range(len(case.ids)))) == whole, text
        json.dumps([whole.content, whole.reasoning_content], ensure_ascii=False).encode()
        for call in whole.tool_calls:
            assert isinstance(json.loads(call.arguments), dict)
