"""A thread that makes steps while there is something to do, and between two steps the calls that others ask for.

Knows nothing of models: the engine gives it what to do.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar

from ..errors import EngineClosedError

T = TypeVar("T")


class StepThread:
    """`changed` is held around whatever the thread shares with others; `tell` it after each change."""

    def __init__(
        self, name: str, *, busy: Callable[[], bool], step: Callable[[], None], end: Callable[[], None]
    ) -> None:
        """`busy` is asked with `changed` held; `step` must not raise; `end` is called last, in the thread."""
        self.changed = threading.Condition()
        self.closing = False
        self.on_tell: Callable[[], None] = _nothing  # where `step` waits for something that `changed` does not tell
        self._busy = busy
        self._step = step
        self._end = end
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._guests = 0
        self._parked = False  # it is between two steps, and stays there
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def tell(self) -> None:
        """Something changed: the thread, and whoever waits for it, look again."""
        with self.changed:
            self.changed.notify_all()
        self.on_tell()

    def call(self, work: Callable[[], T]) -> Future[T]:
        """Have the thread do it between two steps. Raises: EngineClosedError."""
        done: Future[T] = Future()
        with self.changed:
            if self.closing:
                raise EngineClosedError("the engine is closed")
            self._calls.append((work, done))
            self.tell()
        return done

    @contextmanager
    def hold(self) -> Iterator[None]:
        """No step is made while the block runs. Entering blocks until the one that is being made has ended."""
        with self.changed:
            self._guests += 1
            self.tell()
            self.changed.wait_for(lambda: self._parked or self.closing)
        try:
            yield
        finally:
            with self.changed:
                self._guests -= 1
                self.tell()

    def close(self) -> None:
        """No further step. May be called again, from any thread; blocks until `end` has been called."""
        with self.changed:
            self.closing = True
            self.tell()
        self._thread.join()

    def _run(self) -> None:
        while self._wait():
            while self._calls:
                work, done = self._calls.popleft()
                if done.set_running_or_notify_cancel():
                    try:
                        done.set_result(work())
                    except BaseException as error:
                        done.set_exception(error)
            with self.changed:
                step = self._may_step()
            if step:
                self._step()
        try:
            self._end()
        finally:
            while self._calls:
                _, done = self._calls.popleft()
                if done.set_running_or_notify_cancel():
                    done.set_exception(EngineClosedError("the engine is closed"))

    def _may_step(self) -> bool:
        return not (self._guests or self.closing) and self._busy()

    def _wait(self) -> bool:
        """Until there is something to do. False: the end."""
        with self.changed:
            while not self.closing:
                if self._calls or self._may_step():
                    self._parked = False
                    return True
                self._parked = True
                self.changed.notify_all()
                self.changed.wait()
            self._parked = True
            self.changed.notify_all()
            return False


def _nothing() -> None:
    pass
