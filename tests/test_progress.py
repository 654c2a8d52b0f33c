"""The progress line: terminal, pipe, notebook, nothing; and a display that fails does not stop the work."""

from __future__ import annotations

import asyncio
import io
import sys
import threading
from typing import Any

import pytest
import tqdm.auto
import tqdm.notebook

from artnb.notebook.meter import Meter
from artnb.notebook.progress import Progress
from artnb.trajectories import Trajectory, TrajectoryGroup


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_one_line_with_what_is_told_last() -> None:
    stream = Terminal()
    with Progress(4, "gather", "rollout", file=stream) as progress:
        for i in range(4):
            progress.update(1, reward=i / 4, exceptions=i)
    last = stream.getvalue().split("\r")[-1]
    assert "gather: 100%" in last and "4/4" in last and "rollout" in last
    assert "reward=0.75" in last and "exceptions=3" in last
    assert stream.getvalue().count("\n") == 1


def test_a_pipe_gets_few_lines() -> None:
    stream = io.StringIO()
    with Progress(1000, "gather", file=stream) as progress:
        for _ in range(1000):
            progress.update()
    assert "1000/1000" in stream.getvalue()
    assert stream.getvalue().count("\r") <= 4  # the first, the last, and what ten seconds bring


def test_without_a_description_it_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(3) as progress:
        progress.update(2, reward=1.0)
        progress.set_total(5)
    assert capsys.readouterr() == ("", "")
    assert (progress.n, progress.total) == (2, 5)


def test_no_total_a_changed_total_and_a_late_start() -> None:
    stream = Terminal()
    with Progress(None, "read", file=stream) as progress:
        progress.update(5)
    assert "5it" in stream.getvalue()
    stream = Terminal()
    with Progress(1, "grow", file=stream, initial=1) as progress:
        progress.set_total(3)
        progress.update(2)
    assert "3/3" in stream.getvalue()


def test_close_can_be_repeated_and_an_early_end_is_shown_as_it_is() -> None:
    stream = Terminal()
    progress = Progress(4, "gather", file=stream)
    progress.update(1)
    progress.close()
    progress.close()
    progress.update(1)  # after the end: counted, not shown
    assert "1/4" in stream.getvalue() and "2/4" not in stream.getvalue()


@pytest.mark.parametrize("broken", ["closed", "oserror"])
def test_a_stream_that_fails_does_not_stop_the_work(broken: str) -> None:
    class Broken(Terminal):
        fails = False

        def write(self, text: str) -> int:
            if self.fails:
                raise OSError("pipe is gone")
            return super().write(text)

    stream = Broken()
    with Progress(4, "gather", file=stream) as progress:
        if broken == "closed":
            stream.close()
        else:
            stream.fails = True
        for _ in range(4):
            progress.update()
    assert progress.n == 4


def test_streams_without_fileno_isatty_or_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    class Minimal:
        """What some notebooks put in the place of standard error."""

        encoding = "utf-8"
        text = ""

        def write(self, text: str) -> None:
            self.text += text

        def flush(self) -> None:
            pass

    stream = Minimal()
    monkeypatch.setattr(sys, "stderr", stream)
    with Progress(2, "gather") as progress:
        progress.update(2)
    assert "2/2" in stream.text
    monkeypatch.setattr(sys, "stderr", None)
    with Progress(2, "gather") as progress:
        progress.update(2)


def test_in_a_notebook_without_a_front_end_it_is_text(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Refuses(tqdm.notebook.tqdm_notebook):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.disable = True
            raise ImportError("IProgress not found. Please update jupyter and ipywidgets.")

    monkeypatch.setattr(tqdm.auto, "tqdm", Refuses)
    with Progress(2, "gather") as progress:
        progress.update(2, reward=0.5)
    assert "2/2" in capsys.readouterr().err

    class NobodyListens(tqdm.notebook.tqdm_notebook):
        """Outside a kernel a widget's messages go nowhere."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "display": False})
            self.container.close()

    monkeypatch.setattr(tqdm.auto, "tqdm", NobodyListens)
    with Progress(2, "gather") as progress:
        progress.update(2, reward=0.5)
    assert "reward=0.5" in capsys.readouterr().err


def test_it_starts_no_thread_and_changes_nobody_elses_bars() -> None:
    before = threading.active_count()
    interval = tqdm.std.tqdm.monitor_interval
    with Progress(2, "gather", file=Terminal()) as progress:
        progress.update()
        assert threading.active_count() == before
    assert tqdm.std.tqdm.monitor_interval == interval


async def test_a_worker_thread_updates_through_the_loop_that_made_the_bar() -> None:
    stream = Terminal()
    drawn_in: set[int] = set()

    class Watched(Terminal):
        def write(self, text: str) -> int:
            drawn_in.add(threading.get_ident())
            return stream.write(text)

    with Progress(50, "train", file=Watched()) as progress:
        await asyncio.to_thread(lambda: [progress.update(1, loss=0.5) for _ in range(50)])
    assert progress.n == 50 and "50/50" in stream.getvalue() and "loss=0.5" in stream.getvalue()
    assert drawn_in == {threading.get_ident()}


def test_the_meter_shows_means_counts_and_totals() -> None:
    for total_tokens, expected in ((False, 15.0), (True, 30)):
        meter = Meter(Progress(3), total_tokens=total_tokens, max_metrics=1)
        group = TrajectoryGroup(
            [
                Trajectory(reward=1.0, metrics={"completion_tokens": 10, "won": True, "turns": 3}),
                Trajectory(reward=None, metrics={"completion_tokens": 20, "won": False}),
                Trajectory(reward=float("nan")),
                ValueError("x"),
            ]
        )
        meter.given(group)
        shown = meter.postfix()
        assert list(shown) == ["reward", "exceptions", "completion_tokens", "tok/s", "won"]
        assert (shown["reward"], shown["exceptions"], shown["completion_tokens"], shown["won"]) == (
            1.0,
            1,
            expected,
            0.5,
        )
