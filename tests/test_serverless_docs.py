"""docs/serverless.md: its code runs, against the local service, and says what it has not been run against."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from run_page import run
from training_service import KEY, running

from artnb.serverless.client import _ADVICE
from artnb.serverless.options import SERVICE_NAMES

PAGE = Path(__file__).parent.parent / "docs" / "serverless.md"


async def test_the_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with running() as service:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("WANDB_API_KEY", KEY)
        monkeypatch.setattr("artnb.serverless.backend.DEFAULT_URL", service.url)
        # The key in the environment also means that metrics go to W&B, which is not here.
        monkeypatch.setenv("WANDB_MODE", "disabled")
        assert await run(PAGE) == 3
    out = capsys.readouterr().out
    assert "step 1: reward 0.25" in out and "[1] 1" in out and "left 0" in out


def test_the_page_says_what_it_must() -> None:
    text = PAGE.read_text()
    assert "**It has not been run against the live service.**" in text
    for name in SERVICE_NAMES:
        assert f"`{name}`" in text
    for status in _ADVICE:
        assert re.search(rf"^\| .*\b{status}\b", text, re.M)
