"""TensorBoard's files, read back with TensorBoard's own reader."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest

import artnb as art
from artnb.tracking.follow import TRACKING
from artnb.tracking.tensorboard import TensorBoardTracker


async def test_every_value_is_in_the_event_files(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def make() -> art.Model:
        return art.Model("agent", "tests", base_path=tmp_path, report_metrics=["tensorboard"])

    for step in range(3):
        await make().log(metrics={"reward": step / 10, "won": True, "odd": math.nan}, split="train", step=step)
    TRACKING.detach("tests/agent")
    await make().log(metrics={"reward": 0.75}, split="val", step=1)  # late, and in another session
    TRACKING.detach("tests/agent")
    folder = tmp_path / "tests" / "models" / "agent" / "tensorboard"
    reader = EventAccumulator(str(folder))
    reader.Reload()
    found = {
        (event.step, tag): event.tensor_proto.float_val[0]
        for tag in reader.Tags()["tensors"]
        for event in reader.Tensors(tag)
    }
    history = make().history().set_index("step")
    expected = {
        (int(step), str(name)): float(history.loc[step, name])
        for step in history.index
        for name in history.columns
        if name != "val/reward" or step == 1
    }
    assert found == pytest.approx(expected, nan_ok=True)
    assert len(expected) == 10


def test_it_needs_neither_torch_nor_tensorflow(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from artnb.tracking.tensorboard import TensorBoardRun\n"
        f"TensorBoardRun(Path({str(tmp_path)!r})).close()\n"
        "print([name for name in ('torch', 'tensorflow') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


async def test_the_folder_can_be_chosen(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    tracker = TensorBoardTracker(log_dir=tmp_path / "runs")
    model = art.Model("agent", "tests", base_path=tmp_path / "art", report_metrics=[tracker])
    await model.log(metrics={"reward": 1.0}, step=1)
    TRACKING.detach("tests/agent")
    assert list((tmp_path / "runs").glob("events.out.tfevents.*"))
