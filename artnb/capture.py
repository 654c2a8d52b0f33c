"""Automatic capture: what a rollout's OpenAI client sampled is written on the current trajectory.

    async with art.trajectory(group=scenario.id) as t:
        await play(model.openai_client())
        t.reward = score()

A request made in this process is known by the scope it was made in; one that went over HTTP by a
header (capture_http.py). This module does not sample, and does not decide rewards.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import uuid
from collections.abc import Coroutine, Hashable, Mapping, Sequence
from contextvars import ContextVar, Token
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, cast, overload

from openai.types.chat.chat_completion import Choice

from .capture_http import TRAJECTORY_HEADER, ProcessScopes
from .collector import Collector, collected
from .errors import ConfigError, RolloutError, nearest
from .trajectories import (
    ExceptionRecord,
    History,
    MessageOrChoice,
    MessagesAndChoices,
    StopReason,
    Tools,
    Trajectory,
    messages_of,
)

__all__ = [
    "CaptureRegistry",
    "ChoiceRecord",
    "Collector",
    "TrajectoryScope",
    "auto_trajectory",
    "capture_auto_trajectory",
    "capture_headers",
    "trajectory",
]

SETTLE_SECONDS = 1.0
"""How long a scope that ends waits for the server to notice streams that its client stopped reading."""


@dataclass(frozen=True, slots=True)
class ChoiceRecord:
    """One sampled choice and the request that it answers, as the endpoint reports them."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    choice: Choice
    name: str  # the served model without a step: what collectors are registered under
    step: int | None  # None: the base model
    trajectory_id: str | None = None  # of the scope that asked


class TrajectoryScope:
    """A trajectory that records while it is open; made by `trajectory()`. Serves `with` and `async with`."""

    def __init__(self, group: Hashable, fields: Mapping[str, Any]) -> None:
        for name in fields:
            if name not in Trajectory.model_fields:
                raise ConfigError(f"trajectory() has no field {name!r}{nearest(name, Trajectory.model_fields)}")
        try:
            hash(group)
        except TypeError:
            raise ConfigError(f"trajectory(group={group!r}): a group key must be hashable, e.g. a str") from None
        self.id = uuid.uuid4().hex
        self.group = group
        self.trajectory = Trajectory(**{"reward": None, **fields})
        self._lock = threading.Lock()
        self._state: Literal["new", "open", "closed"] = "new"
        self._token: Token[TrajectoryScope | None] | None = None
        self._sources: list[tuple[CaptureRegistry, str]] = []
        self._context_full = False  # the last request was refused, for its messages fill the context
        self._streams = 0  # streamed answers to clients over HTTP that have not ended
        self._settled: list[_Settled] = []

    def add(self, record: ChoiceRecord, source: CaptureRegistry) -> bool:
        """Write a choice on the trajectory; False when the scope has closed."""
        with self._lock:
            if self._state != "open":
                return False
            append_choice(self.trajectory, record)
            self._context_full = False
            if record.step is not None:
                if self.trajectory.initial_policy_version is None:
                    self.trajectory.initial_policy_version = record.step
                self.trajectory.final_policy_version = record.step
            if (source, record.name) not in self._sources:
                self._sources.append((source, record.name))
            return True

    def context_filled(self) -> None:
        """A request was refused because its messages fill the context. If no choice follows, that was the end."""
        with self._lock:
            self._context_full = True

    def stream_began(self) -> None:
        with self._lock:
            self._streams += 1

    def stream_ended(self) -> None:
        with self._lock:
            self._streams -= 1
            waiting, self._settled = (self._settled, []) if not self._streams else ([], self._settled)
        for waiter in waiting:
            waiter.set()

    def __enter__(self) -> Trajectory:
        if self._state != "new":
            raise RolloutError("a trajectory() scope can be entered once; call trajectory() again")
        self._state = "open"
        self._token = _current.set(self)
        _process.open(self.id, self)
        return self.trajectory

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if (settled := self._settling(error)) is not None:
            settled.done.wait(SETTLE_SECONDS)
        self._close(error)

    async def __aenter__(self) -> Trajectory:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if (settled := self._settling(error)) is not None:
                await settled.wait(SETTLE_SECONDS)
        finally:
            self._close(error)

    def _settling(self, error: BaseException | None) -> _Settled | None:
        if error is not None and not isinstance(error, Exception):
            return None  # cancelled or interrupted: do not hold it up
        with self._lock:
            if not self._streams:
                return None
            waiter = _Settled()
            self._settled.append(waiter)
            return waiter

    def _close(self, error: BaseException | None) -> None:
        with self._lock:
            self._state = "closed"
        _process.close(self.id)
        if self._token is not None:
            # ValueError: left in another context than entered (an async fixture does); that one ends by itself.
            with contextlib.suppress(ValueError):
                _current.reset(self._token)
        traj = self.trajectory
        traj.finish()
        if error is not None:
            traj.error = ExceptionRecord.of(error)
        if traj.stop_reason is None:
            traj.stop_reason = _stop_reason(traj, error, self._context_full)
        if error is None and traj.reward is not None and self._sources:
            self._deliver()

    def _deliver(self) -> None:
        found = [(name, c) for source, name in self._sources if (c := source.collector(name)) is not None]
        if not found or not collected.get():
            return
        name, collector = found[0]
        if any(other is not collector for _, other in found):
            names = ", ".join(dict.fromkeys(name for name, _ in found))
            self.trajectory.log(f"sampled from several models ({names}); collected for {name}, which answered first")
        collector.add(self.trajectory, self.group)


