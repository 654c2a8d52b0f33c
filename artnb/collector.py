"""Finished, scored trajectories of one model, kept by group until a step trains on them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Callable, Hashable, Iterator
from contextvars import ContextVar

from openai.types.chat.chat_completion import Choice

from .trajectories import Trajectory, TrajectoryGroup


def group_key(trajectory: Trajectory) -> str:
    """What trajectories of one scenario share: a hash of the tools and the messages before the first choice."""
    opening = []
    for item in trajectory.messages_and_choices:
        if isinstance(item, Choice):
            break
        opening.append(item)
    text = json.dumps([trajectory.tools or [], opening], sort_keys=True, default=str)
    return hashlib.sha256(text.encode("utf-8", errors="surrogatepass")).hexdigest()


collected: ContextVar[bool] = ContextVar("artnb_collected", default=True)
"""Whether what scopes capture here waits for training."""


@contextlib.contextmanager
def not_collected() -> Iterator[None]:
    """Inside, scopes record as ever, but what they captured is not handed to any collector: it is only looked at."""
    token = collected.set(False)
    try:
        yield
    finally:
        collected.reset(token)


class Collector:
    """Collects trajectories and hands out groups. Any thread may call it.

    >>> collector = Collector()
    >>> collector.add(Trajectory(reward=1.0), group="a"); collector.add(Trajectory(reward=0.0), group="a")
    >>> collector.pop_ready(group_size=2)
    [TrajectoryGroup(2 trajectories, rewards [1, 0])]
    """

    def __init__(self) -> None:
        self.on_add: Callable[[], None] | None = None  # called after each add, in the thread that added
        self._leave: Callable[[], None] | None = None  # tells the present consumer that another one has come
        self._lock = threading.Lock()
        self._groups: dict[Hashable, list[Trajectory]] = {}

    def add(self, trajectory: Trajectory, group: Hashable = None) -> None:
        """Keep a trajectory; without `group` it is grouped by `group_key`."""
        key = ("derived", group_key(trajectory)) if group is None else ("given", group)
        with self._lock:
            self._groups.setdefault(key, []).append(trajectory)
        if self.on_add is not None:
            self.on_add()

    def take_over(self, on_add: Callable[[], None], leave: Callable[[], None]) -> None:
        """Become the one consumer: `on_add` is called from now on, and the former consumer's `leave` now."""
        with self._lock:
            former, self._leave, self.on_add = self._leave, leave, on_add
        if former is not None:
            former()

    def give_up(self, leave: Callable[[], None]) -> None:
        """End what `take_over` with this `leave` began; nothing if another has taken over since."""
        with self._lock:
            if self._leave == leave:
                self._leave = self.on_add = None

    def __len__(self) -> int:
        """Trajectories that wait."""
        with self._lock:
            return sum(map(len, self._groups.values()))

    def count_ready(self, group_size: int) -> int:
        """How many complete groups of `group_size` wait."""
        with self._lock:
            return sum(len(waiting) // group_size for waiting in self._groups.values())

    def pop_ready(self, group_size: int, max_groups: int | None = None) -> list[TrajectoryGroup]:
        """Take complete groups of exactly `group_size`, oldest first; the rest stays."""
        taken: list[TrajectoryGroup] = []
        with self._lock:
            for key, waiting in list(self._groups.items()):
                while len(waiting) >= group_size and (max_groups is None or len(taken) < max_groups):
                    taken.append(_group(key, waiting[:group_size]))
                    del waiting[:group_size]
                if not waiting:
                    del self._groups[key]
        return taken

    def pop_all(self, min_size: int = 2) -> list[TrajectoryGroup]:
        """Take every group of at least `min_size`, whole; smaller ones stay."""
        with self._lock:
            ready = {key: waiting for key, waiting in self._groups.items() if len(waiting) >= min_size}
            for key in ready:
                del self._groups[key]
        return [_group(key, waiting) for key, waiting in ready.items()]

    def __repr__(self) -> str:
        return f"<Collector: {len(self)} trajectories in {len(self._groups)} groups>"


def _group(key: Hashable, trajectories: list[Trajectory]) -> TrajectoryGroup:
    assert isinstance(key, tuple)
    kind, name = key
    return TrajectoryGroup(trajectories, metadata={"group": str(name)} if kind == "given" else {})
