"""A job from the client's side: sent under an id of its own, followed by its events, whatever the line does.

The id is what makes it safe: sent again, it is the same job; and a server that was restarted is asked for the model
first. Does not know what the job does.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import ServiceError
from ..serving.transport import client_library
from .connection import AGAIN, Connection, StatusError, understood
from .wire import FINAL, NO_JOB, NOT_REGISTERED, pack

log = logging.getLogger("artnb")
CANCEL_S = 10.0
"""Seconds that an interrupted cell waits for the server to end its job."""


@dataclass
class RemoteJob:
    """One job. `body` is called, in a thread, when it is sent; `from_step` just before."""

    connection: Connection
    body: Callable[[], Mapping[str, Any]]
    doing: str
    restore: Callable[[], Awaitable[None]] | None = None  # registers the model with a server that forgot it
    from_step: Callable[[], int] | None = None  # for a job that makes a step
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    accepted: bool = False  # whether the server has said that it has it
    withdrawn: bool = False  # its caller was interrupted
    outcome: dict[str, Any] | None = None  # the last event, also after an interrupt, where the server could be asked
    _start: dict[str, int] = field(default_factory=dict)
    _packed: bytes = b""

    def is_same(self, body: Callable[[], Mapping[str, Any]]) -> bool:
        """Whether `body` is what was sent."""
        return pack({**body(), **self._start}) == self._packed

    async def events(self) -> AsyncGenerator[tuple[str, dict[str, Any]]]:
        """(type, data) of every event, the final one last. Stopped early, it cancels the job at the server.

        Called again after it has failed, it goes on with the same job.
        """
        try:
            async with contextlib.aclosing(self._events()) as events:
                async for event in events:
                    yield event
        except (asyncio.CancelledError, GeneratorExit):
            if self.outcome is None:
                self.withdrawn = True
                await self.cancel()
            raise

    async def _events(self) -> AsyncGenerator[tuple[str, dict[str, Any]]]:
        if not self._packed:
            self._start = {} if self.from_step is None else {"from_step": self.from_step()}
            packed = await asyncio.to_thread(lambda: pack({**self.body(), **self._start}))
            self._check_size(len(packed))
            self._packed = packed
        last = 0
        while self.outcome is None:
            await self._submit(self._packed)
            try:
                async with contextlib.aclosing(self._follow(last)) as followed:
                    async for number, kind, data in followed:
                        last = number
                        if kind in FINAL:
                            self._end({"state": kind, **data})
                        yield kind, data
            except StatusError as error:
                if error.code != NO_JOB:
                    raise
                last = 0  # a new server, which has no events of it yet

    def _check_size(self, size: int) -> None:
        """Before it is sent: a server that refuses it on the way may be taken for one that went away."""
        most = self.connection.max_body
        if most is not None and size > most:
            raise StatusError(
                f"{self.doing}: packed it takes {size / (1 << 20):.1f} MiB, and {self.connection.url} takes "
                f"{most / (1 << 20):.0f}: train on fewer or shorter rollouts a step, or start the server with a larger "
                "--max-body-mb",
                status=413,
                code="body_too_large",
            )

    async def _submit(self, packed: bytes) -> None:
        while True:
            try:
                await self.connection.json(
                    "PUT",
                    f"/jobs/{self.id}",
                    doing=self.doing,
                    content=packed,
                    headers={"content-type": "application/json", "content-encoding": "gzip"},
                )
                self.accepted = True
                return
            except StatusError as error:
                if error.code != NOT_REGISTERED or self.restore is None:
                    raise
                await self.restore()

    async def _follow(self, last: int) -> AsyncGenerator[tuple[int, str, dict[str, Any]]]:
        patience = self.connection.patience()
        while True:
            try:
                headers = {"last-event-id": str(last)}
                async with self.connection.stream(
                    f"/jobs/{self.id}/events", doing=self.doing, headers=headers
                ) as response:
                    patience.well()
                    async with contextlib.aclosing(_read_events(response)) as read:
                        async for number, kind, data in read:
                            last = number
                            yield number, kind, data
                            if kind in FINAL:
                                return
                cut: Exception = client_library().RemoteProtocolError("the stream of events ended early")
            except self.connection.cut as error:
                cut = error
            except StatusError as error:
                if error.status not in AGAIN:
                    raise
                cut = error
            await patience.wait(cut, self.doing)

    async def cancel(self) -> None:
        """Ask for the job's end; what it had come to is the outcome. None when the server cannot be asked."""
        try:
            async with asyncio.timeout(CANCEL_S):
                state = await self.connection.json("POST", f"/jobs/{self.id}/cancel", doing=self.doing)
        except (ServiceError, TimeoutError) as error:
            if isinstance(error, StatusError) and error.code == NO_JOB:  # nor will it start it when it comes
                state = {"state": "cancelled", "step": None, "result": None, "error": None}
            else:
                log.warning(
                    "%s: the server could not be told to stop (%s); the step may still be made", self.doing, error
                )
                return
        if state.get("state") in FINAL:
            self._end(state)

    def _end(self, answer: Mapping[str, Any]) -> None:
        with understood(self.doing, self.connection.url):
            self.outcome = {key: answer[key] for key in ("state", "step", "result", "error")}


async def _read_events(response: Any) -> AsyncGenerator[tuple[int, str, dict[str, Any]]]:
    """Server-sent events, as `artnb serve` writes them; a torn one is left out."""
    event: dict[str, str] = {}
    async with contextlib.aclosing(response.aiter_lines()) as lines:
        async for line in lines:
            if line:
                name, _, value = line.partition(":")
                event[name] = value.removeprefix(" ")
                continue
            if event.keys() >= {"id", "event", "data"}:
                with understood("following a job", str(response.url)):
                    read = int(event["id"]), event["event"], dict(json.loads(event["data"]))
                yield read
            event = {}
