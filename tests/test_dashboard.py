"""The dashboard's Python side: what it knows, when it sends, how much, and what a saved notebook keeps.

How it looks and moves is test_dashboard_page.py's."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agents import even_groups

import artnb as art
from artnb.errors import ConfigError
from artnb.events import EVENTS, Event
from artnb.notebook.charts import LOSS_NOTE, charts
from artnb.notebook.courier import Courier
from artnb.notebook.dashboard import _OPEN, WIDGET, Dashboard, _listen
from artnb.notebook.phases import Phases
from artnb.notebook.run_view import BLOCK, MAX_POINTS, RunView
from artnb.notebook.static import static_html
from artnb.tracking.history import History

NASTY = "<img src=x onerror=alert(1)>"


@pytest.fixture(autouse=True)
def nothing_listens_afterwards() -> Iterator[None]:
    before = len(EVENTS._listeners)
    yield
    for board in list(_OPEN.values()):
        board.close()
    assert len(EVENTS._listeners) == before, "a closed dashboard still listens"


def make(folder: Path, name: str = "agent") -> art.TrainableModel:
    return art.TrainableModel(name, "tests", "no-such-model", base_path=folder)


def values(step: int, **more: float) -> dict[str, float]:
    return {"reward": 0.1 * step, "trained": 1.0, "groups": 8.0, "groups_left_out/all_equal": 0.25, **more}


def tell(step: int, split: str = "train", **metrics: float) -> None:
    EVENTS.emit("step", "tests/agent", step=step, split=split, metrics=metrics, reasons={}, notes=[])


def progress(phase: str, done: int, total: int | None, seconds: float, closed: bool = False) -> dict[str, Any]:
    shown = {"reward": 0.5}
    return {
        "phase": phase,
        "desc": phase,
        "unit": "rollout",
        "done": done,
        "total": total,
        "seconds": seconds,
        "closed": closed,
        "shown": shown,
    }


# What it knows -------------------------------------------------------------------------------------


async def test_events_and_history_give_the_same_run(tiny_base: Path, tmp_path: Path) -> None:
    """Real steps, GRPO, supervised and without signal: what was heard is what a re-opened notebook reads."""
    heard = RunView("heard")

    def listen(event: Event) -> None:
        if event.kind != "progress":
            heard.add(event.data["step"], event.data["split"], event.data["metrics"])

    leave = EVENTS.subscribe(listen)
    try:
        async with art.LocalBackend(path=tmp_path, device="cpu", verbose=False) as backend:
            model = art.TrainableModel("agent", "tests", tiny_base, lora=art.LoraConfig(r=2))
            await model.register(backend)
            groups = await even_groups(model, 0)
            await model.train(groups)
            await model.log(await even_groups(model, 1, groups=1), split="val")
            for trajectory in groups[0]:
                trajectory.reward = 1.0
            await model.train([groups[0]])
            await model.train_sft(groups[0].trajectories[:2])
            history = model._history()
    finally:
        leave()
    read = RunView("read")
    read.load(history)
    assert heard.series()["steps"] == read.series()["steps"] == [1, 2, 3]
    assert heard.rows == read.rows
    assert heard.summary() == read.summary()
    assert read.summary()["last_groups"] == 0 and read.summary()["reasons"] == {"all rewards equal": 1}
    assert read.summary()["tokens"] >= 8 * 12
    for name in ("sampling_tokens_per_second", "memory_bytes", "engine_kv_bytes", "seconds_swap"):
        assert read.rows[1][f"train/{name}"] > 0, name


def test_every_chart_draws_what_a_real_step_logs() -> None:
    specs = {chart["id"]: chart for chart in charts()}
    assert specs["loss"]["note"] == LOSS_NOTE and "construction" in LOSS_NOTE  # report 22
    assert specs["reward"]["series"][0]["spread"] == ["train/reward_std_in_groups"]
    for chart in ("solved", "kl", "entropy", "ratio", "grad", "speed", "memory"):
        assert specs[chart]["series"], chart
    mine = charts("won_games", ["score", "val/score"])
    assert mine[1]["series"][0]["columns"] == ["train/won_games"]
    assert [len(chart["series"]) for chart in mine[-2:]] == [2, 1]


def test_it_opens_from_disk_and_follows_what_is_logged(tmp_path: Path) -> None:
    model = make(tmp_path)
    model._history().log_metrics(1, "train", values(1))
    board = model.dashboard(steps=4, metrics=["score"])
    assert board.recent["0"]["columns"]["train/reward"] == [0.1]
    tell(2, **values(2))
    board._courier.now()
    assert board.recent["0"]["steps"] == [1, 2] and board.runs[0]["summary"]["step"] == 2
    assert board.runs[0]["summary"]["reasons"] == {"all rewards equal": 4}
    EVENTS.emit("log", "tests/agent", step=1, split="val", metrics={"reward": 0.7, "broken": float("nan")})
    EVENTS.emit("log", "tests/other", step=9, split="val", metrics={"reward": 0.7})
    board._courier.now()
    assert board.recent["0"]["columns"]["val/reward"] == [0.7, None]
    assert "val/broken" not in board.recent["0"]["columns"] and board.recent["0"]["steps"] == [1, 2]


def test_a_run_that_went_back_forgets_the_later_steps(tmp_path: Path) -> None:
    model = make(tmp_path)
    history = model._history()
    for step in range(1, 6):
        history.log_metrics(step, "train", values(step))
    board = model.dashboard()
    history.truncate_after(2)  # a resume at checkpoint 2
    history.log_metrics(3, "train", values(30))
    tell(3, **values(30))
    board._courier.now()
    assert board.recent["0"]["steps"] == [1, 2, 3]


def test_runs_are_laid_over_each_other(tmp_path: Path) -> None:
    models = [make(tmp_path, name) for name in ("agent", "other", "third")]
    for number, model in enumerate(models):
        model._history().log_metrics(1, "train", {"reward": float(number)})
    board = models[0].dashboard(compare=[models[1], models[2].folder])
    assert [run["name"] for run in board.runs] == ["tests/agent", "tests/other", "third"]
    assert [board.recent[i]["columns"]["train/reward"] for i in "012"] == [[0], [1], [2]]
    EVENTS.emit("log", "tests/other", step=2, split="train", metrics={"reward": 5.0})
    board._courier.now()
    assert board.recent["1"]["steps"] == [1, 2] and board.recent["0"]["steps"] == [1]
    assert list(models[0].dashboard().recent) == ["0"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"compare": "folder"}, "compare is a list"),
        ({"compare": [3]}, "not a int"),
        ({"compare": ["/nowhere"]}, "no history"),
        ({"theme": "drak"}, "dark"),
        ({"steps": 0}, "steps"),
    ],
)
def test_a_wrong_option_is_named_and_leaves_nothing_behind(options: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        make(tmp_path).dashboard(**options)


def test_phases_and_what_is_left() -> None:
    phases = Phases(planned_steps=10)
    phases.progress(progress("work", 0, 10, 0.0) | {"unit": "step"}, 0.0)
    phases.progress(progress("gather", 4, 16, 8.0), 8.0)
    head = phases.head(10.0, None)
    assert (head["phase"], head["seconds"], head["left"]) == ("gather", 10, 30)
    assert head["shown"] == {"reward": 0.5} and head["run_left"] is None
    phases.progress(progress("gather", 16, 16, 32.0, closed=True), 32.0)
    phases.progress(progress("train", 3, None, 5.0), 37.0)
    assert phases.head(37.0, None)["left"] is None, "no total, and no step before to compare with"
    phases.progress(progress("train", 9, None, 20.0, closed=True), 52.0)
    phases.step(1, 52.0)
    assert phases.head(52.0, 1)["before"] == {"gather": 32, "train": 20}
    phases.progress(progress("train", 3, None, 5.0), 90.0)
    assert phases.head(90.0, 1)["left"] == 15
    phases.step(2, 112.0)
    assert phases.head(122.0, 2)["run_left"] == 8 * 60 - 10
    assert Phases().head(0.0, None)["phase"] is None


def test_nothing_is_estimated_while_nothing_runs() -> None:
    phases = Phases(planned_steps=10)
    for step in (1, 2):
        phases.progress(progress("train", 1, 4, 1.0), 60.0 * step - 10)
        phases.step(step, 60.0 * step)
    assert phases.head(121.0, 2)["run_left"] == 8 * 60 - 1
    phases.progress(progress("train", 4, 4, 12.0, closed=True), 122.0)  # e.g. the cell was interrupted
    head = phases.head(500.0, 2)
    assert head["phase"] is head["run_left"] is None and not {"seconds", "left"} & set(head)
    assert head["worked"] == 12, "what the phases took, not the time since"


async def test_a_gather_is_shown_before_its_first_rollout_ends(tmp_path: Path) -> None:
    board = make(tmp_path).dashboard()
    board._courier.interval = 0.0
    seen: list[Any] = []

    async def rollout() -> art.Trajectory:
        seen.append((board.head["phase"], board.head["done"]))
        return art.Trajectory(reward=0.0)

    await art.gather_trajectories([rollout()], pbar_desc=None)
    assert seen == [("gather", 0)] and board.head["phase"] is None


# When it sends -------------------------------------------------------------------------------------


async def test_workers_are_served_by_the_loop_that_made_it() -> None:
    """Colab shows no change that another thread makes (report 78)."""
    threads: list[int] = []
    courier = Courier(lambda: threads.append(threading.get_ident()), interval=0.0)

    def work() -> None:
        for _ in range(200):
            courier.poke()

    await asyncio.gather(*(asyncio.to_thread(work) for _ in range(4)))
    await asyncio.sleep(0.01)
    assert threads and set(threads) == {threading.get_ident()}


async def test_what_comes_too_soon_is_sent_later_once() -> None:
    sent: list[None] = []
    courier = Courier(lambda: sent.append(None), interval=0.05)
    for _ in range(100):
        courier.poke()
    assert len(sent) == 1
    await asyncio.sleep(0.2)
    assert len(sent) == 2


def test_without_a_loop_whoever_pokes_sends() -> None:
    sent: list[int] = []
    courier = Courier(lambda: sent.append(threading.get_ident()), interval=0.0)
    worker = threading.Thread(target=courier.poke)
    worker.start()
    worker.join()
    courier.poke()
    assert len(sent) == 2


async def test_a_worker_sends_by_itself_under_a_blocked_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("artnb.notebook.courier.STALLED_S", -1.0)
    sent: list[int] = []
    courier = Courier(lambda: sent.append(threading.get_ident()), interval=0.0)

    def work() -> None:
        courier.poke()  # asks the loop
        courier.poke()  # which sits in worker.join() below

    worker = threading.Thread(target=work)
    worker.start()
    worker.join()
    assert sent == [worker.ident]


async def test_the_head_changes_while_a_thread_works(tmp_path: Path) -> None:
    board = make(tmp_path).dashboard()
    board._courier.interval = 0.0
    seen: list[Any] = []
    board.observe(lambda change: seen.append((threading.get_ident(), change["new"].get("done"))), "head")

    def work() -> None:
        for done in range(1, 4):
            EVENTS.emit("progress", **progress("train", done, 3, 1.0))

    for _ in range(2):
        await asyncio.to_thread(work)
        await asyncio.sleep(0.01)
    assert seen[-1] == (threading.get_ident(), 3) and {thread for thread, _ in seen} == {threading.get_ident()}


# How much it sends, and who listens ----------------------------------------------------------------


def test_a_step_of_a_long_run_is_a_small_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    board = make(tmp_path).dashboard()
    board._courier.interval = 1e9  # only when told
    messages: list[int] = []
    monkeypatch.setattr(
        Dashboard, "_send", lambda self, msg, buffers=None: messages.append(len(json.dumps(msg))), raising=True
    )
    many = {f"metric_{i}": i + 0.123456789 for i in range(60)}
    view = board._runs[0].view
    for step in range(3000):
        view.add(step, "train", {**values(step), **many})
    board._courier.now()
    messages.clear()
    for step in range(3000, 3000 + 2 * BLOCK):
        tell(step, **values(step), **many)
        board._courier.now()
        EVENTS.emit("progress", **progress("gather", 1, 2, 3.0))
        board._courier.now()
    small = sorted(messages)[: -2 * 2]
    assert max(small) < 30_000, "32 steps of 64 metrics at most"
    assert sorted(messages)[len(messages) // 4] < 1_000, "progress alone sends the head"
    assert max(messages) < 450_000 and len(board.past["0"]["steps"]) <= MAX_POINTS


def test_blocks_together_are_the_whole_run() -> None:
    view, blocks = RunView("run"), {"past": None, "recent": None}
    for step in range(3 * BLOCK + 5):
        view.add(step, "train", {"reward": float(step)})
        past, recent = view.changes()
        blocks["past"] = past if past is not None else blocks["past"]
        blocks["recent"] = recent if recent is not None else blocks["recent"]
        assert blocks["past"]["steps"] + blocks["recent"]["steps"] == list(range(step + 1))
    assert view.changes() == (None, None)
    view.add(2, "val", {"reward": 1.0})  # late, in the part that was sent long ago
    past, recent = view.changes()
    assert past is not None and past["columns"]["val/reward"][2] == 1 and recent is None


def test_a_cell_that_runs_again_leaves_one_listener(tmp_path: Path) -> None:
    before = len(EVENTS._listeners)
    boards = {id(make(tmp_path).dashboard()) for _ in range(3)}  # the cell that makes the model runs again, too
    assert len(boards) == 1 and len(EVENTS._listeners) == before + 1
    board = make(tmp_path).dashboard()
    board.close()
    board.close()
    assert len(EVENTS._listeners) == before
    tell(1, **values(1))  # nobody hears it
    fresh = make(tmp_path).dashboard()
    assert fresh is not board and len(EVENTS._listeners) == before + 1


def test_listening_keeps_nothing_alive() -> None:
    class Owner:
        heard = 0

        def hear(self, event: Event) -> None:
            self.heard += 1

    owner = Owner()
    leave = _listen(EVENTS.subscribe, owner, "hear")
    weakref.finalize(owner, leave)
    EVENTS.emit("log", step=1)
    assert owner.heard == 1
    before = len(EVENTS._listeners)
    del owner
    gc.collect()
    assert len(EVENTS._listeners) == before - 1


# What is saved -------------------------------------------------------------------------------------


def logged_run(folder: Path) -> art.TrainableModel:
    model = make(folder, "a$b")
    history = model._history()
    for step in (1, 2):
        history.log_metrics(step, "train", values(step))
    good = art.Trajectory(messages_and_choices=[{"role": "user", "content": f"{NASTY} good"}], reward=0.9)
    bad = art.Trajectory(messages_and_choices=[{"role": "user", "content": "bad" * 9000}], reward=-0.5)
    history.log_trajectories(2, "train", [art.TrajectoryGroup([bad, good])])
    return model


def test_the_static_picture_has_curve_best_and_worst_and_no_foreign_html(tmp_path: Path) -> None:
    page = static_html(logged_run(tmp_path), title=NASTY)
    assert page.count("data:image/png;base64,") == 1 and "<script" not in page
    assert "Best" in page and "0.9" in page and "Worst" in page and "−0.5" in page
    assert NASTY not in page and "&lt;img src=x" in page
    assert len(page) < 80_000, "a long text is cut"


def test_without_a_step_the_picture_says_so(tmp_path: Path) -> None:
    page = static_html(History(tmp_path), title=NASTY)
    assert "no step with a reward yet" in page and "No trajectories yet" in page and NASTY not in page


def test_the_bundle_has_a_view_and_a_picture(tmp_path: Path) -> None:
    board = logged_run(tmp_path).dashboard()
    bundle = board._repr_mimebundle_()
    assert bundle[WIDGET]["model_id"] == board.model_id
    assert "data:image/png" in bundle["text/html"] and board.static_class in bundle["text/html"]
    assert len(bundle["text/plain"]) < 100
    board.close()
    assert WIDGET not in board._repr_mimebundle_()
