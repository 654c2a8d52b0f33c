"""The dashboard's JavaScript in a real browser, on a page whose `model` holds what Python sent; no kernel.

In JupyterLab it is driven by test_browser.py. Screenshots at 1280 and 800 pixels, light and dark, are kept in
$ARTNB_ARTIFACTS when it is set."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import artnb as art
from artnb.events import EVENTS

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
if CHROMIUM is None:
    pytest.skip("no Chromium here: apt-get install chromium", allow_module_level=True)
if importlib.util.find_spec("playwright") is None:
    pytest.skip("playwright is not installed: pip install 'artnb[dev]'", allow_module_level=True)

NASTY = "<img src=x onerror=hacked=1>"
TRAITS = ("runs", "head", "past", "recent", "charts", "metric", "theme", "static_class")
PAGE = """<!doctype html><meta charset="utf-8"><title>dashboard</title><style>%(css)s</style>
<body style="margin:0;background:%(background)s"><div id="host" style="padding:8px"></div>
<p class="%(static)s">the saved picture</p>
<script type="module">
%(js)s
const state = %(state)s, listeners = {};
const model = {
  get: (k) => state[k], set: (k, v) => { state[k] = v; }, save_changes: () => { window.saved = { ...state }; },
  on: (e, f) => { (listeners[e] ??= []).push(f); },
  off: (e, f) => { listeners[e] = listeners[e].filter((g) => g !== f); },
};
window.change = (values) => { for (const [k, v] of Object.entries(values)) { state[k] = v;
  for (const f of listeners["change:" + k] || []) f(); } };
window.listening = () => Object.values(listeners).flat().length;
window.again = (el) => render({ model, el });
window.end = again(document.getElementById("host"));
</script>"""


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture
def models(tmp_path: Path) -> list[art.TrainableModel]:
    found = []
    for number, name in enumerate((f"agent {NASTY[:-3]}", "other")):
        model = art.TrainableModel(name.replace("/", ""), "tests", "no-such-model", base_path=tmp_path)
        history = model._history()
        for step in range(1, 41):
            metrics = {NASTY: 0.5, "win": step / 40, "reward": 0.2 + 0.015 * step + 0.1 * number, "trained": 1.0}
            metrics |= {"reward_std_in_groups": 0.1, "loss": 1e-8 * (step % 3), "grad_norm": 0.5, "entropy": 2 / step}
            metrics |= {"mismatch_ratio": 1.001, "mismatch_k3": 1e-4, "groups": 8.0, "groups_left_out/unscored": 0.125}
            metrics |= {"memory_bytes": 2.0**31, "tokens_per_second": 150.0, "sampling_tokens_per_second": 300.0}
            history.log_metrics(step, "train", metrics)
            if step % 10 == 0:
                history.log_metrics(step, "val", {"reward": 0.5, "win": 0.5})
        found.append(model)
    return found


def state_of(model: art.TrainableModel, **options: Any) -> dict[str, Any]:
    """What a front end would hold, with a gather under way."""
    board = model.dashboard(steps=50, **options)
    shown = {NASTY: 0.25}
    EVENTS.emit(
        "progress",
        phase="gather",
        desc=NASTY,
        unit="rollout",
        done=16,
        total=64,
        seconds=8.0,
        closed=False,
        shown=shown,
    )
    board._courier.now()
    state = {name: getattr(board, name) for name in TRAITS}
    state["css"], state["js"] = board._css, board._esm
    board.close()
    return state


def open_page(browser: Any, state: dict[str, Any], *, width: int = 1280, dark: bool = False) -> Any:
    values = {k: v for k, v in state.items() if k in TRAITS}
    content = PAGE % {
        "css": state["css"],
        "js": state["js"],
        "background": "#111" if dark else "#fff",
        "static": state["static_class"],
        "state": json.dumps(values).replace("<", "\\u003c"),
    }
    page = browser.new_page(viewport={"width": width, "height": 1000})
    page.errors = []
    page.on("pageerror", lambda error: page.errors.append(str(error)))
    page.on("request", lambda request: page.errors.append(f"it asked for {request.url}"))
    page.set_content(content)
    page.wait_for_selector("figure[data-chart=reward] path.artnb-line")
    return page


def text(page: Any, selector: str) -> str:
    return str(page.text_content(selector))


def test_it_draws_escapes_and_asks_for_nothing(chromium: Any, models: list[art.TrainableModel]) -> None:
    page = open_page(chromium, state_of(models[0]))
    assert page.locator("figure").count() == 11
    assert page.locator("figure[data-chart=reward] .artnb-band").count() == 1
    assert page.locator("figure[data-chart=solved] path.artnb-line").count() == 2
    assert "by construction" in text(page, "figure[data-chart=loss]")
    assert NASTY in text(page, ".artnb-words") and "16 of 64 rollouts" in text(page, ".artnb-words")
    assert "about" in text(page, ".artnb-time") and "left" in text(page, ".artnb-time")
    assert "step 40: 1 of 8 groups did not train: 1 × unscored" in text(page, ".artnb-why")
    assert "40 of 50" in text(page, ".artnb-top")
    assert page.locator("#host img").count() == 0 and page.evaluate("window.hacked") is None
    assert NASTY in page.locator("select option").all_text_contents(), "any logged metric can be chosen"
    page.select_option("select", "win")
    assert page.evaluate("saved.metric") == "win"
    page.hover("figure[data-chart=reward] svg[role=img]", position={"x": 47, "y": 60})
    assert "step 1" in text(page, "figure[data-chart=entropy]"), "one pointer, the same step in all charts"
    assert page.errors == []
    page.close()


def test_an_update_changes_texts_and_keeps_the_charts(chromium: Any, models: list[art.TrainableModel]) -> None:
    """Flicker is what a node that is made anew does: progress touches no chart, a step no chart's frame."""
    state = state_of(models[0])
    page = open_page(chromium, state)
    page.evaluate("line = document.querySelector('path.artnb-line'); svg = line.ownerSVGElement")
    page.evaluate("head => change({ head })", {**state["head"], "done": 48, "seconds": 20, "left": 7, "run_left": 300})
    assert "48 of 64" in text(page, ".artnb-words") and "20 s, about 7.0 s left" in text(page, ".artnb-time")
    assert "run ends in about 5 min 00 s" in text(page, ".artnb-top")
    assert page.evaluate("line.isConnected")
    recent = state["recent"]["0"]
    columns = {name: [*values, values[-1]] for name, values in recent["columns"].items()}
    longer = {"0": {"steps": [*recent["steps"], 41], "columns": {**columns, "train/entropy": [*recent["steps"], 123]}}}
    page.evaluate("recent => change({ recent })", longer)
    page.wait_for_function("document.querySelector('figure[data-chart=entropy]').textContent.includes('123')")
    assert page.evaluate("svg.isConnected && !line.isConnected")
    page.evaluate("change({ head: { phase: null, spent: {}, before: {}, worked: 95, run_left: null, planned: 50 } })")
    assert text(page, ".artnb-words") == "idle" and text(page, ".artnb-time") == "worked 1 min 35 s in all"
    assert "ends in about" not in text(page, ".artnb-top") and "40 of 50" in text(page, ".artnb-top")
    assert page.errors == []
    page.close()


