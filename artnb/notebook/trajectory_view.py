"""What the inspector's browser half is sent: a compact index of all trajectories, then one trajectory at a time.

Plain values that any JSON writer takes: no NaN, no infinities, no half emoji. Long texts and token lists are cut, and
say so. Draws nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from openai.types.chat.chat_completion import Choice

from ..tracking.records import from_line, to_line, to_trajectory, trajectory_record
from ..tracking.stored import AnyTrajectory
from ..training.rows import sampled_tokens
from ..trajectories import ExceptionRecord, MessageOrChoice, Trajectory
from .trajectory_query import NO_STOP_REASON
from .trajectory_source import Source, Standing
from .trajectory_text import ShownMessage, cut, finite, number, plain, shown_message

MAX_CHARACTERS = 20_000
"""Of one text of a message."""
MAX_TOKENS = 4_000
"""Of one message, coloured one by one."""
MAX_FACTS = 60
"""Metrics, or entries of metadata, of one trajectory."""
Values = dict[str, Any]


def index_values(source: Source) -> Values:
    """One entry per trajectory and group, as columns: numbers are ids, so a row is the same position in each column."""
    heads = source.heads
    names = sorted({name for head in heads for name in head.metrics})[:MAX_FACTS]
    return {
        "groups": [
            {
                "members": group.members,
                "failed": [cut(plain(text), 300) for text in group.failed[:20]],
                "failures": len(group.failed),
                "metadata": _facts(group.metadata),
                **_spread([heads[n].reward for n in group.members]),
            }
            for group in source.groups
        ],
        "group": [head.group for head in heads],
        "index": [head.index for head in heads],
        "reward": [number(head.reward) for head in heads],
        "height": _heights([head.reward for head in heads]),
        "stop": [plain(head.stop_reason or NO_STOP_REASON) for head in heads],
        "turns": [head.turns for head in heads],
        "tokens": [head.tokens for head in heads],
        "last": [plain(head.last) for head in heads],
        "metrics": {plain(name): [json_number(head.metrics.get(name)) for head in heads] for name in names},
        "stops": sorted({plain(head.stop_reason or NO_STOP_REASON) for head in heads}),
    }


def trajectory_values(
    trajectory: Trajectory,
    standing: Standing | None = None,
    *,
    supervised: bool = False,
    longest: int | None = MAX_CHARACTERS,
    messages: int | None = None,
) -> Values:
    """All that is shown of one trajectory. Without a standing it is not said what was trained.

    `supervised`: its assistant messages are what was trained (train_sft), whoever wrote them. `longest`: characters of
    one text, None for all texts and tokens. `messages`: how many of each history.
    """
    error = trajectory.error
    return {
        "reward": number(trajectory.reward),
        "stop": plain(trajectory.stop_reason or NO_STOP_REASON),
        "metrics": _facts(trajectory.metrics),
        "metadata": _facts(trajectory.metadata),
        "logs": [cut(plain(line), 2000) for line in trajectory.logs[:500]],
        "error": error and _error(error, longest),
        "trained": standing and standing.trained,
        "advantage": standing and json_number(standing.advantage),
        "reason": plain(standing.reason) if standing else "",
        "rows": standing.rows if standing else 0,
        "histories": [
            [_message(item, standing, supervised, longest) for item in items[:messages]]
            for items, _ in trajectory.histories()
        ],
    }


def json_number(value: Any) -> float | None:
    """A number that JSON has; None for what is missing, NaN or infinite."""
    known = finite(value)
    return None if known is None or math.isinf(known) else known


def to_jsonl(trajectories: Iterable[tuple[int, int, Trajectory]]) -> bytes:
    """(group, index in it, trajectory) as lines of JSON, complete: token ids and log-probs, too."""
    return b"".join(to_line(trajectory_record(t, group, index)) for group, index, t in trajectories)


def from_jsonl(data: bytes) -> list[Trajectory]:
    """The trajectories of an exported file, exactly as they were. Raises ValueError for a line that is none of ours."""
    found: list[Trajectory] = []
    for at, line in enumerate(data.splitlines(), start=1):
        record = from_line(line)
        if record is None or record["kind"] != "trajectory":
            raise ValueError(f"line {at} is not a trajectory that artnb exported")
        known = record["fields"].keys() <= Trajectory.model_fields.keys()
        found.append(to_trajectory(record, Trajectory if known else AnyTrajectory))
    return found


def _error(error: ExceptionRecord, longest: int | None) -> Values:
    title = cut(plain(f"{error.type}: {error.message}"), 500)
    text = plain(error.traceback)
    return {"title": title, "traceback": text if longest is None else text[-longest:]}  # its end says what happened


def _message(item: MessageOrChoice, standing: Standing | None, supervised: bool, longest: int | None) -> Values:
    shown = shown_message(item)
    values = _texts(shown, longest)
    tokens = _tokens(item, MAX_TOKENS if longest else None) if isinstance(item, Choice) else None
    if supervised:
        trained = shown.role == "assistant"
    else:
        trained = bool(standing and standing.trained and tokens and tokens["ids"])
    values["state"] = "trained" if trained else "sampled" if shown.sampled else "context"
    values["tokens"] = tokens
    return values


def _texts(shown: ShownMessage, longest: int | None) -> Values:
    def short(text: str) -> str:
        return text if longest is None else text[:longest]

    texts = [shown.text, shown.reasoning, *(call.arguments for call in shown.tool_calls)]
    return {
        "role": shown.role,
        "name": shown.name,
        "finish": shown.finish_reason,
        "text": short(shown.text),
        "reasoning": short(shown.reasoning),
        "calls": [{"name": c.name, "arguments": short(c.arguments), "id": c.id} for c in shown.tool_calls],
        "missing": sum(max(0, len(text) - longest) for text in texts) if longest is not None else 0,
    }


def _tokens(choice: Choice, most: int | None) -> Values:
    """Texts, ids, log-probs and ratios of the sampled tokens. `ratios` is None where the trainer's are not known."""
    sampled = sampled_tokens(choice)
    content = (choice.logprobs.content if choice.logprobs else None) or []
    ids = [] if isinstance(sampled, str) else sampled.token_ids
    logprobs = [entry.logprob for entry in content]
    count = len(content)
    trainer = (choice.model_extra or {}).get("trainer_logprobs")
    ratios = None
    if isinstance(trainer, list) and len(trainer) == count:
        ratios = [_ratio(new, old) for new, old in zip(trainer[:most], logprobs[:most], strict=True)]
    return {
        "texts": token_texts([entry.bytes for entry in content[:most]], [entry.token for entry in content[:most]]),
        "ids": ids[:most],
        "logprobs": [json_number(value) for value in logprobs[:most]],
        "ratios": ratios,
        "count": count,
        "problem": plain(sampled) if isinstance(sampled, str) else "",
    }


