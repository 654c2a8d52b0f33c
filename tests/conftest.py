"""Nothing in the tests reaches a model hub, and no test writes outside its own folder."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")
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
    """GPU tests are skipped where there is none, and say so."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked:
        import torch

        if not torch.cuda.is_available():
            for item in marked:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device; this machine has none"))
