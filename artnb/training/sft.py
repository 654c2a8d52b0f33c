"""Rows for supervised fine-tuning: the assistant turns of trajectories, with their end-of-turn token, are the targets.

A Choice that carries token ids is used as it was sampled. A message given as text is tokenized in its place, by
comparing two renders of the whole conversation, so no template needs {% generation %} marks and none is asked to
render a message alone. Does not weigh turns by reward, and knows nothing about the loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from openai.types.chat.chat_completion import Choice

from ..errors import RenderError
from ..trajectories import MessageOrChoice, MessagesAndChoices, Tools, Trajectory, messages_of
from .rows import OpenRow, Skip, has_failed
from .types import RowBatch, SkipReason


class Chat(Protocol):
    """What is used of serving.chat.ChatFormat."""

    @property
    def tokenizer(self) -> Any: ...  # with all_special_ids, decode and encode, as transformers' have them

    def render(
        self, messages: Sequence[Any], tools: Sequence[Any] | None = None, *, add_generation_prompt: bool = True
    ) -> list[int]: ...


def sft_rows(trajectories: Sequence[Trajectory], chat: Chat, *, max_row_tokens: int | None) -> RowBatch:
    """Rows whose `sampled` marks the assistant tokens, with advantage 1; rewards are not looked at.

    A conversation is one row as long as each prompt extends the one before. Where the template rewrites history (it
    strips earlier <think>), each turn gets the row in which it would be sampled. `Row.trajectory` is the index in
    `trajectories`; log-probs are 0 and temperatures 1, for the loss is the plain log-likelihood.

    Args:
        max_row_tokens: longer rows are left out, and their trajectories counted as TOO_LONG; their other rows
            train, since every turn is a target of its own.

    Raises: RenderError naming the trajectory, for messages that the template cannot render.
    """
    batch = RowBatch()
    context_messages = 0
    for index, trajectory in enumerate(trajectories):
        skip, unprompted = None, 0
        rows: list[OpenRow] = []
        if (failure := has_failed(trajectory)) is not None:
            skip = failure
        else:
            for items, tools in trajectory.histories():
                made, without_prompt = _history_rows(items, tools, chat, index)
                rows += made
                unprompted += without_prompt
        context_messages += unprompted
        fits = [row for row in rows if max_row_tokens is None or len(row.token_ids) <= max_row_tokens]
        if len(fits) < len(rows):
            longest = max(len(row.token_ids) for row in rows)
            skip = Skip(
                SkipReason.TOO_LONG,
                f"{len(rows) - len(fits)} of {len(rows)} rows left out: {longest} tokens, limit {max_row_tokens}",
            )
        elif not rows and skip is None:
            skip = Skip(SkipReason.NO_CHOICES, "no assistant message to learn from")
        if skip is not None:
            batch.trajectory_reasons[skip.reason] += 1
            batch.notes.append(skip.at(trajectory=index))
        batch.rows += [row.close(trajectory=index, advantage=1.0) for row in fits]
    trained = len({row.trajectory for row in batch.rows})
    batch.metrics = {
        "trajectories": len(trajectories),
        "trajectories_trained": trained,
        "rows": len(batch.rows),
        "row_tokens": sum(len(row) for row in batch.rows),
        "sampled_tokens": sum(int(row.sampled.sum()) for row in batch.rows),
        "context_assistant_messages": context_messages,
    }
    if trained:
        batch.metrics["rows_per_trajectory"] = len(batch.rows) / trained
    for reason, count in batch.trajectory_reasons.items():
        batch.metrics[f"left_out/{reason.name.lower()}"] = count / len(trajectories)
    return batch


def _history_rows(items: MessagesAndChoices, tools: Tools | None, chat: Chat, index: int) -> tuple[list[OpenRow], int]:
    """The rows of one conversation, and how many assistant messages open it and so are context."""
    rows: list[OpenRow] = []
    unprompted = 0
    for position, item in enumerate(items):
        if not _is_assistant(item):
            continue
        tokens = _sampled(item)
        if tokens is None:
            if all(_is_assistant(before) for before in items[:position]):
                unprompted += 1  # nothing stands before it that a model could be prompted with
                continue
            try:
                tokens = _rendered(items, position, tools, chat)
            except RenderError as error:
                raise RenderError(f"trajectory {index}: {error}", index=error.index) from error
        prompt_ids, answer_ids = tokens
        if not answer_ids:
            continue
        if not rows or not rows[-1].grows_into(prompt_ids):
            rows.append(OpenRow())
        row = rows[-1]
        row.add_context(prompt_ids[len(row.token_ids) :])
        row.add_sampled(answer_ids, [0.0] * len(answer_ids), 1.0)
    return rows, unprompted


def _is_assistant(item: MessageOrChoice) -> bool:
    return isinstance(item, Choice) or item.get("role") == "assistant"


def _sampled(item: MessageOrChoice) -> tuple[list[int], list[int]] | None:
    """Prompt and answer ids of a choice that carries both; log-probs are not needed here."""
    extra = (item.model_extra or {}) if isinstance(item, Choice) else {}
    prompt_ids, token_ids = extra.get("prompt_token_ids"), extra.get("token_ids")
    return None if prompt_ids is None or token_ids is None else (list(prompt_ids), list(token_ids))


def _rendered(items: MessagesAndChoices, position: int, tools: Tools | None, chat: Chat) -> tuple[list[int], list[int]]:
    """Prompt and answer ids of the assistant message at `position`: what its render adds to the prompt's."""
    messages = messages_of(items[: position + 1])
    prompt_ids = chat.render(messages[:-1], tools, add_generation_prompt=True)
    full_ids = chat.render(messages, tools, add_generation_prompt=False)
    shared = _common_prefix(prompt_ids, full_ids)
    if shared == len(prompt_ids):
        return prompt_ids, _to_end_of_turn(full_ids[shared:], chat)

    # Either the tokenizer merged across the border ("\n" + "\n…" is one token in many vocabularies): then the prompt
    # is what the engine will see, and the answer is tokenized after it.
    prompt, full = chat.tokenizer.decode(prompt_ids), chat.tokenizer.decode(full_ids)
    if full.startswith(prompt):
        answer_ids = list(chat.tokenizer.encode(full[len(prompt) :], add_special_tokens=False))
        if chat.tokenizer.decode(prompt_ids + answer_ids) == full:
            return prompt_ids, _to_end_of_turn(answer_ids, chat)
    # Or the prompt opens the answer with something that this message does not have (an opened <think> and no thought):
    # then the turn starts where the two part, provided that it is not the history that has changed.
    history = chat.tokenizer.decode(chat.render(messages[:-1], tools, add_generation_prompt=False))
    if not full.startswith(history.rstrip()):
        raise RenderError(
            f"the chat template rewrites the messages before messages[{position}] when that answer is added, so "
            "there is no prompt that it would follow",
            index=position,
        )
    return full_ids[:shared], _to_end_of_turn(full_ids[shared:], chat)


def _common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    n = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        n += 1
    return n


def _to_end_of_turn(answer_ids: list[int], chat: Chat) -> list[int]:
    """Without the line break that many templates write after the end token: no model samples past that token."""
    special = set(chat.tokenizer.all_special_ids)
    ends = [i for i, token in enumerate(answer_ids) if token in special]
    if ends and not chat.tokenizer.decode(answer_ids[ends[-1] + 1 :]).strip():
        return answer_ids[: ends[-1] + 1]
    return answer_ids
