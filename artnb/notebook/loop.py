"""Run coroutines from synchronous code: in a script, in a notebook cell, under any event loop.

They always run on one daemon thread with a loop of its own, so a loop that is already running (Jupyter, Colab,
papermill, uvloop) neither matters nor is patched. Not for objects bound to another loop: what a coroutine awaits here
must have been made here.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import contextvars
import inspect
import logging
import threading
from collections.abc import Awaitable, Callable, Iterator
from types import TracebackType
from typing import Any, Self, TypeVar

from ..config import check_number

T = TypeVar("T")
Work = Awaitable[T] | Callable[[], Awaitable[T]]

logger = logging.getLogger("artnb")

CLOSE_LIMIT_S = 10.0
"""Seconds that `close` waits for what it cancelled, and an ended `run` for a coroutine that ignores cancellation."""


TICK_S = 0.2


@contextlib.contextmanager
def ticking() -> Iterator[None]:
    """Inside, the running loop wakes several times a second, so that a cell that only waits can be interrupted.

    ipykernel's signal handler asks the loop to cancel the cell by tornado's add_callback, which (tornado 6.5 to 6.6) is
    a plain call_soon there: it does not wake a loop that sleeps until a socket or a thread says something, and the stop
    button seems dead.
    """
    loop = asyncio.get_running_loop()
    timers: list[asyncio.TimerHandle] = []

    def tick() -> None:
        timers[:] = [loop.call_later(TICK_S, tick)]

    tick()
    try:
        yield
    finally:
        timers[0].cancel()


class LoopFuture(concurrent.futures.Future[T]):
    """The result of a coroutine on a loop thread. Waiting for it on that very thread raises instead of hanging."""

    def __init__(self, owner: LoopThread) -> None:
        super().__init__()
        self._owner = owner

    def result(self, timeout: float | None = None) -> T:
        self._check()
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._check()
        return super().exception(timeout)

    def _check(self) -> None:
        if not self.done():
            self._owner.refuse_own_thread()


class LoopThread:
    """One daemon thread running one event loop, started at the first use. `close` ends both; later use starts anew."""

    def __init__(self, name: str = "artnb-loop") -> None:
        self.name = name
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._workers: concurrent.futures.ThreadPoolExecutor | None = None

    @property
    def running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def refuse_own_thread(self) -> None:
        """Raise RuntimeError when called on the loop's own thread, where waiting would never end."""
        if threading.current_thread() is self._thread:
            raise RuntimeError(
                f"a synchronous helper was called on the event-loop thread {self.name!r} that has to do its work; "
                "it would wait for itself. Use `await` and the async method here"
            )

    def spawn(self, work: Work[T]) -> LoopFuture[T]:
        """Start a coroutine (or what makes one) and return at once; cancelling the future cancels the coroutine.

        The coroutine sees the caller's context variables, as a copy.
        """
        return self._submit(work)[0]

    def run(self, work: Work[T], timeout: float | None = None) -> T:
        """Run a coroutine to its end and return its result, or raise what it raised.

        `timeout` in seconds: the coroutine is cancelled, ends, and TimeoutError is raised. An interrupt of the waiting
        thread does the same and passes through. Raises RuntimeError on the loop's own thread.
        """
        try:
            self.refuse_own_thread()
            if timeout is not None:
                check_number("run_sync", "timeout", timeout, above=0.0)
        except BaseException:
            if asyncio.iscoroutine(work):
                work.close()
            raise
        future, cancel = self._submit(work)
        try:
            concurrent.futures.wait([future], timeout)
        except BaseException:  # KeyboardInterrupt, or what a signal handler raised
            cancel()
            self._wait_for_end(future)
            raise
        if not future.done():
            cancel()
            self._wait_for_end(future)
            raise TimeoutError(f"not finished after {timeout:g} s; it was cancelled")
        return future.result()

    def close(self) -> None:
        """Cancel what runs, wait for it, end the thread and close the loop. Repeatable."""
        self.refuse_own_thread()
        with self._lock:
            loop, thread, workers = self._loop, self._thread, self._workers
            self._loop = self._thread = self._workers = None
        atexit.unregister(self.close)
        if loop is None or thread is None or workers is None or not thread.is_alive():
            return
        asyncio.run_coroutine_threadsafe(_end_all(), loop).result()
        workers.shutdown()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _submit(self, work: Work[T]) -> tuple[LoopFuture[T], Callable[[], None]]:
        """The future, and a function that cancels the task itself: the future is then done when the task has ended."""
        future: LoopFuture[T] = LoopFuture(self)
        task: asyncio.Task[T] | None = None
        context = contextvars.copy_context()

        def begin() -> None:
            nonlocal task
            coroutine = work if asyncio.iscoroutine(work) else _await(work)
            task = loop.create_task(coroutine, context=context)
            task.add_done_callback(lambda ended: _copy_result(ended, future))

        def cancel() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(lambda: task is not None and task.cancel())

        with self._lock:  # so that `close` comes either before all of this or after `begin`
            loop = self._ensure()
            loop.call_soon_threadsafe(begin)
        future.add_done_callback(lambda ended: cancel() if ended.cancelled() else None)
        return future, cancel

    def _ensure(self) -> asyncio.AbstractEventLoop:
        if self._loop is None or not self.running:  # not running: also after a fork, which keeps no thread
            self._loop = asyncio.new_event_loop()
            # Not the loop's own: to end that, asyncio starts a thread, and from Python 3.12 on none can be at exit.
            self._workers = concurrent.futures.ThreadPoolExecutor(thread_name_prefix=f"{self.name}-worker")
            self._loop.set_default_executor(self._workers)
            self._thread = threading.Thread(target=_run_loop, args=(self._loop,), name=self.name, daemon=True)
            self._thread.start()
            atexit.register(self.close)
        return self._loop

    def _wait_for_end(self, future: LoopFuture[Any]) -> None:
        if not concurrent.futures.wait([future], CLOSE_LIMIT_S).done:
            logger.error("a coroutine ignores its cancellation for %g s; it was left running", CLOSE_LIMIT_S)


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    stopped = False
    try:
        while not stopped:
            try:
                loop.run_forever()
                stopped = True
            except (KeyboardInterrupt, SystemExit):
                # Raised by a coroutine: asyncio hands it to its future, where the waiting thread gets it, and breaks
                # out of the loop as well. The other coroutines must go on.
                logger.debug("a coroutine raised an interrupt; the loop goes on", exc_info=True)
    finally:
        asyncio.set_event_loop(None)
        loop.close()


