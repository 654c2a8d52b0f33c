"""docs/remote.md: its code runs against a server on loopback, and it names what there is."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
from remote_server import KEY, Serving
from run_page import run

import artnb as art
from artnb.cli import parser
from artnb.remote.guard import Limits

PAGE = Path(__file__).parent.parent / "docs" / "remote.md"


async def test_the_page_runs(
    tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with Serving(tmp_path / "there", tiny_base) as server:
        text = PAGE.read_text()
        for here, there in [("http://127.0.0.1:8765", server.url), ("Qwen/Qwen2.5-7B-Instruct", str(tiny_base))]:
            assert f'"{here}"' in text
            text = text.replace(f'"{here}"', f'"{there}"')
        page = tmp_path / "remote.md"
        page.write_text(text)
        monkeypatch.setenv("ARTNB_API_KEY", KEY)
        monkeypatch.chdir(tmp_path)
        assert await run(page) == 3
    out = capsys.readouterr().out
    assert (
        "step 3: reward" in out and "[0, 1, 2, 3]" in out and "\n4 1\n" in out and "agent-001 starts at step 0" in out
    )


def test_the_page_names_what_there_is() -> None:
    text = PAGE.read_text()
    help_text = next(a for a in parser()._subparsers._group_actions).choices["serve"].format_help()  # type: ignore[union-attr]
    for option in set(re.findall(r"--[a-z][a-z0-9-]+", text)) - {"--help"}:
        assert option in help_text, f"{option} is no option of artnb serve"
    assert str(inspect.signature(art.RemoteBackend.__init__)) == (
        "(self, url: 'str', api_key: 'str | None' = None, *, ca_file: 'str | Path | None' = None, "
        "reconnect_seconds: 'float' = 600.0, verbose: 'bool' = True) -> 'None'"
    )
    limits = Limits()
    assert (limits.max_body, limits.max_chat, limits.idle_s, limits.header_s) == (64 << 20, 16 << 20, 30.0, 20.0)
    assert (limits.slowest, limits.send_s) == (16384.0, 300.0)
