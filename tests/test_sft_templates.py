"""SFT masks on the families' own chat templates, as TRL ships them, against transformers' mask of marked templates.

TRL's `*_training.jinja` are the same templates with {% generation %} marks: what transformers makes of these is the
reference. It is made of nothing that artnb uses.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
if importlib.util.find_spec("trl") is None:
    pytest.skip("needs trl", allow_module_level=True)

from chat_cases import TOOLS
from tokenizers_for_tests import make_tokenizer

from artnb.serving.chat import ChatFormat
from artnb.training.sft import sft_rows
from artnb.training.types import Row
from artnb.trajectories import Trajectory

FOLDER = Path(importlib.util.find_spec("trl").submodule_search_locations[0]) / "chat_templates"  # type: ignore
# template → the tokenizer that has its special tokens
FAMILIES = {"lfm2": "chatml", "llama3": "llama3", "qwen2_5": "qwen3", "qwen3": "qwen3", "gemma": "gemma"}
TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "안녕 👋"},
    {"role": "user", "content": "the weather in Paris?"},
    {"role": "assistant", "content": 'naïve {"a": 1}\n\nfine'},
]
CALLS: list[dict[str, Any]] = [
    {"role": "user", "content": "the weather in Paris?"},
    {
        "role": "assistant",
        "content": "look:",
        "tool_calls": [
            {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Paris 한글", "days": 3}}},
            {"type": "function", "function": {"name": "ping", "arguments": {}}},
        ],
    },
    {"role": "tool", "content": "sunny"},
    {"role": "tool", "content": "pong"},
    {"role": "assistant", "content": "sunny in Paris"},
]


def tokenizer_of(name: str, kind: str) -> Any:
    tokenizer = make_tokenizer(kind)
    tokenizer.chat_template = (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
    return tokenizer


def spans(tokenizer: Any, ids: list[int], mask: list[Any]) -> list[str]:
    found: list[list[int]] = []
    for i, (token, trained) in enumerate(zip(ids, mask, strict=True)):
        if trained and (i == 0 or not mask[i - 1]):
            found.append([])
        if trained:
            found[-1].append(token)
    return [tokenizer.decode(span) for span in found]


def reference(name: str, kind: str, talk: list[dict[str, Any]], tools: Any) -> list[str]:
    """The trained spans by transformers' own mask. Some marks take the line breaks around a turn in, which no model
    samples: the prompt ends with the first, and the engine stops before the last."""
    tokenizer = tokenizer_of(f"{name}_training", kind)
    made = tokenizer.apply_chat_template(talk, tools=tools, return_assistant_tokens_mask=True, return_dict=True)
    return [span.strip("\n") for span in spans(tokenizer, made["input_ids"], made["assistant_masks"])]


def trained(rows: list[Row], tokenizer: Any) -> list[str]:
    return [span for row in rows for span in spans(tokenizer, row.token_ids.tolist(), row.sampled.tolist())]


@pytest.mark.parametrize(("name", "kind"), FAMILIES.items())
def test_the_mask_is_that_of_the_marked_template(name: str, kind: str) -> None:
    """user-reports #49."""
    tokenizer = tokenizer_of(name, kind)
    rows = sft_rows([Trajectory(messages_and_choices=TALK)], ChatFormat(tokenizer), max_row_tokens=None).rows
    assert trained(rows, tokenizer) == reference(name, kind, TALK, None)
    assert len(reference(name, kind, TALK, None)) == 2
    # What is trained and what stands before it is what the template says, so the model is asked as it was trained.
    whole = tokenizer.apply_chat_template(TALK, tokenize=False)
    assert tokenizer.decode(rows[-1].token_ids.tolist()) == whole.rstrip("\n")


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3"])
def test_tool_calls_are_in_the_mask_and_their_results_are_not(name: str) -> None:
    tokenizer = tokenizer_of(name, "qwen3")
    made = [Trajectory(messages_and_choices=CALLS, tools=TOOLS)]
    rows = sft_rows(made, ChatFormat(tokenizer), max_row_tokens=None).rows
    found = trained(rows, tokenizer)
    assert found == reference(name, "qwen3", CALLS, TOOLS)
    assert [("ping" in span, "한글" in span, "pong" in span) for span in found] == [(True, True, False), (False,) * 3]
    text = "".join(tokenizer.decode(row.token_ids.tolist()) for row in rows)
    assert "sunny" in text and "get_weather" in text.split("look:")[0], "results and schemas are context"


def test_a_turn_that_only_the_next_header_ends_is_closed() -> None:
    """GLM's turns end with the next role's token, which the last turn does not have."""
    tokenizer = tokenizer_of("glm4moe", "chatml")
    rows = sft_rows([Trajectory(messages_and_choices=TALK)], ChatFormat(tokenizer), max_row_tokens=None).rows
    assert [int(row.token_ids[row.sampled][-1]) for row in rows] == [tokenizer.eos_token_id] * 2
    assert [span.removesuffix("<|im_end|>") for span in trained(rows, tokenizer)] == [
        f"\n<think></think>\n{TALK[1]['content']}",
        f"\n<think></think>\n{TALK[3]['content']}",
    ]


@pytest.mark.model
def test_smollm2s_own_template() -> None:
    from transformers import AutoTokenizer

    import artnb as art

    tokenizer: Any = AutoTokenizer.from_pretrained(art.demo_model())
    rows = sft_rows([Trajectory(messages_and_choices=TALK)], ChatFormat(tokenizer), max_row_tokens=None).rows
    assert trained(rows, tokenizer) == [f"{TALK[1]['content']}<|im_end|>", f"{TALK[3]['content']}<|im_end|>"]
