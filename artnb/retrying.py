"""Try a function again when it fails, with growing pauses. Interrupts and cancellations are never retried."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import time
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

from .config import check_number
from .errors import ConfigError

P = ParamSpec("P")
R = TypeVar("R")

logger = logging.getLogger("artnb")

NEVER = (KeyboardInterrupt, SystemExit, GeneratorExit, asyncio.CancelledError)


def retry(
    max_attempts: int = 3,
    delay: float = 0.25,
    backoff_factor: float = 2.0,
    exceptions: tuple[type[BaseException], ...] = (Exception,),
    on_retry: Callable[[Exception, int], Any] | None = None,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function, sync or async, to be called up to `max_attempts` times while it raises `exceptions`.

        @retry(max_attempts=5, exceptions=(openai.APIConnectionError,))
        async def ask(question): ...

    `delay`: seconds before the second attempt; each further pause is `backoff_factor` times longer. `on_retry(error,
    attempt)` is called before each pause instead of a warning in the log, `attempt` counting from 1; for an async
    function it may be async. The last error is raised as it is.
    """
    if callable(max_attempts):
        raise ConfigError("write @retry() with brackets: retry takes options and returns the decorator")
    check_number("retry", "max_attempts", max_attempts, low=1, whole=True)
    check_number("retry", "delay", delay, low=0.0)
    check_number("retry", "backoff_factor", backoff_factor, low=0.0)

    def failed(name: str, error: BaseException, attempt: int) -> Any:
        """Raise if that was the last attempt or is not ours to retry; otherwise tell, and return what the hook did."""
        if isinstance(error, NEVER) or attempt == max_attempts:
            raise error
        if on_retry is not None:
            return on_retry(cast(Exception, error), attempt)
        logger.warning("%s failed, attempt %d of %d: %s: %s", name, attempt, max_attempts, type(error).__name__, error)
        return None

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise ConfigError(f"{function.__name__} is a generator: what it has yielded cannot be taken back to retry")
        name = getattr(function, "__qualname__", repr(function))
        pauses = [delay * backoff_factor**i for i in range(max_attempts - 1)]

        if _is_async(function):

            @functools.wraps(function)
            async def again_async(*args: P.args, **kwargs: P.kwargs) -> Any:
                for attempt in range(1, max_attempts + 1):
                    try:
                        return await cast(Any, function(*args, **kwargs))
                    except exceptions as error:
                        told = failed(name, error, attempt)
                        if inspect.isawaitable(told):
                            await told
                    await asyncio.sleep(pauses[attempt - 1])

            return cast(Callable[P, R], again_async)

        @functools.wraps(function)
        def again(*args: P.args, **kwargs: P.kwargs) -> R:
            for attempt in range(1, max_attempts + 1):
                try:
                    return function(*args, **kwargs)
                except exceptions as error:
                    failed(name, error, attempt)
                time.sleep(pauses[attempt - 1])
            raise AssertionError("the last attempt returns or raises")

        return again

    return decorate


def _is_async(function: object) -> bool:
    """Also for functools.partial and for objects whose __call__ is async."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004
