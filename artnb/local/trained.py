"""One model on a LocalBackend, and how a step of it is kept: history and checkpoint, then the engine.

The history is written while the checkpoint is, and the checkpoint's rename, after both, makes a step exist: a kill at
any instant leaves the last complete step, and on resume the history of later ones is dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ..backend import TrainResult
from ..capture import Collector
from ..config import LoraConfig, TrainConfig
from ..engines.base import AdapterRef
from ..errors import CheckpointError, ConfigError, TrainError
from ..events import EVENTS
from ..memory import held_bytes
from ..notebook.progress import Progress
from ..tracking.follow import TRACKING
from ..tracking.history import History
from ..tracking.summary import summarize
from ..training.checkpoints import OPTIMIZER_FILE, CheckpointStore
from ..training.policy import Policy
from ..training.state_file import read_state, write_state
from ..training.trainer import Trainer
from ..trajectories import TrajectoryGroup
from ..whole import StepInterrupted, in_worker, to_the_end
from .lockfile import FolderLock
from .resident import Turn
from .room import Room
from .run_file import RUN_FILE

if TYPE_CHECKING:
    from ..model import TrainableModel
    from .served import ServedBase

T = TypeVar("T")
logger = logging.getLogger("artnb")
MISMATCHED_STEPS = 3
"""A run stops after so many steps in a row beyond `max_mismatch_kl`."""


class TrainedModel:
    """A registered model: its folder, its trainer, and the step it is at."""

    def __init__(
        self, name: str, project: str, base_model: str, lora: LoraConfig, folder: Path, lock: FolderLock
    ) -> None:
        self.name = name
        self.project = project
        self.base_model = base_model
        self.lora = lora
        self.folder = folder
        self.lock = lock
        self.store = CheckpointStore(folder)
        self.history = History(folder)
        self.collector = Collector()
        self.step = 0
        self.newest: TrainResult | None = None  # what the last step came to, also where its caller was cancelled
        self.base: ServedBase | None = None
        self.trainer: Trainer | None = None
        self.warned_cut = False
        self._seed = 0
        self._quantized: str | None = None  # how the base's weights are held, where that is not what their files say
        self._sampled = (0, 0.0)  # tokens and seconds of the engine when the last step was committed
        self._mismatched = 0  # steps in a row whose sampler and trainer disagreed
        self._turn = Turn()
        self._stops: set[threading.Event] = set()  # of the step that runs, if any
        self._closing = False  # steps that wait for their turn are refused, whoever gets the turn first

    # Coming and going ----------------------------------------------------------------------------

    def check_same(self, model: TrainableModel) -> None:
        """A second handle with the same name is the same model, or an error."""
        if (model.base_model, model.project, model.lora) != (self.base_model, self.project, self.lora):
            raise ConfigError(
                f"{self.name} is registered here with base_model={self.base_model!r}, project={self.project!r}, "
                f"{self.lora}; the new handle differs. Use another name= or backend.close() first"
            )

    @property
    def adapter(self) -> str:
        """What the policy calls the adapter that is trained."""
        return "train-" + self.name.replace(".", "_dot_")

    def lost_its_folder(self) -> bool:
        """Whether somebody removed the model's folder, to start anew, while it was loaded."""
        return not (self.folder / RUN_FILE).exists()

    async def attach(self, base: ServedBase, *, seed: int) -> None:
        """Resume at the newest complete checkpoint, or make checkpoint 0; then serve it."""
        self._seed = seed
        self._quantized = base.quantized
        path = await asyncio.to_thread(self._resume, base)
        await base.engine.load_adapter(AdapterRef(self.name, self.step), path)
        self.base = base
        base.models[self.name] = self

    def _resume(self, base: ServedBase) -> Path:
        self.store.clean()
        adapter = self.adapter
        latest = self.store.latest()
        if latest is None:
            base.policy.add_adapter(adapter, self.lora)
            self.trainer = Trainer(base.policy, adapter, seed=self._seed)
            self.step = 0
            self.history.truncate_after(0)
            return self._save(0, {})
        self.trainer = self._restored(base.policy, latest)
        self.step = latest
        self.history.truncate_after(latest)
        return self.store.path(latest)

    def _restored(self, policy: Policy, step: int) -> Trainer:
        """The adapter of a checkpoint, and a trainer with its optimizer and random state.

        A model that was forked from a bare adapter begins without these.
        """
        path = self.store.path(step)
        policy.load_adapter(self.adapter, path)
        trainer = Trainer(policy, self.adapter, seed=self._seed)
        if (path / OPTIMIZER_FILE).exists():
            trainer.load_state_dict(read_state(path / OPTIMIZER_FILE))
        return trainer

    async def detach(self) -> None:
        """End the step that runs and give the folder back."""
        await self.end_step()
        await asyncio.to_thread(TRACKING.detach, f"{self.project}/{self.name}")
        self.trainer = None
        self.history.close()
        self.lock.release()

    async def delete_checkpoints(self, steps: Sequence[int]) -> None:
        """See LocalBackend.delete_checkpoints."""
        if self.step in steps:
            raise ConfigError(f"checkpoint {self.step} of {self.name} is the newest and is served; it stays")
        # First from disk: a request that comes in between would load it again.
        await asyncio.to_thread(self.store.delete, steps)
        for step in steps:
            await self.served().forget(AdapterRef(self.name, step))

    def served(self) -> ServedBase:
        if self.base is None:
            raise ConfigError(f"{self.name} is closed; register it with a new backend")
        return self.base

    # The step ------------------------------------------------------------------------------------

    @asynccontextmanager
    async def turn(self) -> AsyncGenerator[None]:
        """One step at a time. Raises ConfigError when the model was closed while this one waited."""
        async with self._turn:
            if self._closing:
                raise ConfigError(f"{self.name} is closed; register it with a new backend")
            self.served()
            yield

    async def whole_step(self, step: Callable[[threading.Event], Coroutine[Any, Any, TrainResult]]) -> TrainResult:
        """Run `step(stop)` inside `turn`, to its end: it is either made and kept, or it has changed nothing.

        An interrupt sets `stop`, which ends the trainer's work between two packs, and is passed on afterwards; so does
        `end_step`. Past the trainer's work a step is kept.

        Raises TrainError when `end_step` stopped it.
        """
        stop, before = threading.Event(), self.step
        self._stops.add(stop)
        try:
            return await to_the_end(self._kept_or_undone(step(stop)), stop.set)
        except asyncio.CancelledError:
            if self.step > before:
                print(f"artnb: the interrupt came after step {self.step} was trained: it is kept", flush=True)
            raise
        except StepInterrupted:
            raise TrainError(
                f"{self.name} was closed while the step ran; the last complete step is {self.step}", phase="train"
            ) from None
        finally:
            self._stops.discard(stop)

    async def _kept_or_undone(self, step: Coroutine[Any, Any, TrainResult]) -> TrainResult:
        before = self.step
        try:
            return await step
        except BaseException:
            if self.step == before:
                await asyncio.to_thread(self.undo)
            raise

    async def train_in(
        self, room: Room, work: Callable[[threading.Event], T], stop: threading.Event
    ) -> tuple[T, dict[str, float]]:
        """`work(stop)` in a thread while the device is the trainer's: its result, and what giving the device took."""
        async with room.for_trainer() as seconds:
            if stop.is_set():
                raise StepInterrupted
            done = await in_worker(work, stop)
        return done, seconds

    async def end_step(self) -> None:
        """Stop the step that runs, if any, and wait until it has ended; those that wait find the model closed."""
        self._closing = True
        for stop in list(self._stops):
            stop.set()
        async with self._turn:
            self.base = None

    def _save(
        self,
        step: int,
        metrics: dict[str, float],
        written: Callable[[Path], None] = lambda folder: None,
        beside: Callable[[], None] = lambda: None,
    ) -> Path:
        """Write checkpoint `step`, and do what is `beside` it at the same time; its rename comes after all of it.

        `written` is told the folder as soon as the adapter is in it: what follows takes longer than to serve that.
        """
        trainer = self.trainer
        assert trainer is not None

        def write_optimizer(folder: Path) -> None:
            write_state(trainer.state_dict(), folder / OPTIMIZER_FILE)
            self.store.finished(folder / OPTIMIZER_FILE)

        def write(folder: Path) -> None:
            trainer.policy.save_adapter(trainer.adapter, folder)
            written(folder)
            for path in folder.iterdir():
                self.store.finished(path)
            with ThreadPoolExecutor(2) as pool:
                for other in [pool.submit(write_optimizer, folder), pool.submit(beside)]:
                    other.result()

        state: dict[str, Any] = {"metrics": metrics, "model": self.name, "base_model": self.base_model}
        if self._quantized is not None:
            state["quantized"] = self._quantized
        return self.store.save(step, write, state)

    def check_mismatch(self, result: TrainResult, config: TrainConfig) -> None:
        """Stop a run whose rollouts no longer come from the policy that is trained. The step itself is kept.

        Reported by people whose reward collapses late: https://github.com/PrimeIntellect-ai/prime-rl/issues/964
        """
        # A trained step without the metric is one where it was infinite: such values are left out of the metrics.
        kl = result.metrics.get("mismatch_k3", math.inf if result.trained else 0.0)
        self._mismatched = self._mismatched + 1 if kl > config.max_mismatch_kl else 0
        if self._mismatched >= MISMATCHED_STEPS:
            self._mismatched = 0
            frame = self.history.metrics()
            column = "val/reward" if "val/reward" in frame and frame["val/reward"].notna().any() else "train/reward"
            best = int(frame["step"].iloc[int(frame[column].argmax())])
            raise TrainError(
                f"step {result.step}: for {MISMATCHED_STEPS} steps in a row the sampler's and the trainer's log-probs "
                f"differed by a KL of more than max_mismatch_kl={config.max_mismatch_kl} (now {kl:.3g} nats a token): "
                "the rollouts are not this policy's. Train on fresh rollouts, with a lower learning rate; the best "
                f"{column} so far was at step {best}",
                phase="check",
            )

    def undo(self) -> None:
        """Put the trainer back to the last complete step, after one that was trained, or in part, and not kept."""
        self.trainer = self._restored(self.served().policy, self.step)
        self.store.delete(step for step in self.store.steps() if step > self.step)
        self.history.truncate_after(self.step)

    async def commit(self, result: TrainResult, groups: list[TrajectoryGroup], split: str) -> TrainResult:
        """Keep the step: history and checkpoint, and meanwhile wake the engine, serve the new adapter and probe it.

        The step counts when its checkpoint is there. When anything else than the probe fails, the engine is back at the
        last complete step, and the trainer is put back by `whole_step`.
        """
        base = self.served()
        ref = AdapterRef(self.name, result.step)
        result.metrics["trained"] = float(result.trained)
        result.metrics |= self._measure(base)
        logged = {**summarize(groups), **result.metrics}
        loop = asyncio.get_running_loop()
        written: asyncio.Future[Path] = loop.create_future()
        served = threading.Event()

        def log() -> None:
            served.wait()  # writing text keeps Python busy, and whoever samples waits for the engine
            self.history.log_trajectories(result.step, split, groups, replace=True)
            self.history.log_metrics(result.step, split, logged)

        def tell(folder: Path) -> None:
            loop.call_soon_threadsafe(written.set_result, folder)

        took: dict[str, float] = {}
        failed: Exception | None = None
        saver = ThreadPoolExecutor(1)  # its own: it waits for what needs a thread of the loop's
        saving = loop.run_in_executor(saver, self._save, result.step, result.metrics, tell, log)
        saver.shutdown(wait=False)
        try:
            with Progress(1, None, phase="save"), _timed("save", took):
                await asyncio.wait([written, saving], return_when=asyncio.FIRST_COMPLETED)
                folder = written.result() if written.done() else await saving
            took |= await base.room.awake()
            with Progress(1, None, phase="swap"), _timed("swap", took):
                await to_the_end(base.engine.load_adapter(ref, folder))  # else it would come after its drop below
            if base.probe is not None and result.trained:
                try:
                    with _timed("probe", took):
                        took |= await base.probe.check(self, ref)
                except Exception as error:  # the step is kept, and its caller told
                    failed = error
            served.set()
            with Progress(1, None, phase="save"), _timed("save", took):
                result.checkpoint_path = await asyncio.shield(saving)
            with _timed("swap", took):
                await base.engine.load_adapter(ref, result.checkpoint_path)  # where its files are now
        except BaseException:
            served.set()
            with contextlib.suppress(Exception, asyncio.CancelledError):
                await to_the_end(saving)
            await base.room.settle()
            await base.engine.drop_adapter(ref)
            raise
        with Progress(1, None, phase="swap"), _timed("swap", took):
            before, self.step = self.step, result.step
            await base.engine.drop_adapter(AdapterRef(self.name, before))
        result.metrics |= took
        try:
            await asyncio.to_thread(self.history.log_metrics, result.step, split, took)
        except CheckpointError as error:  # the step is complete and served: these numbers are not worth failing it
            logger.warning("what the swap of step %d took is not in the history: %s", result.step, error)
        self.newest = result
        for group in groups:
            group._logged.add((self.name, split))
        EVENTS.emit(
            "step",
            f"{self.project}/{self.name}",
            step=result.step,
            split=split,
            metrics=logged | result.metrics,
            groups=groups,
            reasons=dict(result.reasons),
            notes=list(result.notes),
        )
        if failed is not None:
            raise failed
        return result

    def _measure(self, base: ServedBase) -> dict[str, float]:
        """What the engine sampled since the last step, for all models on this base, and the memory held now."""
        stats = base.engine.stats()
        tokens, seconds = stats.generated_tokens - self._sampled[0], stats.forward_seconds - self._sampled[1]
        self._sampled = (stats.generated_tokens, stats.forward_seconds)
        metrics = {
            "generated_tokens": float(tokens),
            "engine_kv_bytes": float(stats.extra.get("kv_bytes", 0.0)),
            "memory_bytes": float(held_bytes(base.policy.device)),
        }
        if seconds > 0.0:
            metrics["sampling_tokens_per_second"] = tokens / seconds
        return metrics


@contextlib.contextmanager
def _timed(phase: str, took: dict[str, float]) -> Iterator[None]:
    """Add the block's seconds to what the phase took."""
    began = time.monotonic()
    try:
        yield
    finally:
        took[f"seconds_{phase}"] = took.get(f"seconds_{phase}", 0.0) + time.monotonic() - began
