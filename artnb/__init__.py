"""artnb: train LLM agents by reinforcement learning from inside a notebook, on one GPU or none.

    import artnb as art

Importing it loads neither torch nor transformers, touches no GPU and patches nothing. It says one line, and only where
an install cell has replaced a package that this kernel had already imported.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from .restart import warn_if_replaced

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .backend import Backend as Backend
    from .backend import TrainResult as TrainResult
    from .batches import trajectory_group_batches as trajectory_group_batches
    from .capture import (
        auto_trajectory as auto_trajectory,
    )
    from .capture import (
        capture_auto_trajectory as capture_auto_trajectory,
    )
    from .capture import (
        trajectory as trajectory,
    )
    from .compat.names import LocalTrainResult as LocalTrainResult
    from .compat.names import (
        capture_yielded_trajectory as capture_yielded_trajectory,
    )
    from .compat.names import (
        current_trajectory as current_trajectory,
    )
    from .compat.names import (
        no_capture as no_capture,
    )
    from .compat.names import (
        trajectory_group as trajectory_group,
    )
    from .compat.names import (
        yield_trajectory as yield_trajectory,
    )
    from .config import LoraConfig as LoraConfig
    from .config import TrainConfig as TrainConfig
    from .config import TrainSFTConfig as TrainSFTConfig
    from .demo import demo_model as demo_model
    from .dev import LoRAConfig as LoRAConfig
    from .engines.scripted import ScriptedEngine as ScriptedEngine
    from .errors import ArtnbError as ArtnbError
    from .gather import gather_trajectories as gather_trajectories
    from .gather import gather_trajectory_groups as gather_trajectory_groups
    from .local.backend import LocalBackend as LocalBackend
    from .model import Model as Model
    from .model import TrainableModel as TrainableModel
    from .remote.backend import RemoteBackend as RemoteBackend
    from .retrying import retry as retry
    from .rewards.preflight import preflight as preflight
    from .serverless.backend import ServerlessBackend as ServerlessBackend
    from .serverless.registered import ServerlessTrainResult as ServerlessTrainResult
    from .trajectories import (
        History as History,
    )
    from .trajectories import (
        Messages as Messages,
    )
    from .trajectories import (
        MessagesAndChoices as MessagesAndChoices,
    )
    from .trajectories import (
        StopReason as StopReason,
    )
    from .trajectories import (
        Tools as Tools,
    )
    from .trajectories import (
        Trajectory as Trajectory,
    )
    from .trajectories import (
        TrajectoryGroup as TrajectoryGroup,
    )

# Public name → module. Each is imported when it is first used.
_PUBLIC = {
    # What ART's users know and artnb has in another place, or under another name.
    "LoRAConfig": "dev",
    "LocalTrainResult": "compat.names",
    "Messages": "trajectories",
    "MessagesAndChoices": "trajectories",
    "ServerlessTrainResult": "serverless.registered",
    "Tools": "trajectories",
    "capture_yielded_trajectory": "compat.names",
    "current_trajectory": "compat.names",
    "no_capture": "compat.names",
    "trajectory_group": "compat.names",
    "yield_trajectory": "compat.names",
    # artnb's own.
    "ArtnbError": "errors",
    "Backend": "backend",
    "History": "trajectories",
    "LocalBackend": "local.backend",
    "LoraConfig": "config",
    "Model": "model",
    "RemoteBackend": "remote.backend",
    "ScriptedEngine": "engines.scripted",
    "ServerlessBackend": "serverless.backend",
    "StopReason": "trajectories",
    "TrainConfig": "config",
    "TrainResult": "backend",
    "TrainSFTConfig": "config",
    "TrainableModel": "model",
    "Trajectory": "trajectories",
    "TrajectoryGroup": "trajectories",
    "auto_trajectory": "capture",
    "capture_auto_trajectory": "capture",
    "demo_model": "demo",
    "gather_trajectories": "gather",
    "gather_trajectory_groups": "gather",
    "preflight": "rewards.preflight",
    "retry": "retrying",
    "trajectory": "capture",
    "trajectory_group_batches": "batches",
}

__all__ = ["__version__", *sorted(_PUBLIC)]


def __getattr__(name: str) -> Any:
    module = _PUBLIC.get(name)
    if module is None:
        if importlib.util.find_spec(f"{__name__}.{name}") is not None:
            return importlib.import_module(f".{name}", __name__)
        from .compat.differences import reason

        raise AttributeError(f"module 'artnb' has no attribute {name!r}{reason(name)}")
    value = getattr(importlib.import_module(f".{module}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__


warn_if_replaced()
