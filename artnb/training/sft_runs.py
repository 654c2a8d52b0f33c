"""Longer supervised runs: through a file, or in chunks of a data set, each chunk a step with a checkpoint of its own.

What a chunk trains follows from the data and the options alone, so a run that was interrupted goes on at the batch that
its last complete checkpoint stands for, with the same order of rows and the same learning rates.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Generator, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..config import TrainSFTConfig, check_number
from ..errors import ConfigError
from ..notebook.progress import Progress
from ..trajectories import Trajectory
from .sft_batches import Schedule, buffered_order, create_lr_schedule, epoch_order
from .sft_data import JsonlFile

if TYPE_CHECKING:
    import pandas as pd

    from ..backend import TrainResult
    from ..model import TrainableModel


class SFTChunk(NamedTuple):
    """One `model.train_sft` call: its rows and options, and where it stands. Batches count from 0."""

    trajectories: list[Trajectory]
    config: TrainSFTConfig
    step: int  # its first batch, over all epochs
    epoch: int
    epoch_step: int  # its first batch in the epoch


def get_file_row_count(file_path: str | Path) -> int:
    """How many rows a JSONL file has, blank lines not counted. Raises: DataError as `JsonlFile`."""
    return len(JsonlFile(file_path))


def iterate_file(
    file_path: str | Path,
    epochs: int = 1,
    shuffle_buffer_size: int = 10000,
    seed: int = 42,
    initial_skip: int = 0,
) -> Iterator[Trajectory]:
    """The rows of a JSONL file, epoch after epoch, each epoch shuffled in its own way; read one by one.

    Args:
        shuffle_buffer_size: from how many next rows each is drawn; 1 keeps the file's order.
        initial_skip: rows to leave out at the beginning, counted over all epochs.

    Raises: DataError naming each wrong line, before the first row.
    """
    _check_stream("iterate_file", epochs, shuffle_buffer_size, seed)
    check_number("iterate_file", "initial_skip", initial_skip, low=0, whole=True)
    rows = JsonlFile(file_path)
    order = buffered_order(len(rows), epochs, seed=seed, buffer=shuffle_buffer_size)
    return (rows[number] for number in islice(order, initial_skip, None))


def create_sft_dataset_iterator(
    trajectories: Sequence[Trajectory],
    chunk_size: int = 10,
    epochs: int = 1,
    batch_size: int = 2,
    peak_lr: float = 2e-4,
    schedule_type: Schedule = "linear",
    warmup_ratio: float = 0.1,
    shuffle: bool = True,
    seed: int = 42,
    initial_step: int = 0,
    show_progress: bool = True,
) -> Generator[SFTChunk]:
    """Cut a data set into calls of `model.train_sft`; the learning rate goes over all of them.

    for chunk in art.utils.sft.create_sft_dataset_iterator(trajectories, epochs=3):
        await model.train_sft(chunk.trajectories, chunk.config)

    Args:
        chunk_size: batches in a call; after each call there is a checkpoint and a line in the history.
        initial_step: batches that are done already. A chunk of which some are done begins after them.
    """
    me = "create_sft_dataset_iterator"
    check_number(me, "chunk_size", chunk_size, low=1, whole=True)
    check_number(me, "epochs", epochs, low=0, whole=True)
    check_number(me, "batch_size", batch_size, low=1, whole=True)
    check_number(me, "initial_step", initial_step, low=0, whole=True)
    check_number(me, "warmup_ratio", warmup_ratio, low=0.0, high=1.0)
    check_number(me, "seed", seed, low=0, whole=True)
    per_epoch = math.ceil(len(trajectories) / batch_size)
    total = per_epoch * epochs
    rates = create_lr_schedule(total, peak_lr, schedule_type, int(total * warmup_ratio))

    def chunks() -> Generator[SFTChunk]:
        with Progress(total, "sft" if show_progress else None, "batch", initial=min(initial_step, total)) as bar:
            for epoch in range(epochs):
                order = epoch_order(len(trajectories), epoch, seed=seed, shuffle=shuffle)
                for first in range(0, per_epoch, chunk_size):
                    stop = min(first + chunk_size, per_epoch)
                    start = max(first, initial_step - epoch * per_epoch)
                    if start >= stop:
                        continue
                    step = epoch * per_epoch + start
                    config = TrainSFTConfig(
                        learning_rate=rates[step : step + stop - start], batch_size=batch_size, shuffle=False
                    )
                    numbers = order[start * batch_size : stop * batch_size]
                    yield SFTChunk([trajectories[n] for n in numbers], config, step, epoch, start)
                    bar.update(stop - start)

    return chunks()


async def train_sft_from_file(
    model: TrainableModel,
    file_path: str | Path,
    epochs: int = 1,
    batch_size: int = 2,
    peak_lr: float = 2e-4,
    schedule_type: Schedule = "linear",
    warmup_ratio: float = 0.1,
    initial_step: int = 0,
    final_step: int | None = None,
    _config: None = None,
    verbose: bool = False,
    shuffle_buffer_size: int = 10000,
    *,
    seed: int = 42,
    checkpoint_every: int | None = None,
    resume: bool = False,
) -> list[TrainResult]:
    """Fine-tune on a JSONL file of any size: the rows of one checkpoint's batches are in memory at a time.

    await train_sft_from_file(model, "train.jsonl", epochs=3, checkpoint_every=200, resume=True)

    Args:
        warmup_ratio: share of the batches with linear warm-up.
        initial_step, final_step: the batches to train, from the first to before the second; the learning rates are
            those of the whole run, so that it can be cut into parts.
        shuffle_buffer_size: as in `iterate_file`.
        checkpoint_every: batches in a step, each with its checkpoint; None: all in one.
        resume: go on where an earlier call with the same file and options stopped, by the history; where it had ended
            nothing is trained. A step that was interrupted has trained nothing and is done again as a whole.

    Returns: the result of each step.
    Raises: DataError naming each wrong line, before anything is trained; as `model.train_sft`.
    """
    me = "train_sft_from_file"
    if _config is not None:
        raise ConfigError(f"{me}: there is no _config here; the options are named: {', '.join(_OPTIONS)}")
    _check_stream(me, epochs, shuffle_buffer_size, seed)
    check_number(me, "batch_size", batch_size, low=1, whole=True)
    check_number(me, "initial_step", initial_step, low=0, whole=True)
    check_number(me, "warmup_ratio", warmup_ratio, low=0.0, high=1.0)
    for option, value in (("final_step", final_step), ("checkpoint_every", checkpoint_every)):
        if value is not None:
            check_number(me, option, value, low=1, whole=True)
    rows = JsonlFile(file_path)
    total = math.ceil(len(rows) * epochs / batch_size)
    rates = create_lr_schedule(total, peak_lr, schedule_type, int(total * warmup_ratio))
    run = _run_number(rows.sha256, epochs, batch_size, peak_lr, schedule_type, warmup_ratio, shuffle_buffer_size, seed)
    await model.ready()
    first = max(initial_step, _batches_done(model.history(), run) if resume else 0)
    end = total if final_step is None else min(final_step, total)
    _say(verbose or resume, f"{rows.path.name}: {len(rows)} rows, {total} batches; {_plan(first, end)}")
    order = islice(
        buffered_order(len(rows), epochs, seed=seed, buffer=shuffle_buffer_size), first * batch_size, end * batch_size
    )
    results = []
    for start in range(first, end, checkpoint_every or max(1, end - first)):
        stop = min(end, start + (checkpoint_every or end))
        config = TrainSFTConfig(
            learning_rate=rates[start:stop],
            batch_size=batch_size,
            shuffle=False,
            extra_metrics={_RUN: float(run), _DONE: float(stop)},
        )
        chunk = [rows[number] for number in islice(order, (stop - start) * batch_size)]
        results.append(await model.train_sft(chunk, config))
        _say(verbose, str(results[-1]))
    return results


_OPTIONS = ("epochs", "batch_size", "peak_lr", "schedule_type", "warmup_ratio", "seed", "checkpoint_every", "resume")
_RUN, _DONE = "file_run", "file_batches_done"
"""Metrics that say which run through a file a step belongs to, and how many of its batches are trained with it."""


def _check_stream(me: str, epochs: int, shuffle_buffer_size: int, seed: int) -> None:
    check_number(me, "epochs", epochs, low=0, whole=True)
    check_number(me, "shuffle_buffer_size", shuffle_buffer_size, low=1, whole=True)
    check_number(me, "seed", seed, low=0, whole=True)


def _run_number(*options: Any) -> int:
    """A number for the file's content and the options that decide what is trained; exact as a float."""
    return int(hashlib.sha256(json.dumps(options).encode()).hexdigest()[:12], 16)


def _batches_done(history: pd.DataFrame, run: int) -> int:
    if f"sft/{_RUN}" not in history:
        return 0
    mine = history[history[f"sft/{_RUN}"] == float(run)]
    return int(mine[f"sft/{_DONE}"].max()) if len(mine) else 0


def _plan(first: int, end: int) -> str:
    if first >= end:
        return "all are trained already"
    return f"training batches {first} to {end - 1}"


def _say(shown: bool, line: str) -> None:
    if shown:
        print(f"artnb: {line}", flush=True)
