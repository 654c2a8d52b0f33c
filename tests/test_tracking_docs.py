"""docs/tracking.md: its code runs, with servers on loopback in place of the services."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from langfuse_server import LangfuseServer
from wandb_files import rows, run_folders
from weave_server import WeaveServer

for library in ("wandb", "weave", "langfuse", "tensorboard"):
    pytest.importorskip(library)
HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "tracking.md"


@pytest.mark.slow
def test_the_page_runs(tiny_base: Path, tmp_path: Path) -> None:
    with WeaveServer() as weave, LangfuseServer() as langfuse:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-P", str(HERE / "run_page.py"), str(PAGE), str(tiny_base)],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=250,
            env=os.environ
            | {"WANDB_BASE_URL": weave.url, "WANDB_API_KEY": "0123456789abcdef" * 3, "HOME": str(tmp_path)}
            | {"LANGFUSE_BASE_URL": langfuse.url, "LANGFUSE_PUBLIC_KEY": "pk-lf-1", "LANGFUSE_SECRET_KEY": "sk-lf-1"},
        )
    assert done.returncode == 0, done.stderr
    assert "3 blocks of tracking.md ran" in done.stdout
    folder = tmp_path / ".art" / "tracking" / "models" / "agent-001"
    assert len(run_folders(folder)) == 1, done.stderr
    (run,) = run_folders(folder)
    assert [row["training_step"] for row in rows(run)] == [1, 1, 2, 3]
    assert list((folder / "tensorboard").glob("events.out.tfevents.*"))
    rollouts = [call for call in weave.calls if "/op/rollout:" in call["op_name"]]
    below = [call for call in weave.calls if call["parent_id"] in {call["id"] for call in rollouts}]
    assert len(rollouts) == len(below) == 2
    assert {f["weave_ref"].rpartition("/")[2] for f in weave.feedback} == {call["id"] for call in rollouts}
    assert {(f["payload"]["split"], f["payload"]["step"]) for f in weave.feedback} == {("train", 2)}
    roots = [span for span in langfuse.spans if span.name == "rollout"]
    generations = [span for span in langfuse.spans if span.name == "OpenAI-generation"]
    assert len(roots) == 2 and sorted(g.parent for g in generations) == sorted(root.id for root in roots)
    assert {score["traceId"]: score["metadata"]["step"] for score in langfuse.scores} == {r.trace: 3 for r in roots}


def test_every_warning_that_the_page_explains_exists() -> None:
    source = "".join(path.read_text() for path in (HERE.parent / "artnb" / "tracking").glob("*.py"))
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith(("| `…", "| `not all"))]
    said = [line.split("`")[1].removeprefix("… ") for line in lines]
    assert len(said) == 5
    for text in (
        "is not reported to W&B online",
        "no API key was found",
        "cannot be reached",
        "not all of the run was",
    ):
        assert text in source and any(text in line for line in said)
