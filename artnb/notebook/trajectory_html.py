"""A trajectory as static HTML, for files that are read without a kernel: GitHub, nbconvert, papermill's output.

Every text is escaped: a model's HTML is text. Long conversations and texts are cut. Styles are inline, for a saved
output has no stylesheet, and colours are see-through, for light and dark pages. No JavaScript.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from ..trajectories import Trajectory, TrajectoryGroup
from .plots import OKABE_ITO
from .trajectory_text import ShownMessage, cut, finite, number, plain, shown_messages

MAX_CHARACTERS = 2000
"""Of one text; the rest is counted."""
MAX_MESSAGES = 24
"""Of one history; those in the middle are counted."""

_COLOURS = {"system": OKABE_ITO[3], "user": OKABE_ITO[4], "assistant": OKABE_ITO[0], "tool": OKABE_ITO[2]}
_TEXT = "white-space:pre-wrap;overflow-wrap:anywhere;margin:2px 0;font-family:inherit;text-align:start"


def trajectory_html(trajectory: Trajectory, title: str = "") -> str:
    """One trajectory, escaped and cut: reward, metrics, why it ended, and its messages.

    `title` is put before the reward, e.g. "Best". The HTML stands alone and holds no ids, scripts or links.
    """
    parts = [
        '<div style="border:1px solid rgba(128,128,128,.4);border-radius:6px;padding:8px 10px;margin:8px 0;'
        'max-width:900px;font-size:13px;line-height:1.45;text-align:start">',
        f'<div style="margin-bottom:6px">{_summary(trajectory, title)}</div>',
    ]
    if trajectory.error is not None:
        error = f"{trajectory.error.type}: {trajectory.error.message}"
        parts.append(_fold("error", _text(error) + _text(trajectory.error.traceback), OKABE_ITO[1], is_open=True))
    for number_of, messages in enumerate(shown_messages(trajectory)):
        if number_of:
            parts.append(f'<div style="margin:8px 0 2px;opacity:.75">further history {number_of}</div>')
        parts += _messages(messages)
    if trajectory.logs:
        parts.append(_fold(f"{len(trajectory.logs)} log lines", _text("\n".join(map(plain, trajectory.logs)))))
    parts.append("</div>")
    return "".join(parts)


def best_and_worst(rewards: Sequence[Any]) -> list[tuple[str, int]]:
    """("Best", position), ("Worst", position) among the rewards that are numbers; one where they are the same."""
    scored = [(value, at) for at, reward in enumerate(rewards) if (value := finite(reward)) is not None]
    if not scored:
        return [("First", 0)] if rewards else []
    best = max(scored, key=lambda found: (found[0], -found[1]))[1]
    worst = min(scored)[1]
    return [("Best", best)] if best == worst else [("Best", best), ("Worst", worst)]


def best_and_worst_html(groups: Iterable[TrajectoryGroup]) -> str:
    """The best and the worst trajectory of the groups, one below the other."""
    trajectories = [t for group in groups for t in group.trajectories]
    chosen = best_and_worst([t.reward for t in trajectories])
    return "".join(trajectory_html(trajectories[at], title) for title, at in chosen)


def _summary(trajectory: Trajectory, title: str) -> str:
    facts = [f"<b>{escape(title)}{' · ' if title else ''}reward {escape(number(trajectory.reward))}</b>"]
    if trajectory.stop_reason is not None:
        facts.append(f"ended: {escape(str(trajectory.stop_reason))}")
    turns = len(trajectory.choices())
    facts.append(f"{turns} sampled turn{'' if turns == 1 else 's'}")
    facts += [f"{escape(cut(plain(k), 60))} {escape(number(v))}" for k, v in list(trajectory.metrics.items())[:12]]
    facts += [
        f"{escape(cut(plain(k), 60))}: {escape(cut(plain(v), 120))}" for k, v in list(trajectory.metadata.items())[:12]
    ]
    return " · ".join(facts)


def _messages(messages: list[ShownMessage]) -> list[str]:
    if len(messages) <= MAX_MESSAGES:
        return [_bubble(message) for message in messages]
    head, tail = MAX_MESSAGES // 3, MAX_MESSAGES - MAX_MESSAGES // 3
    left_out = len(messages) - head - tail
    gap = f'<div style="opacity:.75;margin:6px 0">… {left_out} messages left out …</div>'
    return [*map(_bubble, messages[:head]), gap, *map(_bubble, messages[-tail:])]


def _bubble(message: ShownMessage) -> str:
    colour = _COLOURS.get(message.role, OKABE_ITO[5])
    what = "sampled" if message.sampled else "context"
    head = " · ".join(filter(None, [message.role, message.name, what, message.finish_reason]))
    # A solid bar for what the model sampled, a dotted one for context: not told by colour alone.
    style = (
        f"border-left:4px {'solid' if message.sampled else 'dotted'} {colour};background:{colour}14;"
        "border-radius:4px;padding:4px 8px;margin:4px 0"
    )
    body = []
    if message.reasoning:
        body.append(_fold("reasoning", _text(message.reasoning)))
    if message.text:
        folded = message.role == "tool" and len(message.text) > 200
        body.append(_fold("result", _text(message.text)) if folded else _text(message.text))
    body += [_fold(f"calls {call.name}", _text(call.arguments)) for call in message.tool_calls]
    return f'<div style="{style}"><div style="font-size:11px;opacity:.75">{escape(head)}</div>{"".join(body)}</div>'


def _text(text: str) -> str:
    return f'<div dir="auto" style="{_TEXT}">{escape(cut(text, MAX_CHARACTERS))}</div>'


def _fold(title: str, inner: str, colour: str = "", is_open: bool = False) -> str:
    style = f' style="color:{colour}"' if colour else ""
    return f"<details{' open' if is_open else ''}><summary{style}>{escape(cut(title, 120))}</summary>{inner}</details>"
