"""An engine that answers from a script: for our tests, and for users' tests of their rollouts. No torch, no model.

It keeps the whole contract of base.py (sleep, adapters, cancellation, limits), and samples nothing:
seed, temperature, top-p, top-k and min-p change no answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from ..errors import AdapterNotFoundError, ConfigError, ContextLengthError, EngineClosedError, RequestError
from .base import AdapterRef, EngineState, EngineStats, FinishReason, SamplingParams, TokenChunk
from .byte_tokenizer import ByteTokenizer

SCRIPTED_LOGPROB = -0.5
"""The log-prob reported for every token whose script gives none."""


class TextTokenizer(Protocol):
    """What the scripted engine needs of a tokenizer; ByteTokenizer and transformers' tokenizers have it."""

    @property
    def eos_token_id(self) -> int | None: ...
    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]: ...
    def decode(self, ids: list[int], *, skip_special_tokens: bool = ...) -> str: ...


@dataclass(frozen=True, slots=True)
class ScriptedRequest:
    """One request as the engine got it; a callable script answers it."""

    prompt_ids: list[int]
    sampling: SamplingParams
    adapter: AdapterRef | None
    index: int  # 0 for the first request the engine got
    tokenizer: TextTokenizer = field(repr=False)

    @property
    def prompt_text(self) -> str:
        """The prompt decoded, special tokens included."""
        return self.tokenizer.decode(self.prompt_ids, skip_special_tokens=False)


@dataclass(frozen=True, slots=True)
class ScriptedAnswer:
    """An answer given token by token. With a `finish_reason` no end token is added."""

    token_ids: list[int]
    logprobs: list[float] | None = None  # one per token id; None: SCRIPTED_LOGPROB
    finish_reason: FinishReason | None = None

    def __post_init__(self) -> None:
        if self.logprobs is not None and len(self.logprobs) != len(self.token_ids):
            raise ConfigError(
                f"ScriptedAnswer: {len(self.logprobs)} logprobs for {len(self.token_ids)} token ids; give one per token"
            )


Answer = str | list[int] | ScriptedAnswer
Script = str | list[str] | Callable[[ScriptedRequest], Answer | Awaitable[Answer]]


