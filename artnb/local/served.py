"""One base model in this process: its weights, its engine, and the endpoint over it."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..backend import ASGIApp
from ..capture import CaptureRegistry
from ..engines.base import AdapterRef, SharedEngine
from ..errors import AdapterNotFoundError, CheckpointError, EngineError
from ..serving.app import Served, create_app
from ..serving.chat import ChatFormat
from ..serving.server import Server
from ..training.policy import Policy
from ..whole import to_the_end
from .probe import Probe
from .room import Room

if TYPE_CHECKING:
    from .backend import LocalBackend
    from .trained import TrainedModel

JUST_ASKED_S = 5.0
"""Seconds for which a checkpoint stays loaded after it was asked for, whatever else is: its request may yet begin."""


class ServedBase:
    """Weights, engine, app and (once asked for) server of one base. Resolves model names for the endpoint."""

    def __init__(
        self,
        name: str,
        policy: Policy,
        engine: SharedEngine,
        backend: LocalBackend,
        captures: CaptureRegistry,
        *,
        sleeps: bool = False,
        probe: Probe | None = None,
        why: str = "",
    ) -> None:
        """`sleeps`: the engine gives its memory to the trainer. `probe`: checks that both hold the same weights."""
        self.name = name
        self.policy = policy
        self.engine = engine
        self.room = Room(engine, sleeps=sleeps)
        self.probe = probe
        self._why = why
        self.chat = ChatFormat(policy.tokenizer)
        self.api_key = secrets.token_urlsafe(24)
        self.app: ASGIApp = create_app(engine, self.chat, self, api_key=self.api_key, captures=captures)
        self.models: dict[str, TrainedModel] = {}
        self.quantized = "4-bit" if backend.load_in_4bit else "FP8" if backend.load_in_fp8 else None
        self._told = (backend.device, backend.dtype)
        self._served_checkpoints = backend.served_checkpoints
        self._older: OrderedDict[AdapterRef, float] = OrderedDict()  # when each was last asked for
        self._server: Server | None = None

    def describe(self) -> str:
        """One line: what was chosen, and why."""
        device, told = self.policy.device.type, self._told
        here = {"cpu": "no CUDA or MPS device was found", "cuda": "a CUDA device was found", "mps": "Apple's GPU"}
        why = [f"device={told[0]!r} was asked for" if told[0] != "auto" else here[device]]
        if told[1] != "auto":
            why.append(f"dtype={told[1]!r} was asked for")
        elif device == "cpu":
            native = self.policy.dtype == torch.bfloat16
            why.append("this CPU computes bf16 natively" if native else "bf16 is not native to this CPU, so fp32")
        if self._why:
            why.append(self._why)
        return f"{self.engine.description}, context {self.engine.context_length} tokens; {', '.join(why)}"

    # Names the endpoint knows ----------------------------------------------------------------------

    def names(self) -> list[str]:
        names = [self.name]
        for model in self.models.values():
            names.append(model.name)
            names.extend(f"{model.name}@{step}" for step in model.store.steps())
        return names

    async def resolve(self, model: str) -> Served:
        """NAME → newest adapter, NAME@N → checkpoint N, loaded when first asked for; the base's name → no adapter."""
        await self.room.ensure_awake()
        if model == self.name:
            return Served(adapter=None, canonical=self.name)
        name, at, digits = model.rpartition("@")
        trained = self.models.get(name if at else model)
        if trained is None or (at and not (digits.isascii() and digits.isdigit())):
            raise AdapterNotFoundError(f"no model {model!r} here; served: {', '.join(self.names()[:20])}")
        ref = AdapterRef(trained.name, int(digits) if at else trained.step)
        if ref.step != trained.step:
            await to_the_end(self._load_older(trained, ref))  # else it might be loaded, and on no list of what to drop
        return Served(adapter=ref, canonical=str(ref))

    async def _load_older(self, trained: TrainedModel, ref: AdapterRef) -> None:
        if ref not in self.engine.adapters():
            path = self._path_of(trained, ref.step)
            try:
                await self.engine.load_adapter(ref, path)
            except (CheckpointError, EngineError):
                self._path_of(trained, ref.step)  # says so if it was deleted meanwhile
                raise
            try:
                self._path_of(trained, ref.step)
            except AdapterNotFoundError:  # deleted while it was loaded
                await self.forget(ref)
                raise
        self._older[ref] = time.monotonic()
        self._older.move_to_end(ref)
        while len(self._older) > self._served_checkpoints:
            oldest, asked = next(iter(self._older.items()))
            if time.monotonic() - asked < JUST_ASKED_S:
                break
            del self._older[oldest]
            await self.engine.drop_adapter(oldest)

    def _path_of(self, trained: TrainedModel, step: int) -> Path:
        """The folder of a checkpoint. Raises: AdapterNotFoundError when it is not there, or is not complete."""
        try:
            return trained.store.path(step)
        except CheckpointError:
            kept = trained.store.steps()
            raise AdapterNotFoundError(f"{trained.name} has no checkpoint {step}; it has {kept}") from None

    async def forget(self, ref: AdapterRef) -> None:
        """Stop serving an older checkpoint; requests that use it end first."""
        self._older.pop(ref, None)
        await self.engine.drop_adapter(ref)

    async def remove(self, trained: TrainedModel) -> None:
        """Stop serving a model and free its adapters; requests that use them end first."""
        self.models.pop(trained.name, None)
        for ref in [ref for ref in self.engine.adapters() if ref.name == trained.name]:
            await self.forget(ref)
        self.policy.drop_adapter(trained.adapter)

    # HTTP ------------------------------------------------------------------------------------------

    def start_server(self, host: str, port: int) -> str:
        """Base URL (ending in /v1) of the endpoint over HTTP; starts it on the first call."""
        if self._server is None:
            server = Server(self.app, host=host, port=port)
            server.start()
            self._server = server
        return f"{self._server.url}/v1"

    async def close(self) -> None:
        if self._server is not None:
            await asyncio.to_thread(self._server.close)
            self._server = None
        await self.engine.close()
