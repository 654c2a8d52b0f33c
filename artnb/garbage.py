"""Python's garbage collector beside a heap that stays: while rollouts run, it leaves alone what was there before.

A notebook with torch, vLLM and a few steps' trajectories holds a million objects. The collector looks through all of
them whenever a quarter as many are new, which a gather's log-probs are soon, and meanwhile nothing else runs: half of
a gather's CPU time (benchmarks/garbage.py). `gc.freeze` keeps it to what is new; it takes no time, and ends with the
block. https://docs.python.org/3/library/gc.html#gc.freeze
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

GROWTH = 1.25
"""Where the heap has grown by so much since it was last looked through, it is once more: Python's own rule."""

_lock = threading.RLock()
_blocks = 0  # that run now
_ours = False  # whether what is frozen was frozen here
_known = 0  # objects that were there when all were last looked through


@contextmanager
def heap_spared() -> Iterator[None]:
    """What exists already is not looked through for garbage in this block. Blocks may nest, and run side by side.

    Whoever froze or disabled the collector himself keeps it as it is.
    """
    global _blocks
    with _lock:
        _blocks += 1
        grown = _blocks == 1 and _freeze()
    try:
        if grown:
            collect()
        yield
    finally:
        with _lock:
            _blocks -= 1
            if _blocks == 0:
                _thaw()


def collect() -> None:
    """A full collection, also of what is spared now."""
    global _known
    with _lock:
        _thaw()
    gc.collect()  # without the lock: finalizers run in it, and may wait for whoever waits for the lock
    with _lock:
        if _blocks and _freeze():
            _known = gc.get_freeze_count()


def _freeze() -> bool:
    """Returns whether the heap has grown enough to be looked through."""
    global _ours
    if not gc.isenabled() or gc.get_freeze_count():
        return False
    gc.freeze()
    _ours = True
    return gc.get_freeze_count() > GROWTH * _known


def _thaw() -> None:
    global _ours
    if _ours:
        gc.unfreeze()
    _ours = False
