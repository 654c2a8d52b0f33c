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
    (run,) = run_folders(folder)
    assert [row["training_step"] for row in rows(run)] == [1, 2, 1]
    assert list((folder / "tensorboard").glob("events.out.tfevents.*"))
    (call,) = [call for call in weave.calls if "/op/rollout:" in call["op_name"]]
    assert [other["parent_id"] for other in weave.calls if other is not call] == [call["id"], None]
    ((feedback,), (score,)) = weave.feedback, langfuse.scores
    assert feedback["weave_ref"].endswith(call["id"]) and feedback["payload"]["model"] == "judged"
    (root,) = [span for span in langfuse.spans if span.name == "rollout"]
    assert score["traceId"] == root.trace and score["metadata"]["model"] == "scored"
    assert [span.parent for span in langfuse.spans if span.name == "OpenAI-generation"] == [root.id]


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
