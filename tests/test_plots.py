"""The reward curve: a real picture that holds the numbers it was given."""

from __future__ import annotations

import math
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from artnb.errors import ConfigError
from artnb.notebook.plots import OKABE_ITO, reward_curve


@pytest.fixture
def history() -> pd.DataFrame:
    nan = math.nan
    return pd.DataFrame(
        {
            "step": [0, 1, 2, 3],
            "train/reward": [nan, -0.2, 0.1, 0.4],
            "train/reward_std_in_groups": [nan, 0.3, nan, 0.1],
            "val/reward": [-0.25, nan, nan, 0.5],
        }
    )


def test_lines_band_and_marks_hold_the_numbers(history: pd.DataFrame) -> None:
    axes = reward_curve(history, title="A game").axes[0]
    train, val = axes.lines
    assert train.get_xydata().tolist() == [[1, -0.2], [2, 0.1], [3, 0.4]]
    assert val.get_xydata().tolist() == [[0, -0.25], [3, 0.5]]
    assert val.get_marker() == "D"
    assert train.get_color() != val.get_color()
    assert {train.get_color(), val.get_color()} <= set(OKABE_ITO)
    band = {tuple(point) for point in axes.collections[0].get_paths()[0].vertices.round(6).tolist()}
    assert {(1.0, -0.5), (1.0, 0.1), (2.0, 0.1), (3.0, 0.3), (3.0, 0.5)} <= band
    assert [t.get_text() for t in axes.texts] == ["−0.25", "0.50"]
    assert axes.get_title(loc="left") == "A game"
    assert [t.get_text() for t in axes.get_legend().get_texts()] == [
        "training rollouts", "± spread inside groups", "held-out validation"
    ]  # fmt: skip


def test_png_is_real_and_of_readme_size(history: pd.DataFrame, tmp_path: Path) -> None:
    path = tmp_path / "made" / "curve.png"
    reward_curve(history, path=path)
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    assert content.endswith(b"IEND\xaeB`\x82")
    assert struct.unpack(">II", content[16:24]) == (1080, 600)
    assert 10_000 < len(content) < 200_000
    assert [p.name for p in path.parent.iterdir()] == ["curve.png"]

    from matplotlib.image import imread

    pixels = imread(path)[..., :3]
    for colour in (OKABE_ITO[0], OKABE_ITO[1]):
        rgb = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
        assert (np.abs(pixels - rgb).max(axis=-1) < 0.01).sum() > 50, colour


def test_a_cell_that_ends_in_a_figure_shows_it(history: pd.DataFrame) -> None:
    from IPython.core.formatters import DisplayFormatter

    shown, _ = DisplayFormatter().format(reward_curve(history))
    assert shown["image/png"].startswith(b"\x89PNG")


def test_rows_as_dicts_in_any_order() -> None:
    axes = reward_curve([{"step": 2, "train/reward": 1.0}, {"step": 1, "train/reward": 0.0}]).axes[0]
    assert axes.lines[0].get_xydata().tolist() == [[1, 0], [2, 1]]


def test_several_runs_are_told_apart(history: pd.DataFrame) -> None:
    axes = reward_curve([history, history.drop(columns="val/reward"), history]).axes[0]
    labels = [t.get_text() for t in axes.get_legend().get_texts()]
    assert labels == ["run 1", "run 1, held out", "run 2", "run 3", "run 3, held out"]
    assert len({line.get_color() for line in axes.lines if "held" not in str(line.get_label())}) == 3
    assert len(axes.collections) == 0


def test_one_step_is_visible_and_one_validation_is_labelled_once() -> None:
    axes = reward_curve(pd.DataFrame({"step": [1], "train/reward": [0.5], "val/reward": [0.25]})).axes[0]
    assert axes.lines[0].get_marker() == "o"
    assert [t.get_text() for t in axes.texts] == ["0.25"]


@pytest.mark.parametrize(
    "history",
    [[], pd.DataFrame({"step": []}), pd.DataFrame({"step": [1], "train/loss": [1.0], "val/reward": [math.nan]})],
)
def test_nothing_to_draw_says_what_to_do(history: pd.DataFrame, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no reward to draw.*train a step, or log scored trajectories"):
        reward_curve(history, path=tmp_path / "x.png")
    assert not (tmp_path / "x.png").exists()


def test_wrong_input_is_named() -> None:
    with pytest.raises(ConfigError, match=r"takes model\.history"):
        reward_curve([1.0, 2.0])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="no column 'step'"):
        reward_curve(pd.DataFrame({"train/reward": [1.0]}))


CODE = """
import sys
from artnb.notebook.plots import reward_curve
reward_curve([{"step": 1, "train/reward": 1.0}], path=sys.argv[1])
print("matplotlib.pyplot" in sys.modules)
"""


def test_pyplot_and_its_global_state_are_not_loaded(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(tmp_path / "c.png")], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "False\n", done.stderr
