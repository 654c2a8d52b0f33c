"""Which rows each optimizer step of supervised fine-tuning takes, and at which learning rate. Numbers only.

Everything here follows from the number of rows and the options, so that a run can be cut and gone on with anywhere.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Literal

from ..config import SCHEDULES, TrainSFTConfig, check_choice, check_number, scheduled_rate
from ..errors import ConfigError

Schedule = Literal["constant", "linear", "cosine"]
AUTO_BATCH_SIZE = 2
"""Trajectories in an optimizer step where batch_size="auto"."""


def batch_size_of(config: TrainSFTConfig) -> int:
    return AUTO_BATCH_SIZE if config.batch_size == "auto" else config.batch_size


def sft_batches(rows: int, config: TrainSFTConfig) -> list[list[int]]:
    """The numbers of the rows of each batch, over all epochs; the last batch of an epoch may be short."""
    size = batch_size_of(config)
    batches = []
    for epoch in range(config.epochs):
        order = epoch_order(rows, epoch, seed=config.seed, shuffle=config.shuffle)
        batches += [order[i : i + size] for i in range(0, rows, size)]
    return batches


def epoch_order(rows: int, epoch: int, *, seed: int, shuffle: bool = True) -> list[int]:
    """The order of the rows in an epoch; each epoch has its own."""
    order = list(range(rows))
    if shuffle:
        random.Random(seed + epoch).shuffle(order)
    return order


def buffered_order(rows: int, epochs: int, *, seed: int, buffer: int) -> Iterator[int]:
    """The rows' numbers, epoch after epoch, shuffled as a stream is: each is drawn from the next `buffer` ones.

    Each row of the buffer is as likely; so a row may come late by any distance, and early by at most `buffer`.
    """
    for epoch in range(epochs):
        rng = random.Random(seed + epoch)
        held: list[int] = []
        for row in range(rows):
            held.append(row)
            if len(held) >= buffer:
                drawn = rng.randrange(len(held))
                held[drawn], held[-1] = held[-1], held[drawn]
                yield held.pop()
        rng.shuffle(held)
        yield from held


def learning_rates(config: TrainSFTConfig, batches: int) -> list[float]:
    """One rate for each of `batches` optimizer steps. Raises: ConfigError when a list of rates has another length."""
    rates = config.learning_rate
    if not isinstance(rates, list):
        warmup = int(batches * config.warmup_ratio)
        return create_lr_schedule(batches, rates, config.lr_schedule, warmup)
    if len(rates) != batches:
        raise ConfigError(f"train_sft: {len(rates)} learning rates for {batches} batches")
    return list(rates)


def create_lr_schedule(
    total_steps: int, peak_lr: float, method: Schedule = "linear", warmup_steps: int = 0, min_lr: float = 0.0
) -> list[float]:
    """The learning rate of each of `total_steps` steps: up from `min_lr` to `peak_lr`, then down again by `method`.

    The first step's rate is above `min_lr`, and so is the last one's: a step at rate 0 would be for nothing.
    """
    me = "create_lr_schedule"
    check_number(me, "total_steps", total_steps, low=0, whole=True)
    check_number(me, "warmup_steps", warmup_steps, low=0, whole=True)
    check_number(me, "min_lr", min_lr, low=0.0)
    check_number(me, "peak_lr", peak_lr, low=min_lr)
    check_choice(me, "method", method, SCHEDULES)
    span = peak_lr - min_lr
    return [
        min_lr + scheduled_rate(span, method, step, warmup=warmup_steps, total=total_steps)
        for step in range(total_steps)
    ]
