"""An import path that users of ART know. The code lives in artnb.trajectories, artnb.config and artnb.backend."""

from typing import Any

from .backend import TrainResult
from .compat.names import LocalTrainResult
from .config import TrainConfig, TrainSFTConfig
from .trajectories import Message, MessageOrChoice, Messages, MessagesAndChoices, Tools

__all__ = [
    "LocalTrainResult",
    "Message",
    "MessageOrChoice",
    "Messages",
    "MessagesAndChoices",
    "Tools",
    "TrainConfig",
    "TrainResult",
    "TrainSFTConfig",
]


def __getattr__(name: str) -> Any:
    if name == "ServerlessTrainResult":  # its neighbours load the service's client
        from .serverless.registered import ServerlessTrainResult

        return ServerlessTrainResult
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
