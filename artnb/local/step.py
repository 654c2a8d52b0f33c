"""One step of a model on a LocalBackend: rows → trainer, then kept by trained.py."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence

from ..backend import TrainResult
from ..config import TrainConfig, TrainSFTConfig
from ..errors import ConfigError
from ..notebook.progress import Progress
from ..tracking.history import KEPT_EXAMPLES
from ..training.explain import cut_short, explain
from ..training.ratios import keep_trainer_logprobs
from ..training.rows import rows_from_groups
from ..training.sft import SFTRows
from ..training.sft_batches import learning_rates, sft_batches
from ..training.sft_metrics import Means
from ..training.trainer import StepResult
from ..training.types import Row, RowBatch
from ..trajectories import Trajectory, TrajectoryGroup
from ..whole import StepInterrupted
from .trained import TrainedModel

LOOP_HELD_S = 0.05
"""Seconds of tokenizing after which other tasks of the event loop get a turn."""


async def run_step(trained: TrainedModel, groups: list[TrajectoryGroup], config: TrainConfig) -> TrainResult:
    """One GRPO step of `trained` on `groups`. Cancelled, it ends at a complete step: the last one, or this one."""
    base = trained.served()
    async with trained.turn():
        trained.store.check_free(trained.step + 1)
        batch = rows_from_groups(groups, config, max_row_tokens=base.engine.context_length)
        return await trained.whole_step(lambda stop: _grpo_step(trained, groups, batch, config, stop))


async def _grpo_step(
    trained: TrainedModel, groups: list[TrajectoryGroup], batch: RowBatch, config: TrainConfig, stop: threading.Event
) -> TrainResult:
    result = TrainResult(step=trained.step + 1, metrics=dict(batch.metrics), notes=list(batch.notes))
    result.reasons = Counter(str(reason) for reason in batch.group_reasons.values())
    if batch.rows:
        trainer = trained.trainer
        assert trainer is not None
        step = trained.step
        if trainer.policy.cold:
            print(
                "artnb: this step first compiles the model's layers: about a minute, and less when it was done on "
                "this machine before; LocalBackend(compile_layers=False) goes without",
                flush=True,
            )
        with Progress(total=None, desc=f"train step {step + 1}", unit="pack", phase="train") as bar:

            def work(stop: threading.Event) -> StepResult:
                return trainer.step(batch, config, step=step, on_progress=_progress(bar, stop))

            done, seconds = await trained.train_in(trained.served().room, work, stop)
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
    """One supervised step: `config.epochs` passes over `trajectories` in batches, then a checkpoint.

    Cancelled, it ends at a complete step: the last one, or this one. When it fails, it is the last one.
    """
    trained.served()
    if not trajectories:
        raise ConfigError("train_sft: no trajectories were given")
    batches = sft_batches(len(trajectories), config)
    plan = list(zip(batches, learning_rates(config, len(batches)), strict=True))
    async with trained.turn():
        trained.store.check_free(trained.step + 1)
        batch = await _sft_rows(trained, trajectories)
        return await trained.whole_step(lambda stop: _sft_step(trained, trajectories, batch, plan, config, stop))


async def _sft_step(
    trained: TrainedModel,
    trajectories: list[Trajectory],
    batch: RowBatch,
    plan: Sequence[tuple[Sequence[int], float]],
    config: TrainSFTConfig,
    stop: threading.Event,
) -> TrainResult:
    """`plan`: for each update which trajectories it is of, and its learning rate."""
    result = TrainResult(step=trained.step + 1, metrics=dict(batch.metrics), notes=list(batch.notes))
    result.reasons = Counter({str(reason): n for reason, n in batch.trajectory_reasons.items()})
    if batch.rows:
        trainer = trained.trainer
        assert trainer is not None
        rows_of: dict[int, list[Row]] = {}
        for row in batch.rows:
            rows_of.setdefault(row.trajectory, []).append(row)

        def train(stop: threading.Event) -> dict[str, float]:
            means = Means()
            with Progress(total=len(plan), desc=f"sft step {result.step}", unit="batch", phase="train") as bar:
                for numbers, rate in plan:
                    # A batch of which nothing fits is passed over: the others keep their learning rates.
                    if part := [row for number in numbers for row in rows_of.get(number, ())]:
                        done = trainer.sft_step(RowBatch(part), rate, config, on_progress=_progress(None, stop))
                        means.add(done.metrics)
                    bar.update(1, loss=means.last("loss"), lr=rate)
            return means.of_all()

        metrics, seconds = await trained.train_in(trained.served().room, train, stop)
        result.metrics.update(metrics | seconds)
    else:
        result.trained = False
        result.notes.insert(0, explain(batch))
    if batch.trajectory_reasons:
        print(f"artnb: step {result.step}: {explain(batch)}", flush=True)
    result.metrics |= config.extra_metrics or {}
    kept = [TrajectoryGroup([trajectory]) for trajectory in trajectories[:KEPT_EXAMPLES]]
    return await trained.commit(result, kept, "sft")


async def _sft_rows(trained: TrainedModel, trajectories: list[Trajectory]) -> RowBatch:
    """The rows of all trajectories, made in turn with whatever else the event loop has to do."""
    base = trained.served()
    making = SFTRows(base.chat, max_row_tokens=base.engine.context_length)
    begun = time.monotonic()
    with Progress(len(trajectories), f"sft step {trained.step + 1}: tokenize", "row", phase="work") as bar:
        for number, trajectory in enumerate(trajectories, start=1):
            making.add(trajectory)
            if time.monotonic() - begun > LOOP_HELD_S or number == len(trajectories):
                bar.update(number - bar.n)
                await asyncio.sleep(0)
                begun = time.monotonic()
    return making.batch()


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
