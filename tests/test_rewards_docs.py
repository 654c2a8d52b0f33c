"""docs/rewards.md: its code runs, with a judge on loopback and a tiny model; its messages and figures exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from judge_server import JudgeServer, by_length
from run_page import run

import artnb as art
from artnb.serving.server import Server

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "rewards.md"


@pytest.fixture
def judge_url() -> Iterator[str]:
    server = Server(JudgeServer(by_length).app)
    server.start()
    yield f"{server.url}/v1"
    server.close()


@pytest.mark.slow
async def test_the_page_runs(
    judge_url: str,
    tiny_base: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENAI_BASE_URL", judge_url)
    monkeypatch.setenv("OPENAI_API_KEY", "any")
    monkeypatch.setattr(art, "demo_model", lambda: str(tiny_base))
    assert await run(PAGE) == 5
    out = capsys.readouterr().out
    assert "JudgeUsage(requests=1, prompt_tokens=100, completion_tokens=20, cost=" in out
    assert "'judge/requests': 2" in out and "'judge/cost': " in out
    assert "of 8 pairs right" in out
    assert "1.3" in out and "'reward_weight/form': 0.2" in out
    assert "{'step': 0, 'split': 'train'} [(0.0, 1.3)]" in out.replace("1.3000000000000003", "1.3")


def test_every_message_that_the_page_explains_exists() -> None:
    source = "".join(path.read_text() for path in (ROOT / "artnb" / "rewards").glob("*.py"))
    rows = PAGE.read_text().split("## What messages mean")[1]
    said = [
        text.removeprefix("… ")
        for line in rows.splitlines()[4:]
        for text in re.findall(r"`([^`]+)`", line.split("|")[1])
    ]
    assert len(said) == 8
    assert [text for text in said if text not in source] == []
