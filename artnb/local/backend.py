"""LocalBackend: one engine and one trainer in this process, on the weights that both share.

It chooses device, dtype and engine, says in one line what it chose and why, and can be told otherwise.
Several models on one backend share their base; so do backends of one process with the same path and options, which is
what a cell that is run again makes. The step itself is in step.py.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..backend import ASGIApp, TrainResult, TurnLogprobs, check_groups
from ..capture import Collector
from ..compat.options import train_config
from ..config import TrainConfig, TrainSFTConfig, check_choice, check_number
from ..errors import ConfigError, ModelError
from ..notebook.progress import Progress
from ..tracking.history import History
from ..training.checkpoints import model_folder
from ..trajectories import Trajectory, TrajectoryGroup
from ..whole import to_the_end
from .build import load_base
from .fork import start_from
from .lockfile import FolderLock
from .resident import RESIDENTS, Resident
from .run_file import write_run_file
from .scoring import base_logprobs
from .served import ServedBase
from .step import run_sft_step, run_step
from .trained import TrainedModel

if TYPE_CHECKING:
    from ..model import TrainableModel


class LocalBackend:
    """Serve and train in this process.

    backend = art.LocalBackend()                      # chooses by itself
    backend = art.LocalBackend(path="/content/drive/MyDrive/art", device="cpu", dtype="float32")

    `path` is where checkpoints and history live: a plain folder, a mounted drive too.

    Made again with the same path and options, it finds what this process has loaded: one base in memory, one engine.
    With other options it takes over: what holds the model's folder is closed first. `close` closes it for all.
    """

    def __init__(
        self,
        *,
        path: str | Path = ".art",
        device: str = "auto",
        dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
        engine: Literal["auto", "transformers", "vllm", "vllm-process"] = "auto",
        context_length: int | None = None,
        max_running: int | None = None,
        kv_tokens: int | None = None,
        load_in_4bit: bool = False,
        load_in_fp8: bool = False,
        sleep: Literal["auto", "always", "never"] = "auto",
        gpu_memory_utilization: float | None = None,
        enforce_eager: bool = False,
        engine_options: Mapping[str, Any] | None = None,
        activation_gib: float | None = None,
        compile_layers: bool | Literal["auto"] = "auto",
        max_probe_difference: float | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        seed: int = 0,
        served_checkpoints: int = 4,
        in_process: bool = True,
        verbose: bool = True,
    ) -> None:
        """
        Args:
            engine: "auto" takes vLLM where there is a CUDA device and vLLM, else the embedded engine. "vllm-process" is
                vLLM in a child process, with base weights of its own: for where it cannot be in this one.
            context_length: tokens of prompt and answer together; None takes the model's own, on a GPU what fits.
            max_running: requests that are sampled side by side; more wait. None: 64, with vLLM 256.
            kv_tokens: tokens whose keys and values the embedded engine keeps; None: a quarter of the free memory.
            load_in_4bit, load_in_fp8: quantize the base model; for vLLM.
            sleep: whether the engine gives its cache's memory to the trainer during a step; "auto": where both do not
                fit (`artnb plan` shows it).
            gpu_memory_utilization: share of the card for vLLM, its weights included; None: planned.
            enforce_eager: vLLM without CUDA graphs: it starts sooner and samples more slowly.
            engine_options: further engine arguments by vLLM's own names.
            activation_gib: what a training pass may take for activations, in GiB; None, on a GPU: a quarter of what is
                free, or what 32 of the step's rows would take, padded, with every layer recomputed.
            compile_layers: compile the model's layers for training, which takes about a minute once and makes steps up
                to twice as fast; "auto": on a GPU from Ampere on, for models of 0.5B weights and more.
            max_probe_difference: nats a token by which vLLM's and the trainer's log-probs of a fixed answer may differ
                before a run is stopped; 0 asks no probe; None: 0.1, with load_in_fp8 0.5.
            port: of the HTTP endpoint, which starts when `inference_base_url` is first used; 0 is any free one.
            served_checkpoints: how many older checkpoints (`name@step`) stay loaded once asked for.
        """
        me = "LocalBackend"
        check_choice(me, "dtype", dtype, ("auto", "float32", "bfloat16", "float16"))
        check_choice(me, "engine", engine, ("auto", "transformers", "vllm", "vllm-process"))
        check_choice(me, "sleep", sleep, ("auto", "always", "never"))
        if max_probe_difference is None:
            # In FP8 vLLM rounds activations too, the trainer does not.
            max_probe_difference = 0.5 if load_in_fp8 else 0.1
        check_number(me, "max_probe_difference", max_probe_difference, low=0.0)
        if activation_gib is not None:
            check_number(me, "activation_gib", activation_gib, above=0.0)
        if not isinstance(compile_layers, bool):
            check_choice(me, "compile_layers", compile_layers, ("auto",))
        if gpu_memory_utilization is not None:
            check_number(me, "gpu_memory_utilization", gpu_memory_utilization, above=0.0, high=1.0)
        check_number(me, "port", port, low=0, high=65535, whole=True)
        check_number(me, "seed", seed, low=0, whole=True)
        check_number(me, "served_checkpoints", served_checkpoints, low=1, whole=True)
        for option, value, low in (
            ("context_length", context_length, 16),
            ("kv_tokens", kv_tokens, 16),
            ("max_running", max_running, 1),
        ):
            if value is not None:
                check_number(me, option, value, low=low, whole=True)
        if not in_process:
            raise ConfigError(
                f"{me}: in_process=False is not offered: the trainer is in this process; "
                "engine='vllm-process' puts the engine into another"
            )
        self.path = Path(path).expanduser().absolute()  # now: a later cell may change the working folder
        self.device = device
        self.dtype = dtype
        self.engine = engine
        self.load_in_4bit = load_in_4bit
        self.load_in_fp8 = load_in_fp8
        self.sleep = sleep
        self.gpu_memory_utilization = gpu_memory_utilization
        self.enforce_eager = enforce_eager
        self.engine_options = dict(engine_options or {})
        self.activation_gib = activation_gib
        self.compile_layers: bool | Literal["auto"] = compile_layers
        self.max_probe_difference = max_probe_difference
        self.context_length = context_length
        self.max_running = max_running
        self.kv_tokens = kv_tokens
        self.host = host
        self.port = port
        self.seed = seed
        self.served_checkpoints = served_checkpoints
        self.verbose = verbose
        self._resident: Resident | None = None
        self._closed = False

    @property
    def _bases(self) -> dict[str, ServedBase]:
        return {} if self._resident is None else self._resident.bases

    @property
    def _models(self) -> dict[str, TrainedModel]:
        return {} if self._resident is None else self._resident.models

    def take_options(self, options: Mapping[str, Any]) -> None:
        """Options that a model asks for (ART's `_internal_config`), before anything is loaded.

        Raises ConfigError for a wrong one, one that contradicts this backend's, and one that comes too late.
        """
        asked, default = LocalBackend(**options), LocalBackend()
        for name in options:
            mine, new = getattr(self, name), getattr(asked, name)
            if mine == new:
                continue
            if self._resident is not None or mine != getattr(default, name):
                why = "has loaded its base" if self._resident is not None else f"was made with {name}={mine!r}"
                raise ConfigError(
                    f"the model asks for {name}={new!r}, but this LocalBackend {why}; make it with {name}={new!r}"
                )
            setattr(self, name, new)

    def _key(self) -> tuple[object, ...]:
        """What makes two backends of a process the same."""
        where = (self.path.resolve(), self.host, self.port)
        sizes = (self.context_length, self.max_running, self.kv_tokens, self.served_checkpoints)
        weights = (self.device, self.dtype, self.load_in_4bit, self.load_in_fp8)
        engine = (self.engine, self.sleep, self.gpu_memory_utilization, self.enforce_eager, repr(self.engine_options))
        trainer = (self.activation_gib, self.compile_layers)
        return (*where, *sizes, *weights, *engine, *trainer, self.max_probe_difference, self.seed)

    # Registering ---------------------------------------------------------------------------------

    async def register(self, model: TrainableModel) -> None:
        """Load the base, resume or create the adapter, serve it. A second call changes nothing.

        Raises: ModelError (unknown base), ConfigError (the folder holds another base or LoRA),
        CheckpointError (damaged checkpoint, folder in use by another process).
        """
        if self._closed:
            raise ConfigError("this LocalBackend is closed; make a new one with art.LocalBackend()")
        async with RESIDENTS.turn:
            joins = self._resident is None or self._resident.closed
            self._resident = resident = RESIDENTS.join(self._key())
            folder = model_folder(self.path, model.project, model.name)
            known = resident.models.get(model.name)
            if known is not None and known.lost_its_folder():
                self._say(f"{model.name}: {known.folder} was removed; it starts anew")
                await resident.drop(known)
                known = None
            if known is not None:
                known.check_same(model)
                if joins:
                    self._say(f"{model.name} is loaded already, at step {known.step}; folder {folder}")
                return
            other = RESIDENTS.holder(folder)
            if other is not None and other is not resident:
                self._say(f"{folder} was held by an earlier backend with other options; that one is closed")
                await RESIDENTS.close(other)
            await RESIDENTS.close_unused(resident)
            # An interrupt waits for its end: what is half loaded would be nobody's, and nothing could give it back.
            trained = await to_the_end(self._load(resident, model, folder))
            state = f"resumes at step {trained.step}" if trained.step else "starts at step 0"
            self._say(f"{model.name} {state}; folder {folder}")

    def _say(self, line: str) -> None:
        if self.verbose:
            print(f"artnb: {line}", flush=True)

    async def _load(self, resident: Resident, model: TrainableModel, folder: Path) -> TrainedModel:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FolderLock(folder)
        lock.acquire()
        try:
            trained = TrainedModel(model.name, model.project, model.base_model, model.lora, folder, lock)
            write_run_file(folder, trained)
            base = await self._base(resident, model)
            await trained.attach(base, seed=self.seed)
        except BaseException:
            lock.release()
            raise
        resident.add(trained)
        return trained

    async def _base(self, resident: Resident, model: TrainableModel) -> ServedBase:
        key = str(model.base_model)
        if key not in resident.bases:
            for other in resident.bases.values():
                if other.policy.device.type != "cpu":
                    raise ModelError(
                        f"this backend already holds {other.name} on {other.policy.device}; `await backend.close()` "
                        f"before loading {key}, or give a second backend another path="
                    )
            desc = f"load {Path(key).name}" if self.verbose else None
            with Progress(None, desc, "weight", phase="load") as bar:
                bar.update(0)  # the dashboard shows the phase while files are still being fetched and opened

                def report(done: int, total: int) -> None:
                    if bar.total != total:
                        bar.set_total(total)
                    bar.update(done)

                base = await asyncio.to_thread(load_base, key, self, resident.captures, model.lora, report)
            try:
                if base.probe is not None:
                    await base.probe.start()
            except BaseException:
                await base.close()
                raise
            resident.bases[key] = base
            self._say(base.describe())
        return resident.bases[key]

    def _trained(self, model: TrainableModel) -> TrainedModel:
        trained = self._models.get(model.name)
        if trained is None or trained.base is None:
            closed = self._closed or (self._resident is not None and self._resident.closed)
            state = "closed" if closed else "not registered here"
            raise ConfigError(f"{model.name} is {state}; call `await model.register(backend)` first")
        return trained

    # Training ------------------------------------------------------------------------------------

    async def train(
        self,
        model: TrainableModel,
        trajectory_groups: Iterable[TrajectoryGroup],
        config: TrainConfig | None = None,
        **options: Any,
    ) -> TrainResult:
        """One GRPO step; see `Backend.train`. A batch without signal is a step, too: its result says why."""
        chosen = train_config(config, options)
        groups = check_groups(trajectory_groups)
        return await run_step(self._trained(model), groups, chosen)

    async def train_sft(
        self, model: TrainableModel, trajectories: Iterable[Trajectory], config: TrainSFTConfig | None = None
    ) -> TrainResult:
        """One supervised step over all `trajectories`."""
        return await run_sft_step(self._trained(model), list(trajectories), config or TrainSFTConfig())

    async def get_step(self, model: TrainableModel) -> int:
        return self._trained(model).step

    async def checkpoints(self, model: TrainableModel) -> list[int]:
        """Steps whose complete checkpoints are kept, ascending."""
        return self._trained(model).store.steps()

    async def delete_checkpoints(self, model: TrainableModel, steps: Sequence[int]) -> None:
        """Delete checkpoints; requests that one of them answers end first, later ones find it gone.

        Raises ConfigError for the newest, which is served; CheckpointError for unknown ones.
        """
        await to_the_end(self._trained(model).delete_checkpoints(steps))

    async def pull_checkpoint(self, model: TrainableModel, step: int | None = None) -> Path:
        """The PEFT folder of a checkpoint, None: of the newest. Raises CheckpointError when there is none."""
        trained = self._trained(model)
        return trained.store.path(trained.step if step is None else step)

    async def fork_checkpoint(
        self,
        model: TrainableModel,
        from_model: str | None = None,
        from_project: str | None = None,
        *,
        step: int | None = None,
        not_after_step: int | None = None,
        from_path: str | Path | None = None,
    ) -> int:
        """Start `model` from a checkpoint that exists. Before `register`; done again, it changes nothing.

        await backend.fork_checkpoint(model, from_model="agent-001", step=30)

        Args:
            from_model: a model below this backend's path, of `from_project` (None: of the model's own). The fork has
                its step number, optimizer and random state, and goes on where it was.
            step, not_after_step: which checkpoint: of this step, or the newest up to it; None: the newest.
            from_path: a PEFT adapter folder instead. It becomes checkpoint 0, with a new optimizer.

        Returns: the step at which the model is now.
        Raises: ConfigError when base model or LoRA are not the model's; CheckpointError for no, or a damaged,
        checkpoint, and when the model has checkpoints of its own.
        """
        chosen = {"step": step, "not_after_step": not_after_step}
        at = await to_the_end(
            asyncio.to_thread(start_from, self.path, model, from_model, from_project, from_path, **chosen)
        )
        self._say(f"{model.name} starts from {from_path or from_model} at step {at}")
        return at

    async def log(
        self, model: TrainableModel, groups: Iterable[Trajectory | TrajectoryGroup], split: str = "val"
    ) -> None:
        """The same as `model.log`."""
        await model.log(groups, split)

    # Serving -------------------------------------------------------------------------------------

    def app(self, model: TrainableModel) -> ASGIApp:
        return self._trained(model).served().app

    def endpoint(self, model: TrainableModel) -> tuple[str, str]:
        """(base URL, API key) over HTTP; starts the server on the first call."""
        base = self._trained(model).served()
        return base.start_server(self.host, self.port), base.api_key

    def api_key(self, model: TrainableModel) -> str:
        return self._trained(model).served().api_key

    def context_tokens(self, model: TrainableModel) -> int | None:
        return self._trained(model).served().engine.context_length

    async def base_logprobs(
        self, model: TrainableModel, trajectories: Sequence[Trajectory]
    ) -> list[TurnLogprobs | None]:
        """How likely the base, every adapter off, finds the assistant turns of each trajectory; see HasBaseLogprobs."""
        return await base_logprobs(self._trained(model).served(), trajectories)

    def history(self, model: TrainableModel) -> History:
        trained = self._models.get(model.name)
        if trained is not None:
            return trained.history
        return History(model_folder(self.path, model.project, model.name))

    def collector(self, model: TrainableModel) -> Collector:
        return self._trained(model).collector

    # Closing -------------------------------------------------------------------------------------

    async def close(self) -> None:
        """End requests and steps, stop the server, give memory and folders back. May be called again.

        Backends that share what this one holds are closed with it; they may register their models again.
        """
        self._closed = True
        async with RESIDENTS.turn:
            if self._resident is not None:
                await RESIDENTS.close(self._resident)

    async def __aenter__(self) -> LocalBackend:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"LocalBackend(path={json.dumps(str(self.path))}, models={sorted(self._models)})"
