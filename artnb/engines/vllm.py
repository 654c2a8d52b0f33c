"""vLLM in this process: its engine core is stepped by a thread of our own, beside the trainer on the same GPU.

What touches vLLM is in the vllm*.py beside this: options, beginning and end, requests, adapters, worker, weights.
While the engine sleeps its key/value cache belongs to the trainer; requests that were under way go on afterwards from
the tokens they had, new ones wait. vllm_process.py is the same with vLLM in a child process.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from ..errors import EngineClosedError, EngineError, RequestError
from .base import AdapterRef, EngineState, EngineStats, SamplingParams, TokenChunk
from .delivery import Deliveries, Mailbox
from .step_thread import StepThread
from .vllm_adapters import Adapter, Adapters, lora_request
from .vllm_options import VllmOptions, installed_version
from .vllm_request import Request, chunk_of, line, room_to_answer
from .vllm_start import check_room, pool_bytes, start, stop

T = TypeVar("T")
logger = logging.getLogger("artnb")


class VllmEngine:
    """See the module docstring and the Engine protocol.

    Log-probs are those of the distribution that was sampled from: softmax(logits / temperature), and where a request
    sets top_p, top_k or min_p, of what these leave, renormalised. vLLM offers no others at a temperature.
    """

    place = "in-process"  # for people

    def __init__(self, options: VllmOptions, *, eos_token_ids: Iterable[int]) -> None:
        """Start vLLM. Blocks until it can sample.

        Raises: ConfigError (no vLLM, a wrong version or option), EngineError (it did not start).
        """
        self._version = installed_version()
        self._options = options
        self._eos = frozenset(eos_token_ids)
        self._stats = EngineStats()
        self._engine: Any = None  # vLLM's LLMEngine, or what has the same methods; the engine's thread alone calls it
        self._arrived: deque[Request] = deque()
        self._left: list[Request] = []  # their consumers went away
        self._active: dict[str, Request] = {}
        self._adapters = Adapters()
        self._count = itertools.count(1)
        self._sleeping = False
        self._config: Any = None
        self._pool_bytes = 0  # that it gives away when it sleeps
        self._broken = ""  # why vLLM will never answer again
        self._thread = StepThread("artnb-vllm", busy=self._busy, step=self._safe_step, end=self._end)
        self._changed = self._thread.changed  # over everything above
        try:
            self._thread.call(self._start).result()
        except BaseException:
            self._thread.close()
            raise

    # The protocol ----------------------------------------------------------------------------------

    @property
    def description(self) -> str:
        graphs = "eager" if self._config.model_config.enforce_eager else "CUDA graphs"
        dtype = str(self._config.model_config.dtype).removeprefix("torch.")
        return f"vLLM {self._version} ({self.place}), {self._config.device_config.device_type}, {dtype}, {graphs}"

    @property
    def state(self) -> EngineState:
        return "closed" if self._thread.closing or self._broken else "asleep" if self._sleeping else "awake"

    @property
    def context_length(self) -> int:
        return int(self._config.model_config.max_model_len)

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return self._eos

    async def generate(
        self, prompt_ids: Sequence[int], sampling: SamplingParams, adapter: AdapterRef | None = None
    ) -> AsyncGenerator[TokenChunk]:
        request = self._accept(list(prompt_ids), sampling, adapter, Mailbox(sampling.stream))
        ended = False
        try:
            while not ended:
                chunk = await request.mailbox.get()
                ended = chunk.finish_reason is not None
                yield chunk
        finally:
            if not ended:
                with self._changed:
                    self._left.append(request)
                    self._thread.tell()

    async def load_adapter(self, ref: AdapterRef, path: Path) -> None:
        def load() -> None:
            if ref in self._adapters:
                with self._changed:
                    self._adapters.moved(ref, path)
                return
            request = lora_request(ref, next(self._count), path)
            try:
                self._engine.add_lora(request)
            except Exception as error:
                raise EngineError(f"vLLM did not take the adapter {path}: {line(error)}") from error
            with self._changed:
                self._adapters.add(ref, request)

        await self._call(load)

    async def drop_adapter(self, ref: AdapterRef) -> None:
        with self._changed:
            adapter = self._adapters.retire(ref)
        if adapter is not None:
            self._remove_if_unused(adapter)

    def adapters(self) -> list[AdapterRef]:
        with self._changed:
            return self._adapters.refs()

    async def sleep(self) -> None:
        """Give the cache's memory away. Requests under way keep what they have sampled. May be called again."""

        def fall_asleep() -> None:
            if self._sleeping:
                return
            self._set_aside()
            if self._sleeps:
                self._engine.sleep(level=1)
            else:
                self._engine.reset_prefix_cache()
            self._sleeping = True

        await self._call(fall_asleep)

    async def wake(self) -> None:
        """Take the cache's memory back; what waits goes on. May be called again, also after it failed.

        Raises: EngineError when another holds the memory; the engine then still sleeps.
        """

        def wake_up() -> None:
            if not self._sleeping:
                return
            if self._sleeps:
                check_room(self._pool_bytes)
                self._engine.wake_up()
            self._sleeping = False

        await self._call(wake_up)

    async def close(self) -> None:
        await asyncio.to_thread(self._thread.close)

    @contextmanager
    def hold(self) -> Iterator[None]:
        """The engine stands still between two steps while the block runs; its requests keep their place."""
        with self._thread.hold():
            yield

    def stats(self) -> EngineStats:
        with self._changed:
            extra = {"kv_bytes": float(0 if self._sleeping else self.cache_bytes)}
            running = len(self._active)
            return replace(self._stats, running=running, waiting=len(self._arrived), extra=extra)

    # What the trainer shares -----------------------------------------------------------------------

    @property
    def cache_bytes(self) -> int:
        """Of the key/value cache, when awake."""
        return self._pool_bytes

    @property
    def module(self) -> torch.nn.Module:
        """vLLM's own model, whose weights stay valid while the engine sleeps."""
        module: torch.nn.Module = self._engine.apply_model(lambda module: module)[0]
        return module

    # Called from any thread ------------------------------------------------------------------------

    def _accept(self, prompt: list[int], sampling: SamplingParams, ref: AdapterRef | None, mailbox: Mailbox) -> Request:
        room = room_to_answer(
            prompt, vocabulary=int(self._config.model_config.get_vocab_size()), context=self.context_length
        )
        with self._changed:
            self._check_open()
            adapter = None if ref is None else self._adapters.use(ref)
            self._stats.requests += 1
            self._stats.prompt_tokens += len(prompt)
            limit = min(sampling.max_tokens, room)
            request = Request(f"r{next(self._count)}", prompt, sampling, limit, adapter, mailbox)
            self._arrived.append(request)
            self._thread.tell()
            return request

    def _check_open(self) -> None:
        if self._thread.closing:
            raise EngineClosedError("the engine is closed")
        if self._broken:
            raise EngineError(self._broken)

    async def _call(self, work: Callable[[], T]) -> T:
        """Have the engine's thread do it between two steps."""
        self._check_open()
        return await asyncio.wrap_future(self._thread.call(work))

    def _remove_if_unused(self, adapter: Adapter) -> None:
        with self._changed:
            if adapter.unused and not self._thread.closing:
                number = adapter.request.lora_int_id
                self._thread.call(lambda: self._engine.remove_lora(number))

    # The engine's thread ---------------------------------------------------------------------------

    def _busy(self) -> bool:
        return not self._sleeping and bool(self._arrived or self._left or self._active)

    def _safe_step(self) -> None:
        try:
            self._step()
        except Exception as error:
            self._failed(error)

    def _step(self) -> None:
        with self._changed:
            arrived, left = list(self._arrived), self._left
            self._arrived.clear()
            self._left = []
        deliveries = Deliveries()
        gone = {request.id for request in left}
        for request in arrived:
            if request.id in gone:
                self._release(request)
                continue
            try:
                self._submit(request)
            except Exception as error:
                known = isinstance(error, RequestError)
                deliveries.add(request.mailbox, error if known else EngineError(f"vLLM refused it: {line(error)}"))
                self._release(request)
        self._abort([request for request in left if request.id in self._active])
        try:
            if self._active:
                began = time.perf_counter()
                outputs = self._engine.step()
                fresh = sum(self._take(output, deliveries) for output in outputs)
                with self._changed:
                    self._stats.generated_tokens += fresh
                    self._stats.forward_seconds += time.perf_counter() - began
        finally:
            self._deliver(deliveries)

    def _submit(self, request: Request) -> None:
        lora = None if request.adapter is None else request.adapter.request
        params = request.engine_params(self._eos)
        self._engine.add_request(request.id, request.engine_prompt(), params, lora_request=lora)
        self._active[request.id] = request

    def _take(self, output: Any, deliveries: Deliveries) -> int:
        """Hand on what a request got; returns how many tokens."""
        request = self._active.get(output.request_id)
        if request is None:
            return 0
        try:
            chunk = chunk_of(output)
        except EngineError as error:
            self._abort([request])
            deliveries.add(request.mailbox, error)
            return 0
        request.sampled += chunk.token_ids
        deliveries.add(request.mailbox, chunk)
        if chunk.finish_reason is not None:
            self._active.pop(request.id)
            self._release(request)
        return len(chunk.token_ids)

    def _abort(self, requests: list[Request]) -> None:
        if requests:
            self._engine.abort_request([request.id for request in requests])
            for request in requests:
                self._active.pop(request.id, None)
                self._release(request)

    def _set_aside(self) -> None:
        """Take the requests under way out of vLLM; they are submitted again, with what they have sampled, first."""
        requests, self._active = list(self._active.values()), {}
        if requests:
            self._engine.abort_request([request.id for request in requests])
        for request in requests:
            request.id = f"r{next(self._count)}"
        with self._changed:
            self._arrived.extendleft(reversed(requests))

    def _release(self, request: Request) -> None:
        if request.adapter is not None:
            with self._changed:
                request.adapter.users -= 1
            self._remove_if_unused(request.adapter)

    def _deliver(self, deliveries: Deliveries) -> None:
        dead = set(map(id, deliveries.send()))
        if dead:
            self._abort([request for request in self._active.values() if id(request.mailbox) in dead])

    def _failed(self, error: Exception) -> None:
        """A step failed: the requests get its error. vLLM may go on, or say the same next time."""
        logger.error("a step of vLLM failed", exc_info=error)
        self._end_all(f"vLLM failed: {line(error)}")

    def _end_all(self, failure: str) -> None:
        """Give every request its last word: an error, or "abort"."""
        deliveries = Deliveries()
        with self._changed:
            requests = [*self._active.values(), *self._arrived]
            self._arrived.clear()
            self._left = []
        under_way, self._active = list(self._active), {}
        for request in requests:
            deliveries.add(request.mailbox, EngineError(failure) if failure else TokenChunk([], [], "abort"))
            self._release(request)
        deliveries.send()
        if under_way:
            try:
                self._engine.abort_request(under_way)
            except Exception:
                logger.exception("vLLM could not take back its requests")

    # vLLM's beginning and end ----------------------------------------------------------------------

    def _start(self) -> None:
        self._engine = start(self._options)
        self._config = self._engine.vllm_config
        self._pool_bytes = pool_bytes() if self._sleeps else 0

    @property
    def _sleeps(self) -> bool:
        return bool(self._config.model_config.enable_sleep_mode)

    def _end(self) -> None:
        self._end_all("")
        engine, self._engine = self._engine, None
        if engine is None:
            return
        with self._changed:
            self._adapters.clear()
        stop(engine, asleep=self._sleeping and self._sleeps)
