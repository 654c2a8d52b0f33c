"""Supervised tasks: slots, time limits, recorded failures, and nothing left running afterwards.

What gather.py and batches.py share. A piece of work ends as a result or as the exception it raised; when the
supervisor leaves, for whatever reason, everything that it started is cancelled and awaited, and coroutines that were
never started are closed. Knows nothing of trajectories; cannot end work that blocks the event loop itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from types import TracebackType
from typing import Any, TypeVar

from .config import check_number
from .errors import RolloutError, RolloutTimeoutError
from .limits import Failures, Key, Slots
from .notebook.loop import ticking

T = TypeVar("T")
logger = logging.getLogger("artnb")

GRACE_S = 5.0
"""Seconds that cancelled work has for its cleanup before it is cancelled once more."""
ROUNDS = 3
"""How often a rollout is cancelled before it is given up. Each level above waits one round longer."""


async def drain(tasks: Iterable[asyncio.Future[Any]], *, rounds: int = ROUNDS) -> None:
    """Cancel `tasks` and wait until they have ended.

    A task that is still running after `rounds` cancellations, GRACE_S apart, is named in the log and left: waiting for
    ever would wedge the notebook. A cancellation of the caller meanwhile is raised when all is done.
    """
    tasks = list(tasks)
    pending = {task for task in tasks if not task.done()}
    interrupt: asyncio.CancelledError | None = None
    loop = asyncio.get_running_loop()
    for _ in range(rounds):
        for task in pending:
            task.cancel()
        deadline = loop.time() + GRACE_S
        while pending and (left := deadline - loop.time()) > 0:
            try:
                _, pending = await asyncio.wait(pending, timeout=left)
            except asyncio.CancelledError as error:
                interrupt = error
                pending = {task for task in pending if not task.done()}
        if not pending:
            break
    for task in tasks:
        if task.done() and not task.cancelled():
            task.exception()  # marks it as seen: its result is read elsewhere or no longer wanted
    if pending:
        names = ", ".join(sorted(task.get_name() if isinstance(task, asyncio.Task) else repr(task) for task in pending))
        logger.error("still running after %d cancellations, left alone: %s", rounds, names)
    if interrupt is not None:
        raise interrupt


def close_unstarted(work: object) -> None:
    """Close a coroutine, or a pending group of them, that will never be awaited."""
    close = getattr(work, "close", None)
    if callable(close):
        close()


class Lease:
    """The slot and the timer of one running piece of work."""

    def __init__(self, supervisor: Supervisor, key: Key) -> None:
        self.supervisor = supervisor
        self.key = key
        self.handed_over = False
        self.late = False
        self.on_late: Callable[[], None] | None = None
        self.timer: asyncio.TimerHandle | None = None
        self._held = True

    def give_up(self) -> None:
        """Stop the timer and free the slot; harmless when done already."""
        if self.timer is not None:
            self.timer.cancel()
        if self._held:
            self._held = False
            self.supervisor.slots.release()

    def note_late(self) -> None:
        """The work returned after it had been ended at its limit."""
        self.late = True
        self.supervisor.late += 1
        if self.on_late is not None:
            self.on_late()

    def hand_over(self, rollouts: int) -> None:
        """A group's coroutine starts `rollouts` of its own: those are what is limited and timed, not their waiter."""
        self.supervisor.add_total(rollouts if self.handed_over else rollouts - 1)
        self.handed_over = True
        self.give_up()


enclosing: contextvars.ContextVar[Lease | None] = contextvars.ContextVar("artnb_enclosing_group", default=None)
"""Inside a coroutine that makes a group under a gather: that gather's lease. None inside a rollout."""


