"""Trajectory and TrajectoryGroup: what a rollout did, what it earned, and why it ended.

Plain pydantic values that can be saved as JSON and read back. They do not sample, score or train.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import AsyncGenerator, Awaitable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, TypeAlias, TypeVar, cast, overload

import pydantic
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam
from openai.types.chat.chat_completion import Choice
from pydantic import SkipValidation

from .tracking.traces import current_traces

MetadataValue: TypeAlias = float | int | str | bool | None
Message: TypeAlias = Annotated[ChatCompletionMessageParam, SkipValidation]
Messages: TypeAlias = list[Message]
MessageOrChoice: TypeAlias = Message | Choice


def _read_item(item: Any) -> Any:
    """A choice that was saved is a dict again. A message has a role; a choice has a message instead."""
    if not isinstance(item, dict) or "message" not in item or "role" in item:
        return item
    try:
        return Choice.model_validate(item)
    except pydantic.ValidationError:
        return Choice.construct(**item)  # as the client made it: a server's own finish reasons are kept


def _plain(item: Any, info: pydantic.SerializationInfo) -> Any:
    """Messages and tools are saved as they are, also those that OpenAI's types do not know (content that is a dict)."""
    return item.model_dump(mode=info.mode) if isinstance(item, pydantic.BaseModel) else item


_SavedItem: TypeAlias = Annotated[
    MessageOrChoice, pydantic.BeforeValidator(_read_item), pydantic.PlainSerializer(_plain, return_type=Any)
]
MessagesAndChoices: TypeAlias = list[_SavedItem]
Tools: TypeAlias = list[
    Annotated[ChatCompletionToolParam, SkipValidation, pydantic.PlainSerializer(_plain, return_type=Any)]
]
ModelT = TypeVar("ModelT", bound="Trajectory")


class StopReason(StrEnum):
    """Why a trajectory ended."""

    FINISHED = "finished"
    """The rollout returned."""
    TRUNCATED = "truncated"
    """A choice was cut by max_tokens."""
    CONTEXT_FULL = "context_full"
    """The history left no room for another token."""
    TIMEOUT = "timeout"
    """The rollout ran past its time limit."""
    CANCELLED = "cancelled"
    """The rollout was cancelled from outside, e.g. by interrupting the cell."""
    FAILED = "failed"
    """The rollout raised."""


class ExceptionRecord(pydantic.BaseModel):
    """An exception as it was raised, in a form that can be saved."""

    type: str
    message: str
    traceback: str

    @classmethod
    def of(cls, error: BaseException) -> ExceptionRecord:
        kind = type(error)
        name = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
        return cls(type=name, message=str(error), traceback="".join(traceback.format_exception(error)))


class History(pydantic.BaseModel):
    """A further conversation of the same rollout, e.g. a sub-agent's."""

    messages_and_choices: MessagesAndChoices = pydantic.Field(default_factory=list)
    tools: Tools | None = None

    def messages(self) -> Messages:
        return messages_of(self.messages_and_choices)


