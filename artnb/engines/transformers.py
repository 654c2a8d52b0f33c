"""The embedded engine: transformers' own forward pass, on the weights that the trainer holds, nothing else.

Not over transformers' continuous batching: docs/engine.md says, with the places in its source, what it cannot
do that the engine protocol asks for. One thread runs the loop: admit → one forward pass for each adapter →
sample → deliver. Who runs is scheduler.py, how they attend flat_attention.py, which token comes sampling.py.
Loads no weights itself: adapters come and go through a `Policy`.
"""

from __future__ import annotations

import asyncio
import threading
import time
import traceback
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import transformers

from ..errors import AdapterNotFoundError, ContextLengthError, EngineClosedError, RequestError, nearest
from ..memory import available_bytes
from . import scheduler as sched
from .base import AdapterRef, EngineState, EngineStats, FinishReason, SamplingParams, TokenChunk
from .delivery import Deliveries, Mailbox
from .forward import Forward, Policy, engine_error, out_of_memory
from .kv_pool import KVPool
from .sampling import mix

FREE_MEMORY_SHARE = 0.25
"""Of the memory that is free at the start, the cache may grow to this share unless `kv_tokens` is given."""


@dataclass(eq=False, slots=True)
class _Adapter:
    name: str  # in the policy; new for every load, so that keys and values can never be another's
    users: int = 0
    retired: bool = False


@dataclass(eq=False, slots=True)
class _Request:
    mailbox: Mailbox
    adapter: _Adapter | None
    stops: frozenset[int]