FITS = """[...document.querySelectorAll('figure svg[role=img]')].filter((svg) => svg.style.display !== 'none')
  .every((svg) => ["width", "height"].every(
    (side) => Math.abs(svg.viewBox.baseVal[side] - svg.getBoundingClientRect()[side]) < 0.1))"""


def test_charts_are_as_wide_as_their_place(chromium: Any, models: list[art.TrainableModel]) -> None:
    """In a cell that is run again, was narrowed, or is hidden or narrow at the moment in which a chart is drawn."""
    state = state_of(models[0])
    page = open_page(chromium, state)
    page.evaluate("host.style.width = '609px'")
    page.wait_for_function(FITS)
    recent = {**state["recent"]["0"], "steps": [step + 1 for step in state["recent"]["0"]["steps"]]}
    for moment in ("display = 'none'", "width = '439px'"):
        name, _, _ = moment.partition(" ")
        page.evaluate(
            f"""new Promise((done) => {{
              const before = host.style.{name};
              requestAnimationFrame(() => {{ host.style.{moment}; }});
              change({{ recent: {json.dumps({"0": recent})} }});  // drawn in the same frame
              requestAnimationFrame(() => {{ host.style.{name} = before; requestAnimationFrame(done); }});
            }})"""
        )
        assert page.evaluate(FITS), f"{moment}: the page never showed that, so nobody draws it again"
        recent["steps"] = [step + 1 for step in recent["steps"]]
    page.evaluate(
        """() => {
          end();
          const cell = document.createElement("div");
          cell.style.width = "404px";
          window.end = again(cell);  // not in the page yet, as JupyterLab does it
          host.replaceChildren(cell);
        }"""
    )
    page.wait_for_function(f"{FITS} && document.querySelector('figure svg[role=img]').clientWidth < 400")
    assert page.errors == []
    page.close()


def test_the_saved_picture_is_hidden_while_the_widget_lives(chromium: Any, models: list[art.TrainableModel]) -> None:
    state = state_of(models[0])
    page = open_page(chromium, state)
    picture = page.locator(f".{state['static_class']}")
    assert not picture.is_visible()
    page.evaluate("end()")
    assert picture.is_visible() and page.evaluate("listening()") == 0
    page.close()


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 800])
def test_it_fits_and_follows_the_theme(chromium: Any, models: list[art.TrainableModel], width: int, dark: bool) -> None:
    page = open_page(chromium, state_of(models[0], compare=[models[1]]), width=width, dark=dark)
    page.wait_for_function(
        f"document.querySelector('.artnb-dashboard').dataset.theme === '{'dark' if dark else 'light'}'"
    )
    assert page.locator(".artnb-legend svg").count() == 2
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    wide = "[...document.querySelectorAll('figure')].filter(f => f.scrollWidth > f.clientWidth + 1).length"
    assert page.evaluate(wide) == 0, "nothing sticks out of a chart"
    colours = page.evaluate(
        "[...document.querySelectorAll('figure[data-chart=reward] path.artnb-line')]"
        ".map(path => getComputedStyle(path).stroke)"
    )
    assert len(set(colours)) == 2, "a run has a colour"
    if folder := os.environ.get("ARTNB_ARTIFACTS"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        page.screenshot(path=Path(folder) / f"dashboard-{width}-{'dark' if dark else 'light'}.png", full_page=True)
    page.close()
