"""The inspector's script in headless Chromium, on a page of its own (inspector_page.py): what a reader sees and clicks.

With ARTNB_SCREENSHOTS=<folder> the pictures are kept there.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from inspector_groups import NASTY, many, nasty_trajectory
from inspector_page import CHROMIUM, WITHOUT, Page, served

from artnb.notebook.inspector import Inspector
from artnb.notebook.trajectory_view import from_jsonl
from artnb.tracking.history import History
from artnb.trajectories import TrajectoryGroup

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason=WITHOUT)
OPEN = "await until('the list', () => one('.row.current') && one('.detail .tools'));"


@pytest.fixture(scope="module")
def groups() -> list[TrajectoryGroup]:
    made = many(40, 8, 4)
    made[0].trajectories[1] = nasty_trajectory()
    made[0].trajectories[1].error = None
    for trajectory in made[2]:
        trajectory.reward = 1.0
    return made


@pytest.fixture
def page(groups: list[TrajectoryGroup]) -> Iterator[Page]:
    with served(Inspector(groups, title="agent-001")) as made:
        yield made


def test_list_filter_and_reading(page: Page) -> None:
    seen = page.run(
        OPEN
        + """
        const found = { drawn: all(".row").length, status: one(".said").textContent };
        set("low", "0.9"); set("high", "0.999"); set("sort", "reward"); set("descending", true);
        await until("the filter", () => one(".said").textContent.includes(" of 320"));
        found.filtered = one(".said").textContent;
        await until("rows", () => all(".row .value").length > 2);
        found.rewards = all(".row .value").map((node) => node.textContent);
        all(".row")[1].click();
        await until("its messages", () => one(".heading .reward").textContent === `reward ${found.rewards[1]}`);
        found.states = all(".bubble .tag").map((tag) => tag.textContent);
        found.standing = one(".standing").textContent;
        one(".call summary").click();
        await until("the call", () => one(".call .text"));
        found.call = one(".call .text").textContent;
        return found;
        """
    )
    assert seen["drawn"] < 60 and seen["status"] == "320 trajectories in 40 groups"
    expected = page.inspector.find(reward=(0.9, 0.999), sort="reward", descending=True)
    assert seen["filtered"] == f"{len(expected)} of 320 trajectories in 40 groups"
    rewards = [str(page.inspector.trajectory(n).reward) for n in expected]
    assert [f"{float(r):g}" for r in seen["rewards"]] == [f"{float(r):g}" for r in rewards[: len(seen["rewards"])]]
    assert seen["states"][:3] == ["context", "context", "trained"]
    assert seen["standing"].startswith("● Trained with advantage +")
    assert '"query"' in seen["call"]


def test_html_of_a_model_stays_text(page: Page) -> None:
    seen = page.run(
        OPEN
        + """
        all(".row").find((row) => row.querySelector(".place")?.textContent === "1").click();
        await until("its messages", () => all(".bubble").length === 27);
        for (const fold of all(".bubble details, .heading details")) fold.open = true;
        await sleep(100);
        const found = { texts: one(".detail").textContent, hacked: window.hacked ?? null };
        const tags = ["script", "img", "textarea", "style", "iframe"];
        found.foreign = tags.filter((tag) => one(`.artnb-inspector ${tag}`));
        found.auto = all(".detail .text").every((node) => node.dir === "auto");
        press("Log-prob"); await painted();
        found.coloured = all(".token").length;
        press("side by side"); await until("columns", () => all(".column").length === 8);
        found.after = window.hacked ?? null;
        return found;
        """
    )
    assert seen["hacked"] is None and seen["after"] is None and seen["foreign"] == []
    assert seen["auto"] and seen["coloured"] > 20
    for text in NASTY:
        assert text.encode("utf-8", "replace").decode() in seen["texts"], text


def test_colours_and_what_is_under_the_pointer(page: Page) -> None:
    seen = page.run(
        OPEN
        + """
        const found = {};
        for (const name of ["Advantage", "Log-prob"]) {
          press(name); await painted();
          const token = one(".bubble.trained .token");
          found[name] = [token.title, token.style.backgroundColor, getComputedStyle(token).backgroundColor];
        }
        found.ratio = all(".tools button").find((b) => b.textContent === "Ratio").disabled;
        found.context = all(".bubble.context .token").length;
        return found;
        """
    )
    choice = page.inspector.trajectory(0).choices()[0]
    assert choice.logprobs is not None and choice.logprobs.content and choice.model_extra is not None
    title, style, computed = seen["Advantage"]
    assert title.startswith(f"id {choice.model_extra['token_ids'][0]} · log-prob −")
    advantage = page.inspector._standings.of(0).advantage
    assert advantage is not None and f"advantage {'+' if advantage > 0 else '−'}{abs(advantage):.3g}" in title
    assert f"--artnb-c{0 if advantage > 0 else 1}" in style and computed != "rgba(0, 0, 0, 0)"
    assert "--artnb-c4" in seen["Log-prob"][1]
    assert seen["ratio"] is True and seen["context"] == 0


def test_ratios_are_coloured_where_they_are_known() -> None:
    (group,) = many(1, 2, 1)
    choice = group.trajectories[0].choices()[0]
    assert choice.logprobs is not None and choice.logprobs.content
    logprobs = [entry.logprob for entry in choice.logprobs.content]
    choice.trainer_logprobs = [logprobs[0] + 0.3, logprobs[1] - 0.3, *logprobs[2:]]  # type: ignore[attr-defined]
    with served(Inspector([group])) as page:
        tokens = page.run(
            OPEN
            + """
            press("Ratio"); await painted();
            return all(".bubble.trained .token").slice(0, 3).map((node) => [node.title, node.style.backgroundColor]);
            """
        )
    assert [title.split("ratio ")[1] for title, _ in tokens] == ["1.3499", "0.7408", "1"]
    assert "--artnb-c0" in tokens[0][1] and "--artnb-c1" in tokens[1][1] and " 8%" in tokens[2][1]


def test_not_trained_in_words_and_side_by_side(page: Page) -> None:
    seen = page.run(
        OPEN
        + """
        const found = {};
        for (const row of all(".row.group").slice(0, 2)) row.click();  // folds groups 0 and 1
        await until("group 2", () => all(".row")[2].textContent.includes("group 2"));
        all(".row")[3].click();
        await until("its messages", () => one(".standing.not"));
        found.why = one(".standing.not").textContent;
        found.sampled = all(".bubble.sampled .tag")[0].textContent;
        press("side by side");
        await until("columns", () => all(".column").length === 8);
        found.reference = all(".column.reference").length;
        found.same = all(".same summary").map((node) => node.textContent).slice(0, 2);
        found.marks = all("mark").length;
        found.first = all(".first").length;
        all(".column button")[0].click();
        await painted();
        found.again = all(".column.reference").length;
        return found;
        """
    )
    assert seen["why"] == "○ Not trained: all 8 rewards equal 1"
    assert seen["sampled"] == "sampled, not trained"
    assert seen["reference"] == seen["again"] == 1 and seen["first"] == 7 and seen["marks"] > 20
    assert seen["same"] == ["system: the same", "user: the same"]


def test_ticks_reach_python_and_the_download_reads_back(page: Page) -> None:
    seen = page.run(
        OPEN
        + """
        let blob; URL.createObjectURL = (made) => { blob = made; return "#"; };
        let name; HTMLAnchorElement.prototype.click = function () { name = this.download; };
        all(".row input")[4].click(); all(".row input")[1].click();
        press("download 2 ticked");
        await until("the download", () => blob);
        const bytes = new Uint8Array(await blob.arrayBuffer());
        let text = ""; for (const byte of bytes) text += String.fromCharCode(byte);
        return { data: btoa(text), name, said: one(".said").textContent };
        """
    )
    assert list(page.inspector.selected) == [1, 4]
    assert from_jsonl(base64.b64decode(seen["data"])) == page.inspector.selection()
    assert seen["name"] == "trajectories.jsonl" and "2 trajectories" in seen["said"]


def test_keys_scrolling_and_rows_far_down(page: Page) -> None:
    seen = page.run(
        OPEN
        + """
        const list = one(".list");
        list.scrollTop = 200 * 30; await painted(); await sleep(50);
        const found = { rows: all(".row").length, groups: all(".row.group b").map((b) => b.textContent) };
        await until("standings in sight", () => all(".stand").every((node) => node.textContent !== "·"));
        list.scrollTop = 0; await painted(); await sleep(50);
        for (let i = 0; i < 30; i++) list.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowDown" }));
        await until("trajectory 30", () => one(".heading b").textContent === "group 3 · trajectory 6");
        found.scrolled = list.scrollTop > 0;
        found.current = all(".row.current").length;
        return found;
        """
    )
    assert seen["rows"] < 60 and "group 22" in seen["groups"] and "group 0" not in seen["groups"]
    assert seen["scrolled"] and seen["current"] == 1


def test_rows_drawn_in_a_moment_without_layout_fill_the_list(page: Page) -> None:
    """JupyterLab takes its style sheet away and brings another within a frame: no observer tells of it."""
    seen = page.run(
        OPEN
        + """
        const list = one(".list"), body = document.body;
        await painted();
        const rows = all(".row").length;
        requestAnimationFrame(() => { body.style.display = "none"; });
        list.dispatchEvent(new Event("scroll")); // drawn in the same frame
        requestAnimationFrame(() => { body.style.display = ""; });
        await painted();
        return { rows, now: all(".row").length };
        """
    )
    assert seen["now"] == seen["rows"] > 8


def test_another_step_is_chosen(tmp_path: Path) -> None:
    history = History(tmp_path / "m")
    for step in (1, 2):
        history.log_trajectories(step, "train", many(step, 3, 2))
    with served(Inspector(history=history)) as page:
        seen = page.run(
            OPEN
            + """
            const found = [one(".said").textContent];
            const place = one(".place"); place.selectedIndex = 1; place.dispatchEvent(new Event("change"));
            await until("step 1", () => one(".said").textContent.startsWith("3 "));
            return [...found, one(".place").selectedOptions[0].textContent];
            """
        )
    assert seen == ["6 trajectories in 2 groups", "step 1 · train"]


def test_without_a_kernel_the_best_and_worst_are_there(page: Page) -> None:
    seen = page.run(
        """
        await until("the note", () => one(".said").textContent.includes("does not answer"));
        return { titles: all(".heading b").map((b) => b.textContent), bubbles: all(".bubble").length };
        """,
        silent=True,
    )
    assert seen["titles"] == ["Best", "Worst"] and seen["bubbles"] > 8


def test_nothing_is_cut_in_a_narrow_cell(page: Page) -> None:
    """Every part of a row can be seen, or scrolled to, down to a cell of 200 pixels; wide cells keep one line a row."""
    seen = page.run(
        OPEN
        + """
        const found = {};
        const list = one(".list");
        for (const width of [1200, 700, 480, 340, 200]) {
          one("#cell").style.width = `${width}px`;
          await until("the size", () => Math.abs(one(".artnb-inspector").offsetWidth - width) < 2);
          await painted(); await painted();
          const inside = list.getBoundingClientRect();
          const end = inside.left + list.scrollWidth + 1;
          const reach = (part, row) => {
            const [a, b] = [part.getBoundingClientRect(), row.getBoundingClientRect()];
            return a.right <= b.right + 1 && a.bottom <= b.bottom + 1 && a.top >= b.top - 1 && b.right <= end;
          };
          const cut = all(".row").flatMap((row) => [...row.children].filter((part) => !reach(part, row)));
          const texts = all(".row .last").filter((node) => node.textContent);
          found[width] = {
            cut: cut.map((node) => `${node.className} ${node.textContent}`),
            height: one(".row").offsetHeight,
            text: Math.min(...texts.map((node) => node.offsetWidth)),
            out: all(".bar > *, .status > *, .tools > *, .detail .bubble").filter(
              (node) => node.getBoundingClientRect().right > one(".artnb-inspector").getBoundingClientRect().right + 1
            ).map((node) => node.textContent.slice(0, 30)),
          };
        }
        list.scrollTop = 100 * 52; await painted(); await sleep(50);
        one("#cell").style.width = "700px"; await painted(); await painted();
        found.first = Math.round(list.scrollTop / 30);
        return found;
        """
    )
    assert seen.pop("first") == 100, "the list stays where it was"
    for width, found in seen.items():
        assert found["cut"] == [] and found["out"] == [], width
        assert found["text"] >= 60, "something of the last message can be read"
    heights = {int(width): found["height"] for width, found in seen.items()}
    assert heights == {1200: 30, 700: 30, 480: 30, 340: 52, 200: 52}


def test_the_saved_page_is_hidden_while_the_widget_lives(page: Page) -> None:
    seen = page.run(
        """
        const height = () => document.querySelector("body > p").offsetHeight;
        const found = [height()];
        end();
        return [...found, height()];
        """
    )
    assert seen[0] == 0 < seen[1]


@pytest.mark.parametrize(
    ("width", "host"), [(1280, "system-light"), (800, "system-dark"), (800, "jupyter-light"), (1280, "jupyter-dark")]
)
def test_pictures_and_contrast(groups: list[TrajectoryGroup], width: int, host: str, tmp_path: Path) -> None:
    """Nothing sticks out of the cell, and text can be read: a contrast of at least 4.5 on what lies behind it."""
    folder = Path(os.environ.get("ARTNB_SCREENSHOTS", tmp_path))
    folder.mkdir(parents=True, exist_ok=True)
    picture = folder / f"inspector-{width}-{host}.png"
    name = "system" if host.startswith("system") else host
    # JupyterLab's theme is its own, whatever the system's is.
    dark = host == "system-dark" or host == "jupyter-light"
    with served(Inspector(groups, title="agent-001"), host=name) as page:
        seen: dict[str, Any] = page.run(
            OPEN
            + """
            press("Advantage"); await painted();
            const paint = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
            const over = (colours) => {  // of several layers, the last on top
              paint.globalCompositeOperation = "source-over";
              for (const colour of colours) { paint.fillStyle = colour; paint.fillRect(0, 0, 1, 1); }
              return [...paint.getImageData(0, 0, 1, 1).data].slice(0, 3);
            };
            const light = (rgb) => {
              const linear = (v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
              const [r, g, b] = rgb.map((v) => linear(v / 255));
              return 0.2126 * r + 0.7152 * g + 0.0722 * b;
            };
            const behind = (node) => {
              const layers = [];
              for (let at = node; at; at = at.parentElement) layers.unshift(getComputedStyle(at).backgroundColor);
              return layers;
            };
            let worst = 99, where = "";
            for (const node of all(".artnb-inspector *")) {
              const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim());
              if (!own || node.disabled || node.closest("option")) continue;
              const layers = behind(node);
              const back = light(over(layers));
              const front = light(over([...layers, getComputedStyle(node).color]));
              const contrast = (Math.max(back, front) + 0.05) / (Math.min(back, front) + 0.05);
              if (contrast < worst) { worst = contrast; where = `${node.className}: ${node.textContent.slice(0, 30)}`; }
            }
            const root = one(".artnb-inspector").getBoundingClientRect();
            const wide = all(".bar > *, .status > *, .tools > *, .body > *");
            const out = wide.filter((node) => node.getBoundingClientRect().right > root.right + 1).length;
            return { worst, where, out, back: light(over(behind(one(".detail")))) };
            """,
            width=width,
            dark=dark,
            picture=picture,
        )
    assert seen["out"] == 0
    assert seen["worst"] >= 4.5, seen
    assert (seen["back"] < 0.2) is host.endswith("dark")
    assert picture.stat().st_size > 20_000
