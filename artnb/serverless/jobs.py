"""A training job at the service, followed from its first event to its last, by whoever is there.

What was started is written beside the model's history at once: an interrupted cell, a broken connection or a killed
kernel leaves a job that runs on, and the next call finds it instead of training the same rollouts twice.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import statistics
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from ..durable import replace_file, sync_folder
from ..errors import CheckpointError, TrainError
from ..notebook.progress import Progress
from .client import JobEvent, TrainingService

logger = logging.getLogger("artnb")

FILE = "serverless-job.json"
FORMAT = 1
SHOWN = ("loss", "reward", "entropy")


@dataclass(frozen=True, slots=True)
class Job:
    """A job that was started and whose end was not seen yet."""

    id: str
    kind: Literal["train", "sft"]
    model_id: str
    step: int  # the newest checkpoint before it
    digest: str  # of what it trains on


class OpenJob:
    """The record of a model's job on disk. There is one at most: the service takes one after the other."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE

    def read(self) -> Job | None:
        """Raises CheckpointError for a file that is not ours."""
        try:
            found = json.loads(self.path.read_bytes())
            if found["v"] != FORMAT:
                raise ValueError(f"its format is {found['v']}")
            return Job(**found["job"])
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{self.path} is not a record of a training job ({error!r}); move it away and call again"
            ) from None

    def write(self, job: Job) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(self.path, [json.dumps({"v": FORMAT, "job": asdict(job)}).encode()])

    def clear(self) -> None:
        """The job has ended."""
        self.path.unlink(missing_ok=True)
        sync_folder(self.path.parent)


class Followed:
    """What is known of a job so far. Events that come twice count once."""

    def __init__(self) -> None:
        self.cursor: str | None = None
        self.total: int | None = None  # gradient steps, once the service has said
        self.ended = False
        self.failure: str | None = None
        self._seen: set[str] = set()
        self._values: dict[str, list[float]] = defaultdict(list)

    @property
    def gradient_steps(self) -> int:
        return max(map(len, self._values.values()), default=0)

    def take(self, event: JobEvent) -> dict[str, float] | None:
        """Note an event; the metrics of a gradient step, None for any other."""
        self.cursor = event.id
        if event.id in self._seen:
            return None
        self._seen.add(event.id)
        if event.type == "gradient_step":
            metrics = _numbers(event.data)
            for name, value in metrics.items():
                self._values[name].append(value)
            return metrics
        if event.type == "training_started":
            count = event.data.get("num_sequences")
            self.total = count if isinstance(count, int) else None
        elif event.type == "training_ended":
            self.ended = True
        elif event.type == "training_failed":
            self.ended = True
            self.failure = str(event.data.get("error_message") or "without saying why")
        else:
            logger.info("an event of an unknown type, %r, came from the training service", event.type)
        return None

    def metrics(self) -> dict[str, float]:
        """The mean of each metric over the gradient steps."""
        means = {name: statistics.fmean(values) for name, values in self._values.items()}
        if "loss" not in means and "policy_loss" in means:
            means["loss"] = means.pop("policy_loss")  # artnb's word for it
        return means


async def follow(service: TrainingService, job: Job, *, desc: str, poll_seconds: float) -> Followed:
    """Read a job's events until it has ended, with a progress line.

    Raises ServiceError when the service cannot be asked any more (the job goes on there), TrainError when it failed.
    """
    seen = Followed()
    with Progress(total=None, desc=desc, unit="gradient step", phase="train") as bar:
        while not seen.ended:
            for event in await service.events(job.id, seen.cursor, sft=job.kind == "sft"):
                metrics = seen.take(event)
                if metrics is not None:
                    bar.update(1, **{name: metrics[name] for name in SHOWN if name in metrics})
                if seen.total is not None and bar.total != seen.total:
                    bar.set_total(seen.total)
            if not seen.ended:
                await asyncio.sleep(poll_seconds)
    if seen.failure is not None:
        raise TrainError(f"the service says that job {job.id} failed: {seen.failure}", phase=f"{job.kind} job")
    return seen


def _numbers(data: dict[str, Any]) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in data.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }
