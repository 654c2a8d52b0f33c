"""Tells the trackers of a run what its history got, each in a thread of its own.

A tracker that fails or that takes too long costs one line on standard error and nothing else: the history has it all,
and the next session tells the tracker what it missed. Knows no tracker by name (choose.py does).
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..events import EVENTS, Event
from .history import History
from .tracker import Logged, RunInfo, State, TrackedRun, Tracker, logger, traced_rewards

CLOSE_LIMIT_S = 90.0
"""Seconds that the end of a run waits for its trackers; each has shorter limits of its own."""

Work = Callable[[TrackedRun], None]


class Follower:
    """One tracker of one run: a thread that opens it and tells it everything in order."""

    def __init__(self, tracker: Tracker, run: RunInfo) -> None:
        self.tracker = tracker
        self._run = run
        self._state = State(run.folder / "tracking" / f"{tracker.name}.json")
        self._since = time.time()  # what was logged before is read from the history, the rest comes by `log`
        self._queue: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._ended = False
        name = f"artnb-{tracker.name}-{run.name}"
        self._thread = threading.Thread(target=self._follow, name=name, daemon=True)
        self._thread.start()

    def log(self, logged: Logged) -> None:
        self._put(lambda tracked: self._tell(tracked, logged))

    def configure(self, config: Mapping[str, Any]) -> None:
        values = dict(config)
        self._put(lambda tracked: tracked.configure(values))

    def end(self) -> None:
        """Nothing more comes. `wait` waits for it."""
        self._queue.put(None)

    def wait(self, seconds: float) -> None:
        """Until the tracker has ended, `seconds` at most."""
        self._thread.join(seconds)
        if self._thread.is_alive():
            logger.warning("%s: %s did not end in time; its history is on disk", self._run.name, self.tracker.name)

    def _put(self, work: Work) -> None:
        if not self._ended:
            self._queue.put(work)

    def _follow(self) -> None:
        try:
            tracked = self.tracker.open(self._run, self._state)
            try:
                for logged in self._missed() if self.tracker.resumes else ():
                    self._tell(tracked, logged)
                while (work := self._queue.get()) is not None:
                    work(tracked)
            finally:
                tracked.close()
        except Exception as error:
            logger.warning(
                "%s is not reported to %s (%s: %s); training goes on, the history has everything, and the next session "
                "sends what is missing",
                *(self._run.name, self.tracker.name, type(error).__name__, _first_line(error)),
            )
            logger.debug("the tracker %s failed", self.tracker.name, exc_info=True)
        finally:
            self._ended = True

    def _tell(self, tracked: TrackedRun, logged: Logged) -> None:
        tracked.log(logged)
        if self.tracker.resumes:
            self._state.update(until=logged.time)

    def _missed(self) -> list[Logged]:
        """What the history got since the tracker was last told anything and before it was made, oldest first."""
        import pandas as pd

        frame = History(self._run.folder).metrics_long()
        frame["at"] = (frame["time"] - pd.Timestamp(0, tz="UTC")).dt.total_seconds()
        frame = frame[(frame["at"] > self._state.values.get("until", 0.0)) & (frame["at"] <= self._since)]
        found = [
            Logged(int(step), str(split), dict(zip(part["name"], part["value"], strict=True)), float(part["at"].max()))
            for (step, split), part in frame.groupby(["step", "split"], sort=False)
        ]
        return sorted(found, key=lambda logged: logged.time)


class Tracking:
    """The runs of this process that are followed, by "project/name" as in the events."""

    def __init__(self) -> None:
        self._attaching = threading.Lock()
        self._lock = threading.Lock()
        self._runs: dict[str, tuple[RunInfo, list[Follower]]] = {}
        self._listens = False

    def attach(self, run: RunInfo, trackers: Sequence[Tracker]) -> None:
        """Follow `run` with `trackers`, from its first step on. Called again with the same, it changes nothing."""
        key = f"{run.project}/{run.name}"
        with self._attaching:
            known = self._runs.get(key)
            if known is not None:
                if known[0].folder == run.folder and [f.tracker for f in known[1]] == list(trackers):
                    return
                self.detach(key)
            if not trackers:
                return
            if not self._listens:
                EVENTS.subscribe(self._hear)
                threading.Thread(target=self._close_at_end, name="artnb-tracking-end", daemon=False).start()
                self._listens = True
            followers = [Follower(tracker, run) for tracker in trackers]
            with self._lock:
                self._runs[key] = (run, followers)

    def configure(self, key: str, config: Mapping[str, Any]) -> None:
        """Tell the trackers of a run about its options; a run that is not followed has none."""
        with self._lock:
            _, followers = self._runs.get(key, (None, []))
        for follower in followers:
            follower.configure(config)

    def detach(self, key: str) -> None:
        """End the following of a run and wait for it, CLOSE_LIMIT_S at most. May be called again."""
        with self._lock:
            known = self._runs.pop(key, None)
        if known is not None:
            _end(known[1])

    def close(self) -> None:
        """End the following of every run: at the end of the process."""
        with self._lock:
            runs, self._runs = list(self._runs.values()), {}
        _end([follower for _, followers in runs for follower in followers])

    def _close_at_end(self) -> None:
        """Not by atexit: it would come after the hooks of libraries that a tracker imports, which end what is open.

        The interpreter waits for threads that are no daemons before it calls those hooks.
        """
        threading.main_thread().join()
        self.close()

    def _hear(self, event: Event) -> None:
        if event.kind == "progress" or event.model not in self._runs:
            return
        with self._lock:
            _, followers = self._runs.get(event.model, (None, []))
        if followers:
            groups = event.data.get("groups", ())
            logged = Logged(
                step=event.data["step"],
                split=event.data["split"],
                metrics=dict(event.data["metrics"]),
                time=event.time,
                groups=len(groups),
                rewards=traced_rewards(groups),
            )
            for follower in followers:
                follower.log(logged)


def _end(followers: Sequence[Follower]) -> None:
    deadline = time.monotonic() + CLOSE_LIMIT_S
    for follower in followers:
        follower.end()
    for follower in followers:
        follower.wait(max(0.0, deadline - time.monotonic()))


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


TRACKING = Tracking()
"""This process's followed runs. Handles come and go with notebook cells; the run is one."""
