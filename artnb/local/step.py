"""One step of a model on a LocalBackend: rows → trainer, then kept by trained.py."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable

from ..backend import TrainResult
from ..config import TrainConfig, TrainSFTConfig
from ..errors import ConfigError
from ..notebook.progress import Progress
from ..training.explain import cut_short, explain
from ..training.ratios import keep_trainer_logprobs
from ..training.rows import rows_from_groups
from ..training.sft import sft_rows
from ..training.trainer import StepResult
from ..training.types import RowBatch
from ..trajectories import Trajectory, TrajectoryGroup
from .trained import TrainedModel
from .worker import StepInterrupted


async def run_step(trained: TrainedModel, groups: list[TrajectoryGroup], config: TrainConfig) -> TrainResult:
    """One GRPO step of `trained` on `groups`. Cancelling it leaves the model at its last complete step."""
    base = trained.served()
    async with trained.turn():
        trained.store.check_free(trained.step + 1)
        batch = rows_from_groups(groups, config, max_row_tokens=base.engine.context_length)
        result = TrainResult(step=trained.step + 1, metrics=dict(batch.metrics), notes=list(batch.notes))
        result.reasons = Counter(str(reason) for reason in batch.group_reasons.values())
        if batch.rows:
            trainer = trained.trainer
            assert trainer is not None
            step = trained.step
            with Progress(total=None, desc=f"train step {step + 1}", unit="pack", phase="train") as bar:

                def work(stop: threading.Event) -> StepResult:
                    return trainer.step(batch, config, step=step, on_progress=_progress(bar, stop))

                done, seconds = await trained.train_in(base.room, work)
            keep_trainer_logprobs(groups, batch.rows)
            result.metrics.update(done.metrics | seconds)
        else:
            result.trained = False
            result.notes.insert(0, explain(batch))
        if batch.group_reasons or not batch.rows:
            print(f"artnb: step {result.step}: {explain(batch)}", flush=True)
        for warning in cut_short(batch) if not trained.warned_cut else []:
            trained.warned_cut = True
            print(f"artnb: step {result.step}: {warning}", flush=True)
        result = await trained.commit(result, groups, "train")
        trained.check_mismatch(result, config)
        return result


async def run_sft_step(trained: TrainedModel, trajectories: list[Trajectory], config: TrainSFTConfig) -> TrainResult:
    """One supervised step: `config.epochs` passes over `trajectories` in batches, then a checkpoint."""
    base = trained.served()
    if not trajectories:
        raise ConfigError("train_sft: no trajectories were given")
    async with trained.turn():
        trained.store.check_free(trained.step + 1)
        batch = sft_rows(trajectories, base.chat, max_row_tokens=base.engine.context_length)
        result = TrainResult(step=trained.step + 1, metrics=dict(batch.metrics), notes=list(batch.notes))
        result.reasons = Counter({str(reason): n for reason, n in batch.trajectory_reasons.items()})
        size = 2 if config.batch_size == "auto" else config.batch_size
        batches = _by_trajectory(batch, size) * config.epochs
        rates = (
            config.learning_rate if isinstance(config.learning_rate, list) else [config.learning_rate] * len(batches)
        )
        if len(rates) != len(batches):
            raise ConfigError(f"train_sft: {len(rates)} learning rates for {len(batches)} batches")
        trainer = trained.trainer
        assert trainer is not None

        def train(stop: threading.Event) -> dict[str, float]:
            metrics: dict[str, float] = {}
            with Progress(total=len(batches), desc=f"sft step {result.step}", unit="batch", phase="train") as bar:
                for part, rate in zip(batches, rates, strict=True):
                    metrics = trainer.sft_step(part, rate, config, on_progress=_progress(None, stop)).metrics
                    bar.update(1, loss=metrics.get("loss", 0.0))
            return metrics

        if batches:
            try:
                metrics, seconds = await trained.train_in(base.room, train)
                result.metrics.update(metrics | seconds)
            except BaseException:
                await asyncio.to_thread(trained.undo)
                raise
        else:
            result.trained = False
            result.notes.insert(0, explain(batch))
            print(f"artnb: step {result.step}: {result.notes[0]}", flush=True)
        return await trained.commit(result, [TrajectoryGroup([t]) for t in trajectories], "sft")


def _by_trajectory(batch: RowBatch, size: int) -> list[RowBatch]:
    """The rows of `size` trajectories at a time; a template that rewrites history gives a trajectory several rows."""
    trajectories = list(dict.fromkeys((row.group, row.trajectory) for row in batch.rows))
    parts = [set(trajectories[i : i + size]) for i in range(0, len(trajectories), size)]
    return [RowBatch(rows=[r for r in batch.rows if (r.group, r.trajectory) in part]) for part in parts]


def _progress(bar: Progress | None, stop: threading.Event) -> Callable[..., None]:
    def on_progress(done: int = 1, *, total: int | None = None, **shown: float) -> None:
        if stop.is_set():
            raise StepInterrupted
        if bar is None:
            return
        if total is not None:
            bar.set_total(total)
        bar.update(done, **shown)

    return on_progress
