"""A step in a worker thread that can be stopped between two packs, and is always waited for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from ..notebook.loop import ticking

T = TypeVar("T")


class StepInterrupted(BaseException):
    """Raised between two packs to end a step whose caller was cancelled, or whose model was closed."""


async def in_worker(work: Callable[[threading.Event], T], stop: threading.Event) -> T:
    """Run `work(stop)` in a thread. When the caller is cancelled, set `stop`, wait for its end, then pass it on."""
    task = asyncio.ensure_future(asyncio.to_thread(work, stop))
    try:
        with ticking():
            return await asyncio.shield(task)
    except asyncio.CancelledError:
        stop.set()
        while not task.done():
            try:
                await asyncio.wait([task])
            except asyncio.CancelledError:
                continue  # a second interrupt does not leave a half-made step behind
        if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, StepInterrupted):
            raise error from None
        raise


async def to_the_end(work: Coroutine[Any, Any, T] | asyncio.Future[T]) -> T:
    """Await it whole, even when the caller is cancelled meanwhile; the cancellation is passed on afterwards."""
    task = asyncio.ensure_future(work)
    interrupted = False
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            interrupted = True
    if interrupted:
        if not task.cancelled():
            task.exception()  # looked at, so that it is not reported as forgotten
        raise asyncio.CancelledError
    return task.result()