class Trajectory(pydantic.BaseModel):
    """One rollout: messages and sampled choices, its reward, and what is known about it.

    `reward=None` means unscored: the trajectory takes no part in training.

        traj = art.Trajectory(messages_and_choices=[{"role": "user", "content": "hi"}], reward=1.0)
    """

    model_config = pydantic.ConfigDict(validate_assignment=False, extra="forbid")

    messages_and_choices: MessagesAndChoices = pydantic.Field(default_factory=list)
    tools: Tools | None = None
    additional_histories: list[History] = pydantic.Field(default_factory=list)
    reward: float | None = 0.0
    initial_policy_version: int | None = None
    final_policy_version: int | None = None
    metrics: dict[str, float | int | bool] = pydantic.Field(default_factory=dict)
    metadata: dict[str, MetadataValue] = pydantic.Field(default_factory=dict)
    logs: list[str] = pydantic.Field(default_factory=list)
    stop_reason: StopReason | None = None
    error: ExceptionRecord | None = None
    start_time: datetime = pydantic.Field(default_factory=datetime.now)
    # Traces of observability tools that it was made in: its reward is put on them when it is logged.
    _traces: dict[str, str] = pydantic.PrivateAttr(default_factory=current_traces)

    def log(self, message: str) -> None:
        """Add a line to `logs`."""
        self.logs.append(message)

    def finish(self) -> Trajectory:
        """Set `metrics["duration"]` to the seconds since the trajectory was made; returns itself."""
        self.metrics["duration"] = (datetime.now() - self.start_time).total_seconds()
        return self

    @asynccontextmanager
    async def track_duration(self, metric_name: str) -> AsyncGenerator[None]:
        """Add the seconds spent in the block to `metrics["<metric_name>_duration"]`."""
        start = time.monotonic()
        try:
            yield
        finally:
            key = f"{metric_name}_duration"
            self.metrics[key] = self.metrics.get(key, 0.0) + time.monotonic() - start

    def messages(self) -> Messages:
        """The conversation as message dicts, ready to be sent again."""
        return messages_of(self.messages_and_choices)

    def histories(self) -> list[tuple[MessagesAndChoices, Tools | None]]:
        """The main conversation and every additional one, with their tools."""
        main = [(self.messages_and_choices, self.tools)]
        return main + [(h.messages_and_choices, h.tools) for h in self.additional_histories]

    def choices(self) -> list[Choice]:
        """Every sampled choice, additional histories included."""
        return [item for items, _ in self.histories() for item in items if isinstance(item, Choice)]

    def for_logging(self) -> dict[str, Any]:
        """A JSON-ready dict; each message says whether it is trainable (sampled)."""
        return {
            "reward": self.reward,
            "initial_policy_version": self.initial_policy_version,
            "final_policy_version": self.final_policy_version,
            "metrics": self.metrics,
            "metadata": self.metadata,
            "messages": [
                {**message, "trainable": isinstance(item, Choice)}
                for message, item in zip(self.messages(), self.messages_and_choices, strict=True)
            ],
            "tools": self.tools,
            "logs": self.logs,
        }

    def __str__(self) -> str:
        return f"Trajectory(reward={self.reward}, metrics={self.metrics}, metadata={self.metadata})"

    def __repr__(self) -> str:
        # A pydantic repr prints every token of every choice; a notebook shows reprs.
        turns = len(self.choices())
        return f"Trajectory(reward={self.reward}, {turns} choices, stop_reason={self.stop_reason})"


def messages_of(items: Sequence[MessageOrChoice]) -> Messages:
    """Message dicts of a mixed list; a choice becomes its assistant message, None content becomes ""."""
    messages: list[dict[str, Any]] = []
    for item in items:
        if isinstance(item, Choice):
            message: dict[str, Any] = {"role": "assistant", "content": item.message.content or ""}
            extra = item.message.model_extra or {}
            if extra.get("reasoning_content"):
                message["reasoning_content"] = extra["reasoning_content"]
            if item.message.tool_calls:
                message["tool_calls"] = [call.model_dump(mode="json") for call in item.message.tool_calls]
        else:
            message = dict(item)
            if message.get("content") is None:
                message["content"] = ""
        messages.append(message)
    return cast(Messages, messages)


PydanticException = ExceptionRecord  # ART's name


def get_messages(messages_and_choices: Sequence[MessageOrChoice]) -> Messages:
    """ART's name for `messages_of`."""
    return messages_of(messages_and_choices)


_RECORDED = "artnb_trajectory"


def attach_trajectory(error: BaseException, trajectory: Trajectory) -> None:
    """Let `error` carry what its rollout had recorded when it failed: a group made of it keeps that."""
    setattr(error, _RECORDED, trajectory)


def recorded_trajectory(error: BaseException) -> Trajectory | None:
    """What `attach_trajectory` attached, also to the cancellation of a rollout that ran past its limit."""
    trajectory: Trajectory | None = getattr(error, _RECORDED, None)
    if trajectory is None and isinstance(error, TimeoutError) and error.__cause__ is not None:
        trajectory = getattr(error.__cause__, _RECORDED, None)
        if trajectory is not None:
            trajectory.stop_reason, trajectory.error = StopReason.TIMEOUT, ExceptionRecord.of(error)
    return trajectory


