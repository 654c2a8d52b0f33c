"""Messages to prompt ids: shapes of messages, chat templates of several families, tools, token text."""

from __future__ import annotations

import functools
import json
import logging
import subprocess
import sys
from importlib import resources
from typing import Any

import pytest
from tokenizers_for_tests import KINDS, make_tokenizer

from artnb.engines.byte_tokenizer import ByteTokenizer
from artnb.errors import ConfigError, RenderError, RequestError
from artnb.serving.chat import ChatFormat, normalize_messages

NASTY = [
    "",
    " ",
    "\n",
    "👋👩‍👩‍👧🎉",
    "한글 안녕하세요",
    "</think>",
    "}}",
    '{"a": {"b": "}"}}',
    "naïve\u0301",
    "<|im_star",
    "a\x00b",
]
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    },
}
USER = {"role": "user", "content": "hello"}
KINDS_WITH_TOOLS = ["qwen3", "qwen3_coder", "llama3", "mistral"]


def tokenizer_of(kind: str) -> Any:
    return ByteTokenizer() if kind == "bytes" else make_tokenizer(kind)


@functools.cache
def chat_of(kind: str, **options: Any) -> ChatFormat:
    return ChatFormat(tokenizer_of(kind), **options)


def rendered(chat: ChatFormat, messages: list[Any], tools: list[Any] | None = None, **options: Any) -> str:
    return str(chat.tokenizer.decode(chat.render(messages, tools, **options), skip_special_tokens=False))


def history(content: Any = "fine", arguments: Any = '{"city": "Paris"}', said: Any = None) -> list[dict[str, Any]]:
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
    return [
        USER,
        {"role": "assistant", "content": said, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "abcdefghi", "content": content},
    ]


# Shapes of messages


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, ""),
        (5, "5"),
        (True, "true"),
        ({"a": "한글"}, '{"a": "한글"}'),
        ([], ""),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "ab"),
        ([{"type": "text", "text": None}], ""),
        ({"type": "text", "text": "a"}, "a"),
        ([1, {"a": 2}], '[1, {"a": 2}]'),
        ({"a": "\ud800"}, '{"a": "\\ud800"}'),
        *[(text, text) for text in NASTY],
    ],
)
@pytest.mark.parametrize("role", ["user", "tool"])
def test_content_becomes_text(role: str, content: Any, text: str) -> None:
    assert normalize_messages([{"role": role, "content": content}])[0]["content"] == text


def test_a_tool_may_answer_with_objects_that_have_a_type() -> None:
    content = [{"type": "Feature", "id": 1}]
    assert normalize_messages([{"role": "tool", "content": content}])[0]["content"] == json.dumps(content)


@pytest.mark.parametrize(
    ("messages", "index", "words"),
    [
        ([USER, {"content": "x"}], 1, "role"),
        ([{"role": None, "content": "x"}], 0, "role"),
        ([USER, "x"], 1, "mapping"),
        ([USER, {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], 1, "image_url"),
        ([{"role": "tool", "content": [{"type": "text", "text": "x"}, {"type": "image"}]}], 0, "image"),
        ([{"role": "user", "content": [{"type": "strange"}]}], 0, "strange"),
        ([{"role": "assistant", "tool_calls": [{"id": "1"}]}], 0, "tool_calls[0]"),
        ([{"role": "assistant", "tool_calls": ["x"]}], 0, "tool_calls[0]"),
        ([{"role": "assistant", "tool_calls": {"a": 1}}], 0, "tool_calls"),
        ([], None, "empty"),
        ({"role": "user"}, None, "list"),
    ],
)
def test_bad_messages_name_their_index(messages: Any, index: int | None, words: str) -> None:
    with pytest.raises(RenderError, match=words.replace("[", r"\[")) as caught:
        normalize_messages(messages)
    assert caught.value.index == index


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"city": "Paris"}', {"city": "Paris"}),
        ({"city": "Paris"}, {"city": "Paris"}),
        ("", {}),
        (None, {}),
        ('{"city": "Par', '{"city": "Par'),
        ("[1]", "[1]"),
        ([1], "[1]"),
        ("[" * 100_000, "[" * 100_000),
    ],
)
def test_arguments_become_a_mapping_or_stay(arguments: Any, expected: Any) -> None:
    message = normalize_messages(history(arguments=arguments))[1]
    assert message["tool_calls"][0]["function"]["arguments"] == expected
    assert message["content"] == ""


def test_normalising_leaves_the_callers_messages_alone_and_takes_old_calls() -> None:
    messages = [USER, {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}]
    before = json.dumps(messages)
    new = normalize_messages(messages)
    assert json.dumps(messages) == before
    assert new[1]["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": {}}}]
    assert normalize_messages([{"role": "assistant", "refusal": "no"}])[0]["content"] == "no"


# Rendering


