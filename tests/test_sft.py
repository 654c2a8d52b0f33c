"""Supervised rows: the mask is the text of the assistant turns, on the templates of six families."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import pytest
from openai.types.chat.chat_completion import Choice

pytest.importorskip("transformers")

from tokenizers_for_tests import make_tokenizer

from artnb.engines.byte_tokenizer import ByteTokenizer
from artnb.errors import RenderError
from artnb.serving.chat import ChatFormat
from artnb.training.rows import explain
from artnb.training.sft import sft_rows
from artnb.training.types import Row, SkipReason
from artnb.trajectories import ExceptionRecord, History, Trajectory

TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "안녕 👋", "reasoning_content": "greet back"},
    {"role": "user", "content": "the weather in Paris?"},
    {"role": "assistant", "content": 'naïve {"a": 1}\n\nfine', "reasoning_content": "look"},
]
FIRST, SECOND = TALK[1]["content"], TALK[3]["content"]

# Per kind: (number of rows, text of each assistant turn as a model would have to write it after its prompt).
EXPECTED = {
    "chatml": (1, [f"{FIRST}<|im_end|>", f"{SECOND}<|im_end|>"]),
    # Strips earlier thoughts, so the second turn's history is another one and needs a row of its own.
    "qwen3": (
        2,
        [f"<think>\ngreet back\n</think>\n\n{FIRST}<|im_end|>", f"<think>\nlook\n</think>\n\n{SECOND}<|im_end|>"],
    ),
    # The prompt itself opens <think>.
    "qwen3_coder": (1, [f"greet back\n</think>\n\n{FIRST}<|im_end|>", f"look\n</think>\n\n{SECOND}<|im_end|>"]),
    "llama3": (1, [f"{FIRST}<|eot_id|>", f"{SECOND}<|eot_id|>"]),
    "mistral": (1, [f"{FIRST}</s>", f"{SECOND}</s>"]),
    "gemma": (1, [f"{FIRST}<end_of_turn>", f"{SECOND}<end_of_turn>"]),
}  # fmt: skip


def chat_of(kind: str) -> ChatFormat:
    return ChatFormat(make_tokenizer(kind))


def spans(chat: ChatFormat, rows: list[Row]) -> list[str]:
    """The text of each run of targets."""
    found = []
    for row in rows:
        for is_target, run in groupby(zip(row.sampled.tolist(), row.token_ids.tolist(), strict=True), lambda p: p[0]):
            if is_target:
                found.append(chat.tokenizer.decode([token for _, token in run]))
    return found


def trajectory(*messages: Any, **fields: Any) -> Trajectory:
    return Trajectory(messages_and_choices=list(messages), reward=None, **fields)


def sampled(prompt_ids: list[int], token_ids: list[int]) -> Choice:
    message = {"role": "assistant", "content": "whatever"}
    fields = {"prompt_token_ids": prompt_ids, "token_ids": token_ids}
    return Choice.model_validate({"index": 0, "finish_reason": "stop", "message": message, **fields})


@pytest.mark.parametrize("kind", EXPECTED)
def test_the_mask_is_the_text_of_the_assistant_turns(kind: str) -> None:
    """user-reports #49."""
    chat = chat_of(kind)
    batch = sft_rows([trajectory(*TALK)], chat, max_row_tokens=None)
    count, texts = EXPECTED[kind]
    assert len(batch.rows) == count
    assert spans(chat, batch.rows) == texts
    # Targets and context together are the template's own text, up to the last end-of-turn token.
    whole = chat.tokenizer.apply_chat_template(TALK, tokenize=False)
    assert chat.tokenizer.decode(batch.rows[-1].token_ids.tolist()) == whole.rstrip("\n")
    assert batch.metrics["sampled_tokens"] == sum(int(row.sampled.sum()) for row in batch.rows)
    assert all(
        row.advantage == 1.0 and (row.temperatures == 1.0).all() and not row.logprobs.any() for row in batch.rows
    )


@pytest.mark.parametrize("kind", EXPECTED)
def test_every_target_follows_the_prompt_that_the_engine_will_see(kind: str) -> None:
    chat = chat_of(kind)
    batch = sft_rows([trajectory(*TALK)], chat, max_row_tokens=None)
    starts = [
        row.token_ids[:i].tolist()
        for row in batch.rows
        for i in range(1, len(row))
        if row.sampled[i] and not row.sampled[i - 1]
    ]
    assert starts == [chat.render(TALK[:1]), chat.render(TALK[:3])]