class TransformersEngine:
    """See the module docstring and the Engine protocol.

    `max_running` sequences compute at a time, the others wait. `max_batch_tokens` bounds one forward pass.
    `kv_tokens` bounds the cache and so the context, too. Requests without a seed get one from `seed` and a counter.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        eos_token_ids: Iterable[int],
        context_length: int,
        kv_tokens: int | None = None,
        max_running: int = 64,
        max_batch_tokens: int = 2048,
        seed: int = 0,
    ) -> None:
        if not 1 <= max_running <= max_batch_tokens:
            raise ValueError(f"max_running={max_running} must be between 1 and max_batch_tokens={max_batch_tokens}")
        self._policy = policy
        self._forward = Forward(policy)
        self._eos = frozenset(eos_token_ids)
        if kv_tokens is None:
            fits = int(available_bytes(self._forward.device) * FREE_MEMORY_SHARE) // self._forward.bytes_per_token
            kv_tokens = max(1024, min(fits, max_running * context_length))
        self._context_length = min(context_length, kv_tokens)
        self._seed = seed
        self._stats = EngineStats()
        self._max_running = max_running
        self._max_batch_tokens = max_batch_tokens
        self._pool = KVPool(kv_tokens)
        self._scheduler = self._new_scheduler()
        self._changed = threading.Condition()  # over everything below
        self._arrived: list[sched.Sequence] = []
        self._adapters: dict[AdapterRef, _Adapter] = {}
        self._to_drop: list[_Adapter] = []
        self._loads = 0
        self._guests = 0  # threads that want to change the model between two forward passes
        self._someone_cancelled = False
        self._sleeping = False
        self._closing = False
        self._parked = threading.Event()  # the loop sleeps, or has ended
        self._loading = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="artnb-engine", daemon=True)
        self._thread.start()

    # The protocol ----------------------------------------------------------------------------------

    @property
    def description(self) -> str:
        dtype = str(self._forward.dtype).removeprefix("torch.")
        return f"transformers {transformers.__version__} (embedded), {self._forward.device}, {dtype}"

    @property
    def state(self) -> EngineState:
        return "closed" if self._closing else "asleep" if self._sleeping else "awake"

    @property
    def context_length(self) -> int:
        return self._context_length

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return self._eos

    async def generate(
        self, prompt_ids: Sequence[int], sampling: SamplingParams, adapter: AdapterRef | None = None
    ) -> AsyncGenerator[TokenChunk]:
        mailbox = Mailbox(sampling.stream)
        self._accept(list(prompt_ids), sampling, adapter, mailbox)
        ended = False
        try:
            while not ended:
                chunk = await mailbox.get()
                ended = chunk.finish_reason is not None
                yield chunk
        finally:
            if not ended:
                with self._changed:
                    mailbox.cancelled = self._someone_cancelled = True
                    self._changed.notify_all()

    async def load_adapter(self, ref: AdapterRef, path: Path) -> None:
        await asyncio.to_thread(self._load, ref, path)

    async def drop_adapter(self, ref: AdapterRef) -> None:
        with self._changed:
            adapter = self._adapters.pop(ref, None)
            if adapter is not None:
                adapter.retired = True
                self._drop_if_unused(adapter)

    def adapters(self) -> list[AdapterRef]:
        with self._changed:
            return list(self._adapters)

    async def sleep(self) -> None:
        with self._changed:
            if not self._sleeping and not self._closing:
                self._sleeping = True
                self._parked.clear()
                self._changed.notify_all()
        if self._sleeping:
            await asyncio.to_thread(self._parked.wait)

    async def wake(self) -> None:
        with self._changed:
            self._sleeping = False
            self._parked.set()  # lets go of a sleep() that still waits for the loop
            self._changed.notify_all()

    async def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        await asyncio.to_thread(self._thread.join)

    @contextmanager
    def hold(self) -> Iterator[None]:
        """The loop stands still between two forward passes while the block runs, e.g. a training step.

        Requests keep their place and their keys and values. A lock alone would not do: the loop would take it
        again before a trainer that waits for it wakes up.
        """
        with self._changed:
            self._guests += 1
        try:
            yield
        finally:
            with self._changed:
                self._guests -= 1
                self._changed.notify_all()

    def stats(self) -> EngineStats:
        with self._changed:
            return replace(
                self._stats,
                running=len(self._scheduler.running),
                waiting=len(self._scheduler.waiting) + len(self._arrived),
                cached_prompt_tokens=self._stats.cached_prompt_tokens + self._scheduler.cached_prompt_tokens,
                extra={
                    "kv_tokens_used": self._pool.used_tokens,
                    "kv_tokens_limit": self._pool.limit,
                    "kv_bytes": self._pool.allocated_bytes,
                    "preemptions": self._scheduler.preemptions,
                },
            )

    # Called from any thread ------------------------------------------------------------------------

    def _accept(self, prompt: list[int], sampling: SamplingParams, ref: AdapterRef | None, mailbox: Mailbox) -> None:
        if not prompt:
            raise RequestError("the prompt is empty", param="prompt")
        if min(prompt) < 0 or max(prompt) >= self._forward.vocabulary:
            raise RequestError(f"prompt ids must be in [0, {self._forward.vocabulary})", param="prompt")
        if len(prompt) >= self._context_length:
            raise ContextLengthError(
                f"the prompt has {len(prompt)} tokens; the context of {self._context_length} leaves no room to answer",
                param="messages",
            )
        stops = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else self._eos)
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
            seed = sampling.seed if sampling.seed is not None else mix(mix(self._seed) ^ self._stats.requests)
            self._stats.requests += 1
            self._stats.prompt_tokens += len(prompt)
            sequence = sched.Sequence(
                tokens=prompt,
                prompt_tokens=len(prompt),
                sampling=sampling,
                adapter=None if adapter is None else adapter.name,
                seed=seed,
                max_tokens=min(sampling.max_tokens, self._context_length - len(prompt)),
                owner=_Request(mailbox, adapter, stops),
            )
            self._arrived.append(sequence)
            self._changed.notify_all()

    def _load(self, ref: AdapterRef, path: Path) -> None:
        with self._loading:
            with self._changed:
                if self._closing:
                    raise EngineClosedError("the engine is closed")
                if ref in self._adapters:
                    return
                self._loads += 1
                name = f"{ref}#{self._loads}"
            with self.hold():
                self._policy.load_adapter(name, path)
            with self._changed:
                if self.state != "closed":
                    self._adapters[ref] = _Adapter(name)
                    return
            self._policy.drop_adapter(name)
            raise EngineClosedError(f"the engine was closed while it loaded {ref}")

    def _drop_if_unused(self, adapter: _Adapter) -> None:
        if adapter.retired and not adapter.users:
            self._to_drop.append(adapter)
            self._changed.notify_all()

    # The engine's thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        while self._wait():
            try:
                self._step()
            except Exception as error:  # a fault of our own: the requests get it, the engine starts over
                self._end_all(error)
        self._end_all(None)
        with self._changed:
            loaded, self._to_drop = [*self._to_drop, *self._adapters.values()], []
            self._adapters.clear()
            self._parked.set()
        for adapter in loaded:
            self._policy.drop_adapter(adapter.name)

    def _wait(self) -> bool:
        """Until there is something to do; takes in what others left. False: the end."""
        with self._changed:
            while not self._closing:
                if self._sleeping and not self._parked.is_set():
                    self._rest()
                    self._parked.set()
                open_for_work = not (self._sleeping or self._guests)
                if self._to_drop or (open_for_work and self._has_work()):
                    return True
                self._changed.wait()
            return False

    def _has_work(self) -> bool:
        return bool(self._arrived) or self._someone_cancelled or self._scheduler.busy

    def _rest(self) -> None:
        """Asleep with no request under way, the cache gives its memory to the trainer."""
        self._scheduler.clear_cache()
        if not self._pool.used_tokens:
            self._pool.release_memory()

    def _step(self) -> None:
        with self._changed:
            arrived, self._arrived = self._arrived, []
            dropped, self._to_drop = self._to_drop, []
            look_for_cancelled, self._someone_cancelled = self._someone_cancelled, False
            for sequence in arrived:
                self._scheduler.add(sequence)
            if look_for_cancelled:
                for sequence in self._scheduler.all():
                    if sequence.owner.mailbox.cancelled:
                        self._end(sequence)
        for adapter in dropped:
            self._scheduler.tree.drop(adapter.name)
            self._policy.drop_adapter(adapter.name)
        if self._interrupted():
            return
        for batch in self._scheduler.next():
            self._compute(batch)
            if self._interrupted():
                return

    def _interrupted(self) -> bool:
        return self._sleeping or self._closing or self._guests > 0

    def _compute(self, batch: list[sched.Work], *, may_retry: bool = True) -> None:
        deliveries = Deliveries()
        started = time.perf_counter()
        try:
            with self._policy.lock, self._policy.using(batch[0].sequence.adapter):
                sampled = self._forward.run(batch, self._pool)
        except Exception as error:
            if may_retry and out_of_memory(error):
                traceback.clear_frames(error.__traceback__)
                self._make_room()
                for part in sched.halves(batch):
                    self._compute(part, may_retry=False)
                return
            for work in batch:
                deliveries.add(work.sequence.owner.mailbox, engine_error("the forward pass", error))
                self._end(work.sequence)
        else:
            with self._changed:
                self._stats.forward_seconds += time.perf_counter() - started
                self._stats.generated_tokens += len(sampled)
            due = [work.sequence for work in batch if work.samples]
            for work in batch:
                self._scheduler.computed(work)
            for sequence, (token, logprob) in zip(due, sampled, strict=True):
                sequence.tokens.append(token)
                reason = _finish_reason(sequence, token)
                deliveries.add(sequence.owner.mailbox, TokenChunk([token], [logprob], reason))
                if reason is not None:
                    self._end(sequence)
        self._send(deliveries)

    def _send(self, deliveries: Deliveries) -> None:
        for mailbox in deliveries.send():
            with self._changed:
                mailbox.cancelled = self._someone_cancelled = True

    def _end(self, sequence: sched.Sequence) -> None:
        self._scheduler.finish(sequence)
        adapter = sequence.owner.adapter
        if adapter is not None:
            with self._changed:
                adapter.users -= 1
                self._drop_if_unused(adapter)

    def _end_all(self, error: Exception | None) -> None:
        """Give every request its last word, an error or "abort", and start with an empty cache."""
        deliveries = Deliveries()
        with self._changed:
            sequences, self._arrived = [*self._scheduler.all(), *self._arrived], []
            self._stats.cached_prompt_tokens += self._scheduler.cached_prompt_tokens
            self._pool = KVPool(self._pool.limit)
            self._scheduler = self._new_scheduler()
            for sequence in sequences:
                abort = TokenChunk([], [], "abort")
                deliveries.add(sequence.owner.mailbox, engine_error("the engine's step", error) if error else abort)
                adapter = sequence.owner.adapter
                if adapter is not None:
                    adapter.users -= 1
                    self._drop_if_unused(adapter)
        self._send(deliveries)

    def _new_scheduler(self) -> sched.Scheduler:
        return sched.Scheduler(self._pool, max_running=self._max_running, max_batch_tokens=self._max_batch_tokens)

    def _make_room(self) -> None:
        self._scheduler.clear_cache()
        if self._forward.device.type == "cuda":
            torch.cuda.empty_cache()
        elif self._forward.device.type == "mps":
            torch.mps.empty_cache()


def _finish_reason(sequence: sched.Sequence, token: int) -> FinishReason | None:
    if token in sequence.owner.stops:
        return "stop"
    return "length" if sequence.sampled >= sequence.max_tokens else None
