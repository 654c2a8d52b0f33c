"""Nothing in the tests reaches a model hub, and no test writes outside its own folder."""

from __future__ import annotations

import importlib.util
import os
import signal
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")
os.environ.pop("WANDB_API_KEY", None)  # a developer's own key would send the tests' runs to W&B
# A shell starts what it runs in the background with interrupts ignored, and children inherit that: the tests that
# interrupt a wait, a kernel or a process would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def tiny_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of 3 layers with a ChatML tokenizer, as a folder."""
    from tiny_models import make_model

    return make_model("llama", tmp_path_factory.mktemp("base") / "tiny-llama")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of a GPU, or of vLLM, are skipped where there is none, and say so."""
    if any(item.get_closest_marker("gpu") for item in items):
        import torch

        if not torch.cuda.is_available():
            _skip(items, "gpu", "needs a CUDA device; this machine has none")
    if importlib.util.find_spec("vllm") is None:
        _skip(items, "vllm", "needs vLLM, which is not installed here; scripts/test runs it in a venv of its own")


def _skip(items: list[pytest.Item], marker: str, reason: str) -> None:
    for item in items:
        if item.get_closest_marker(marker):
            item.add_marker(pytest.mark.skip(reason=reason))