async def _end_all() -> None:
    loop = asyncio.get_running_loop()
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    if tasks:
        _, pending = await asyncio.wait(tasks, timeout=CLOSE_LIMIT_S)
        if pending:
            logger.error("%d coroutines ignore their cancellation; the loop is closed over them", len(pending))
    await loop.shutdown_asyncgens()


async def _await(work: Work[T]) -> T:
    made = work() if callable(work) else work
    if not inspect.isawaitable(made):
        raise TypeError(f"run_sync takes a coroutine or a function that makes one, not {type(made).__name__}")
    return await made


def _copy_result(task: asyncio.Task[T], future: LoopFuture[T]) -> None:
    if task.cancelled():
        future.cancel()
        future.set_running_or_notify_cancel()
        return
    error = task.exception()
    if not future.set_running_or_notify_cancel():
        return  # cancelled by its holder, who does not want the result
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(task.result())


SHARED = LoopThread()
"""The loop thread of this process. It starts at the first use and ends with the interpreter."""


def run_sync(work: Work[T], timeout: float | None = None) -> T:
    """`LoopThread.run` on the process's shared loop thread.

    reply = run_sync(client.chat.completions.create(...))
    """
    return SHARED.run(work, timeout)


def spawn(work: Work[T]) -> LoopFuture[T]:
    """`LoopThread.spawn` on the process's shared loop thread: start now, wait later with `.result()`."""
    return SHARED.spawn(work)
