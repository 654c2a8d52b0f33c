"""What goes between RemoteBackend and `artnb serve`: groups, results and errors as JSON, and back.

Groups are written as the history writes them (tracking/records.py), so token ids and log-probs arrive exactly.
Needs the core install only; sends nothing.
"""

from __future__ import annotations

import gzip
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from .. import errors
from ..backend import TrainResult, TurnLogprobs
from ..errors import ArtnbError, ConfigError, ServiceError
from ..tracking.records import group_record, to_group, to_line, to_trajectory, trajectory_record
from ..tracking.stored import AnyTrajectory
from ..trajectories import Trajectory, TrajectoryGroup

T = TypeVar("T")
API = "/artnb/v1"
"""Where the paths of this protocol begin; the OpenAI endpoint is at /v1."""
FINAL = ("done", "failed", "cancelled")
"""The states in which a job has ended; its last event has the same name."""

# Codes of errors that the client acts on.
NOT_REGISTERED = "model_not_registered"
NO_JOB = "job_not_found"


def pack(body: Mapping[str, Any]) -> bytes:
    """The body of a request, as gzip: log-probs as JSON shrink to about a quarter."""
    return gzip.compress(to_line(body), compresslevel=1, mtime=0)


# Groups -----------------------------------------------------------------------------------------------


def groups_json(groups: Iterable[TrajectoryGroup]) -> list[dict[str, Any]]:
    return [
        {
            "group": group_record(group, g),
            "trajectories": [trajectory_record(trajectory, g, t) for t, trajectory in enumerate(group)],
        }
        for g, group in enumerate(groups)
    ]


def trajectories_json(trajectories: Iterable[Trajectory]) -> list[dict[str, Any]]:
    return [trajectory_record(trajectory, 0, index) for index, trajectory in enumerate(trajectories)]


def read_groups(groups: Sequence[Mapping[str, Any]]) -> list[TrajectoryGroup]:
    """The groups of `groups_json`. Raises ConfigError that names what is none."""
    made = []
    for g, entry in enumerate(groups):
        members = [
            read_trajectory(record, f"groups[{g}].trajectories[{t}]") for t, record in enumerate(entry["trajectories"])
        ]
        try:
            made.append(to_group(entry["group"], members))
        except (KeyError, TypeError, ValueError) as error:
            raise _unreadable(f"groups[{g}].group", error) from error
    return made


def read_trajectory(record: Mapping[str, Any], where: str) -> Trajectory:
    """A trajectory as it was recorded, fields of a subclass too. Raises ConfigError with `where`."""
    try:
        return to_trajectory(record, AnyTrajectory)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _unreadable(where, error) from error


def read_trajectories(records: Sequence[Mapping[str, Any]]) -> list[Trajectory]:
    """The trajectories of `trajectories_json`. Raises ConfigError that names what is none."""
    return [read_trajectory(record, f"trajectories[{index}]") for index, record in enumerate(records)]


def _unreadable(where: str, error: Exception) -> ConfigError:
    return ConfigError(f"{where} is not as artnb writes it: {type(error).__name__}: {error}")


# Results ----------------------------------------------------------------------------------------------


def result_json(result: TrainResult, groups: Sequence[TrajectoryGroup] = ()) -> dict[str, Any]:
    """A step's result, with what the step wrote on the choices of `groups`."""
    return {
        "step": result.step,
        "metrics": result.metrics,
        "reasons": dict(result.reasons),
        "notes": result.notes,
        "trained": result.trained,
        "trainer_logprobs": [
            [g, t, c, values]
            for g, group in enumerate(groups)
            for t, trajectory in enumerate(group)
            for c, choice in enumerate(trajectory.choices())
            if (values := (choice.model_extra or {}).get("trainer_logprobs")) is not None
        ],
    }


def read_result(data: Mapping[str, Any], groups: Sequence[TrajectoryGroup] = ()) -> TrainResult:
    """The result of `result_json`; writes the trainer's log-probs on the choices of `groups`, as a local step does."""
    kept = {(g, t, c): values for g, t, c, values in data["trainer_logprobs"]}
    for g, group in enumerate(groups):
        for t, trajectory in enumerate(group):
            for c, choice in enumerate(trajectory.choices()):
                if (values := kept.get((g, t, c))) is not None:
                    choice.trainer_logprobs = values  # type: ignore[attr-defined]
                elif "trainer_logprobs" in (choice.model_extra or {}):
                    del choice.trainer_logprobs  # type: ignore[attr-defined]  # of an earlier step
    return TrainResult(
        step=data["step"],
        metrics=dict(data["metrics"]),
        reasons=Counter(data["reasons"]),
        notes=list(data["notes"]),
        trained=data["trained"],
    )


def turns_json(found: Iterable[TurnLogprobs | None]) -> list[dict[str, Any] | None]:
    return [None if t is None else {"values": t.values.tolist(), "row_tokens": t.row_tokens} for t in found]


def read_turns(data: Iterable[Mapping[str, Any] | None]) -> list[TurnLogprobs | None]:
    """What `turns_json` made; float32 goes through JSON unchanged."""
    return [None if t is None else TurnLogprobs(np.array(t["values"], np.float32), int(t["row_tokens"])) for t in data]


# Errors -----------------------------------------------------------------------------------------------

_ATTRIBUTES = ("phase", "memory", "param", "index")


def error_json(error: BaseException) -> dict[str, Any]:
    """An error that ended a job; `read_error` makes the same of it."""
    known = isinstance(error, ArtnbError)
    return {
        "type": type(error).__name__,
        "message": str(error),
        "attributes": {name: getattr(error, name) for name in _ATTRIBUTES if known and hasattr(error, name)},
    }


def read_error(data: Mapping[str, Any], url: str) -> ArtnbError:
    """The error as it was raised on the server; ServiceError where artnb has no such class."""
    kind = getattr(errors, str(data.get("type")), None)
    text = str(data.get("message"))
    if not (isinstance(kind, type) and issubclass(kind, ArtnbError)) or kind is ServiceError:
        return ServiceError(f"{url} failed with {data.get('type')}: {text}. The server's log has the traceback")
    error = kind.__new__(kind)  # not by its constructor: the message is complete already
    Exception.__init__(error, f"{text} (at {url})")
    error.__dict__.update(data.get("attributes") or {})
    return error
