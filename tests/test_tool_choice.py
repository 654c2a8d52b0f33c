"""tool_choice that asks for a call: the answer begins as one, and everything after the beginning is sampled."""

import json

import pytest
from chat_cases import ANSWERS, USER, tokenizer_of
from chat_cases import TOOLS as TWO_TOOLS
from endpoint_for_tests import TOOLS, Endpoint, calls, rebuild
from test_endpoint import refused

from artnb.errors import RequestError
from artnb.serving.chat import ChatFormat, accumulate

NAMED = {"type": "function", "function": {"name": "f"}}
OTHER = {"type": "function", "function": {"name": "g", "parameters": {"type": "object", "properties": {}}}}


@pytest.mark.parametrize(
    ("tools", "choice", "opening"),
    [
        (TOOLS, NAMED, '<tool_call>\n{"name": "f", "arguments":'),
        (TOOLS, "required", '<tool_call>\n{"name": "f", "arguments":'),  # there is but one
        ([*TOOLS, OTHER], "required", '<tool_call>\n{"name":'),
    ],
)
async def test_tool_choice_begins_the_answer_with_a_call(tools, choice, opening):
    """The opening is context, what follows is sampled: the row is exactly what the engine saw and said."""
    answer = calls('{"x": 1}', '{"x": 2}').removeprefix(opening)
    endpoint = Endpoint(answer, chunk_size=3)
    asked = await endpoint.ask(tools=tools, tool_choice=choice)
    request = endpoint.engine.requests[0]
    assert request.prompt_text.endswith("<|im_start|>assistant\n" + opening)
    assert asked.prompt_token_ids == request.prompt_ids
    assert endpoint.tokenizer.decode(asked.token_ids, skip_special_tokens=True) == answer
    assert [json.loads(c.function.arguments) for c in asked.message.tool_calls] == [{"x": 1}, {"x": 2}]
    assert asked.message.content is None and asked.finish_reason == "tool_calls"
    streamed = rebuild(await endpoint.stream(tools=tools, tool_choice=choice))[0]
    assert streamed.model_dump() == asked.model_dump()
    one = await endpoint.ask(tools=tools, tool_choice=choice, parallel_tool_calls=False)
    assert [json.loads(c.function.arguments) for c in one.message.tool_calls] == [{"x": 1}]


async def test_a_call_that_was_asked_for_and_went_wrong_is_text():
    choice = await Endpoint(' "f", oops').ask(tools=[*TOOLS, OTHER], tool_choice="required")
    assert choice.message.tool_calls is None and choice.message.content == '<tool_call>\n{"name": "f", oops'


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tool_choice": "required"}, "no tools"),
        ({"tool_choice": NAMED}, "no tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "ff"}}}, "did you mean 'f'"),
        ({"tools": TOOLS, "tool_choice": "any"}, "'required'"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "'required'"),
    ],
)
async def test_a_tool_choice_that_cannot_be_honoured_is_refused(options, words):
    error = await refused(Endpoint("a"), **options)
    assert error["param"] == "tool_choice" and words in error["message"]


@pytest.mark.parametrize("kind", sorted(ANSWERS.keys() - {"qwen3_coder"}))
@pytest.mark.parametrize("name", ["get_weather", ""])
@pytest.mark.parametrize("size", [1, 10_000])
def test_every_family_goes_on_from_the_beginning_of_its_own_call(kind, name, size):
    tokenizer = tokenizer_of(kind)
    chat = ChatFormat(tokenizer)
    plain, begun = chat.render([USER], TWO_TOOLS), chat.render([USER], TWO_TOOLS, begin_call=name)
    opening = tokenizer.decode(begun)[len(tokenizer.decode(plain)) :]
    assert ("get_weather" in opening) is bool(name)
    whole = ANSWERS[kind][1].strip().replace("[TOOL_CALLS][", "[TOOL_CALLS] [")
    assert whole.startswith(opening)
    ids = tokenizer.encode(whole.removeprefix(opening), add_special_tokens=False)
    stream = chat.stream(begun, TWO_TOOLS, begin_call=name)
    deltas = [delta for start in range(0, len(ids), size) for delta in stream.push(ids[start : start + size])]
    message = accumulate([*deltas, *stream.finish()])
    assert message.content is None
    assert [call.name for call in message.tool_calls] == ["get_weather", "ping"]
    assert "한글" in message.tool_calls[0].arguments


def test_xml_calls_begin_too_and_never_inside_of_reasoning():
    chat = ChatFormat(tokenizer_of("qwen3_coder"))
    with pytest.raises(RequestError, match="<think>") as caught:
        chat.render([USER], TWO_TOOLS, begin_call="ping")
    assert caught.value.param == "tool_choice"
    tokenizer = tokenizer_of("qwen3_coder")
    closed = tokenizer.chat_template.replace("<think>\\n", "")
    assert closed != tokenizer.chat_template
    chat = ChatFormat(tokenizer, chat_template=closed)
    begun = chat.render([USER], TWO_TOOLS, begin_call="get_weather")
    assert tokenizer.decode(begun).endswith("<tool_call>\n<function=get_weather>\n")
    answer = "<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>"
    ids = tokenizer.encode(answer, add_special_tokens=False)
    stream = chat.stream(begun, TWO_TOOLS, begin_call="get_weather")
    (call,) = accumulate([*stream.push(ids), *stream.finish()]).tool_calls
    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Paris"})


def test_a_model_with_a_response_template_of_its_own_says_that_it_cannot():
    tokenizer = tokenizer_of("qwen3")
    tokenizer.response_template = {
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {"tool_calls": {"open": "<<", "close": ">>", "repeats": True, "content": "json"}, "content": {}},
    }
    chat = ChatFormat(tokenizer)
    with pytest.raises(RequestError, match="'auto' or 'none' only"):
        chat.render([USER], TWO_TOOLS, begin_call="ping")