@pytest.mark.parametrize("kind", [*KINDS, "bytes"])
@pytest.mark.parametrize("text", NASTY)
def test_render_is_the_chat_template(kind: str, text: str) -> None:
    chat = chat_of(kind)
    ids = chat.render([{"role": "user", "content": text}])
    template = chat.tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
    )
    assert ids == template
    assert all(isinstance(token_id, int) for token_id in ids)


@pytest.mark.parametrize("kind", [*KINDS_WITH_TOOLS, "chatml", "gemma", "bytes"])
@pytest.mark.parametrize(
    ("content", "shown"),
    [
        ("fine", "fine"),
        ({"rain": 0.5}, "rain"),
        ([{"type": "text", "text": "dry"}], "dry"),
        (7, "7"),
        (None, ""),
        ("", ""),
    ],
)
def test_tool_results_of_every_shape_in_every_family(kind: str, content: Any, shown: str) -> None:
    chat = chat_of(kind)
    text = rendered(chat, history(content), [TOOL])
    assert shown in text
    assert "None" not in text
    assert "get_weather" in text and "Paris" in text
    assert text == rendered(chat, history(content), [TOOL])


@pytest.mark.parametrize("kind", [*KINDS_WITH_TOOLS, "chatml", "gemma", "bytes"])
@pytest.mark.parametrize("arguments", ['{"city": "Par', "[1, 2]", "Paris"])
def test_malformed_arguments_render_and_are_not_lost(kind: str, arguments: str) -> None:
    text = rendered(chat_of(kind), history(arguments=arguments), [TOOL])
    assert arguments in text or json.dumps(arguments)[1:-1] in text


@pytest.mark.parametrize("kind", KINDS_WITH_TOOLS)
def test_a_string_and_a_mapping_of_arguments_render_alike(kind: str) -> None:
    chat = chat_of(kind)
    text = '{"city": "Paris", "days": 3}'
    assert chat.render(history(arguments=text), [TOOL]) == chat.render(history(arguments=json.loads(text)), [TOOL])


@pytest.mark.parametrize(
    ("kind", "messages", "index", "words"),
    [
        ("gemma", [{"role": "system", "content": "x"}, USER], 0, "System role not supported"),
        ("gemma", [USER, USER], 1, "must alternate"),
        ("gemma", [USER, {"role": "assistant", "content": "x"}, USER, USER], 3, "alternate"),
        ("qwen3", [USER, {"role": "critic", "content": "x"}, USER], 1, "Unexpected role critic"),
        ("mistral", [USER, {"role": "assistant", "content": "x"}, {"role": "critic", "content": "x"}], 2, "Only user"),
        ("qwen3_coder", [USER, {"role": "system", "content": "x"}], 1, "must be at the beginning"),
        ("chatml", [USER, {"role": "user", "content": "\ud800"}], 1, "messages"),
    ],
)  # fmt: skip
def test_what_a_template_refuses_names_the_message(kind: str, messages: Any, index: int, words: str) -> None:
    with pytest.raises(RenderError, match=words) as caught:
        chat_of(kind).render(messages)
    assert caught.value.index == index


def test_parallel_calls_that_llama_refuses() -> None:
    messages = history()
    messages[1]["tool_calls"] *= 2
    with pytest.raises(RenderError, match="single tool-calls") as caught:
        chat_of("llama3").render(messages, [TOOL])
    assert caught.value.index == 1


def test_the_template_variables_reach_the_template() -> None:
    chat = chat_of("qwen3")
    assert rendered(chat, [USER], enable_thinking=False).endswith("<think>\n\n</think>\n\n")
    assert rendered(chat, [USER], add_generation_prompt=False).endswith("hello<|im_end|>\n")
    for reserved in ("tokenize", "return_dict", "chat_template"):
        with pytest.raises(RequestError, match=reserved) as caught:
            chat.render([USER], **{reserved: True})
        assert caught.value.param == "chat_template_kwargs"


def test_thinking_leaves_the_history_and_a_developer_is_the_system() -> None:
    chat = chat_of("qwen3")
    said = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nyes"}
    assert "hm" in rendered(chat, [USER, said], add_generation_prompt=False)
    assert "hm" not in rendered(chat, [USER, said, USER])
    text = rendered(chat, [{"role": "developer", "content": "be kind"}, USER])
    assert text.startswith("<|im_start|>system\nbe kind")


def test_a_given_template_replaces_the_tokenizers_own() -> None:
    tokenizer = make_tokenizer("qwen3")
    chat = ChatFormat(tokenizer, chat_template="{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}")
    assert rendered(chat, [USER]) == "[user] hello"
    assert not chat.takes_tools


def test_without_a_template_the_constructor_says_so() -> None:
    tokenizer = make_tokenizer("chatml")
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="no chat template"):
        ChatFormat(tokenizer)


# Tools


