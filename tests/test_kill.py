"""kill -9 at random instants of a real training run: what is on disk is always a complete step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.timeout(900)
def test_every_resume_continues_at_the_last_complete_step(tiny_base: Path, tmp_path: Path) -> None:
    here = Path(__file__).parent
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(here), str(here.parent)])}
    done = subprocess.run(
        [sys.executable, str(here / "kill_run.py"), str(tiny_base), str(tmp_path)],
        env=env,
        capture_output=True,
        text=True,
        timeout=880,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    seen = json.loads(done.stdout.strip().splitlines()[-1])
    assert seen["problems"] == [], seen
    assert seen["kills"] == 20
    assert len(set(seen["latest"])) > 3, "the kills came at different steps"
