"""Engine and trainer in this process: `LocalBackend`."""

from typing import Any


def __getattr__(name: str) -> Any:
    if name == "LocalBackend":  # it loads torch; its neighbours are imported without
        from .backend import LocalBackend

        return LocalBackend
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
