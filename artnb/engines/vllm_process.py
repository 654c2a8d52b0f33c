"""vLLM in a child process (its AsyncLLM), behind the same protocol: for where it cannot be in this one.

It cannot where this process's PyTorch has expandable segments on, where another engine with sleep mode is here already
(vLLM allows one a process), and where an illegal memory access in vLLM's kernels must not end the kernel. The base
weights are then held twice, and every token comes through a socket: in-process is the better choice elsewhere. A child
that dies fails its requests; nothing but a new backend brings the engine back.

A script that starts it needs `if __name__ == "__main__":`, because the child imports the script; notebooks do not.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from ..errors import ConfigError, EngineError
from .delivery import Deliveries
from .vllm import VllmEngine
from .vllm_options import VllmOptions, engine_args, engine_environment
from .vllm_request import line
from .vllm_start import collect

T = TypeVar("T")
logger = logging.getLogger("artnb")
LIFE_CHECK_S = 1.0
"""How often a call that waits for the child looks whether it lives."""
END_S = 10.0
"""How long a child that was told to end may take."""


class ChildDiedError(EngineError):
    """The child process is gone, and all that it held."""

    def __init__(self) -> None:
        super().__init__("vLLM's process has died; its own last words are above, or in the notebook server's log")


@dataclass(frozen=True, slots=True)
class _Failure:
    """Stands for a RequestOutput where a request failed."""

    request_id: str
    error: Exception


class VllmProcessEngine(VllmEngine):
    """See the module docstring. Raises as VllmEngine does."""

    place = "in a child process"
    _child: _Child | None = None

    @property
    def cache_bytes(self) -> int:
        return (self._options.kv_cache_bytes or 0) if self._sleeps else 0

    @contextmanager
    def hold(self) -> Iterator[None]:
        child = self._child
        with super().hold():
            if child is None or child.dead:
                yield
                return
            child.pause()
            try:
                yield
            finally:
                child.resume()

    def _start(self) -> None:
        self._engine = self._child = _Child(self._options)
        self._config = self._child.vllm_config
        self._pool_bytes = self._child.pool_bytes
        self._thread.on_tell = self._child.nudge

    def _take(self, output: Any, deliveries: Deliveries) -> int:
        if not isinstance(output, _Failure):
            return super()._take(output, deliveries)
        request = self._active.pop(output.request_id, None)
        if request is not None:
            deliveries.add(request.mailbox, EngineError(f"vLLM failed: {line(output.error)}"))
            self._release(request)
        return 0

    def _failed(self, error: Exception) -> None:
        if isinstance(error, ChildDiedError):
            self._broken = f"{error}. Close the backend and register the model again: it resumes at its last step"
            logger.error("%s", self._broken)
            self._end_all(self._broken)
        else:
            super()._failed(error)


class _Child:
    """AsyncLLM in an event loop of its own, with LLMEngine's methods: whoever calls `step` waits for what the child
    has sampled meanwhile.
    """

    def __init__(self, options: VllmOptions) -> None:
        self._outputs: SimpleQueue[Any] = SimpleQueue()  # None: look whether there is something else to do
        self._streams: dict[str, asyncio.Task[None]] = {}
        self._pauses = 0
        self._pausing = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="artnb-vllm-child", daemon=True)
        self._thread.start()
        try:
            before = multiprocessing.active_children()
            # The child dies with the thread that starts it, so that is the one which lives as long as the engine.
            self._llm, self.pool_bytes = asyncio.run_coroutine_threadsafe(_begin(options), self._loop).result()
        except BaseException:
            self._end_loop()
            raise
        self._processes = [
            process
            for process in multiprocessing.active_children()
            if process not in before and process.name.startswith("EngineCore")
        ]
        self.vllm_config = self._llm.vllm_config

    @property
    def dead(self) -> bool:
        return self._llm is None or bool(self._llm.errored)

    def nudge(self) -> None:
        """Have `step` return although nothing was sampled."""
        self._outputs.put(None)

    def step(self) -> list[Any]:
        """What has been sampled since the last time; waits for something. Raises: ChildDiedError."""
        arrived = [self._outputs.get()]
        try:
            while True:
                arrived.append(self._outputs.get_nowait())
        except Empty:
            pass
        if self.dead:
            raise ChildDiedError
        return [output for output in arrived if output is not None]

    def add_request(self, request_id: str, prompt: Any, params: Any, *, lora_request: Any) -> None:
        def begin() -> None:
            self._streams[request_id] = asyncio.ensure_future(self._stream(request_id, prompt, params, lora_request))

        self._loop.call_soon_threadsafe(begin)

    def abort_request(self, request_ids: list[str]) -> None:
        def abort() -> None:
            for request_id in request_ids:
                stream = self._streams.get(request_id)
                if stream is not None:
                    stream.cancel()

        self._loop.call_soon_threadsafe(abort)

    async def _stream(self, request_id: str, prompt: Any, params: Any, lora_request: Any) -> None:
        try:
            async for output in self._llm.generate(prompt, params, request_id, lora_request=lora_request):
                self._outputs.put(output)
        except asyncio.CancelledError:
            # vLLM forgets to, when it is cancelled while the request is on its way to the child.
            await self._llm.abort(request_id)
            raise
        except Exception as error:
            self._outputs.put(_Failure(request_id, error))
        finally:
            self._streams.pop(request_id, None)

    def add_lora(self, request: Any) -> None:
        self._ask(self._llm.add_lora(request))

    def remove_lora(self, number: int) -> None:
        self._ask(self._llm.remove_lora(number))

    def sleep(self, level: int) -> None:
        self._ask(self._after_streams(self._llm.sleep(level)))

    def wake_up(self) -> None:
        self._ask(self._llm.wake_up())

    def reset_prefix_cache(self) -> None:
        self._ask(self._after_streams(self._llm.reset_prefix_cache()))

    def pause(self) -> None:
        """Compute nothing; requests keep their place. Counted: as many `resume` go on."""
        with self._pausing:
            if not self._pauses:
                self._ask(self._llm.pause_generation(mode="keep", clear_cache=False))
            self._pauses += 1

    def resume(self) -> None:
        with self._pausing:
            self._pauses -= 1
            if not self._pauses and not self.dead:
                self._ask(self._llm.resume_generation())

    def shutdown(self) -> None:
        """End the child, whatever state it is in."""
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._end_loop()
        for process in self._processes:  # vLLM does not wait until they are gone
            process.join(END_S)
            if process.is_alive():
                process.kill()
                process.join()
        collect()

    @property
    def engine_core(self) -> _Child:
        """Where LLMEngine has its `shutdown`."""
        return self

    def _ask(self, question: Coroutine[Any, Any, T]) -> T:
        """Have the loop do it. Raises: ChildDiedError, as vLLM leaves a call to a dead child waiting for ever."""
        return asyncio.run_coroutine_threadsafe(self._while_alive(question), self._loop).result()

    async def _while_alive(self, question: Coroutine[Any, Any, T]) -> T:
        task = asyncio.ensure_future(question)
        while not task.done():
            await asyncio.wait([task], timeout=LIFE_CHECK_S)
            if self.dead:
                task.cancel()
                await asyncio.wait([task])
                raise ChildDiedError
        return task.result()

    async def _after_streams(self, question: Coroutine[Any, Any, T]) -> T:
        """Once vLLM has forgotten the requests that were aborted."""
        if self._streams:
            await asyncio.wait(list(self._streams.values()))
        return await question

    async def _end(self) -> None:
        for stream in list(self._streams.values()):
            stream.cancel()
        self._llm.shutdown()
        self._llm = None  # or it would shut down once more when Python ends, too late
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _begin(options: VllmOptions) -> tuple[Any, int]:
    """AsyncLLM, and the bytes that it gives away when it sleeps. Raises: ConfigError, EngineError."""
    with engine_environment(options, in_process=False):
        from vllm.v1.engine.async_llm import AsyncLLM

        args = engine_args(options, in_process=False)
        try:
            llm = AsyncLLM.from_engine_args(args)
        except ConfigError:
            raise
        except Exception as error:
            raise EngineError(f"vLLM did not start: {line(error)}") from error
    try:
        sleeps = bool(llm.vllm_config.model_config.enable_sleep_mode)
        (pool,) = await llm.collective_rpc("artnb_settle", args=(sleeps,))
    except BaseException:
        llm.shutdown()
        raise
    return llm, pool