class _Settled:
    """Set from the server's thread; waited for in a thread or in a loop."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._async_done = asyncio.Event()
        with contextlib.suppress(RuntimeError):  # no loop runs here: a synchronous scope
            self._loop = asyncio.get_running_loop()

    def set(self) -> None:
        self.done.set()
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._async_done.set)

    async def wait(self, timeout: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._async_done.wait()


_current: ContextVar[TrajectoryScope | None] = ContextVar("artnb_trajectory", default=None)


def _current_id() -> str | None:
    scope = _current.get()
    return scope.id if scope is not None and scope._state == "open" else None


_process: ProcessScopes[TrajectoryScope] = ProcessScopes(_current_id)


def add_server(host: str, port: int) -> None:
    """Let requests to this server of ours carry the trajectory's id."""
    _process.add_server(host, port)


def remove_server(host: str, port: int) -> None:
    _process.remove_server(host, port)


def trajectory(group: Hashable = None, **fields: Any) -> TrajectoryScope:
    """Record every choice that is sampled inside the block. `with` or `async with` gives the Trajectory.

    `await trajectory(coroutine)` is `capture_auto_trajectory(coroutine)`.

    `group` names the scenario that trajectories are compared within; without it, those with the same
    opening messages and tools are. `fields` are Trajectory's. The reward starts as None: unscored.

        async with art.trajectory(group="task-7", metadata={"level": 2}) as t:
            t.reward = await play(model.openai_client())
    """
    if asyncio.iscoroutine(group):
        return cast(TrajectoryScope, capture_auto_trajectory(group))
    return TrajectoryScope(group, fields)


@overload
def auto_trajectory(required: Literal[True]) -> Trajectory: ...
@overload
def auto_trajectory(required: bool = False) -> Trajectory | None: ...
def auto_trajectory(required: bool = False) -> Trajectory | None:
    """The trajectory that records here. None outside of a scope, or RolloutError with `required=True`."""
    scope = _current.get()
    if scope is None and required:
        raise RolloutError("no trajectory is recorded here; use `async with art.trajectory() as t:` around the rollout")
    return None if scope is None else scope.trajectory


async def capture_auto_trajectory(coroutine: Coroutine[Any, Any, Any]) -> Trajectory:
    """Await `coroutine` in a scope of its own; returns the trajectory, its result is dropped."""
    async with trajectory() as recorded:
        await coroutine
    return recorded


def capture_headers() -> dict[str, str]:
    """Headers that tie a request to the current trajectory, for HTTP clients that artnb does not see.

    Empty outside of a scope. With OpenAI: `create(..., extra_headers=art.capture.capture_headers())`.
    """
    scope_id = _current_id()
    return {} if scope_id is None else {TRAJECTORY_HEADER: scope_id}


class CaptureRegistry:
    """Which collector gets the trajectories of which served model; given to `create_app`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._collectors: dict[str, Collector] = {}
        self._dropped_late = 0

    @property
    def dropped_late(self) -> int:
        """Choices that were sampled for a scope which had closed."""
        return self._dropped_late

    def register_collector(self, name: str, collector: Collector) -> None:
        """Deliver what the served model `name` sampled to `collector`; a second call replaces the first."""
        with self._lock:
            self._collectors[name] = collector

    def unregister_collector(self, name: str) -> None:
        with self._lock:
            self._collectors.pop(name, None)

    def collector(self, name: str) -> Collector | None:
        with self._lock:
            return self._collectors.get(name)

    def begin(self, trajectory_id: str | None, *, streamed: bool) -> CaptureTicket:
        """A request arrives; `trajectory_id` is its header. Without one the caller's own scope counts."""
        if trajectory_id is None:
            return CaptureTicket(self, _current.get(), trajectory_id, late=False, streamed=False)
        scope = _process.find(trajectory_id)
        return CaptureTicket(self, scope, trajectory_id, late=scope is None, streamed=streamed)

    def count_late(self) -> None:
        with self._lock:
            self._dropped_late += 1


