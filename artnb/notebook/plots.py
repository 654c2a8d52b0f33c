"""Pictures of a run. Figures are made without pyplot: no window, no global state, the same in a script and a notebook.

Colours are Okabe and Ito's, which people with any colour vision can tell apart; marks and styles differ, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..durable import replace_file
from ..errors import ConfigError

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OKABE_ITO = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKS = ("D", "s", "^", "o", "v", "P", "X")
TRAIN, SPREAD, VAL = "train/reward", "train/reward_std_in_groups", "val/reward"
SIZE_INCHES = (7.2, 4.0)
DPI = 150  # 1080 × 600 pixels: sharp at the width of a README


def reward_curve(
    history: pd.DataFrame | Sequence[pd.DataFrame] | Sequence[Mapping[str, Any]],
    *,
    path: Path | str | None = None,
    title: str | None = None,
) -> Figure:
    """Reward per step with the spread inside groups as a band, and validation as marked points.

    `history` is what `model.history()` gives (columns step, train/reward, train/reward_std_in_groups, val/reward), the
    same as a list of dicts, or a list of such frames: several runs, one line each and no bands, which would cover each
    other. With `path` the picture is written there as PNG. Raises ConfigError if there is no reward to draw.

        reward_curve(model.history(), path="curve.png")
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    runs = _runs(history)
    if not any(_has(run, name) for run in runs for name in (TRAIN, VAL)):
        raise ConfigError(
            f"there is no reward to draw: the history has no value of {TRAIN!r} or {VAL!r} yet; train a step, or log "
            "scored trajectories with `await model.log(groups, split='val')`"
        )
    figure = Figure(figsize=SIZE_INCHES, dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    # Without pyplot nothing tells IPython how to show a figure; as the value of a cell it would be a line of text.
    figure._repr_png_ = lambda: _png(figure)  # type: ignore[attr-defined]
    axes = figure.add_subplot()
    for index, run in enumerate(runs):
        alone = len(runs) == 1
        name = "" if alone else f"run {index + 1}"
        _draw_train(axes, run, OKABE_ITO[0] if alone else OKABE_ITO[index % len(OKABE_ITO)], name)
        _draw_val(
            axes, run, OKABE_ITO[1] if alone else OKABE_ITO[index % len(OKABE_ITO)], name, MARKS[index % len(MARKS)]
        )
    axes.set_xlabel("step")
    axes.set_ylabel("mean reward")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(True, color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.margins(x=0.04, y=0.12)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
    if title:
        axes.set_title(title, loc="left", fontsize=12)
    if path is not None:
        write_png(figure, path)
    return figure


def write_png(figure: Figure, path: Path | str) -> Path:
    """Write a figure as PNG; an older picture stays until the new one is complete."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    replace_file(target, [_png(figure)])
    return target


def _png(figure: Figure) -> bytes:
    import io

    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", facecolor="white")
    return buffer.getvalue()


def _runs(history: Any) -> list[pd.DataFrame]:
    import pandas as pd

    if isinstance(history, pd.DataFrame):
        runs = [history]
    else:
        items = list(history)
        if all(isinstance(item, pd.DataFrame) for item in items):
            runs = items
        elif all(isinstance(item, Mapping) for item in items):
            runs = [pd.DataFrame(items)]
        else:
            raise ConfigError("reward_curve takes model.history(), a list of such frames, or a list of dicts")
    for run in runs:
        if len(run) and "step" not in run.columns:
            raise ConfigError("reward_curve: the history has no column 'step'")
    return [run.sort_values("step") if len(run) else run for run in runs]


def _has(run: pd.DataFrame, name: str) -> bool:
    return name in run.columns and bool(run[name].notna().any())


def _draw_train(axes: Axes, run: pd.DataFrame, colour: str, name: str) -> None:
    if not _has(run, TRAIN):
        return
    known = run[run[TRAIN].notna()]
    steps, rewards = known["step"].to_numpy(float), known[TRAIN].to_numpy(float)
    mark = "o" if len(steps) == 1 else None  # a line of one point would be invisible
    axes.plot(steps, rewards, color=colour, linewidth=2, marker=mark, label=name or "training rollouts")
    if not name and _has(run, SPREAD):
        spread = known[SPREAD].fillna(0.0).to_numpy(float)
        label = "± spread inside groups"
        axes.fill_between(steps, rewards - spread, rewards + spread, color=colour, alpha=0.15, linewidth=0, label=label)


def _draw_val(axes: Axes, run: pd.DataFrame, colour: str, name: str, mark: str) -> None:
    if not _has(run, VAL):
        return
    known = run[run[VAL].notna()]
    steps, rewards = known["step"].to_numpy(float), known[VAL].to_numpy(float)
    axes.plot(
        steps,
        rewards,
        color=colour,
        linestyle="--" if len(steps) > 2 else "",  # before and after alone are two points, not a trend
        linewidth=1,
        marker=mark,
        markersize=7,
        markeredgecolor="white",
        zorder=5,
        label=f"{name}, held out" if name else "held-out validation",
    )
    for at in dict.fromkeys((0, len(steps) - 1)) if not name else ():  # the values before and after
        axes.annotate(
            f"{rewards[at]:.2f}".replace("-", "−"),
            (steps[at], rewards[at]),
            xytext=(0, 9),
            textcoords="offset points",
            ha="center",
            fontsize=10,
            fontweight="bold",
            color=colour,
        )
