"""Make an uploaded adapter the next step of a model: checked, loaded, kept as a checkpoint, and served."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from ..backend import TrainResult
from ..errors import CheckpointError
from ..local.trained import TrainedModel
from ..training.adapter_files import CONFIG_FILE, WEIGHTS_FILE
from ..training.adapter_shape import check_adapter
from ..training.trainer import Trainer
from .uploads import Uploads


async def adopt_adapter(trained: TrainedModel, sha256: str, config: Mapping[str, Any]) -> TrainResult:
    """The step that loads the upload `sha256`; `config` is the adapter_config.json that it was made with.

    The optimizer starts anew. Raises CheckpointError or ConfigError, and changes nothing, for one that does not fit.
    """
    async with trained.turn():
        trained.store.check_free(trained.step + 1)
        weights = Uploads(trained.folder).path(sha256)
        if not weights.exists():
            raise CheckpointError(f"no adapter {sha256} was uploaded for {trained.name}; push it again")

        async def step(stop: threading.Event) -> TrainResult:
            await asyncio.to_thread(_load, trained, weights, config)
            return await trained.commit(TrainResult(step=trained.step + 1), [], "push")

        result = await trained.whole_step(step)
        weights.unlink(missing_ok=True)
        return result


def _load(trained: TrainedModel, weights: Path, config: Mapping[str, Any]) -> None:
    trainer = trained.trainer
    assert trainer is not None
    with TemporaryDirectory(dir=weights.parent) as name:
        folder = Path(name)
        shutil.copyfile(weights, folder / WEIGHTS_FILE)
        (folder / CONFIG_FILE).write_text(json.dumps(config))
        check_adapter(folder, trained.base_model, trained.lora)
        # From here on with the server's own configuration: of what was sent only the numbers are used.
        shutil.copyfile(trained.store.path(trained.step) / CONFIG_FILE, folder / CONFIG_FILE)
        try:
            for tensor_name, tensor in load_file(folder / WEIGHTS_FILE).items():
                if not torch.isfinite(tensor).all():
                    raise CheckpointError(f"the adapter holds NaN or infinite weights, e.g. in {tensor_name}")
        except SafetensorError as error:
            raise CheckpointError(f"the adapter cannot be read: {error}") from error
        trainer.policy.load_adapter(trainer.adapter, folder)
    trained.trainer = Trainer(trainer.policy, trainer.adapter, seed=trained._seed)
