"""Work that ends whole: what an interrupt of its caller would leave half done, or running with nobody to wait for it.

A thread cannot be stopped from outside, and a step that is half kept is neither the one before nor the one after.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from .notebook.loop import ticking

T = TypeVar("T")


class StepInterrupted(BaseException):
    """Raised between two packs to end a step whose caller was cancelled, or whose model was closed."""


async def to_the_end(
    work: Coroutine[Any, Any, T] | asyncio.Future[T], on_cancel: Callable[[], None] = lambda: None
) -> T:
    """Await `work` whole, even when the caller is cancelled meanwhile, and then again: `on_cancel` is called each time.

    The cancellation is passed on afterwards, unless the work failed: then its error is.
    """
    task = asyncio.ensure_future(work)
    cancelled = False
    with ticking():
        while not task.done():
            try:
                await asyncio.wait([task])
            except asyncio.CancelledError:
                cancelled = True
                on_cancel()
    if cancelled and (task.cancelled() or isinstance(task.exception(), StepInterrupted | None)):
        raise asyncio.CancelledError
    return task.result()


async def in_worker(work: Callable[[threading.Event], T], stop: threading.Event) -> T:
    """Run `work(stop)` in a thread, to its end. When the caller is cancelled, `stop` is set."""
    return await to_the_end(asyncio.to_thread(work, stop), stop.set)