class CaptureTicket:
    """One request's link to its scope, taken when it arrives, used when its choices are there."""

    def __init__(
        self, registry: CaptureRegistry, scope: TrajectoryScope | None, given: str | None, *, late: bool, streamed: bool
    ) -> None:
        self._registry = registry
        self._scope = scope
        self._late = late
        self._streaming = scope if streamed else None
        self.trajectory_id = scope.id if scope is not None else given
        if self._streaming is not None:
            self._streaming.stream_began()

    @property
    def wanted(self) -> bool:
        """False when no scope asked: nobody needs the record."""
        return self._scope is not None or self._late

    def add(self, record: ChoiceRecord) -> None:
        """Write the choice on the scope's trajectory, or count it as late."""
        if self._late or (self._scope is not None and not self._scope.add(record, self._registry)):
            self._registry.count_late()

    def context_filled(self) -> None:
        """The request is refused because its messages fill the context."""
        if self._scope is not None:
            self._scope.context_filled()

    def end(self) -> None:
        """The request is over. May be called again."""
        streaming, self._streaming = self._streaming, None
        if streaming is not None:
            streaming.stream_ended()


def append_choice(traj: Trajectory, record: ChoiceRecord) -> None:
    """Put the choice where its conversation is: the first history (main one first) that the request continues.

    Messages that came in between are added before it. A request that continues none starts a further history.
    """
    asked = [_comparable(message) for message in record.messages]
    tools = cast(Tools | None, record.tools)
    histories: list[Trajectory | History] = [traj, *traj.additional_histories]
    target: Trajectory | History | None = None
    for history in histories:
        items = history.messages_and_choices
        same_tools = (history.tools or []) == (tools or []) or (not items and history.tools is None)
        if same_tools and len(items) <= len(asked) and comparables(items) == asked[: len(items)]:
            target = history
            break
    if target is None:
        target = History()
        traj.additional_histories.append(target)
    between = record.messages[len(target.messages_and_choices) :]
    target.messages_and_choices.extend(cast(MessagesAndChoices, between))
    target.messages_and_choices.append(record.choice)
    target.tools = tools or target.tools


def comparables(items: Sequence[MessageOrChoice]) -> list[dict[str, Any]]:
    return [_comparable(cast(dict[str, Any], message)) for message in messages_of(items)]


def _comparable(message: Mapping[str, Any]) -> dict[str, Any]:
    """What makes two messages the same turn, however the client spelled it.

    Reasoning is left out: clients seldom send it back. Whether the prompt's tokens still continue
    the sampled ones is decided later, on tokens.
    """
    content = message.get("content")
    if isinstance(content, list) and all(isinstance(p, Mapping) and p.get("type") == "text" for p in content):
        content = "".join(str(part.get("text", "")) for part in content)
    kept: dict[str, Any] = {"role": message.get("role"), "content": content or ""}
    calls = message.get("tool_calls") or ()
    if calls:
        named = [(call.get("id"), call.get("function") or {}) for call in calls]
        kept["calls"] = [(call_id, f.get("name"), f.get("arguments")) for call_id, f in named]
    # An assistant's name is its framework's (several agents in one conversation); the model sampled none.
    for key in ("tool_call_id",) if kept["role"] == "assistant" else ("tool_call_id", "name"):
        if message.get(key):
            kept[key] = message[key]
    return kept


def _stop_reason(traj: Trajectory, error: BaseException | None, context_full: bool) -> StopReason:
    if error is None:
        if context_full:
            return StopReason.CONTEXT_FULL
        cut = any(choice.finish_reason == "length" for choice in traj.choices())
        return StopReason.TRUNCATED if cut else StopReason.FINISHED
    if getattr(error, "code", None) == "context_length_exceeded":
        return StopReason.CONTEXT_FULL
    if isinstance(error, TimeoutError):
        return StopReason.TIMEOUT
    return StopReason.FAILED if isinstance(error, Exception) else StopReason.CANCELLED