class _Signal:
    """An event of one event loop that any thread may set."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()

    def set(self) -> None:
        # A loop that was closed under its request has nobody left to wake.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._event.set)

    async def wait(self, timeout: float | None) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._event.wait()
        self._event.clear()


class ScriptedEngine:
    """Answers from `script`: a text (always the same), a list of texts (in order of arrival; the last
    one repeats), or a callable `ScriptedRequest -> str | list of ids | ScriptedAnswer`, which may be async.

    An answer without an end token gets one. With `ignore_eos` the answer repeats until max_tokens.
    `delay` is the time in seconds before every chunk of `chunk_size` tokens.

        engine = ScriptedEngine(lambda request: "4" if "2+2" in request.prompt_text else "?")
    """

    def __init__(
        self,
        script: Script,
        *,
        tokenizer: TextTokenizer | None = None,
        context_length: int = 4096,
        delay: float = 0.0,
        chunk_size: int = 16,
    ) -> None:
        if isinstance(script, list) and not script:
            raise ConfigError("ScriptedEngine: script is an empty list; give at least one answer")
        if not isinstance(script, str | list) and not callable(script):
            raise ConfigError(f"ScriptedEngine: script must be a str, a list of str or a callable, not {script!r}")
        if chunk_size < 1 or context_length < 2 or delay < 0:
            raise ConfigError("ScriptedEngine: needs chunk_size >= 1, context_length >= 2 and delay >= 0")
        self.tokenizer: TextTokenizer = tokenizer if tokenizer is not None else ByteTokenizer()
        self.requests: list[ScriptedRequest] = []  # everything it was asked, in order of arrival
        self._script = script
        self._context_length = context_length
        self._delay = delay
        self._chunk_size = chunk_size
        self._lock = threading.Lock()
        self._state: EngineState = "awake"
        self._signals: set[_Signal] = set()
        self._adapters: dict[AdapterRef, Path] = {}
        self._users: dict[AdapterRef, int] = {}  # requests that run on each adapter
        self._dropped: set[AdapterRef] = set()  # dropped while in use
        self._stats = EngineStats(extra={"peak_running": 0.0, "cancelled": 0.0})

    @property
    def description(self) -> str:
        return "scripted engine (no model)"

    @property
    def state(self) -> EngineState:
        return self._state

    @property
    def context_length(self) -> int:
        return self._context_length

    @property
    def eos_token_ids(self) -> frozenset[int]:
        eos = self.tokenizer.eos_token_id
        return frozenset() if eos is None else frozenset([eos])

    async def generate(
        self, prompt_ids: Sequence[int], sampling: SamplingParams, adapter: AdapterRef | None = None
    ) -> AsyncGenerator[TokenChunk]:
        """See Engine.generate. Raises what the script raises before the first chunk."""
        prompt = list(prompt_ids)
        if not prompt:
            raise RequestError("the prompt has no tokens", param="messages")
        room = self._context_length - len(prompt)
        if room < 1:
            raise ContextLengthError(
                f"the prompt has {len(prompt)} tokens, the context holds {self._context_length}", param="messages"
            )
        signal = _Signal()
        with self._running(prompt, sampling, adapter, signal) as request:
            answer = await self._answer(request)
            ids, logprobs, finish = self._cut(answer, sampling, min(sampling.max_tokens, room))
            for start in range(0, max(1, len(ids)), self._chunk_size):
                if not await self._may_go_on(signal):
                    yield TokenChunk([], [], "abort")
                    return
                end = start + self._chunk_size
                last = end >= len(ids)
                chunk = TokenChunk(ids[start:end], logprobs[start:end], finish if last else None)
                with self._lock:
                    self._stats.generated_tokens += len(chunk.token_ids)
                yield chunk

    @contextlib.contextmanager
    def _running(
        self, prompt: list[int], sampling: SamplingParams, adapter: AdapterRef | None, signal: _Signal
    ) -> Iterator[ScriptedRequest]:
        """Count the request, hold its adapter, and note when it was cancelled."""
        with self._lock:
            if self._state == "closed":
                raise EngineClosedError("the engine is closed")
            if adapter is not None and (adapter not in self._adapters or adapter in self._dropped):
                held = ", ".join(map(str, self._held())) or "none"
                raise AdapterNotFoundError(f"the engine does not hold adapter {adapter}; it holds: {held}")
            request = ScriptedRequest(prompt, sampling, adapter, len(self.requests), self.tokenizer)
            self.requests.append(request)
            self._signals.add(signal)
            if adapter is not None:
                self._users[adapter] = self._users.get(adapter, 0) + 1
            stats = self._stats
            stats.requests += 1
            stats.prompt_tokens += len(prompt)
            stats.running += 1
            stats.extra["peak_running"] = max(stats.extra["peak_running"], stats.running)
        try:
            yield request
        except (GeneratorExit, asyncio.CancelledError):
            with self._lock:
                self._stats.extra["cancelled"] += 1
            raise
        finally:
            with self._lock:
                self._signals.discard(signal)
                self._stats.running -= 1
                if adapter is not None:
                    self._users[adapter] -= 1
                    self._forget_unused(adapter)

    async def _answer(self, request: ScriptedRequest) -> ScriptedAnswer:
        script = self._script
        given: Answer
        if isinstance(script, str):
            given = script
        elif isinstance(script, list):
            given = script[min(request.index, len(script) - 1)]
        else:
            result = script(request)
            given = await result if inspect.isawaitable(result) else result
        if isinstance(given, str):
            given = self.tokenizer.encode(given, add_special_tokens=False)
        return given if isinstance(given, ScriptedAnswer) else ScriptedAnswer(list(given))

    def _cut(
        self, answer: ScriptedAnswer, sampling: SamplingParams, limit: int
    ) -> tuple[list[int], list[float], FinishReason]:
        """The tokens of the answer that come out under `sampling`, with their log-probs and the finish reason."""
        ends = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else self.eos_token_ids)
        logprobs = answer.logprobs if answer.logprobs is not None else [SCRIPTED_LOGPROB] * len(answer.token_ids)
        pairs: Iterator[tuple[int, float]] = zip(answer.token_ids, logprobs, strict=True)
        if sampling.ignore_eos and answer.token_ids:
            pairs = itertools.cycle(pairs)
        elif answer.finish_reason is None and not ends.isdisjoint(self.eos_token_ids):
            pairs = itertools.chain(pairs, ((eos, SCRIPTED_LOGPROB) for eos in self.eos_token_ids))
        ids: list[int] = []
        taken: list[float] = []
        for token, logprob in pairs:
            if len(ids) == limit:
                return ids, taken, "length"
            ids.append(token)
            taken.append(logprob)
            if token in ends:
                return ids, taken, "stop"
        return ids, taken, answer.finish_reason or "stop"

    async def _may_go_on(self, signal: _Signal) -> bool:
        """Wait out the delay and any sleep; False when the engine was closed meanwhile."""
        loop = asyncio.get_running_loop()
        due = loop.time() + self._delay
        await asyncio.sleep(0)  # a long answer lets the others have their turn
        while self._state != "closed":
            asleep = self._state == "asleep"
            left = due - loop.time()
            if not asleep and left <= 0:
                return True
            with self._lock:
                self._stats.waiting += asleep
            try:
                await signal.wait(None if asleep else left)
            finally:
                with self._lock:
                    self._stats.waiting -= asleep
        return False

    async def load_adapter(self, ref: AdapterRef, path: Path) -> None:
        """Hold `ref`; the folder is not read."""
        with self._lock:
            if self._state == "closed":
                raise EngineClosedError("the engine is closed")
            self._adapters[ref] = Path(path)
            self._dropped.discard(ref)

    async def drop_adapter(self, ref: AdapterRef) -> None:
        """Take no new request on `ref`, and forget it when its last one has ended."""
        with self._lock:
            if ref in self._adapters:
                self._dropped.add(ref)
                self._forget_unused(ref)

    def adapters(self) -> list[AdapterRef]:
        """The adapters a new request may name."""
        with self._lock:
            return self._held()

    def _held(self) -> list[AdapterRef]:
        return [ref for ref in self._adapters if ref not in self._dropped]

    def _forget_unused(self, ref: AdapterRef) -> None:
        if ref in self._dropped and not self._users.get(ref):
            self._dropped.discard(ref)
            self._adapters.pop(ref, None)
            self._users.pop(ref, None)

    async def sleep(self) -> None:
        self._become("asleep")

    async def wake(self) -> None:
        self._become("awake")

    async def close(self) -> None:
        self._become("closed")

    def _become(self, state: EngineState) -> None:
        with self._lock:
            if self._state == "closed" and state != "closed":
                raise EngineClosedError(f"the engine is closed; it cannot become {state}")
            self._state = state
            for signal in self._signals:
                signal.set()

    def stats(self) -> EngineStats:
        """A copy of the counters; extra: peak_running, cancelled."""
        with self._lock:
            now = self._stats
            return EngineStats(
                running=now.running - now.waiting,
                waiting=now.waiting,
                prompt_tokens=now.prompt_tokens,
                generated_tokens=now.generated_tokens,
                requests=now.requests,
                extra=dict(now.extra),
            )
