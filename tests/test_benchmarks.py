"""The benchmarks still run: each on next to nothing. What they measure is in LOG.md."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture(scope="module")
def words_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As the GPU's benchmarks make their models, small enough for here."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    run("gpu/make_model.py", "tiny", str(folder), "--device", "cpu")
    return folder


def run(script: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / script), *arguments],
        capture_output=True,
        text=True,
        timeout=200,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.model
def test_what_a_request_and_a_gather_cost() -> None:
    told = run("request_cost.py", "--requests", "10", "--repeat", "1", "--tokens", "4", "--steps")
    assert {"client", "transport", "endpoint", "engine", "all"} <= {line.split()[0] for line in told.splitlines()}
    few = ["--groups", "2", "--rollouts", "2", "--tokens", "4", "--kept", "1", "--repeat", "1"]
    assert "history lines" in run("gather_cost.py", *few, "--train-side")


@pytest.mark.slow
def test_the_gpus_benchmarks_on_a_cpu(words_model: Path) -> None:
    few = ["--device", "cpu", "--groups", "2", "--sides", "artnb"]
    told = run("gpu/whole_step.py", str(words_model), *few, "--prompts", "60", "--new-tokens", "4", "--steps", "1")
    assert re.search(r"^60 +\d+\.\d\d ", told, re.M), told  # a side that failed has a dash there
    told = run("gpu/train_step.py", str(words_model), *few, "--prompt", "60", "--quick", "--cases", "long")
    assert re.search(r"^long +\d+\.\d\d ", told, re.M), told


def test_the_suite_names_scripts_that_are_there() -> None:
    told = run("gpu/suite.py", "/nowhere", "--list")
    scripts = {word for word in told.split() if word.endswith(".py")}
    assert len(scripts) >= 6 and all(Path(script).is_file() for script in scripts)
