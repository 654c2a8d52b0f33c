"""docs/sft.md and docs/checkpoints.md: their code runs, in order, each as one notebook."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

HERE = Path(__file__).parent
DOCS = HERE.parent / "docs"


@pytest.mark.slow
@pytest.mark.parametrize(("page", "blocks"), [("sft", 4), ("checkpoints", 6)])
def test_the_page_runs(tiny_base: Path, tmp_path: Path, page: str, blocks: int) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-P", str(HERE / "run_page.py"), str(DOCS / f"{page}.md"), str(tiny_base)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=250,
        env=os.environ | {"HOME": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"{blocks} blocks of {page}.md ran" in done.stdout
    if page == "checkpoints":
        assert "[0, 1] [2, 3]" in done.stdout, "2 was best, 3 is newest"
        assert "vllm serve" in done.stdout and (tmp_path / "agent-merged" / "model.safetensors").exists()


def test_the_options_are_those_of_the_config() -> None:
    import dataclasses

    from artnb.config import TrainSFTConfig

    table = (DOCS / "sft.md").read_text().split("## Options")[1].split("## Long runs")[0]
    listed = re.findall(
        r"`(\w+)`", "".join(line.split("|")[1] for line in table.splitlines() if line.startswith("| `"))
    )
    assert sorted(listed) == sorted(field.name for field in dataclasses.fields(TrainSFTConfig))


def test_the_errors_that_the_page_explains_exist() -> None:
    source = "".join(path.read_text() for path in (HERE.parent / "artnb").rglob("*.py"))
    table = (DOCS / "checkpoints.md").read_text().split("## Errors")[1]
    shown = re.findall(r"^\| `\w+: ([^`]+)` \|", table, flags=re.M)
    assert len(shown) == 8
    for text in shown:
        parts = [part.strip(" :;") for part in re.split(r"…|\d", text)]
        assert all(part in source for part in parts if len(part) > 3), text
