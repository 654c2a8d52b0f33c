"""What papermill leaves of a dashboard and an inspector: curve, best and worst trajectory, where they were shown."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
SHOW = """
import artnb as art
from agents import even_groups
model = art.TrainableModel("agent", "tests", {base!r}, lora=art.LoraConfig(r=2))
backend = art.LocalBackend(device="cpu", verbose=False)
await model.register(backend)
model.dashboard(steps=3)
"""
TRAIN = """
for step in range(3):
    await model.train(await even_groups(model, step))
await model.log(await even_groups(model, 9), split="val")
"""
INSPECT = "model.inspect(step=2)"
CLOSE = "await backend.close()"


def run(folder: Path, *command: str) -> None:
    path = os.pathsep.join([str(HERE.parent), str(HERE)])
    env = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "IPYTHONDIR": str(folder / "ipython")}
    done = subprocess.run([sys.executable, "-m", *command], cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.fixture(scope="module")
def saved(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A notebook of four cells after papermill, with no word to the dashboard after it was shown."""
    for module in ("papermill", "nbconvert", "ipykernel", "nbformat"):
        pytest.importorskip(module)
    import nbformat.v4 as nbf

    folder = tmp_path_factory.mktemp("saved")
    cells = (SHOW.format(base=str(tiny_base)), TRAIN, INSPECT, CLOSE)
    notebook = nbf.new_notebook(cells=[nbf.new_code_cell(cell) for cell in cells])
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    (folder / "in.ipynb").write_text(json.dumps(notebook), encoding="utf-8")
    run(folder, "papermill", "in.ipynb", "out.ipynb")
    return folder / "out.ipynb"


def test_the_saved_notebook_holds_the_final_curve(saved: Path) -> None:
    """Report 78: papermill keeps what was displayed, so the picture must have been replaced as the run went on."""
    cells: list[Any] = json.loads(saved.read_text(encoding="utf-8"))["cells"]
    pages = ["".join(o["data"]["text/html"]) for o in cells[0]["outputs"] if "text/html" in o.get("data", {})]
    pages = [page for page in pages if "artnb-static-" in page]
    assert len(pages) == 1
    assert "data:image/png;base64," in pages[0] and "3 values; validation" in pages[0], "the curve is that of the end"
    assert "Best of step 3" in pages[0] and "Worst of step 3" in pages[0]
    assert "scenario" in pages[0] and len(pages[0]) < 200_000


def test_static_html_shows_it_without_widgets(saved: Path) -> None:
    notebook: Any = json.loads(saved.read_text(encoding="utf-8"))
    state = notebook["metadata"]["widgets"]["application/vnd.jupyter.widget-state+json"]["state"]
    views = [
        output["data"][view]["model_id"]
        for cell in notebook["cells"]
        for output in cell["outputs"]
        if (view := "application/vnd.jupyter.widget-view+json") in output.get("data", {})
    ]
    assert len(views) >= 2 and set(views) <= set(state), "the hard case: nbconvert prefers widgets whose state is saved"
    run(saved.parent, "nbconvert", "--to", "html", "out.ipynb")
    page = (saved.parent / "out.html").read_text(encoding="utf-8")
    assert "data:image/png;base64," in page and "Best of step 3" in page and "Worst of step 3" in page
    assert "Best · reward" in page and "Worst · reward" in page, "the inspector's"