class TrajectoryGroup(pydantic.BaseModel):
    """Trajectories of one scenario, compared with each other.

    Made from trajectories (exceptions among them are recorded; one that carries its trajectory is on that), or from
    awaitables, which gives an awaitable group: pass it to `gather_trajectory_groups`, or await it.

        groups = await art.gather_trajectory_groups(
            art.TrajectoryGroup(rollout(model, s) for _ in range(8)) for s in scenarios)
    """

    model_config = pydantic.ConfigDict(extra="forbid")

    trajectories: list[Trajectory] = pydantic.Field(default_factory=list)
    exceptions: list[ExceptionRecord] = pydantic.Field(default_factory=list)
    metadata: dict[str, MetadataValue] = pydantic.Field(default_factory=dict)
    metrics: dict[str, float | int | bool] = pydantic.Field(default_factory=dict)
    logs: list[str] = pydantic.Field(default_factory=list)
    # (model name, split) pairs whose history already holds this group: logging it again is a no-op.
    _logged: set[tuple[str, str]] = pydantic.PrivateAttr(default_factory=set)

    @overload
    def __new__(cls, trajectories: Iterable[Trajectory | BaseException] = ..., **fields: Any) -> TrajectoryGroup: ...
    @overload
    def __new__(cls, trajectories: Iterable[Awaitable[Trajectory]], **fields: Any) -> Awaitable[TrajectoryGroup]: ...  # type: ignore[misc]
    def __new__(cls, trajectories: Iterable[Any] = (), **fields: Any) -> Any:
        items = list(trajectories)
        if any(isinstance(item, Awaitable) for item in items):
            from .gather import PendingGroup

            return PendingGroup(items, **fields)
        group = super().__new__(cls)
        # __init__ runs after this with the caller's iterable, which may be a generator that is now spent.
        object.__setattr__(group, "_items", items)
        return group

    def __init__(
        self,
        trajectories: Iterable[Any] = (),
        *,
        exceptions: Iterable[BaseException | ExceptionRecord | dict[str, str]] = (),
        metadata: dict[str, MetadataValue] | None = None,
        metrics: dict[str, float | int | bool] | None = None,
        logs: list[str] | None = None,
    ) -> None:
        items = self.__dict__.pop("_items", None)
        items = list(trajectories) if items is None else items
        kept = [(isinstance(item, BaseException) and recorded_trajectory(item)) or item for item in items]
        raised = [item for item in kept if isinstance(item, BaseException)] + list(exceptions)
        super().__init__(
            trajectories=[item for item in kept if not isinstance(item, BaseException)],
            exceptions=[ExceptionRecord.of(e) if isinstance(e, BaseException) else e for e in raised],
            metadata=metadata or {},
            metrics=metrics or {},
            logs=logs or [],
        )

    def log(self, message: str) -> None:
        """Add a line to `logs`."""
        self.logs.append(message)

    def __iter__(self) -> Iterator[Trajectory]:  # type: ignore[override]
        return iter(self.trajectories)

    def __len__(self) -> int:
        return len(self.trajectories)

    def __repr__(self) -> str:
        rewards = [t.reward for t in self.trajectories]
        shown = ", ".join("None" if r is None else f"{r:.3g}" for r in rewards[:8]) + (
            ", …" if len(rewards) > 8 else ""
        )
        failed = f", {len(self.exceptions)} failed" if self.exceptions else ""
        return f"TrajectoryGroup({len(rewards)} trajectories, rewards [{shown}]{failed})"

    def __str__(self) -> str:
        return repr(self)


def as_groups(items: Iterable[Trajectory | TrajectoryGroup | BaseException]) -> list[TrajectoryGroup]:
    """Groups as they are; loose trajectories each become a group of one."""
    return [item if isinstance(item, TrajectoryGroup) else TrajectoryGroup([item]) for item in items]
