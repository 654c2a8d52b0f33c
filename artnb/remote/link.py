"""What RemoteBackend says to the server about one model: registering, steps, logs; and what it keeps of the answers.

A job whose end was not seen, since the server could not be reached for too long, is remembered: the same call made
again follows it, and any other step waits for it. Needs the core install only.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from ..backend import TrainResult
from ..errors import ServiceError
from ..events import EVENTS
from ..notebook.loop import ticking
from ..tracking.summary import summarize
from ..trajectories import TrajectoryGroup
from ..whole import to_the_end
from .bars import Bars
from .connection import Connection, StatusError, understood
from .follow import RemoteJob
from .registered import Registered
from .wire import NOT_REGISTERED, groups_json, read_error, read_result

if TYPE_CHECKING:
    from ..model import TrainableModel

log = logging.getLogger("artnb")
Body = Callable[[], Mapping[str, Any]]


class Link(Registered):
    """A model, and the connection to the server that has it."""

    def __init__(
        self, model: TrainableModel, connection: Connection, *, verbose: bool, say: Callable[[str], None]
    ) -> None:
        super().__init__(model, connection.url, self._mirror)
        self._connection = connection
        self._verbose = verbose
        self._say = say
        self._restoring = asyncio.Lock()  # these are used on the connection's loop only
        self._turn = asyncio.Lock()
        self._log_turn = asyncio.Lock()
        self._logs: set[Future[None]] = set()
        self._unfinished: RemoteJob | None = None

    # Registering -----------------------------------------------------------------------------------

    async def register(self) -> None:
        """Let the server load and serve it, and copy what the history here lacks."""
        doing = f"looking at {self.url}"

        async def ask() -> Any:
            return await self._connection.json("GET", "/server", doing=doing)

        server = await self._connection.run(ask)
        with understood(doing, self.url):
            self._connection.max_body = int(server["max_body_bytes"])
        job = self._registration()
        await self._follow(job)
        state = self._outcome(job)["result"]
        with understood(job.doing, self.url):
            await asyncio.to_thread(self.take, state)
        await self._catch_up()

    def _registration(self) -> RemoteJob:
        body = {**self.of_model(), **self.shape()}
        return RemoteJob(self._connection, lambda: {"kind": "register", **body}, f"register {self.name}")

    async def restore(self) -> None:
        """Register it again if the server does not know it (any more). On the connection's own loop."""
        async with self._restoring:  # of many requests that find the model gone, one brings it back
            try:
                await self._connection.json("GET", self.path, doing=f"looking for {self.name}")
            except StatusError as error:
                if error.code != NOT_REGISTERED:
                    raise
                job = self._registration()
                async with contextlib.aclosing(job.events()) as events:
                    async for _ in events:
                        pass
                self._outcome(job)

    async def state(self) -> tuple[int, list[int]]:
        """The newest step at the server, from which the next one starts, and the steps of its checkpoints."""

        async def ask() -> tuple[int, list[int]]:
            await self.restore()
            found = await self._connection.json("GET", self.path, doing=f"state of {self.name}")
            with understood(f"state of {self.name}", self.url):
                step, checkpoints = int(found["step"]), list(found["checkpoints"])
            if not self._turn.locked():  # a step of ours knows better
                self.step = step
            return step, checkpoints

        return await self._connection.run(ask)

    async def _catch_up(self) -> None:
        """Copy what the server's history has and this one lacks: another client's steps, or a killed kernel's last."""
        after = await asyncio.to_thread(self.complete_until)
        if after is None:
            return
        doing = f"history of {self.name}"

        async def ask() -> Any:
            return await self._connection.json("GET", f"{self.path}/history", doing=doing, params={"after": after})

        listed = await self._connection.run(ask)
        here = await asyncio.to_thread(self.history.saved)
        with understood(doing, self.url):
            await asyncio.to_thread(self.copy_metrics, listed["metrics"])
            there = [(int(saved["step"]), str(saved["split"])) for saved in listed["trajectories"]]
        missing = [at for at in there if at not in here]
        for step, split in missing:
            path = f"{self.path}/history/{quote(split, safe='')}/{step}"

            async def fetch(path: str = path) -> bytes:
                return await self._connection.content(path, doing=doing)

            lines = await self._connection.run(fetch)
            with understood(doing, self.url):
                await asyncio.to_thread(self.copy_trajectories, step, split, lines)
        if missing:
            self._say(f"{self.name}: the history of {len(missing)} step(s) was fetched from the server")

    # Jobs ------------------------------------------------------------------------------------------

    async def run(self, kind: str, body: Body) -> Any:
        """A job that makes no step; returns its result."""
        job = self._job(kind, body)
        await self._follow(job)
        return self._outcome(job)["result"]

    async def make_step(
        self,
        kind: str,
        body: Body,
        split: str,
        *,
        trained: Sequence[TrajectoryGroup] = (),
        kept: Sequence[TrajectoryGroup],
    ) -> TrainResult:
        """One step at the server, and its place in the history here.

        `trained` get the trainer's log-probs, `kept` are those that the history keeps. A cancelled caller ends the step
        there.
        """
        job = await self._resume(kind, body)
        before = self.step
        try:
            await self._follow(job, self._in_turn(job))
        except asyncio.CancelledError:
            if job.outcome is not None and job.outcome["state"] == "done":  # it was made before it could be stopped
                self._tell(self._keep(job.outcome["result"], split, trained, kept), split, kept)
            raise
        if job.outcome is not None and job.outcome["state"] == "failed" and self.step > before:
            await self._catch_up()  # e.g. a run that was stopped after a step that was kept
        answer = self._outcome(job)["result"]

        async def keep() -> TrainResult:
            result = await asyncio.to_thread(self._keep, answer, split, trained, kept)
            self._tell(result, split, kept)
            return result

        result = await to_the_end(keep())
        if result.step > 1 and result.step - 1 not in await asyncio.to_thread(self.steps_here):
            await self._catch_up()
        return result

    async def _resume(self, kind: str, body: Body) -> RemoteJob:
        """The job for this step: the unfinished one if it is the same, which else is waited for and kept first."""
        left = self._unfinished
        if left is not None:
            if await asyncio.to_thread(left.is_same, self._job(kind, body).body):
                self._say(f"{left.doing} was sent before and its end not seen; it is followed")
                return left
            if left.withdrawn:
                await self._connection.run(lambda: self._forget(left))
            else:
                await self._follow(left, self._in_turn(left))
            await self._catch_up()

        job = self._job(kind, body)
        job.from_step = lambda: self.step
        return job

    async def _forget(self, job: RemoteJob) -> None:
        """A job whose caller was interrupted while the server could not be told: it is told now."""
        await job.cancel()
        if job.outcome is not None:
            self._ended(job)

    def _ended(self, job: RemoteJob) -> None:
        assert job.outcome is not None
        self._unfinished = None
        if job.outcome["step"] is not None:
            self.step = job.outcome["step"]

    def _in_turn(self, job: RemoteJob) -> Callable[[], AsyncGenerator[tuple[str, dict[str, Any]]]]:
        """The job's events, as those of the one step that is made at a time. Remembers a job whose end is not seen."""

        async def events() -> AsyncGenerator[tuple[str, dict[str, Any]]]:
            async with self._turn, contextlib.aclosing(job.events()) as made:
                self._unfinished = job
                try:
                    async for event in made:
                        yield event
                except StatusError:
                    if not job.accepted:
                        self._unfinished = None
                    raise
                finally:
                    if job.outcome is not None:
                        self._ended(job)

        return events

    def _job(self, kind: str, body: Body) -> RemoteJob:
        def whole() -> Mapping[str, Any]:
            return {"kind": kind, **self.of_model(), **body()}

        return RemoteJob(self._connection, whole, f"{kind} of {self.name}", self.restore)

    async def _follow(
        self, job: RemoteJob, events: Callable[[], AsyncGenerator[tuple[str, dict[str, Any]]]] | None = None
    ) -> None:
        """Wait for the end of a job, and show its progress."""
        with Bars(self._verbose) as bars, ticking():  # so that a cell which only waits can be interrupted
            async with contextlib.aclosing(self._connection.iterate(events or job.events)) as followed:
                async for kind, data in followed:
                    if kind == "progress":
                        bars.show(data)

    def _outcome(self, job: RemoteJob) -> dict[str, Any]:
        """The outcome of a job that was done; raises what it raised there."""
        outcome = job.outcome
        assert outcome is not None
        if outcome["state"] == "failed":
            with understood(job.doing, self.url):
                error = read_error(outcome["error"], self.url)
            raise error
        if outcome["state"] == "cancelled":
            raise ServiceError(f"{job.doing}: it was cancelled at {self.url} by another client")
        return outcome

    def _keep(
        self,
        answer: Mapping[str, Any],
        split: str,
        trained: Sequence[TrajectoryGroup],
        kept: Sequence[TrajectoryGroup],
    ) -> TrainResult:
        """The step's result, in the history here."""
        with understood(f"step of {self.name}", self.url):
            result = read_result(answer, trained)
        self.history.keep(result.step, split, kept, {**summarize(kept), **result.metrics})
        for group in kept:
            group._logged.add((self.name, split))
        return result

    def _tell(self, result: TrainResult, split: str, kept: Sequence[TrajectoryGroup]) -> None:
        if result.reasons or not result.trained:
            self._say(f"step {result.step}: {result.notes[0]}" if result.notes and not result.trained else str(result))
        EVENTS.emit(
            "step",
            self.key,
            step=result.step,
            split=split,
            metrics={**summarize(kept), **result.metrics},
            groups=list(kept),
            reasons=dict(result.reasons),
            notes=list(result.notes),
        )

    # Logs ------------------------------------------------------------------------------------------

    def _mirror(self, step: int, split: str, groups: list[TrajectoryGroup], metrics: dict[str, Any]) -> None:
        """Send what was logged here to the server's history, one after the other, without waiting for it."""

        async def send() -> None:
            logged = {"step": step, "split": split, "metrics": metrics}
            job = self._job("log", lambda: {**logged, "groups": groups_json(groups)})
            try:
                async with self._log_turn, contextlib.aclosing(job.events()) as events:
                    async for _ in events:
                        pass
                self._outcome(job)
            except Exception as error:
                log.warning("%s of step %d is in the history here, but not at the server: %s", split, step, error)

        if not self._connection.closed:
            future = self._connection.spawn(send)
            self._logs.add(future)
            future.add_done_callback(self._logs.discard)

    async def flush(self) -> None:
        """Wait until what was logged has reached the server, or has failed to."""
        if pending := [asyncio.wrap_future(future) for future in self._logs]:
            await asyncio.wait(pending)
