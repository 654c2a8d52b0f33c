"""Every example notebook: reads like an essay, is committed with the outputs of a real run, and is executed here.

Executed means by papermill, with the small parameters it names itself in `metadata.artnb.ci_parameters`, on the real
small model and the real engine, in a copy of the folder. Whether it learns is not tested here: few steps are made.
"""

from __future__ import annotations

import ast
import html.parser
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*/*.ipynb"))
LINES = 20
SIZE_LIMIT = 2_000_000  # bytes: a notebook that floods its cells is not read
ABSOLUTE = re.compile(r"(?<![\w.:/~])/(?:home|root|work|tmp|usr|opt|mnt|Users|content)\b|[A-Z]:\\\\")
each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def source(cell: Any) -> str:
    return "".join(cell["source"])


def texts(outputs: list[Any]) -> Iterator[str]:
    """Everything in outputs that is text, pictures left out."""
    for output in outputs:
        yield "".join(output.get("text", ""))
        for mime, data in output.get("data", {}).items():
            if not mime.startswith("image/"):
                yield "".join(data) if isinstance(data, list | str) else json.dumps(data)


def has_curve(text: str) -> bool:
    return "<svg" in text or "data:image/png;base64" in text


def test_there_are_notebooks() -> None:
    assert {"quickstart", "tic_tac_toe"} <= {path.stem for path in NOTEBOOKS}


@each_notebook
def test_a_sentence_stands_before_every_short_cell(path: Path) -> None:
    cells = read(path)["cells"]
    for before, cell in zip([None, *cells], cells, strict=False):
        if cell["cell_type"] == "code":
            assert before is not None and before["cell_type"] == "markdown", f"no sentence before:\n{source(cell)}"
            assert len(source(cell).splitlines()) <= LINES, f"over {LINES} lines:\n{source(cell)}"
        assert not ABSOLUTE.search(source(cell)), f"an absolute path in:\n{source(cell)}"


@each_notebook
def test_its_parameters_and_those_of_this_test(path: Path) -> None:
    notebook = read(path)
    tagged = [cell for cell in notebook["cells"] if "parameters" in cell["metadata"].get("tags", [])]
    assert len(tagged) == 1, "papermill needs one cell tagged `parameters`"
    assigned = {
        target.id
        for statement in ast.parse(source(tagged[0])).body
        if isinstance(statement, ast.Assign)
        for target in statement.targets
        if isinstance(target, ast.Name)
    }
    small = notebook["metadata"]["artnb"]["ci_parameters"]
    assert small and set(small) <= assigned, f"ci_parameters that are no parameters: {set(small) - assigned}"


@each_notebook
def test_it_opens_in_colab_and_installs_only_there(path: Path) -> None:
    notebook = read(path)
    place = path.relative_to(FOLDER.parent).as_posix()
    assert f"https://colab.research.google.com/github/artnb/artnb/blob/main/{place})" in source(notebook["cells"][0])
    installing = [
        source(cell) for cell in code_cells(notebook) if re.search(r"\bpip\b|\bwget\b|\bcurl\b", source(cell))
    ]
    assert installing, "no cell installs artnb in Colab"
    for text in installing:
        guard = text.index('if "google.colab" in sys.modules:')
        assert all(line.startswith("    ") for line in text[guard:].splitlines()[1:] if line.strip()), text


@each_notebook
def test_it_is_committed_with_the_outputs_of_a_real_run(path: Path) -> None:
    assert path.stat().st_size < SIZE_LIMIT
    notebook = read(path)
    cells = code_cells(notebook)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1)), "run all, from the top"
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error"]
    shown = list(texts(outputs))
    for text in shown:
        assert not ABSOLUTE.search(text), f"a path of somebody's machine: {ABSOLUTE.search(text)} in {text[:2000]}"
    pictures = any(mime in ("image/png", "image/svg+xml") for out in outputs for mime in out.get("data", {}))
    assert pictures or any(map(has_curve, shown)), "no curve among the outputs"
    opening = source(notebook["cells"][0])
    assert re.search(r"\d CPU cores|H200|T4|A100", opening) and re.search(r"\d minutes", opening), (
        "the first cell names the machine and the minutes of the run whose outputs are shown"
    )


@pytest.mark.timeout(1200)  # a loaded machine is several times slower than a quiet one
@pytest.mark.model
@pytest.mark.slow
@each_notebook
def test_it_runs_and_its_static_page_shows_curve_and_trajectory(path: Path, tmp_path: Path) -> None:
    notebooks = tmp_path / "notebooks"
    shutil.copytree(FOLDER, notebooks, ignore=shutil.ignore_patterns(".art*", ".ipynb_checkpoints", "__pycache__"))
    here = notebooks / path.parent.name
    small = read(path)["metadata"]["artnb"]["ci_parameters"]
    (here / "parameters.yaml").write_text(json.dumps(small))  # JSON is YAML
    options = ["--kernel", "python3", "--no-progress-bar", "--parameters_file", "parameters.yaml"]
    jupyter(tmp_path, here, "papermill", path.name, "result.ipynb", *options)
    result = read(here / "result.ipynb")
    assert not [out for cell in code_cells(result) for out in cell["outputs"] if out["output_type"] == "error"]

    model_folder, steps = trained_steps(here)
    assert steps == list(range(1, len(steps) + 1)) and steps, f"steps in the history: {steps}"
    kept = sorted(int(folder.name) for folder in (model_folder / "checkpoints").iterdir() if folder.name.isdigit())
    assert kept[-1] == steps[-1]

    jupyter(tmp_path, here, "nbconvert", "--to", "html", "--no-input", "result.ipynb")
    page = Page()
    page.feed((here / "result.html").read_text(encoding="utf-8"))
    assert page.curves, "nbconvert's page shows no curve without a kernel"
    visible = squeezed("".join(page.text))
    conversations = list(logged_conversations(model_folder))
    assert conversations
    assert any(all(squeezed(text)[:40] in visible for text in texts) for texts in conversations), (
        "no trajectory can be read on nbconvert's page"
    )


def jupyter(home: Path, cwd: Path, module: str, *arguments: str) -> None:
    """Run papermill or nbconvert with this interpreter's kernel and nobody's settings."""
    env = os.environ | {
        "JUPYTER_PREFER_ENV_PATH": "1",
        "JUPYTER_CONFIG_DIR": str(home / "config"),
        "JUPYTER_DATA_DIR": str(home / "data"),
        "JUPYTER_RUNTIME_DIR": str(home / "runtime"),
        "IPYTHONDIR": str(home / "ipython"),
    }
    done = subprocess.run([sys.executable, "-m", module, *arguments], cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-6000:]


def trained_steps(here: Path) -> tuple[Path, list[int]]:
    """The folder of the model that made most steps, and its steps as the history has them, in the order logged.

    A batch without signal is a step, too, but at least one of them has trained.
    """
    found: list[tuple[Path, list[int]]] = []
    for file in here.rglob("history/metrics.jsonl"):
        records = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        made = [r for r in records if r.get("split") in ("train", "sft") and "trained" in r.get("metrics", {})]
        assert any("loss" in r["metrics"] for r in made), f"{file} has no step that trained"
        steps = [r["step"] for r in made]
        found.append((file.parent.parent, list(dict.fromkeys(steps))))
    return max(found, key=lambda item: len(item[1]))


def logged_conversations(model_folder: Path) -> Iterator[list[str]]:
    """The texts of each logged trajectory, without the system prompt, which stands in every notebook anyway."""
    from artnb.tracking.history import History

    for messages in History(model_folder).trajectories()["messages"]:
        said = [str(message.get("content") or "") for message in messages if message["role"] != "system"]
        if len(said) > 1:
            yield [text for text in said if text.strip()]


def squeezed(text: str) -> str:
    return re.sub(r"\s+", "", text)


class Page(html.parser.HTMLParser):
    """The text of a page that is visible without scripts, and how many curves it shows."""

    def __init__(self) -> None:
        super().__init__()
        self.text: list[str] = []
        self.curves = 0
        self._hidden = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._hidden += tag in ("script", "style")
        picture = str(dict(attrs).get("src")).startswith("data:image/") and tag == "img"
        self.curves += not self._hidden and (tag == "svg" or picture)

    def handle_endtag(self, tag: str) -> None:
        self._hidden -= tag in ("script", "style")

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self.text.append(data)