class Supervisor:
    """Runs work under one gather's limits. Use as `async with`; leaving it drains everything.

    `timeout`: seconds each piece of work may take, from its own start. `on_end(outcome, lease)` is called for every
    result or exception. `on_total(total)` is called when more rollouts turn up than were announced.
    """

    def __init__(
        self,
        *,
        total: int = 0,
        max_exceptions: float = 0,
        timeout: float | None = None,
        slots: Slots | None = None,
        on_end: Callable[[Any, Lease], None] | None = None,
        on_total: Callable[[int], None] | None = None,
    ) -> None:
        if timeout is not None:
            check_number("gather", "timeout", timeout, above=0.0)
        self.failures = Failures(max_exceptions)
        self.slots = slots or Slots(None)
        self.timeout = timeout
        self.total = total
        self.late = 0
        self.fatal: BaseException | None = None
        self.closed = False
        self._on_end = on_end
        self._on_total = on_total
        self._ticking = contextlib.ExitStack()
        self._unstarted: dict[int, object] = {}
        self._jobs: set[asyncio.Task[Any]] = set()
        self._stragglers: set[asyncio.Future[Any]] = set()

    async def __aenter__(self) -> Supervisor:
        self._ticking.enter_context(ticking())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        with self._ticking:
            await self.close()
        if self.fatal is not None and (error is None or isinstance(error, Exception)):
            raise self.fatal from self.fatal.__cause__
        if self.failures.count and error is None:
            logger.warning("%d of %d rollouts failed:\n%s", self.failures.count, self.total, self.failures.table())
        if self.late:
            logger.warning("%d rollouts returned after their time limit; their results were dropped", self.late)

    async def close(self) -> None:
        """Cancel and await all that runs, close what never started. Repeatable."""
        self.closed = True
        try:
            await drain(self._jobs, rounds=ROUNDS + 2)
        finally:
            for work in self._unstarted.values():
                close_unstarted(work)
            self._unstarted.clear()
            await drain(self._stragglers)

    def adopt(self, works: Iterable[object]) -> None:
        """Be answerable for `works`: whichever is not started by the end is closed."""
        self._unstarted.update((id(work), work) for work in works)

    def started(self, work: object) -> None:
        self._unstarted.pop(id(work), None)

    def add_total(self, rollouts: int) -> None:
        self.total += rollouts
        if self._on_total is not None:
            self._on_total(self.total)

    def start(self, job: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Start a job of artnb's own (it calls `outcome` or `join` inside)."""
        task = asyncio.get_running_loop().create_task(job, name=f"artnb {name}")
        self._jobs.add(task)
        task.add_done_callback(self._jobs.discard)
        return task

    async def join(self, jobs: list[asyncio.Task[T]], *, rounds: int = ROUNDS + 1) -> list[T]:
        """The results of all jobs, in order. If one raises or the caller is cancelled, the others end first."""
        try:
            if jobs:
                await asyncio.wait(jobs, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            await drain(jobs, rounds=rounds)
        self._raise_if_ending()
        return [job.result() for job in jobs]

    async def outcome(
        self, work: Awaitable[Any], key: Key, check: Callable[[Any], T], *, is_group: bool = False
    ) -> tuple[T | BaseException, Lease]:
        """Run `work` when there is a slot; returns `check(result)`, or the exception that it ended with.

        Raises only what ends the whole gather: too many failures, KeyboardInterrupt, SystemExit, and the caller's own
        cancellation. Work that was cancelled by somebody else ends with that CancelledError and is not counted.
        """
        try:
            await self.slots.acquire(key)
        except asyncio.CancelledError:
            self.started(work)
            close_unstarted(work)
            raise
        lease = Lease(self, key)
        try:
            ended = await self._run(work, lease, check, is_group)
        finally:
            lease.give_up()
        if self._on_end is not None:
            self._on_end(ended, lease)
        return ended, lease

    async def _run(
        self, work: Awaitable[Any], lease: Lease, check: Callable[[Any], T], is_group: bool
    ) -> T | BaseException:
        loop = asyncio.get_running_loop()
        task = self._begin(work, lease, is_group)
        expired: asyncio.Future[None] = loop.create_future()
        if self.timeout is not None:
            lease.timer = loop.call_later(self.timeout, _expire, expired)
        try:
            await asyncio.wait({task, expired}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            await drain([task])
            raise
        finally:
            expired.cancel()
        if not task.done():
            return await self._overdue(task, lease)
        if task.cancelled():
            return _cancellation(task)
        error = task.exception()
        if error is None:
            try:
                return check(task.result())
            except Exception as wrong:
                error = wrong
        return self._failed(error)

    def _begin(self, work: Awaitable[Any], lease: Lease, is_group: bool) -> asyncio.Future[Any]:
        if isinstance(work, asyncio.Future):  # somebody else's task: it keeps its own context
            self.started(work)
            return work
        context = contextvars.copy_context()
        context.run(enclosing.set, lease if is_group else None)
        if asyncio.iscoroutine(work):
            self.started(work)
            coroutine = work
        else:
            coroutine = self._await(work)
        name = f"artnb rollout {'/'.join(map(str, lease.key))}"
        return asyncio.get_running_loop().create_task(coroutine, name=name, context=context)

    async def _await(self, work: Awaitable[T]) -> T:
        self.started(work)
        return await work

    def _failed(self, error: BaseException) -> BaseException:
        self._raise_if_ending()
        fatal = self.failures.add(error, self.total) if isinstance(error, Exception) else error
        if fatal is None:
            return error
        self.fatal = fatal
        for job in self._jobs - {asyncio.current_task()}:
            job.cancel()
        raise fatal if isinstance(fatal, Exception) else RolloutError("the gather is ending")

    def _raise_if_ending(self) -> None:
        """In our own tasks only: a KeyboardInterrupt raised here would break out of the event loop a second time, so
        the task that waits for the gather raises it, when everything has ended (`__aexit__`)."""
        if isinstance(self.fatal, Exception):
            raise self.fatal
        if self.fatal is not None:
            raise RolloutError("the gather is ending")

    async def _overdue(self, task: asyncio.Future[Any], lease: Lease) -> BaseException:
        """End work that ran past the time limit; what it returns from now on is late and dropped."""
        task.cancel()
        try:
            await asyncio.wait({task}, timeout=GRACE_S)
        except asyncio.CancelledError:
            await drain([task])
            raise
        error = RolloutTimeoutError(f"the rollout ran past its limit of {self.timeout:g} s and was cancelled")
        if not task.done():
            self._stragglers.add(task)
            task.add_done_callback(lambda ended: self._straggler_ended(ended, lease))
            logger.warning("A rollout ignores its cancellation at the limit of %g s; going on without it", self.timeout)
        elif task.cancelled():
            error.__cause__ = _cancellation(task)  # its traceback shows where the rollout stood
        elif (raised := task.exception()) is not None:
            error.__cause__ = raised
        else:
            lease.note_late()
        return self._failed(error)

    def _straggler_ended(self, task: asyncio.Future[Any], lease: Lease) -> None:
        self._stragglers.discard(task)
        if not task.cancelled() and task.exception() is None:
            lease.note_late()


def _expire(expired: asyncio.Future[None]) -> None:
    if not expired.done():
        expired.set_result(None)


def _cancellation(task: asyncio.Future[Any]) -> asyncio.CancelledError:
    """The CancelledError that a cancelled task ended with, traceback included."""
    try:
        task.result()
    except asyncio.CancelledError as error:
        return error
    raise AssertionError("the task was not cancelled")
