"""Groups for the inspector's tests: a mailbox agent's talk with tools and reasoning, nasty texts."""

from __future__ import annotations

import random
from typing import Any

from openai.types.chat.chat_completion import Choice

from artnb.trajectories import ExceptionRecord, StopReason, Trajectory, TrajectoryGroup

NASTY = [
    "<script>window.hacked = 1</script>",
    "<img src=x onerror=\"window.hacked = 2\">",
    "</textarea></style></div><b>bold</b>",
    "👩‍👩‍👧 emoji 🎉 and \u202eoverride\u202c",
    "한글 문장입니다 &amp; &lt;not a tag&gt;",
    "مرحبا بالعالم, then left to right",
    "",
    "half \ud83d of an emoji",
    "a\x00b\x1b[31mc\u2028d",
]  # fmt: skip


def sampled(
    text: str,
    prompt_ids: list[int],
    *,
    finish: str = "stop",
    reasoning: str | None = None,
    calls: list[dict[str, Any]] | None = None,
    rng: random.Random | None = None,
    **extra: Any,
) -> Choice:
    """A choice whose tokens are words and pieces of words; ids and log-probs are there."""
    rng = rng or random.Random(0)
    pieces = [text[i : i + 4] for i in range(0, len(text), 4)] + ["<|im_end|>"]
    ids = [1000 + rng.randrange(40_000) for _ in pieces]
    content = [
        {
            "token": piece,
            "bytes": list(piece.encode("utf-8", "replace")),
            "logprob": -rng.expovariate(1.2),
            "top_logprobs": [],
        }
        for piece in pieces
    ]
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    fields = {"prompt_token_ids": prompt_ids, "token_ids": ids, "temperature": 1.0, **extra}
    return Choice.model_validate(
        {"index": 0, "finish_reason": finish, "message": message, "logprobs": {"content": content}, **fields}
    )


def call(name: str, arguments: str, number: int = 0) -> dict[str, Any]:
    return {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


def episode(rng: random.Random, turns: int, task: str, words: int = 12) -> Trajectory:
    """An agent's episode of `turns` sampled turns. The prompt of each turn extends the one before."""
    items: list[Any] = [
        {"role": "system", "content": "You search a mailbox with tools and answer in one sentence."},
        {"role": "user", "content": task},
    ]
    ids = list(range(40))
    for turn in range(turns):
        said = " ".join(rng.choice(_WORDS) for _ in range(words))
        last = turn == turns - 1
        calls = None if last else [call("search_inbox", f'{{"query": "{rng.choice(_WORDS)}", "limit": {turn}}}', turn)]
        choice = sampled(
            said,
            list(ids),
            rng=rng,
            calls=calls,
            finish="stop" if last else "tool_calls",
            reasoning="The mail must be from March, so I search there first." if turn == 0 else None,
        )
        items.append(choice)
        ids += (choice.model_extra or {})["token_ids"]
        if not last:
            found = "\n".join(f"{n}: {' '.join(rng.choices(_WORDS, k=6))}" for n in range(4))
            items.append({"role": "tool", "tool_call_id": f"call_{turn}", "name": "search_inbox", "content": found})
            ids += [7] * 24
    reward = round(rng.random(), 3)
    made = Trajectory(messages_and_choices=items, reward=reward, stop_reason=StopReason.FINISHED)
    made.metrics = {"correct": reward > 0.5, "searches": turns - 1, "duration": round(rng.random() * 9, 2)}
    made.metadata = {"task": task}
    return made


def many(groups: int, size: int, turns: int, seed: int = 0) -> list[TrajectoryGroup]:
    rng = random.Random(seed)
    return [
        TrajectoryGroup(
            [episode(rng, turns, f"When does the meeting about {_WORDS[g % len(_WORDS)]} begin?") for _ in range(size)],
            metadata={"scenario": g},
        )
        for g in range(groups)
    ]


def nasty_trajectory() -> Trajectory:
    """Every nasty text in every place where a text is shown."""
    items: list[Any] = []
    ids = [1, 2, 3]
    for number, text in enumerate(NASTY):
        items.append({"role": "user", "content": text})
        calls = [call(text or "empty", text, number)]
        choice = sampled(text.encode("utf-8", "replace").decode(), list(ids), reasoning=text or None, calls=calls)
        items.append(choice)
        ids += [*(choice.model_extra or {})["token_ids"], 9]
        items.append({"role": "tool", "tool_call_id": f"call_{number}", "name": text, "content": text})
    return Trajectory(
        messages_and_choices=items,
        reward=0.25,
        metadata={text or "empty": text for text in NASTY},
        metrics={NASTY[0]: 1.0},
        logs=NASTY,
        error=ExceptionRecord(type="ValueError", message=NASTY[1], traceback="\n".join(NASTY)),
    )


_TEXT = """budget pipeline forecast merger lunch invoice Houston gas contract lawyer draft memo server outage
holiday audit trading desk price storm plant valve tariff hearing senate river bridge permit"""
_WORDS = _TEXT.split()