@pytest.mark.parametrize("kind", ["qwen3", "llama3", "mistral"])
def test_tool_calls_are_targets_and_their_results_are_not(kind: str) -> None:
    call = {
        "id": "abcdefghi",
        "type": "function",
        "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'},
    }
    talk = [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "sunny", "tool_call_id": "abcdefghi"},
        {"role": "assistant", "content": "sunny in Paris"},
    ]
    chat = chat_of(kind)
    batch = sft_rows([trajectory(*talk)], chat, max_row_tokens=None)
    first, second = spans(chat, batch.rows)
    assert "get_weather" in first and '"city"' in first and "sunny" not in first
    assert second.startswith("sunny in Paris<")
    assert len(batch.rows) == 1


def test_a_choice_with_token_ids_is_used_as_it_was_sampled() -> None:
    """user-reports #41, #43: whatever its text says."""
    chat = chat_of("chatml")
    batch = sft_rows([trajectory(TALK[0], sampled([9, 8, 7], [5, 5, 6]))], chat, max_row_tokens=None)
    (row,) = batch.rows
    assert row.token_ids.tolist() == [9, 8, 7, 5, 5, 6] and row.sampled.tolist() == [False] * 3 + [True] * 3


def test_sampled_and_written_turns_share_a_row_where_one_extends_the_other() -> None:
    chat = chat_of("chatml")
    prompt_ids = chat.render(TALK[:1])
    answer_ids = chat.render(TALK[:2], add_generation_prompt=False)[len(prompt_ids) : -1]
    choice = sampled(prompt_ids, answer_ids)
    choice.message.content = FIRST
    batch = sft_rows([trajectory(TALK[0], choice, *TALK[2:])], chat, max_row_tokens=None)
    assert len(batch.rows) == 1 and spans(chat, batch.rows) == EXPECTED["chatml"][1]


def test_a_choice_without_token_ids_is_rendered() -> None:
    chat = chat_of("chatml")
    message = {"role": "assistant", "content": "fine"}
    choice = Choice.model_validate({"index": 0, "finish_reason": "stop", "message": message})
    assert spans(chat, sft_rows([trajectory(TALK[0], choice)], chat, max_row_tokens=None).rows) == ["fine<|im_end|>"]


class MergingTokenizer(ByteTokenizer):
    """Writes two line breaks as one token, as most vocabularies do, and opens <think>\\n in the prompt."""

    PAIR = 9999

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        ids: list[int] = []
        for token in super().encode(text):
            if token == 10 and ids and ids[-1] == 10:
                ids[-1] = self.PAIR
            else:
                ids.append(token)
        return ids

    def decode(self, ids: Any, **options: Any) -> str:
        flat = [ids] if isinstance(ids, int) else ids
        return super().decode([x for token in flat for x in ([10, 10] if token == self.PAIR else [token])], **options)


class ThinkingChat:
    """A template that writes <think>\\n after the assistant header; history has "<think>\\n\\n</think>" or nothing."""

    def __init__(self, empty_thought: str) -> None:
        self.tokenizer = MergingTokenizer()
        self.empty_thought = empty_thought

    def render(self, messages: Any, tools: Any = None, *, add_generation_prompt: bool = True) -> list[int]:
        text = ""
        for message in messages:
            thought = self.empty_thought if message["role"] == "assistant" else ""
            text += f"<|im_start|>{message['role']}\n{thought}{message['content']}<|im_end|>\n"
        return self.tokenizer.encode(text + ("<|im_start|>assistant\n<think>\n" if add_generation_prompt else ""))


def test_a_token_that_spans_the_border_is_split_as_the_engine_would_see_it() -> None:
    chat: Any = ThinkingChat("<think>\n\n</think>\n\n")
    prompt_ids = chat.render(TALK[:1])
    assert chat.render(TALK[:2], add_generation_prompt=False)[: len(prompt_ids)] != prompt_ids  # the case in question
    (row,) = sft_rows([trajectory(*TALK[:2])], chat, max_row_tokens=None).rows
    assert row.token_ids[~row.sampled].tolist() == prompt_ids
    assert spans(chat, [row]) == [f"\n</think>\n\n{FIRST}<|im_end|>"]


