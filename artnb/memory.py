"""How much memory a device has left, and how much was used: for plans before a step and for sentences after one."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import psutil
import torch

_CGROUP = Path("/sys/fs/cgroup")


def available_bytes(device: torch.device) -> int:
    """Bytes that can still be allocated on the device; a container's limit counts."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        stats = torch.cuda.memory.memory_stats_as_nested_dict(device)  # memory_stats flattens all of it each time
        reserved, allocated = (stats[f"{kind}_bytes"]["all"]["current"] for kind in ("reserved", "allocated"))
        return int(free + reserved - allocated)
    if device.type == "mps":
        return int(torch.mps.recommended_max_memory() - torch.mps.current_allocated_memory())
    return min(int(psutil.virtual_memory().available), _cgroup_headroom())


def _cgroup_headroom() -> int:
    """What cgroup v2 leaves this container; sys.maxsize without a limit."""
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        used = int((_CGROUP / "memory.current").read_text())
    except (OSError, ValueError):
        return sys.maxsize  # no cgroup v2 here: the host's own figure stands
    return sys.maxsize if limit == "max" else max(0, int(limit) - used)


def give_back(device: torch.device) -> None:
    """Return freed CPU memory to the system.

    glibc keeps what a thread has freed for that thread. Steps run in whichever worker thread is free, and each of
    them would keep a step's activations: 2.5 GiB a thread with a model of 135M.
    """
    if device.type != "cpu" or not sys.platform.startswith("linux"):
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it, musl needs none
    if trim is not None:
        trim(0)


class Trimmer:
    """Gives memory back whenever this process has grown by `slack` bytes since the last time; CPU only.

    glibc reuses little of what tensors free when they come and go layer by layer (aligned blocks do not fit where
    their like has been): without this, recomputing 22 layers of a 135M model held three times what was alive.
    """

    def __init__(self, device: torch.device, slack: int = 512 << 20) -> None:
        self._device = device
        self._slack = slack
        self._floor = held_bytes(device)

    def __call__(self) -> None:
        if self._device.type == "cpu" and held_bytes(self._device) > self._floor + self._slack:
            give_back(self._device)
            self._floor = held_bytes(self._device)


def reset_peak(device: torch.device) -> None:
    """Start a new peak where the device keeps one."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_bytes(device: torch.device) -> int:
    """The most bytes held: since `reset_peak` on CUDA, now on MPS, since the process began on CPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    if device.type == "mps":
        return int(torch.mps.driver_allocated_memory())
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource  # POSIX only

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts in bytes, Linux in KiB


def held_bytes(device: torch.device) -> int:
    """Bytes held now: of the device where it has memory of its own, else of this process."""
    if device.type == "cuda":
        return int(torch.cuda.memory_reserved(device))
    if device.type == "mps":
        return int(torch.mps.driver_allocated_memory())
    return int(psutil.Process().memory_info().rss)


def describe(device: torch.device) -> str:
    """One phrase for error messages: 'cuda: peak 13.2 GiB, 0.4 GiB free'."""
    gib = 1024.0**3
    return f"{device.type}: peak {peak_bytes(device) / gib:.1f} GiB, {available_bytes(device) / gib:.1f} GiB free"
