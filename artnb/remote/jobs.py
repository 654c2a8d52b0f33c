"""A job of `artnb serve`: work that goes on whether or not its client is connected, and the events that it leaves.

Events are numbered; a client that was cut off asks for those after the last one it has. Does not know what the work is.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from ..events import Event
from ..tracking.records import to_line
from .schema import JobState
from .wire import FINAL

KEPT_JOBS = 1024
"""Jobs that have ended and are remembered; what is sent again later counts as new, and its step number refuses it."""
BULK = ("trainer_logprobs", "turns")
"""Parts of results that hold a number for each token."""
PROGRESS_S = 0.25
"""Seconds between two progress events of a phase."""


@dataclass(frozen=True, slots=True)
class JobEvent:
    id: int
    type: str  # "progress", or one of FINAL
    data: bytes  # JSON, one line

    def sse(self) -> bytes:
        return b"id: %d\nevent: %s\ndata: %s\n\n" % (self.id, self.type.encode(), self.data)


class Job:
    """One job. Belongs to the server's event loop."""

    def __init__(self, job_id: str, digest: str, kind: str, project: str, name: str, from_step: int | None) -> None:
        self.id = job_id
        self.digest = digest  # of the request: the same id with another request is refused
        self.kind = kind
        self.project = project
        self.name = name
        self.from_step = from_step
        self.state = "running"
        self.step: int | None = None
        self.result: dict[str, Any] | None = None
        self.error: dict[str, Any] | None = None
        self.task: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._events: list[JobEvent] = []
        self._next = 1
        self._told: dict[str, float] = {}  # phase → when its last event was made
        self._changed = asyncio.Event()
        self._forsaken = False

    def describe(self) -> JobState:
        return JobState(
            id=self.id,
            kind=self.kind,
            project=self.project,
            name=self.name,
            state=self.state,  # type: ignore[arg-type]
            step=self.step,
            result=self.result,
            error=self.error,
        )

    def on_event(self, event: Event) -> None:
        """Hears, in any thread, what happens in the process; see `CURRENT`."""
        if event.kind == "progress":
            self._loop.call_soon_threadsafe(self._progress, dict(event.data))

    def _progress(self, data: Mapping[str, Any]) -> None:
        phase, now = str(data["phase"]), time.monotonic()
        if self.state != "running" or not (data["closed"] or now - self._told.get(phase, 0.0) >= PROGRESS_S):
            return
        self._told[phase] = now
        # Of each phase only the newest is kept: who comes back later needs no more.
        kept = [e for e in self._events if not e.data.startswith(b'{"phase":"%s"' % phase.encode())]
        self._events = kept
        self._add("progress", {"phase": phase, **{k: v for k, v in data.items() if k != "phase"}})

    def end(
        self, state: str, step: int | None, result: dict[str, Any] | None = None, error: dict[str, Any] | None = None
    ) -> None:
        """The work has ended; the last event says how."""
        self.state, self.step, self.result, self.error = state, step, result, error
        self._add(state, {"step": step, "result": result, "error": error})

    def slim(self) -> None:
        """Drop the bulk of the result: a later step of the model has begun, so somebody has it."""
        if self.result is not None and any(self.result.get(name) for name in BULK):
            self.result = {name: [] if name in BULK else value for name, value in self.result.items()}
            last = self._events.pop()
            self._add(last.type, {"step": self.step, "result": self.result, "error": None}, last.id)

    def forsake(self) -> None:
        """The server ends: followers are cut off, as by a lost connection, and ask the next server."""
        self._forsaken = True
        self._notify()

    def _add(self, kind: str, data: Mapping[str, Any], number: int | None = None) -> None:
        self._events.append(JobEvent(number or self._next, kind, to_line(data)[:-1]))
        self._next += number is None
        self._notify()

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def follow(self, after: int, idle_s: float) -> AsyncGenerator[JobEvent | None]:
        """Events with a number above `after`, to the final one; None whenever nothing happened for `idle_s` seconds."""
        while not self._forsaken:
            changed = self._changed
            for event in [e for e in self._events if e.id > after]:
                after = event.id
                yield event
                if event.type in FINAL:
                    return
            if self.state in FINAL and not any(e.id > after for e in self._events):
                return  # all of it was seen
            try:
                async with asyncio.timeout(idle_s):
                    await changed.wait()
            except TimeoutError:
                yield None


class JobTable:
    """Jobs by id: all that run, and the newest of those that ended."""

    def __init__(self) -> None:
        self._jobs: OrderedDict[str, Job] = OrderedDict()
        self._withdrawn: OrderedDict[str, None] = OrderedDict()

    def get(self, job_id: str) -> Job | None:
        return self._jobs.get(job_id)

    def add(self, job: Job) -> None:
        self._jobs[job.id] = job
        ended = [j for j in self._jobs.values() if j.state in FINAL]
        for old in ended[: max(0, len(ended) - KEPT_JOBS)]:
            del self._jobs[old.id]

    def withdraw(self, job_id: str) -> None:
        """Its client ended a job that has not arrived: it may be on its way, and is not to be started then."""
        self._withdrawn[job_id] = None
        while len(self._withdrawn) > KEPT_JOBS:
            self._withdrawn.popitem(last=False)

    def is_withdrawn(self, job_id: str) -> bool:
        return job_id in self._withdrawn

    def running(self) -> list[Job]:
        return [job for job in self._jobs.values() if job.state == "running"]

    def of_model(self, project: str, name: str) -> list[Job]:
        return [job for job in self._jobs.values() if (job.project, job.name) == (project, name)]


CURRENT: ContextVar[Job | None] = ContextVar("artnb_remote_job", default=None)
"""The job that work is done for; worker threads inherit it, so events of the process find their job."""


def tell_current(event: Event) -> None:
    """A listener for artnb.events.EVENTS."""
    if (job := CURRENT.get()) is not None:
        job.on_event(event)
