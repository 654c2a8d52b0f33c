"""The data of an SFT job: a JSONL file, and where the service can read it. By default an artifact at W&B.

Only W&B's own library talks to W&B here. It was not run against an account.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ConfigError, ServiceError
from ..tracking.records import to_line
from ..trajectories import Trajectory, messages_of

DATA_FILE = "train.jsonl"


@dataclass(frozen=True, slots=True)
class Destination:
    """Whose data it is: the model as the service knows it."""

    entity: str
    project: str
    name: str
    run_id: str | None  # the model's run at W&B


def conversations(trajectories: Sequence[Trajectory]) -> list[bytes]:
    """A JSONL line `{"messages": …, "tools": …}` for each conversation, further histories too."""
    return [
        to_line({"messages": messages_of(items), **({"tools": tools} if tools else {})})
        for trajectory in trajectories
        for items, tools in trajectory.histories()
    ]


def upload_to_wandb(path: Path, destination: Destination, api_key: str) -> str:
    """Log the file as a data set's artifact of the model's run; returns its URL. Blocks until W&B has it.

    Raises ConfigError without wandb or where it is told not to use the network, ServiceError when W&B refuses.
    """
    try:
        import wandb
    except ImportError:
        raise ConfigError(
            "train_sft at the service uploads its data with wandb, which is not installed: pip install 'artnb[wandb]', "
            "or give ServerlessBackend(upload=...) a function that puts the file where the service can read it"
        ) from None
    if (mode := os.environ.get("WANDB_MODE", "online")) != "online":
        raise ConfigError(f"WANDB_MODE={mode!r} keeps wandb from uploading the data of train_sft; unset it")
    artifact = make_artifact(path, destination)
    try:
        with wandb.init(
            entity=destination.entity,
            project=destination.project,
            name=destination.name,
            id=destination.run_id or destination.name,
            resume="allow",
            reinit="create_new",
            settings=wandb.Settings(api_key=api_key, silent=True, console="off"),
        ) as run:
            run.log_artifact(artifact).wait()
    except wandb.errors.Error as error:
        raise ServiceError(f"W&B did not take the data of train_sft: {str(error).replace(api_key, '***')}") from None
    return f"wandb-artifact:///{destination.entity}/{destination.project}/{artifact.name.partition(':')[0]}:v0"


def make_artifact(path: Path, destination: Destination) -> Any:
    """A wandb.Artifact that holds the file, under a name that no other call uses."""
    import wandb

    artifact = wandb.Artifact(
        f"{destination.name}-sft-data-{uuid.uuid4().hex[:12]}", type="dataset", metadata={"format": "jsonl"}
    )
    artifact.add_file(str(path), name=DATA_FILE)
    return artifact
