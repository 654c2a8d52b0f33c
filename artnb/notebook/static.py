"""A run as HTML that needs no kernel, no widget and no script: what a saved notebook shows on GitHub or in nbconvert.

The reward curve as an inline PNG, and the best and the worst trajectory of the newest step. All text is escaped.
"""

from __future__ import annotations

import base64
import io
from html import escape
from typing import TYPE_CHECKING

from ..errors import ConfigError
from ..tracking.history import History
from .plots import TRAIN, VAL, reward_curve
from .trajectory_html import best_and_worst, trajectory_html

if TYPE_CHECKING:
    import pandas as pd

    from ..model import Model

CURVE_DPI = 90  # 650 × 360 pixels, about 25 KB


def static_html(model: Model | History, *, title: str | None = None) -> str:
    """Curve, then best and worst trajectory. Without a step yet it says so.

    display(HTML(static_html(model)))
    """
    history = model if isinstance(model, History) else model._history()
    return f"{curve_html(history, title=title)}\n{examples_html(history)}"


def curve_html(history: History, *, title: str | None = None) -> str:
    """The reward curve as `<img>` with the PNG inside it, or a sentence if there is nothing to draw."""
    frame = history.metrics()
    try:
        figure = reward_curve(frame, title=_plain(title))
    except ConfigError:
        return f"<p>{escape(title or 'This run')}: no step with a reward yet.</p>"
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", facecolor="white", dpi=CURVE_DPI)
    data = base64.b64encode(buffer.getvalue()).decode()
    return f'<img alt="{escape(_in_words(frame, title))}" style="max-width:100%" src="data:image/png;base64,{data}">'


def examples_html(history: History) -> str:
    """Best and worst trajectory of the newest step, training's before other splits'."""
    saved = [(step, split == "train", split) for step, split in history.saved()]
    if not saved:
        return "<p>No trajectories yet.</p>"
    step, _, split = max(saved)
    stored = history.stored(step, split)
    chosen = best_and_worst([head.reward for head in stored.heads])
    return "\n".join(trajectory_html(stored.trajectory(at), f"{which} of step {step}, {split}") for which, at in chosen)


def _plain(title: str | None) -> str | None:
    """matplotlib reads dollars as mathematics."""
    return None if title is None else title.replace("$", r"\$")


def _in_words(frame: pd.DataFrame, title: str | None) -> str:
    """The curve for whoever cannot see it."""
    parts = [title or "Reward per step"]
    for name, what in ((TRAIN, "training"), (VAL, "validation")):
        if name in frame and len(values := frame[name].dropna().tolist()):
            parts.append(f"{what} from {values[0]:.3g} to {values[-1]:.3g}, {len(values)} values")
    return "; ".join(parts)
