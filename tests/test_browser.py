"""The quickstart in a real browser: JupyterLab and headless Chromium, started here, used as a person would use them.

Needs the system's Chromium and is skipped without it (scripts/test installs it where it may). The model is tiny and
random, and prefers digits, so that its games have rewards to tell apart. Screenshots are kept in $ARTNB_ARTIFACTS,
or in the test's own folder.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"
CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), ""
)
FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
]
TOKEN = "for-this-test-only"
SMALL = {"STEPS": 6, "GROUPS": 2, "GROUP_SIZE": 4, "EVAL_GAMES": 6}
MORE = 400
"""Steps that a person asks for before thinking better of it."""
SECOND_MS = 1000
PATIENCE_MS = 240 * SECOND_MS  # how long one thing may take on a busy machine; it takes a tenth of that
CURVE = '.artnb-dashboard figure[data-chart="reward"] svg'

SETTINGS = {
    "notebook-extension/tracker": '{"windowingMode": "none"}',  # else cells out of sight are not in the page
    "apputils-extension/notification": '{"fetchNews": "false", "checkForUpdates": false}',
}

missing = [name for name in ("playwright", "jupyterlab", "ipykernel") if importlib.util.find_spec(name) is None]
if not CHROMIUM:
    pytest.skip("no Chromium here: apt-get install chromium", allow_module_level=True)
if missing:
    pytest.skip(f"{', '.join(missing)} is not installed: pip install 'artnb[dev]'", allow_module_level=True)


@pytest.fixture
def artefacts(tmp_path: Path) -> Path:
    folder = Path(os.environ.get("ARTNB_ARTIFACTS") or tmp_path / "artefacts")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture
def digit_model(tmp_path: Path) -> Path:
    """A random model that answers with a digit nine times in ten."""
    import torch
    import transformers
    from tiny_models import make_model

    folder = make_model("llama", tmp_path / "digits")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    digits = [tokenizer.convert_tokens_to_ids(digit) for digit in "123456789"]
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 20.0  # stays the largest part of the hidden state through every layer
        model.lm_head.weight[digits, 0] = 1.2
    model.save_pretrained(folder)
    return folder


def with_parameters(notebook: Path, values: dict[str, Any]) -> None:
    """Give the notebook other parameters, as a person would: in the cell that holds them. Outputs are cleared."""
    content = json.loads(notebook.read_text(encoding="utf-8"))
    for cell in content["cells"]:
        if cell["cell_type"] == "code":
            cell["outputs"], cell["execution_count"] = [], None
        if "parameters" in cell["metadata"].get("tags", []):
            text = "".join(cell["source"])
            for name, value in values.items():
                text, found = re.subn(rf"(?m)^{name} = \S+", lambda _, n=name, v=value: f"{n} = {v!r}", text)
                assert found == 1, f"{name} is no parameter"
            cell["source"] = text
    notebook.write_text(json.dumps(content), encoding="utf-8")


@pytest.fixture
def lab(tmp_path: Path, digit_model: Path) -> Iterator[str]:
    """A JupyterLab on a copy of the notebooks; gives the address of the quickstart."""
    shutil.copytree(NOTEBOOKS, tmp_path / "notebooks", ignore=shutil.ignore_patterns(".art*", "__pycache__"))
    with_parameters(
        tmp_path / "notebooks" / "quickstart" / "quickstart.ipynb", SMALL | {"BASE_MODEL": str(digit_model)}
    )
    for name, text in SETTINGS.items():
        file = tmp_path / "settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    env = os.environ | {
        "JUPYTER_PREFER_ENV_PATH": "1",
        "JUPYTERLAB_SETTINGS_DIR": str(tmp_path / "settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(tmp_path / "workspaces"),
        "JUPYTER_CONFIG_DIR": str(tmp_path / "config"),
        "JUPYTER_DATA_DIR": str(tmp_path / "data"),
        "JUPYTER_RUNTIME_DIR": str(tmp_path / "runtime"),
        "IPYTHONDIR": str(tmp_path / "ipython"),
    }
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = [
        *("--no-browser", "--allow-root", "--ServerApp.ip=127.0.0.1", f"--ServerApp.port={port}"),
        *("--ServerApp.port_retries=0", f"--IdentityProvider.token={TOKEN}"),
        *(f"--ServerApp.root_dir={tmp_path / 'notebooks'}", "--LabApp.extension_manager=readonly"),
        "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
    ]
    log = (tmp_path / "lab.log").open("wb")
    server = subprocess.Popen([sys.executable, "-m", "jupyterlab", *options], env=env, stdout=log, stderr=log)
    try:
        base = f"http://127.0.0.1:{port}"
        wait_until(lambda: server.poll() is None and answers(f"{base}/api?token={TOKEN}"), "JupyterLab answers", 240)
        yield f"{base}/lab/tree/quickstart/quickstart.ipynb?token={TOKEN}"
    finally:
        server.terminate()  # ends its kernels, too
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
        log.close()


def wait_until(condition: Callable[[], bool], what: str, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(0.2)


def answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(address, timeout=5):
            return True
    except (urllib.error.URLError, OSError):
        return False


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        context = playwright.chromium.launch_persistent_context(
            str(tmp_path / "profile"),
            executable_path=CHROMIUM,
            headless=True,
            args=FLAGS,
            viewport={"width": 1280, "height": 900},
        )
        context.set_default_timeout(PATIENCE_MS)
        yield context.pages[0]
        context.close()


class Notebook:
    """The open notebook, by what a person sees and clicks."""

    def __init__(self, page: Any, artefacts: Path) -> None:
        self.page = page
        self.artefacts = artefacts
        self.errors: list[str] = []
        page.on("pageerror", lambda error: self.errors.append(str(error)))

    def open(self, address: str) -> None:
        self.page.goto(address)
        self.page.locator(".jp-NotebookPanel:not(.lm-mod-hidden) .jp-CodeCell").first.wait_for()
        # Before that, "run all" would ask for a kernel.
        self.page.locator(
            ".jp-StatusBar-TextItem, .jp-StatusBar-Widget", has_text=re.compile(r"\| Idle")
        ).first.wait_for()

    def menu(self, name: str, item: str) -> None:
        self.page.locator(".lm-MenuBar-item", has_text=re.compile(f"^{name}$")).click()
        self.page.locator(".lm-Menu-item", has_text=re.compile(f"^{item}")).first.click()

    def cell(self, text: str) -> Any:
        return self.page.locator(".jp-CodeCell", has=self.page.locator(".jp-InputArea", has_text=text)).first

    def run(self, cell: Any) -> None:
        cell.locator(".cm-content").click()
        self.page.keyboard.press("Control+Enter")

    def running(self) -> int:
        return int(self.page.locator(".jp-InputPrompt", has_text="[*]").count())

    def settled(self) -> None:
        """Wait until no cell runs or waits to run."""
        deadline = time.monotonic() + PATIENCE_MS / SECOND_MS
        while self.running():
            assert time.monotonic() < deadline, "cells still run"
            self.page.wait_for_timeout(200)

    def error_outputs(self) -> list[str]:
        texts = self.page.locator(".jp-OutputArea-output").filter(has_text=re.compile("Traceback|Interrupt|Cancelled"))
        return list(texts.all_inner_texts())

    def picture(self, name: str, of: str | None = None) -> None:
        if of is not None:
            self.page.locator(of).first.scroll_into_view_if_needed()
            self.page.wait_for_timeout(300)
        self.page.screenshot(path=str(self.artefacts / f"{name}.png"))

    def steps_on_curve(self) -> int:
        """Corners of the curve of training reward, which are its steps."""
        shapes = self.page.locator(f"{CURVE} path.artnb-line")
        corners = [(shape.get_attribute("d") or "").count(",") for shape in shapes.all()]
        return max(corners, default=0)


@pytest.mark.timeout(900)  # only for a machine that is busy with other things: it takes one or two minutes
def test_a_person_trains_reads_interrupts_and_goes_on(page: Any, lab: str, artefacts: Path) -> None:
    notebook = Notebook(page, artefacts)
    notebook.open(lab)
    training = notebook.cell("model.dashboard")

    # Run all: the curve grows while the training cell runs.
    notebook.menu("Run", "Run All Cells")
    page.locator(".artnb-dashboard").first.wait_for()
    seen: list[int] = []
    while notebook.running():
        if training.locator(".jp-InputPrompt").inner_text().strip() == "[*]:":
            seen.append(notebook.steps_on_curve())
        page.wait_for_timeout(150)
    grown = sorted(set(seen))
    assert len(grown) >= 3, f"the curve did not grow while the cell ran: {seen}"
    assert notebook.steps_on_curve() == SMALL["STEPS"]
    assert notebook.error_outputs() == []
    for width in (1280, 800):
        page.set_viewport_size({"width": width, "height": 900})
        notebook.picture(f"dashboard-light-{width}", ".artnb-dashboard")
        notebook.picture(f"inspector-light-{width}", ".artnb-inspector")
    page.set_viewport_size({"width": 1280, "height": 900})

    # The inspector: filter by reward, read a trajectory.
    inspector = page.locator(".artnb-inspector").first
    inspector.scroll_into_view_if_needed()
    every = SMALL["GROUPS"] * SMALL["GROUP_SIZE"]
    inspector.locator(".said", has_text=f"{every} trajectories").wait_for()
    rewards = inspector.locator(".row .reward .value").all_inner_texts()
    values = sorted(float(text.replace("−", "-")) for text in rewards)
    assert len(values) == every and values[0] < values[-1]
    inspector.locator('input[data-filter="low"]').fill(str(values[-1]))
    best = values.count(values[-1])
    inspector.locator(".said", has_text=f"{best} of {every} trajectories").wait_for()
    assert inspector.locator(".row .reward .value").count() == best
    inspector.locator(".row", has=page.locator(".reward")).first.click()
    bubbles = inspector.locator(".trajectory .bubble")
    bubbles.nth(2).wait_for()
    bubbles.filter(has_text="You play X in tic-tac-toe").first.wait_for()
    said = bubbles.all_inner_texts()
    assert "You play X in tic-tac-toe" in said[0] and "assistant" in said[2]
    inspector.get_by_role("button", name="advantage").click()
    notebook.picture("trajectory-light-1280", ".artnb-inspector")

    # Ask for many more steps, interrupt, and run the same cell again with fewer.
    asked = notebook.cell("EVAL_GAMES =")
    edit(notebook, asked, "STEPS", MORE)
    notebook.run(training)
    wait_for_steps(notebook, SMALL["STEPS"] + 2)
    page.locator('[data-jp-item-name="interrupt"] button, [data-jp-item-name="interrupt"] jp-button').first.click()
    notebook.settled()
    stopped = notebook.steps_on_curve()
    assert SMALL["STEPS"] + 2 <= stopped < MORE
    assert any("Interrupt" in text or "Cancelled" in text for text in notebook.error_outputs()), "it says so"
    notebook.picture("interrupted-light-1280", ".artnb-dashboard")
    edit(notebook, asked, "STEPS", stopped + 3)
    notebook.run(training)
    notebook.settled()
    assert notebook.error_outputs() == []
    assert notebook.steps_on_curve() == stopped + 3

    # Dark.
    notebook.menu("Settings", "Theme")
    page.locator(".lm-Menu-item", has_text=re.compile("^JupyterLab Dark$")).first.click()
    page.locator('body[data-jp-theme-light="false"]').wait_for(state="attached")
    page.locator('.artnb-dashboard[data-theme="dark"]').first.wait_for()
    page.wait_for_timeout(500)  # whatever the change of the theme still does to the layout
    drawn, shown = page.locator(f"{CURVE}[role=img]").evaluate(
        "svg => [svg.viewBox.baseVal.width, svg.getBoundingClientRect().width]"
    )
    assert abs(drawn - shown) < 1, "charts were drawn for a layout that the change of the theme had for a moment"
    for width in (1280, 800):
        page.set_viewport_size({"width": width, "height": 900})
        notebook.picture(f"dashboard-dark-{width}", ".artnb-dashboard")
        notebook.picture(f"inspector-dark-{width}", ".artnb-inspector")
    assert notebook.errors == []


def edit(notebook: Notebook, cell: Any, name: str, value: int) -> None:
    """Type another value of a parameter into its line, and run the cell."""
    cell.locator(".cm-line", has_text=re.compile(f"^{name} = ")).click()
    notebook.page.keyboard.press("End")
    notebook.page.keyboard.press("Shift+Home")
    notebook.page.keyboard.type(f"{name} = {value}")
    notebook.page.keyboard.press("Control+Enter")
    notebook.settled()


def wait_for_steps(notebook: Notebook, steps: int) -> None:
    deadline = time.monotonic() + PATIENCE_MS / SECOND_MS
    while notebook.steps_on_curve() < steps:
        assert time.monotonic() < deadline, f"the curve has {notebook.steps_on_curve()} steps, not {steps}"
        notebook.page.wait_for_timeout(200)
