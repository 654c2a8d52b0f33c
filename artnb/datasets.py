"""Go through a dataset in shuffled steps, the same way every time, from any step on."""

from __future__ import annotations

import math
import random
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from .config import check_number
from .notebook.progress import Progress

T = TypeVar("T")


@dataclass
class DatasetBatch(Generic[T]):
    """The items of one step. `step` counts over all epochs, `epoch_step` within the epoch, all from 0."""

    items: list[T]
    step: int
    epoch: int
    epoch_step: int


def iterate_dataset(
    dataset: Sequence[T],
    groups_per_step: int = 1,
    num_epochs: int = 1,
    initial_step: int = 0,
    use_tqdm: bool = True,
) -> Generator[DatasetBatch[T], None, None]:
    """Yield `groups_per_step` items at a time, for `num_epochs` epochs, starting at step `initial_step`.

    for batch in iterate_dataset(scenarios, groups_per_step=4, initial_step=await model.get_step()): ...

    Each epoch has its own order, which depends on its number and on the length of the dataset only: a resumed run sees
    the rest of the same order, and the global random generator is not touched. The last step of an epoch may be short.
    """
    check_number("iterate_dataset", "groups_per_step", groups_per_step, low=1, whole=True)
    check_number("iterate_dataset", "num_epochs", num_epochs, low=0, whole=True)
    check_number("iterate_dataset", "initial_step", initial_step, low=0, whole=True)
    return _steps(dataset, groups_per_step, num_epochs, initial_step, use_tqdm)


def _steps(
    dataset: Sequence[T], groups_per_step: int, num_epochs: int, initial_step: int, use_tqdm: bool
) -> Generator[DatasetBatch[T], None, None]:
    per_epoch = math.ceil(len(dataset) / groups_per_step)
    total = per_epoch * num_epochs
    if initial_step >= total:
        return
    with Progress(total, "steps" if use_tqdm else None, "step", initial=initial_step) as progress:
        for epoch in range(initial_step // per_epoch, num_epochs):
            order = list(range(len(dataset)))
            random.Random(epoch).shuffle(order)
            for epoch_step in range(per_epoch):
                step = epoch * per_epoch + epoch_step
                if step < initial_step:
                    continue
                chosen = order[epoch_step * groups_per_step : (epoch_step + 1) * groups_per_step]
                yield DatasetBatch([dataset[i] for i in chosen], step, epoch, epoch_step)
                progress.update(1)
