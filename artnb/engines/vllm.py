"""vLLM in this process: its engine core is stepped by a thread of our own, beside the trainer on the same GPU.

What touches vLLM is in the vllm*.py beside this: its options, its beginning and end, its worker, its weights.
While the engine sleeps its key/value cache belongs to the trainer; requests that were under way go on afterwards from
the tokens they had, new ones wait.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from ..errors import AdapterNotFoundError, ContextLengthError, EngineClosedError, EngineError, RequestError, nearest
from .base import AdapterRef, EngineState, EngineStats, FinishReason, SamplingParams, TokenChunk
from .delivery import Deliveries, Mailbox
from .vllm_options import VllmOptions, installed_version, sampling_params
from .vllm_start import check_room, line, pool_bytes, start, stop

T = TypeVar("T")
logger = logging.getLogger("artnb")


@dataclass(eq=False, slots=True)
class _Adapter:
    request: Any  # vLLM's LoRARequest; its name is new for every load, because the prefix cache is keyed by it
    users: int = 0
    retired: bool = False


@dataclass(eq=False, slots=True)
class _Request:
    id: str
    prompt: list[int]
    sampling: SamplingParams
    max_tokens: int
    adapter: _Adapter | None
    mailbox: Mailbox
    sampled: list[int] = field(default_factory=list)


class VllmEngine:
    """See the module docstring and the Engine protocol.

    Log-probs are those of the distribution that was sampled from: softmax(logits / temperature), and where a request
    sets top_p, top_k or min_p, of what these leave, renormalised. vLLM offers no others at a temperature.
    """

    def __init__(self, options: VllmOptions, *, eos_token_ids: Iterable[int]) -> None:
        """Start vLLM. Blocks until it can sample.

        Raises: ConfigError (no vLLM, a wrong version or option), EngineError (it did not start).
        """
        self._version = installed_version()
        self._options = options
        self._eos = frozenset(eos_token_ids)
        self._stats = EngineStats()
        self._changed = threading.Condition()  # over everything below
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()  # to be made by the engine's thread
        self._arrived: deque[_Request] = deque()
        self._left: list[_Request] = []  # their consumers went away
        self._active: dict[str, _Request] = {}
        self._adapters: dict[AdapterRef, _Adapter] = {}
        self._count = itertools.count(1)
        self._guests = 0
        self._parked = False  # the thread is between two steps, and stays there
        self._sleeping = False
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="artnb-vllm", daemon=True)
        started: Future[None] = Future()
        self._calls.append((self._start, started))
        self._thread.start()
        try:
            started.result()
        except BaseException:
            with self._changed:
                self._closing = True
                self._changed.notify_all()
            self._thread.join()
            raise

    # The protocol ----------------------------------------------------------------------------------

    @property
    def description(self) -> str:
        graphs = "eager" if self._config.model_config.enforce_eager else "CUDA graphs"
        dtype = str(self._config.model_config.dtype).removeprefix("torch.")
        return f"vLLM {self._version} (in-process), {self._config.device_config.device_type}, {dtype}, {graphs}"

    @property
    def state(self) -> EngineState:
        return "closed" if self._closing else "asleep" if self._sleeping else "awake"

    @property
    def context_length(self) -> int:
        return int(self._config.model_config.max_model_len)

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return self._eos

    async def generate(
        self, prompt_ids: Sequence[int], sampling: SamplingParams, adapter: AdapterRef | None = None
    ) -> AsyncGenerator[TokenChunk]:
        request = self._accept(list(prompt_ids), sampling, adapter, Mailbox())
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
                    self._changed.notify_all()

    async def load_adapter(self, ref: AdapterRef, path: Path) -> None:
        def load() -> None:
            from vllm.lora.request import LoRARequest

            if ref in self._adapters:
                return
            number = next(self._count)
            request = LoRARequest(f"{ref}#{number}", number, str(path))
            try:
                self._engine.add_lora(request)
            except Exception as error:
                raise EngineError(f"vLLM did not take the adapter {path}: {line(error)}") from error
            with self._changed:
                self._adapters[ref] = _Adapter(request)

        await self._call(load)

    async def drop_adapter(self, ref: AdapterRef) -> None:
        with self._changed:
            adapter = self._adapters.pop(ref, None)
            if adapter is None:
                return
            adapter.retired = True
        self._drop_if_unused(adapter)

    def adapters(self) -> list[AdapterRef]:
        with self._changed:
            return list(self._adapters)

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
                check_room(self._cache_bytes)
                self._engine.wake_up()
            self._sleeping = False

        await self._call(wake_up)

    async def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        await asyncio.to_thread(self._thread.join)

    @contextmanager
    def hold(self) -> Iterator[None]:
        """The engine stands still between two steps while the block runs; its requests keep their place."""
        with self._changed:
            self._guests += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._parked or self._closing)
        try:
            yield
        finally:
            with self._changed:
                self._guests -= 1
                self._changed.notify_all()

    def stats(self) -> EngineStats:
        with self._changed:
            extra = {"kv_bytes": float(0 if self._sleeping else self._cache_bytes)}
            running = len(self._active)
            return replace(self._stats, running=running, waiting=len(self._arrived), extra=extra)

    # What the trainer shares -----------------------------------------------------------------------

    @property
    def cache_bytes(self) -> int:
        """Of the key/value cache, when awake."""
        return self._cache_bytes

    @property
    def module(self) -> torch.nn.Module:
        """vLLM's own model, whose weights stay valid while the engine sleeps."""
        module: torch.nn.Module = self._engine.apply_model(lambda module: module)[0]
        return module

    # Called from any thread ------------------------------------------------------------------------

    def _accept(
        self, prompt: list[int], sampling: SamplingParams, ref: AdapterRef | None, mailbox: Mailbox
    ) -> _Request:
        if not prompt:
            raise RequestError("the prompt is empty", param="prompt")
        if min(prompt) < 0 or max(prompt) >= self._vocabulary:
            raise RequestError(f"prompt ids must be in [0, {self._vocabulary})", param="prompt")
        room = self.context_length - len(prompt)
        if room < 1:
            raise ContextLengthError(
                f"the prompt has {len(prompt)} tokens; the context of {self.context_length} leaves no room to answer",
                param="messages",
            )
        with self._changed:
            if self._closing:
                raise EngineClosedError("the engine is closed")
            adapter = None
            if ref is not None:
                adapter = self._adapters.get(ref)
                if adapter is None:
                    known = nearest(str(ref), map(str, self._adapters))
                    raise AdapterNotFoundError(f"the engine holds no adapter {str(ref)!r}{known}")
                adapter.users += 1
            self._stats.requests += 1
            self._stats.prompt_tokens += len(prompt)
            limit = min(sampling.max_tokens, room)
            request = _Request(f"r{next(self._count)}", prompt, sampling, limit, adapter, mailbox)
            self._arrived.append(request)
            self._changed.notify_all()
            return request

    async def _call(self, work: Callable[[], T]) -> T:
        """Have the engine's thread do it between two steps."""
        done: Future[T] = Future()
        with self._changed:
            if self._closing:
                raise EngineClosedError("the engine is closed")
            self._calls.append((work, done))
            self._changed.notify_all()
        return await asyncio.wrap_future(done)

    def _drop_if_unused(self, adapter: _Adapter) -> None:
        with self._changed:
            if self._closing or not adapter.retired or adapter.users:
                return
            number = adapter.request.lora_int_id
            self._calls.append((lambda: self._engine.remove_lora(number), Future()))
            self._changed.notify_all()

    # The engine's thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        while self._wait():
            while self._calls:
                work, done = self._calls.popleft()
                if done.set_running_or_notify_cancel():
                    try:
                        done.set_result(work())
                    except BaseException as error:
                        done.set_exception(error)
            if self._open():
                try:
                    self._step()
                except Exception as error:  # the requests get it; vLLM may go on, or say the same next time
                    logger.exception("a step of vLLM failed")
                    self._end_all(error)
        self._end_all(None)
        self._stop()
        while self._calls:
            _, done = self._calls.popleft()
            if not done.cancelled():
                done.set_exception(EngineClosedError("the engine is closed"))

    def _wait(self) -> bool:
        """Until there is something to do. False: the end."""
        with self._changed:
            while not self._closing:
                if self._calls or (self._open() and (self._arrived or self._left or self._active)):
                    self._parked = False
                    return True
                self._parked = True
                self._changed.notify_all()
                self._changed.wait()
            self._parked = True
            self._changed.notify_all()
            return False

    def _open(self) -> bool:
        return not (self._sleeping or self._guests or self._closing)

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
                deliveries.add(request.mailbox, EngineError(f"vLLM refused the request: {line(error)}"))
                self._release(request)
        self._abort([request for request in left if request.id in self._active])
        if self._active:
            began = time.perf_counter()
            outputs = self._engine.step()
            fresh = 0
            for output in outputs:
                fresh += self._take(output, deliveries)
            with self._changed:
                self._stats.generated_tokens += fresh
                self._stats.forward_seconds += time.perf_counter() - began
        self._deliver(deliveries)

    def _submit(self, request: _Request) -> None:
        params = sampling_params(request.sampling, request.max_tokens - len(request.sampled), self._eos)
        lora = None if request.adapter is None else request.adapter.request
        prompt = {"prompt_token_ids": request.prompt + request.sampled}
        self._engine.add_request(request.id, prompt, params, lora_request=lora)
        self._active[request.id] = request

    def _take(self, output: Any, deliveries: Deliveries) -> int:
        request = self._active.get(output.request_id)
        if request is None:
            return 0
        part = output.outputs[0]
        ids = list(part.token_ids)
        flat = part.logprobs
        logprobs = [] if flat is None else [float(flat.logprobs[start]) for start in flat.start_indices]
        reason = _reason(part.finish_reason)
        if len(ids) != len(logprobs) or part.finish_reason == "error":
            self._abort([request])
            deliveries.add(request.mailbox, EngineError(f"vLLM ended the request with {part.finish_reason!r}"))
            return 0
        request.sampled += ids
        deliveries.add(request.mailbox, TokenChunk(ids, logprobs, reason))
        if reason is not None:
            self._active.pop(request.id)
            self._release(request)
        return len(ids)

    def _abort(self, requests: list[_Request]) -> None:
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

    def _release(self, request: _Request) -> None:
        if request.adapter is not None:
            with self._changed:
                request.adapter.users -= 1
            self._drop_if_unused(request.adapter)

    def _deliver(self, deliveries: Deliveries) -> None:
        dead = set(map(id, deliveries.send()))
        if dead:
            self._abort([request for request in self._active.values() if id(request.mailbox) in dead])

    def _end_all(self, error: Exception | None) -> None:
        """Give every request its last word: an error, or "abort"."""
        deliveries = Deliveries()
        with self._changed:
            requests = [*self._active.values(), *self._arrived]
            self._arrived.clear()
            self._left = []
        under_way = list(self._active)
        self._active = {}
        for request in requests:
            last = EngineError(f"vLLM failed: {line(error)}") if error is not None else TokenChunk([], [], "abort")
            deliveries.add(request.mailbox, last)
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
        self._config: Any = self._engine.vllm_config
        self._vocabulary = int(self._config.model_config.get_vocab_size())
        self._cache_bytes = pool_bytes() if self._sleeps else 0

    @property
    def _sleeps(self) -> bool:
        return bool(self._config.model_config.enable_sleep_mode)

    def _stop(self) -> None:
        engine, self._engine = getattr(self, "_engine", None), None
        if engine is None:
            return
        with self._changed:
            self._adapters.clear()
        stop(engine, asleep=self._sleeping and self._sleeps)


def _reason(reason: str | None) -> FinishReason | None:
    if reason is None:
        return None
    return "stop" if reason == "stop" else "length" if reason == "length" else "abort"
