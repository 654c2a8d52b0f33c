"""An import path that users of ART know. The code lives in artnb.trajectories, artnb.config and artnb.backend."""

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
