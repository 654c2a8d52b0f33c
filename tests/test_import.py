"""`import artnb` is light: no torch, no transformers, nothing patched."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import artnb as art

PROBE = """
import asyncio, json, sys, time
run, get = asyncio.run, asyncio.get_event_loop_policy
start = time.perf_counter()
import artnb as art
seconds = time.perf_counter() - start
loaded = [m for m in ("torch", "transformers", "peft", "fastapi", "pandas", "matplotlib") if m in sys.modules]
same = asyncio.run is run and asyncio.get_event_loop_policy is get
art.TrainableModel; art.Trajectory; art.TrainConfig; art.gather_trajectory_groups; art.LocalBackend.__class__
heavy = [m for m in ("torch", "transformers", "peft") if m in sys.modules]
print(json.dumps([seconds, loaded, same, heavy]))
"""


def test_import_is_light() -> None:
    probe = PROBE.replace("art.LocalBackend.__class__", "art.trajectory")
    out = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True).stdout
    _, loaded, same, heavy = json.loads(out)
    assert loaded == [] and same and heavy == []


@pytest.mark.parametrize("name", [n for n in art.__all__ if n != "__version__"])
def test_every_public_name_is_what_it_says(name: str) -> None:
    value = getattr(art, name)
    assert callable(value), f"art.{name} is {value!r}"
    assert value.__doc__


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="TrainabelModel"):
        _ = art.TrainabelModel