@pytest.mark.parametrize(
    ("kind", "takes_tools", "parser"),
    [
        ("chatml", False, "hermes"),
        ("gemma", False, "hermes"),
        ("qwen3", True, "hermes"),
        ("qwen3_coder", True, "qwen3_coder"),
        ("llama3", True, "llama3"),
        ("mistral", True, "mistral"),
        ("bytes", True, "hermes"),
    ],
)
def test_the_parser_follows_from_the_template(kind: str, takes_tools: bool, parser: str) -> None:
    chat = chat_of(kind)
    assert (chat.takes_tools, chat.parser) == (takes_tools, parser)


@pytest.mark.parametrize(
    ("name", "takes_tools", "parser"),
    [
        ("qwen2_5", True, "hermes"),
        ("qwen3", True, "hermes"),
        ("qwen3_5_think", True, "qwen3_coder"),
        ("llama3_1", True, "llama3"),
        ("llama3_2", True, "llama3"),
        ("gemma3", False, "hermes"),
        ("phi3", False, "hermes"),
    ],
)
def test_the_templates_of_real_models(name: str, takes_tools: bool, parser: str) -> None:
    """As TRL ships them."""
    template = (resources.files("trl") / "chat_templates" / f"{name}.jinja").read_text()
    tokenizer = make_tokenizer("chatml")
    tokenizer.bos_token = "<|endoftext|>"
    chat = ChatFormat(tokenizer, chat_template=template)
    assert (chat.takes_tools, chat.parser) == (takes_tools, parser)
    for content in ("fine", {"a": 1}, [{"type": "text", "text": "x"}], 3, None):
        text = rendered(chat, history(content), [TOOL])
        assert "get_weather" in text and "None" not in text
    assert "Par" in rendered(chat, history(arguments='{"city": "Par'), [TOOL])


def test_a_template_without_tools_gets_them_as_text() -> None:
    text = rendered(chat_of("chatml"), [{"role": "system", "content": "be kind"}, *history(said="look")], [TOOL])
    assert text.startswith("<|im_start|>system\nbe kind\n\nYou may call")
    assert '"name": "get_weather"' in text.split("<|im_end|>")[0]
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
    assert f"<|im_start|>assistant\nlook\n{call}<|im_end|>" in text
    assert "<|im_start|>user\n<tool_response>\nfine\n</tool_response><|im_end|>" in text


def test_a_template_without_system_gets_tools_before_the_first_user_message() -> None:
    text = rendered(chat_of("gemma"), history(), [TOOL])
    assert text.startswith("<bos><start_of_turn>user\nYou may call")
    assert "hello<end_of_turn>" in text


def test_results_of_parallel_calls_share_a_message() -> None:
    messages = history()
    text = rendered(chat_of("gemma"), [*messages, messages[2]], [TOOL])  # gemma's roles must alternate
    assert text.count("<tool_response>") == 2


def test_history_with_calls_is_not_lost_when_the_request_has_no_tools() -> None:
    assert "get_weather" in rendered(chat_of("chatml"), history())


def test_an_unknown_call_format_warns_once_and_refuses_tools(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        chat = ChatFormat(make_tokenizer("strange_tools"))
    assert len(caplog.records) == 1 and "no parser knows" in caplog.text
    assert chat.render([USER])
    with pytest.raises(RequestError, match="no parser knows") as caught:
        chat.render([USER], [TOOL])
    assert caught.value.param == "tools"
    assert chat_of("strange_tools", parser="hermes").render([USER], [TOOL])


def test_parser_by_name() -> None:
    assert chat_of("qwen3", parser="qwen3_coder").parser == "qwen3_coder"
    with pytest.raises(ConfigError, match=r"did you mean 'hermes'"):
        chat_of("qwen3", parser="hermse")
    with pytest.raises(RequestError, match="parser='hermes'"):
        chat_of("chatml", parser="llama3").render([USER], [TOOL])


@pytest.mark.parametrize("tools", [[{"name": "f"}], [TOOL, {"type": "function", "function": {}}], {"a": 1}, [None]])
def test_malformed_tools_are_refused(tools: Any) -> None:
    with pytest.raises(RequestError, match="tools") as caught:
        chat_of("qwen3").render([USER], tools)
    assert caught.value.param == "tools"
    assert chat_of("qwen3").render([USER], []) == chat_of("qwen3").render([USER])


def test_a_response_template_that_is_none_is_refused() -> None:
    tokenizer = make_tokenizer("qwen3")
    tokenizer.response_template = {"fields": {"content": {"content": "nonsense"}}}
    with pytest.raises(ConfigError, match="response_template"):
        ChatFormat(tokenizer)


def test_importing_loads_neither_torch_nor_transformers() -> None:
    code = "import sys, artnb.serving.chat; print([m for m in ('torch', 'transformers', 'jinja2') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
