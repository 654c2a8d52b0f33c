"""Every error that artnb raises, one class per boundary.

ArtnbError
├── ConfigError (ValueError)          an option that is unknown, of the wrong type, or cannot be honoured
├── ModelError (ValueError)           a base model or model name that cannot be found or loaded
├── EngineError (RuntimeError)        sampling failed
│   ├── EngineClosedError             the engine was closed while, or before, the request ran
│   ├── AdapterNotFoundError          the request names an adapter that the engine does not hold
│   └── RequestError (ValueError)     the request itself is wrong; `param` names the field
│       └── ContextLengthError        the prompt alone fills the context
├── RenderError (ValueError)          messages or tools the chat template cannot render; `index` names the message
├── RolloutError (RuntimeError)       a rollout failed
│   ├── RolloutTimeoutError           it ran past its limit
│   └── TooManyExceptionsError        more rollouts failed than `max_exceptions` allows
├── TrainError (RuntimeError)         a step failed; `phase` and `memory` say where
│   └── NonFiniteGradientError        too many steps in a row had NaN or infinite gradients
├── CheckpointError (RuntimeError)    a checkpoint folder is incomplete, foreign, in use, or cannot be written
├── ServiceError (RuntimeError)       a training service or a hub refused or was not reached; `status` is HTTP's
└── JudgeError (RuntimeError)         an LLM judge gave no usable answer

A rollout's own exception is never wrapped: it is recorded on its group as it was raised.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ArtnbError(Exception):
    """Base of every error that artnb raises on purpose."""


class ConfigError(ArtnbError, ValueError):
    """An option is unknown, has the wrong type, or cannot be honoured."""


class ModelError(ArtnbError, ValueError):
    """A base model or a model name cannot be found or loaded."""


class EngineError(ArtnbError, RuntimeError):
    """Sampling failed."""


class EngineClosedError(EngineError):
    """The engine is closed."""


class AdapterNotFoundError(EngineError, LookupError):
    """The request names an adapter that the engine does not hold."""


class RequestError(EngineError, ValueError):
    """The request is wrong; `param` names the field to change."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextLengthError(RequestError):
    """The prompt leaves no room for a single new token."""


class DataError(ArtnbError, ValueError):
    """A training file or data set whose rows cannot be used."""


class RenderError(ArtnbError, ValueError):
    """Messages or tools that the chat template cannot render; `index` is the message's position."""

    def __init__(self, message: str, *, index: int | None = None) -> None:
        super().__init__(message)
        self.index = index


class RolloutError(ArtnbError, RuntimeError):
    """A rollout failed."""


class RolloutTimeoutError(RolloutError, TimeoutError):
    """A rollout ran past its time limit and was cancelled."""


class TooManyExceptionsError(RolloutError):
    """More rollouts failed than `max_exceptions` allows; the first failure is the cause."""


class TrainError(ArtnbError, RuntimeError):
    """A training step failed. The model keeps its last complete step."""

    def __init__(self, message: str, *, phase: str = "", memory: str = "") -> None:
        detail = "; ".join(part for part in (f"phase: {phase}" if phase else "", memory) if part)
        super().__init__(f"{message} ({detail})" if detail else message)
        self.phase = phase
        self.memory = memory


class NonFiniteGradientError(TrainError):
    """Too many steps in a row had NaN or infinite gradients."""


class CheckpointError(ArtnbError, RuntimeError):
    """A checkpoint folder is incomplete, foreign, in use, or cannot be written."""


class ServiceError(ArtnbError, RuntimeError):
    """A training service or a hub refused, or could not be reached; `status` is HTTP's, None without an answer."""

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class JudgeError(ArtnbError, RuntimeError):
    """An LLM judge gave no usable answer."""


def nearest(name: str, known: Iterable[str]) -> str:
    """'; did you mean 'x'?' for the closest known spelling, or the list of known names."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(names)}"
