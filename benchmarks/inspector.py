"""How long the inspector takes to open 2,000 trajectories of 20 turns: in Python, and until a browser shows them.

From memory and from the history on disk; then what a reader waits for: one trajectory, a filter, a text search, and
the frames while the list is scrolled from top to bottom. The browser part needs chromium and is left out without.
Measures no network: page and Python are on one machine.

    python benchmarks/inspector.py --trajectories 2000 --turns 20
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from artnb.notebook.inspector import Inspector
from artnb.tracking.history import History

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from inspector_groups import many
from inspector_page import CHROMIUM, served

SIZE = 8
SCROLL = """
await until("the list", () => one(".row .value"));
await painted();
const opened = performance.now() - began;
await until("messages", () => one(".bubble"));
const first = performance.now() - began;
const list = one(".list"), frames = [];
let last = performance.now();
const bottom = list.scrollHeight - list.clientHeight;
for (let i = 1; i <= 120; i++) {
  list.scrollTop = (bottom * i) / 120;
  await new Promise(requestAnimationFrame);
  frames.push(performance.now() - last);
  last = performance.now();
}
frames.sort((a, b) => a - b);
return { opened, first, median: frames[60], slowest: frames[119], drawn: all(".row").length };
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, default=2000)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3, help="of each time the smallest is told")
    options = parser.parse_args()
    groups = many(options.trajectories // SIZE, SIZE, options.turns)
    tokens = sum(len((c.model_extra or {})["token_ids"]) for group in groups for t in group for c in t.choices())
    print(f"{options.trajectories:,} trajectories × {options.turns} turns, {tokens:,} sampled tokens")
    with tempfile.TemporaryDirectory() as folder:
        history = History(folder)
        history.log_trajectories(1, "train", groups)
        size = sum(path.stat().st_size for path in history.trajectories_folder.iterdir())
        print(f"the step on disk: {size / 1e6:,.0f} MB")
        sources: dict[str, Callable[[], Inspector]] = {
            "in memory": lambda: Inspector(groups),
            "on disk": lambda: Inspector(history=history),
        }
        for name, make in sources.items():
            _python(name, make, options.repeats)
            if CHROMIUM is None:
                print("  browser: left out, chromium was not found")
            else:
                _browser(make, options.repeats)


def _python(name: str, make: Callable[[], Inspector], repeats: int) -> None:
    opened = min(_seconds(lambda: _answer(make(), kind="index")) for _ in range(repeats))
    inspector = make()
    index = len(json.dumps(_answer(inspector, kind="index")))
    print(f"{name}: {opened:.2f} s until the index is ready ({index / 1e3:,.0f} KB)")
    one = _seconds(lambda: _answer(inspector, kind="trajectory", number=9))
    print(f"  a trajectory of a group not yet seen {1e3 * one:.0f} ms")
    query = {"reward": [0.5, None], "sort": "reward"}
    print(f"  filter by reward {1e3 * _seconds(lambda: _answer(inspector, kind='query', query=query)):.0f} ms")
    for which in ("first", "further"):
        seconds = _seconds(lambda: _answer(inspector, kind="query", query={"text": "tariff storm"}))
        print(f"  {which} search in all texts {seconds:.2f} s")


def _browser(make: Callable[[], Inspector], repeats: int) -> None:
    runs = []
    for _ in range(repeats):
        began = time.perf_counter()
        inspector = make()
        made = time.perf_counter() - began
        with served(inspector) as page:
            runs.append({**page.run(SCROLL), "made": 1e3 * made})
    best = min(runs, key=lambda run: run["made"] + run["opened"])
    opened, messages = (best["made"] + best["opened"]) / 1e3, (best["made"] + best["first"]) / 1e3
    print(f"  browser: list painted {opened:.2f} s after inspect() was called, messages after {messages:.2f} s")
    frames = f"median frame {best['median']:.1f} ms, slowest {best['slowest']:.0f} ms"
    print(f"  scrolling: {frames}; {best['drawn']} rows drawn")


def _answer(inspector: Inspector, **asked: Any) -> dict[str, Any]:
    (message, _), *_ = inspector.answer(asked)
    assert message["kind"] == asked["kind"], message
    return message


def _seconds(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