def token_texts(bytes_of: Sequence[list[int] | None], texts: Sequence[str]) -> list[str]:
    """A text for each token. Where a character is spread over several tokens the last has it and the others are ""."""
    shown: list[str] = []
    held = b""
    for raw, text in zip(bytes_of, texts, strict=True):
        if raw is None:
            shown.append(plain(text))
            held = b""
            continue
        held += bytes(raw)
        try:
            shown.append(held.decode())
        except UnicodeDecodeError as error:
            if error.reason == "unexpected end of data" and len(held) - error.start < 4:
                shown.append(held[: error.start].decode())
                held = held[error.start :]
                continue
            shown.append(held.decode(errors="replace"))
        held = b""
    if held and shown:  # the answer ended inside a character
        shown[-1] += held.decode(errors="replace")
    return shown


def _ratio(trainer: Any, sampler: float) -> float | None:
    known = finite(trainer)
    if known is None:
        return None
    try:
        return json_number(math.exp(known - sampler))
    except OverflowError:
        return None


def _facts(values: Mapping[str, Any]) -> list[list[str]]:
    facts = []
    for name, value in list(values.items())[:MAX_FACTS]:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        facts.append([plain(name), number(value) if is_number else cut(plain(value), 300)])
    return facts


def _spread(rewards: Sequence[Any]) -> Values:
    known = [value for reward in rewards if (value := json_number(reward)) is not None]
    if not known:
        return {"mean": None, "std": None}
    mean = math.fsum(known) / len(known)
    square = math.fsum((value - mean) ** 2 for value in known)
    return {"mean": mean, "std": math.sqrt(square / (len(known) - 1)) if len(known) > 1 else None}


def _heights(rewards: Sequence[Any]) -> list[float | None]:
    """Where each reward stands between the lowest (0) and the highest (1), for its bar; None for no number."""
    known = [json_number(reward) for reward in rewards]
    low, high = (min(v), max(v)) if (v := [r for r in known if r is not None]) else (0.0, 0.0)
    return [None if r is None else round((r - low) / (high - low), 4) if high > low else 1.0 for r in known]
