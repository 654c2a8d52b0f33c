"""TrainableModel: the user's handle on a model that learns. It forwards to a backend and holds no weights.

Async first. `register` starts at once and may be left without `await`; everything later waits for it.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import tempfile
from collections.abc import Awaitable, Generator, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from .asked_model import Model as Model
from .backend import HasCheckpointFiles
from .capture import Collector
from .compat.internal_config import translate, translate_lora
from .config import LoraConfig, TrainConfig, TrainSFTConfig
from .errors import CheckpointError, ConfigError
from .exported import Exported
from .hub import check_repo_id, push_folder
from .notebook.loop import spawn, ticking
from .tracking.choose import configure, track
from .tracking.history import History
from .training.checkpoints import CheckpointStore, steps_to_delete
from .training.export import Source, export_checkpoint
from .training.sft_data import SFTData, read_trajectories
from .trajectories import TrajectoryGroup

if TYPE_CHECKING:
    from openai import AsyncOpenAI

    from .autotrain import AutoTrainer
    from .backend import ASGIApp, Backend, TrainResult


class Registration(Awaitable[None]):
    """A registration that has started. Await it, or go on: what needs it waits for it."""

    def __init__(self, future: concurrent.futures.Future[None]) -> None:
        self._future = future

    def __await__(self) -> Generator[Any, None, None]:
        return self.wait().__await__()

    async def wait(self) -> None:
        """Wait until it is done; being cancelled meanwhile does not stop it. Raises what it raised."""
        if not self._future.done():
            with ticking():
                await asyncio.shield(asyncio.wrap_future(self._future))
        self._future.result()

    def result(self, timeout: float | None = None) -> None:
        """Wait from synchronous code; raises what the registration raised."""
        self._future.result(timeout)

    @property
    def done(self) -> bool:
        return self._future.done()

    def __repr__(self) -> str:
        state = "running" if not self.done else "failed" if self._future.exception() else "done"
        return f"<registration {state}>"


class TrainableModel(Model):
    """The model that learns: a LoRA adapter on `base_model` (a Hugging Face id or a folder).

    model = art.TrainableModel(name="agent-001", project="demo", base_model="Qwen/Qwen2.5-0.5B-Instruct")
    await model.register(art.LocalBackend())
    """

    trainable = True

    def __init__(
        self,
        name: str,
        project: str,
        base_model: str | Path,
        *,
        lora: LoraConfig | None = None,
        lora_config: Mapping[str, Any] | None = None,
        _internal_config: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """
        Args:
            lora: the adapter.
            lora_config: the same by ART's names (rank, alpha, target_modules, random_state).
            _internal_config: options of LocalBackend and of the adapter by ART's names; translated, or refused.
        """
        for option in ("inference_base_url", "inference_api_key"):
            if option in options:
                raise ConfigError(f"TrainableModel: {option} comes from the backend; leave it out")
        super().__init__(name, project, **options)
        if lora is not None and lora_config is not None:
            raise ConfigError("TrainableModel: lora and lora_config say the same; give lora=art.LoraConfig(...)")
        self.base_model = str(base_model)
        self.lora = lora or LoraConfig(**translate_lora(lora_config or {}))
        self._asked: dict[str, Any] = {}
        self._registration: Registration | None = None
        self._client: AsyncOpenAI | None = None
        self._internal_config = _internal_config

    @classmethod
    def _options(cls) -> list[str]:
        return [*super()._options(), "base_model", "lora", "lora_config", "_internal_config"]

    @property
    def _internal_config(self) -> Mapping[str, Any] | None:
        """ART's way to fit a small card. Raises ConfigError for what cannot be honoured, and after registering."""
        return self._given_config

    @_internal_config.setter
    def _internal_config(self, config: Mapping[str, Any] | None) -> None:
        if self._registration is not None:
            raise ConfigError("_internal_config is read when the model is registered; set it before")
        made = translate(config or {})
        if made.dropped:
            print(f"artnb: _internal_config: not needed here: {', '.join(made.dropped)}", flush=True)
        self.lora = replace(self.lora, **made.lora) if made.lora else self.lora
        self._given_config, self._asked = config, made.backend

    def register(self, backend: Backend, _openai_client_config: None = None) -> Registration:
        """Start serving and training this model on `backend`. Starts at once, with or without `await`."""
        if _openai_client_config is not None:
            raise ConfigError("register: the endpoint's options are LocalBackend's: host=, port=, engine_options=")
        running = self._registration
        failed = running is not None and running.done and running._future.exception() is not None
        if self._backend is not backend or running is None or failed:
            if self._asked:
                take = getattr(backend, "take_options", None)
                if take is None:
                    raise ConfigError(f"_internal_config: {type(backend).__name__} has no options {list(self._asked)}")
                take(self._asked)
            self._backend = backend
            self._client = None
            self._registration = Registration(spawn(self._register(backend)))
        assert self._registration is not None
        return self._registration

    async def _register(self, backend: Backend) -> None:
        await backend.register(self)
        track(self)

    async def ready(self) -> Backend:
        """Wait for the registration; returns the backend."""
        backend = self.backend()
        assert self._registration is not None
        await self._registration.wait()
        return backend

    def _ready_sync(self) -> Backend:
        backend = self.backend()
        assert self._registration is not None
        self._registration.result()
        return backend

    @property
    def inference_base_url(self) -> str:
        """Base URL of the endpoint over HTTP; the first use starts the server on 127.0.0.1."""
        return self._ready_sync().endpoint(self)[0]

    @property
    def inference_api_key(self) -> str:
        return self._ready_sync().api_key(self)

    def openai_client(self) -> AsyncOpenAI:
        """An `openai.AsyncOpenAI` that goes straight to the endpoint in this process; it needs no port."""
        from .serving.transport import make_async_client

        if self._client is None or self._client.is_closed():
            self._client = make_async_client(self._app())
        return self._client

    def _app(self) -> ASGIApp:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            backend = await self.ready()
            if scope["type"] == "http":
                # The client is made before the registration, and so the key, is there.
                headers = [(k, v) for k, v in scope["headers"] if k.lower() != b"authorization"]
                bearer = f"Bearer {backend.api_key(self)}".encode()
                scope = {**scope, "headers": [*headers, (b"authorization", bearer)]}
            await backend.app(self)(scope, receive, send)

        return app

    def _history(self) -> History:
        return self._backend.history(self) if self._backend is not None else super()._history()

    async def train(
        self,
        trajectory_groups: Iterable[TrajectoryGroup] | None = None,
        config: TrainConfig | None = None,
        **options: Any,
    ) -> TrainResult:
        """One step: train on `trajectory_groups`, save the checkpoint, serve it, keep it all in the history.

        Without groups it trains on what `art.trajectory()` scopes captured and scored since the last call.
        """
        backend = await self.ready()
        if trajectory_groups is None:
            trajectory_groups = backend.collector(self).pop_all(min_size=2)
            if not trajectory_groups:
                raise ConfigError(
                    "model.train() found nothing collected: run rollouts inside `async with art.trajectory(group=...) "
                    "as t:` and set t.reward in at least two of a group, or pass trajectory_groups"
                )
        configure(self, {"train": config or options or TrainConfig()})
        return await backend.train(self, trajectory_groups, config, **options)

    def auto_train(
        self,
        *,
        groups_per_step: int,
        group_size: int,
        config: TrainConfig | None = None,
        on_step: Any = None,
    ) -> AutoTrainer:
        """Train by itself whenever `groups_per_step` groups of `group_size` scored trajectories are collected."""
        from .autotrain import AutoTrainer

        return AutoTrainer(self, groups_per_step=groups_per_step, group_size=group_size, config=config, on_step=on_step)

    async def train_sft(
        self,
        trajectories: SFTData,
        config: TrainSFTConfig | None = None,
        _config: None = None,
        verbose: bool = False,
    ) -> TrainResult:
        """One supervised step on the assistant turns of conversations.

        await model.train_sft("train.jsonl", art.TrainSFTConfig(epochs=3, learning_rate=2e-4, lr_schedule="linear"))

        Args:
            trajectories: trajectories, a JSONL file's path, a `datasets.Dataset`, or rows
                `{"messages": [...], "tools": [...]}` from anywhere.
            verbose: print the result.

        Raises: DataError naming each row that cannot be used; RenderError for messages that the chat template cannot
        render; ConfigError; TrainError. In each case the model is as before.
        """
        if _config is not None:
            raise ConfigError("train_sft: there is no _config here; every option is in art.TrainSFTConfig")
        if isinstance(trajectories, str | Path):
            rows = await asyncio.to_thread(read_trajectories, trajectories)
        else:
            rows = read_trajectories(trajectories)
        backend = await self.ready()
        configure(self, {"sft": config or TrainSFTConfig()})
        result = await backend.train_sft(self, rows, config)
        if verbose:
            print(f"artnb: {result}", flush=True)
        return result

    async def get_step(self) -> int:
        """The newest checkpoint's step."""
        backend = await self.ready()
        return await backend.get_step(self)

    async def checkpoints(self) -> list[int]:
        """Steps whose complete checkpoints are kept, ascending; each is served as `name@step`."""
        backend = await self.ready()
        return await backend.checkpoints(self)

    async def delete_checkpoints(
        self,
        best_checkpoint_metric: str = "val/reward",
        *,
        keep_last: int = 1,
        keep_best: int = 1,
        lower_is_better: bool = False,
    ) -> list[int]:
        """Delete all checkpoints but the newest `keep_last` and the best `keep_best` by a metric of the history.

        Returns the deleted steps. While the metric has no value for any of them, nothing is deleted.
        """
        backend = await self.ready()
        gone = steps_to_delete(
            await backend.checkpoints(self),
            self.history(),
            best_checkpoint_metric,
            keep_last,
            keep_best=keep_best,
            lower_is_better=lower_is_better,
        )
        if gone:
            await backend.delete_checkpoints(self, gone)
        return gone

    async def export(
        self,
        path: str | Path,
        step: int | None = None,
        *,
        format: Literal["merged", "adapter"] = "merged",
        dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
        base_model: str | Path | None = None,
    ) -> Exported:
        """Write a checkpoint (None: the newest) to a folder that other programs load; from disk, without a backend.

        print(await model.export("out/agent", step=30))  # the folder, and the lines that serve it

        Args:
            path: a new or empty folder, or an earlier export, which is replaced.
            format: "merged", a full model as safetensors with its tokenizer, for transformers, vLLM, Ollama and
                llama.cpp; "adapter", the PEFT folder.
            dtype: of merged weights; "auto" is what the base model's files have.
            base_model: merge into these weights, e.g. the full-precision ones of a base that is quantized.

        Raises: ConfigError, ModelError, CheckpointError; see docs/checkpoints.md.
        """
        folder = await self._checkpoint_folder(step)
        source = Source(folder, self.name, step, self.base_model)
        base = None if base_model is None else str(base_model)
        return await asyncio.to_thread(export_checkpoint, source, path, format=format, dtype=dtype, base_model=base)

    async def push_to_hub(
        self,
        repo_id: str,
        step: int | None = None,
        *,
        format: Literal["merged", "adapter"] = "adapter",
        dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
        base_model: str | Path | None = None,
        private: bool = True,
        token: str | None = None,
        revision: str | None = None,
        commit_message: str | None = None,
    ) -> str:
        """Export a checkpoint and push it to the Hugging Face hub, with a model card; returns the repository's URL.

        `token=None` takes what `hf auth login` or HF_TOKEN gave; it is kept nowhere. Raises: as `export`; ServiceError
        with the hub's answer.
        """
        check_repo_id(repo_id)
        with tempfile.TemporaryDirectory(prefix="artnb-push-") as folder:
            made = Path(folder) / "export"
            exported = await self.export(made, step, format=format, dtype=dtype, base_model=base_model)
            return await asyncio.to_thread(
                push_folder,
                exported,
                repo_id,
                private=private,
                token=token,
                revision=revision,
                commit_message=commit_message,
            )

    async def _checkpoint_folder(self, step: int | None) -> Path:
        """The PEFT folder of a checkpoint on this machine's disk."""
        if self._backend is None:
            store = CheckpointStore(self.folder)
            newest = store.latest() if step is None else step
            if newest is None:
                raise CheckpointError(f"{self.name} is not registered, and there is no checkpoint in {store.root}")
            return store.path(newest)
        backend = await self.ready()
        if not isinstance(backend, HasCheckpointFiles):
            raise ConfigError(f"{type(backend).__name__} does not give out the files of checkpoints")
        return await backend.pull_checkpoint(self, step)

    def collector(self) -> Collector:
        """Captured and scored trajectories that wait for `train()`."""
        return self._ready_sync().collector(self)

    def __repr__(self) -> str:
        return f"TrainableModel({self.name!r}, project={self.project!r}, base_model={self.base_model!r})"
