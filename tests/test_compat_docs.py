"""docs/compatibility.md: its code runs, with a tiny model in place of the small one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "compatibility.md"


@pytest.mark.slow
def test_the_page_runs(tiny_base: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-P", str(HERE / "run_page.py"), str(PAGE), str(tiny_base)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "2 blocks of compatibility.md ran" in done.stdout
    assert (tmp_path / ".art" / "compat" / "models" / "agent-001" / "checkpoints" / "0001").is_dir()
