"""A real Jupyter kernel for tests: run a cell, interrupt it, kill it. Knows only what a cell prints and raises."""

from __future__ import annotations

import os
import queue
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import KernelManager

HERE = Path(__file__).parent
LIMIT_S = 120.0
"""Far more than any cell here needs: it ends a test that would hang."""


@dataclass
class Ran:
    """What a cell left: its text (stdout and stderr) and the name of what it raised."""

    text: str
    error: str | None
    detail: str = ""


class Kernel:
    """A kernel in a folder, with this checkout and these tests importable. `first`: a folder that comes before both."""

    def __init__(self, folder: Path, env: dict[str, str], first: Path | None = None) -> None:
        argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        self.manager = KernelManager(kernel_name="python3")
        self.manager._kernel_spec = KernelSpec(argv=argv, display_name="test", language="python")
        path = [*([str(first)] if first else []), str(HERE.parent), str(HERE)]
        env = {
            **env,
            "PYTHONPATH": os.pathsep.join(path),
            "OMP_NUM_THREADS": "1",
            "IPYTHONDIR": str(folder / "ipython"),
        }
        self.manager.start_kernel(cwd=str(folder), env=env)
        self.client = self.manager.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=LIMIT_S)

    def run(self, code: str, *, when: str | None = None, do: Callable[[], Any] | None = None) -> Ran:
        """Run a cell to its end. Once it has printed `when`, call `do`, e.g. the interrupt."""
        asked = self.client.execute(code, store_history=True, stop_on_error=False)
        ran, deadline = Ran("", None), time.monotonic() + LIMIT_S
        while True:
            try:
                message = self.client.get_iopub_msg(timeout=max(0.1, deadline - time.monotonic()))
            except queue.Empty:
                raise TimeoutError(f"the cell did not end in {LIMIT_S:g} s; so far: {ran.text}") from None
            kind, content = message["msg_type"], message["content"]
            if message["parent_header"].get("msg_id") != asked:
                continue
            if kind == "stream":
                ran.text += content["text"]
                if do is not None and when is not None and when in ran.text:
                    do, then = None, do
                    then()
            elif kind == "error":
                ran.error, ran.detail = content["ename"], "\n".join(content["traceback"])
            elif kind == "status" and content["execution_state"] == "idle":
                return ran

    def said(self, code: str) -> str:
        """The text of a cell that must not fail."""
        ran = self.run(code)
        assert ran.error is None, ran.detail
        return ran.text

    def interrupt(self) -> None:
        """The stop button."""
        self.manager.interrupt_kernel()

    def kill(self) -> None:
        """The session is cut off: kill -9, nothing is cleaned up."""
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)
        self.manager.cleanup_resources()

    def __enter__(self) -> Kernel:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.kill()
