"""How far the loading of a model's weights is, for a progress line of our own in place of transformers' bar."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from transformers.utils import logging

Report = Callable[[int, int], None]
"""Called as `report(1, total)` after each weight, in the thread that loads."""

WEIGHTS_BAR = "Loading weights"
"""What transformers (5.20 to 5.24) calls its bar. Under another name it would stay as it is, beside ours."""


@contextlib.contextmanager
def watched_weights(report: Report) -> Iterator[None]:
    """Inside, weights that this thread loads with transformers are reported. Bars of other threads stay as they are."""
    mine = threading.get_ident()

    def hook(factory: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if threading.get_ident() != mine or options.get("desc") != WEIGHTS_BAR or not args:
            return factory(*args, **options) if before is None else before(factory, args, options)
        return _reported(args[0], report)

    before = logging.set_tqdm_hook(hook)
    try:
        yield
    finally:
        logging.set_tqdm_hook(before)


def _reported(items: Any, report: Report) -> Iterator[Any]:
    total = len(items)
    for item in items:
        yield item
        report(1, total)
