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
    def tokenizer(self) -> Any: ...  # as transformers': all_special_ids, eos_token_id, decode, encode

    def render(
        self, messages: Sequence[Any], tools: Sequence[Any] | None = None, *, add_generation_prompt: bool = True
    ) -> list[int]: ...


def sft_rows(trajectories: Sequence[Trajectory], chat: Chat, *, max_row_tokens: int | None) -> RowBatch:
    """Rows whose `sampled` marks the assistant tokens, with advantage 1; rewards are not looked at.

    A conversation is one row as long as each prompt extends the one before. Where the template rewrites history (it
    strips earlier <think>), each turn gets the row in which it would be sampled. `Row.trajectory` is the index in
    `trajectories`; log-probs are 0 and temperatures 1, for the loss is the plain log-likelihood. An assistant message
    with "weight": 0, as OpenAI's fine-tuning files have it, is context.

    Args:
        max_row_tokens: longer rows are left out, and their trajectories counted as TOO_LONG; their other rows
            train, since every turn is a target of its own.

    Raises: RenderError naming the trajectory, for messages that the template cannot render.
    """
    making = SFTRows(chat, max_row_tokens=max_row_tokens)
    for trajectory in trajectories:
        making.add(trajectory)
    return making.batch()


class SFTRows:
    """`sft_rows`, one trajectory at a time."""

    def __init__(self, chat: Chat, *, max_row_tokens: int | None) -> None:
        self._chat = chat
        self._max_row_tokens = max_row_tokens
        self._batch = RowBatch()
        self._seen = 0
        self._context_messages = 0

    def add(self, trajectory: Trajectory) -> None:
        """Make the rows of the next trajectory. Raises: RenderError."""
        skip: Skip | None = None
        rows: list[OpenRow] = []
        if (failure := has_failed(trajectory)) is not None:
            skip = failure
        else:
            for items, tools in trajectory.histories():
                try:
                    made, context = _history_rows(items, tools, self._chat)
                except RenderError as error:
                    raise RenderError(f"{_place(self._seen, trajectory)}: {error}", index=error.index) from error
                rows += made
                self._context_messages += context
        limit = self._max_row_tokens
        fits = [row for row in rows if limit is None or len(row.token_ids) <= limit]
        if len(fits) < len(rows):
            longest = max(len(row.token_ids) for row in rows)
            note = f"{len(rows) - len(fits)} of {len(rows)} rows left out: {longest} tokens, limit {limit}"
            skip = Skip(SkipReason.TOO_LONG, note)
        elif not rows and skip is None:
            skip = Skip(SkipReason.NO_CHOICES, "no assistant message to learn from")
        if skip is not None:
            self._batch.trajectory_reasons[skip.reason] += 1
            self._batch.notes.append(f"{_place(self._seen, trajectory)}: {skip.note}")
        self._batch.rows += [row.close(trajectory=self._seen, advantage=1.0) for row in fits]
        self._seen += 1

    def batch(self) -> RowBatch:
        """What was made of all trajectories."""
        batch = self._batch
        trained = len({row.trajectory for row in batch.rows})
        batch.metrics = {
            "trajectories": self._seen,
            "trajectories_trained": trained,
            "rows": len(batch.rows),
            "row_tokens": sum(len(row) for row in batch.rows),
            "sampled_tokens": sum(int(row.sampled.sum()) for row in batch.rows),
            "context_assistant_messages": self._context_messages,
        }
        if trained:
            batch.metrics["rows_per_trajectory"] = len(batch.rows) / trained
        for reason, count in batch.trajectory_reasons.items():
            batch.metrics[f"left_out/{reason.name.lower()}"] = count / self._seen
        return batch


def _place(index: int, trajectory: Trajectory) -> str:
    """'trajectory 3 (train.jsonl, line 4)', for what was read from a file."""
    source, line = trajectory.metadata.get("source"), trajectory.metadata.get("line")
    return f"trajectory {index}" if line is None else f"trajectory {index} ({source}, line {line})"


def _history_rows(items: MessagesAndChoices, tools: Tools | None, chat: Chat) -> tuple[list[OpenRow], int]:
    """The rows of one conversation, and how many of its assistant messages are context."""
    rows: list[OpenRow] = []
    context = 0
    for position, item in enumerate(items):
        if not _is_assistant(item):
            continue
        tokens = _sampled(item)
        if tokens is None:
            # What opens a conversation has nothing before it that a model could be prompted with.
            if _weighs_nothing(item) or all(_is_assistant(before) for before in items[:position]):
                context += 1
                continue
            tokens = _rendered(items, position, tools, chat)
        prompt_ids, answer_ids = tokens
        if not answer_ids:
            continue
        if not rows or not rows[-1].grows_into(prompt_ids):
            rows.append(OpenRow())
        row = rows[-1]
        row.add_context(prompt_ids[len(row.token_ids) :])
        row.add_sampled(answer_ids, [0.0] * len(answer_ids), 1.0)
    return rows, context


def _weighs_nothing(item: MessageOrChoice) -> bool:
    return not isinstance(item, Choice) and item.get("weight") == 0


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
    """Without the line break that many templates write after the end token: no model samples past that token.

    Where the template ends a turn with the next one's header (GLM), the tokenizer's own end token closes it: a model
    that is never shown an end goes on for ever.
    """
    special = set(chat.tokenizer.all_special_ids)
    ends = [i for i, token in enumerate(answer_ids) if token in special]
    if ends and not chat.tokenizer.decode(answer_ids[ends[-1] + 1 :]).strip():
        return answer_ids[: ends[-1] + 1]
    eos = chat.tokenizer.eos_token_id
    return answer_ids if eos is None or not answer_ids else [*answer_ids, eos]
