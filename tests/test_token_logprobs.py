"""Log-probs that stay text until they are read: to everybody who looks they are openai's own objects."""

from __future__ import annotations

import copy
import gc
import json
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pydantic
import pytest
from openai.types.chat.chat_completion import Choice, ChoiceLogprobs

import artnb as art
from artnb.token_logprobs import TextLogprobs, token_logprobs, unread_text
from artnb.tracking.records import trajectory_line

# Texts that look like what is searched for, an emoji in halves, the lowest number that the endpoint writes.
ENTRIES = [
    {"token": 'a "logprob":7,', "bytes": [97], "logprob": -0.5, "top_logprobs": []},
    {"token": "]}}", "bytes": None, "logprob": 0.0, "top_logprobs": []},
    {"token": "\ud83d", "bytes": [240, 159], "logprob": -9999.0, "top_logprobs": []},
    {"token": "😀", "bytes": [1], "logprob": -1.0000000000000002e-07, "top_logprobs": []},
]
VALUES = [-0.5, 0.0, -9999.0, -1.0000000000000002e-07]
TEXT = json.dumps(ENTRIES).encode()


def plain() -> ChoiceLogprobs:
    return ChoiceLogprobs.model_validate({"content": ENTRIES})


def make_choice(logprobs: ChoiceLogprobs) -> Choice:
    choice = Choice.model_validate(
        {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "a"}}
        | {"token_ids": [1, 2, 3, 4], "prompt_token_ids": [0]}
    )
    choice.logprobs = logprobs
    return choice


class Holder(pydantic.BaseModel):
    held: Choice
    more: list[ChoiceLogprobs]


@pytest.mark.parametrize(
    "look",
    [
        lambda logprobs: logprobs.content,
        lambda logprobs: logprobs.model_dump(),
        lambda logprobs: logprobs.model_dump(exclude_unset=True, mode="json"),
        lambda logprobs: logprobs.to_dict(),
        lambda logprobs: dict(logprobs),
        lambda logprobs: vars(logprobs),
        lambda logprobs: logprobs.model_fields_set,
        repr,
        copy.copy,
        copy.deepcopy,
        lambda logprobs: logprobs.model_copy(),
        lambda logprobs: pickle.loads(pickle.dumps(logprobs)),
        lambda logprobs: (logprobs.refusal, getattr(logprobs, "other", 1), hasattr(logprobs, "content")),
        lambda logprobs: make_choice(logprobs).model_dump(),
        lambda logprobs: make_choice(logprobs).model_copy(deep=True),
        lambda logprobs: Holder(held=make_choice(logprobs), more=[logprobs]).model_dump(),
        lambda logprobs: pydantic.TypeAdapter(list[Any]).dump_python([logprobs, make_choice(logprobs)]),
        lambda logprobs: Choice.model_validate(make_choice(logprobs).model_dump()),
        lambda logprobs: art.Trajectory(messages_and_choices=[make_choice(logprobs)]).model_dump(
            exclude={"start_time"}
        ),
    ],
)
def test_it_is_what_openai_makes_of_the_same_json(look: Callable[[ChoiceLogprobs], Any]) -> None:
    ours, own = look(TextLogprobs.of(TEXT)), look(plain())
    assert ours == own and own == ours and repr(ours) == repr(own)
    again = TextLogprobs.of(TEXT)
    assert again.content == plain().content and again == plain() and plain() == again and again == TextLogprobs.of(TEXT)
    assert again != ChoiceLogprobs(content=[]) and ChoiceLogprobs(content=[]) != again


def test_json_of_it() -> None:
    entries = [entry for entry in ENTRIES if entry["token"] != "\ud83d"]  # half an emoji: pydantic refuses to write it
    text = json.dumps(entries).encode()
    own = ChoiceLogprobs.model_validate({"content": entries})
    assert make_choice(TextLogprobs.of(text)).model_dump_json() == make_choice(own).model_dump_json()


def test_what_is_changed_stays_changed() -> None:
    logprobs = TextLogprobs.of(TEXT)
    assert logprobs.content is not None
    logprobs.content[0].logprob = -3.0
    assert token_logprobs(logprobs) == [-3.0, *VALUES[1:]] and unread_text(logprobs) is None
    assert logprobs.model_dump()["content"][0]["logprob"] == -3.0
    logprobs = TextLogprobs.of(TEXT)
    logprobs.content = None
    assert token_logprobs(logprobs) is None and logprobs.model_dump() == {"content": None, "refusal": None}
    logprobs = TextLogprobs.of(TEXT)
    logprobs.refusal = []
    assert logprobs.model_dump() == {**plain().model_dump(), "refusal": []}


def test_numbers_make_no_objects_of_the_text() -> None:
    assert token_logprobs(plain()) == VALUES and token_logprobs(None) is None
    logprobs = TextLogprobs.of(TEXT)
    assert token_logprobs(logprobs) == VALUES and unread_text(logprobs) == TEXT
    trajectory_line(art.Trajectory(messages_and_choices=[make_choice(logprobs)], reward=1.0), 0, 0)  # pydantic's own
    many = [make_choice(TextLogprobs.of(json.dumps(ENTRIES * 50).encode())) for _ in range(20)]
    gc.collect()
    before = len(gc.get_objects())
    lines = [trajectory_line(art.Trajectory(messages_and_choices=[choice], reward=1.0), 0, 0) for choice in many]
    assert all(token_logprobs(choice.logprobs) == VALUES * 50 for choice in many)
    gc.collect()
    assert len(gc.get_objects()) - before < 100
    assert all(unread_text(choice.logprobs) is not None for choice in many)
    read = [json.loads(line)["fields"]["messages_and_choices"][0]["choice"] for line in lines]
    assert all(choice["logprobs"] == {"content": ENTRIES * 50} for choice in read)


def test_threads_that_read_at_once() -> None:
    for _ in range(20):
        logprobs = TextLogprobs.of(json.dumps(ENTRIES * 200).encode())
        with ThreadPoolExecutor(8) as threads:
            found = list(threads.map(lambda _, seen=logprobs: len(seen.content or []), range(16)))
        assert found == [800] * 16
