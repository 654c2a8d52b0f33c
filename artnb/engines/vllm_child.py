"""What runs beside vLLM's worker in its child process. vLLM imports it by name (`worker_extension_cls`)."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


class ChildExtension:
    """See the module docstring. Its methods are called by name through vLLM's `collective_rpc`."""

    def artnb_settle(self, sleeps: bool) -> int:
        """Live exactly as long as the parent; returns the bytes that are given away when the engine sleeps.

        Jupyter interrupts a kernel's whole process group, and vLLM ends when it is interrupted: so the child leaves
        the group. Then nobody ends it with the kernel: so the system does when its parent dies (Linux).
        """
        os.setpgrp()
        parent = os.getppid()
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before it was watched
            os.kill(os.getpid(), signal.SIGKILL)
        if not sleeps:
            return 0
        from .vllm_start import pool_bytes

        return pool_bytes()