def test_a_prompt_that_opens_a_thought_which_the_answer_lacks() -> None:
    chat: Any = ThinkingChat("")
    (row,) = sft_rows([trajectory(*TALK[:2])], chat, max_row_tokens=None).rows
    assert spans(chat, [row]) == [f"{FIRST}<|im_end|>"]


def test_a_template_that_rewrites_the_prompt_is_refused() -> None:
    class Rewriting(ThinkingChat):
        def render(self, messages: Any, tools: Any = None, *, add_generation_prompt: bool = True) -> list[int]:
            ids = super().render(messages, tools, add_generation_prompt=add_generation_prompt)
            return self.tokenizer.encode(f"{len(messages)} messages\n") + ids

    chat: Any = Rewriting("")
    with pytest.raises(RenderError, match=r"trajectory 0: .* rewrites the messages before messages\[1\]"):
        sft_rows([trajectory(*TALK[:2])], chat, max_row_tokens=None)


def test_one_overlong_row_is_counted_and_the_rest_trains() -> None:
    """user-reports #39."""
    chat = ChatFormat(ByteTokenizer())
    long = [{"role": "user", "content": "x" * 200_000}, {"role": "assistant", "content": "ok"}]
    batch = sft_rows([trajectory(*TALK), trajectory(*long)], chat, max_row_tokens=1000)
    assert batch.trajectory_reasons == {SkipReason.TOO_LONG: 1}
    assert {row.trajectory for row in batch.rows} == {0}
    assert batch.notes[0].startswith("trajectory 1: 1 of 1 rows left out: 2000") and "limit 1000" in batch.notes[0]
    nothing = explain(sft_rows([trajectory(*long)], chat, max_row_tokens=1000))
    assert nothing.startswith("Nothing was trained: 1 trajectory left out: 1 too long")


def test_a_short_row_trains_beside_a_long_one_of_the_same_trajectory() -> None:
    chat = chat_of("qwen3")
    lengths = [len(row) for row in sft_rows([trajectory(*TALK)], chat, max_row_tokens=None).rows]
    batch = sft_rows([trajectory(*TALK)], chat, max_row_tokens=lengths[0])
    assert [len(row) for row in batch.rows] == lengths[:1] and lengths[1] > lengths[0]
    assert batch.trajectory_reasons == {SkipReason.TOO_LONG: 1}


def test_nothing_to_learn_and_failures_are_counted() -> None:
    chat = chat_of("chatml")
    failed = trajectory(*TALK, error=ExceptionRecord.of(ValueError("boom")))
    batch = sft_rows([trajectory(TALK[0]), failed, trajectory()], chat, max_row_tokens=None)
    assert not batch.rows
    assert batch.trajectory_reasons == {SkipReason.NO_CHOICES: 2, SkipReason.FAILED: 1}
    assert batch.notes[1] == "trajectory 1: failed with ValueError: boom"
    assert sft_rows([], chat, max_row_tokens=None).rows == []


def test_an_assistant_message_that_opens_a_conversation_is_context() -> None:
    chat = chat_of("chatml")
    batch = sft_rows([trajectory({"role": "assistant", "content": "welcome"}, *TALK[:2])], chat, max_row_tokens=None)
    assert spans(chat, batch.rows) == [f"{FIRST}<|im_end|>"]
    assert batch.metrics["context_assistant_messages"] == 1


def test_additional_histories_have_rows_of_their_own() -> None:
    chat = chat_of("chatml")
    made = trajectory(*TALK[:2], additional_histories=[History(messages_and_choices=TALK[2:])])
    batch = sft_rows([made], chat, max_row_tokens=None)
    assert spans(chat, batch.rows) == EXPECTED["chatml"][1] and len(batch.rows) == 2
    assert batch.metrics["rows_per_trajectory"] == 2.0


def test_messages_that_cannot_be_rendered_name_the_trajectory_and_the_message() -> None:
    """user-reports #44, #50."""
    with pytest.raises(RenderError, match=r"trajectory 1: .*messages\[0\]") as caught:
        sft_rows(
            [trajectory(*TALK), trajectory({"role": "system", "content": "be kind"}, *TALK)],
            chat_of("gemma"),
            max_row_tokens=None,
        )
    assert caught.value.index == 0
