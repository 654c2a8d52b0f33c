"""Every code block of the README runs, in order, as in one notebook: top-level await, the real small model."""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.S | re.M)


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_python_blocks_run_as_cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT / "notebooks" / "tic_tac_toe"))
    cells = blocks("python")
    assert len(cells) >= 4
    scale = "STEPS, GROUPS, GROUP_SIZE = 16, 6, 8"
    assert cells[0].count(scale) == 1
    cells[0] = cells[0].replace(scale, "STEPS, GROUPS, GROUP_SIZE = 1, 1, 3")
    scope: dict[str, Any] = {}
    try:
        for number, cell in enumerate(cells):
            code = compile(cell, f"README block {number}", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            result = eval(code, scope)
            if inspect.iscoroutine(result):
                await result
    finally:
        if "model" in scope:
            await scope["model"].backend().close()
        sys.modules.pop("tic_tac_toe", None)
    assert await asyncio.to_thread(lambda: len(scope["model"].history())) >= 2


def test_the_first_screen() -> None:
    first = README.split("## ")[0]
    code = blocks("python")[0]
    assert len([line for line in code.splitlines() if line.strip()]) <= 15
    commands = [line.split("#")[0].strip() for line in blocks("bash")[0].splitlines()]
    assert len(commands) == 2
    for command in commands:
        script = ROOT / command.removeprefix("bash ")
        assert script.is_file()
        subprocess.run(["bash", "-n", str(script)], check=True)
    (picture,) = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", first)
    assert (ROOT / picture).read_bytes().startswith(b"\x89PNG")


def test_ci_calls_the_readmes_test_command() -> None:
    command = blocks("bash")[0].splitlines()[1].split("#")[0].strip()
    script = (ROOT / ".ci" / "run").read_text()
    run = [line for line in script.splitlines() if line and not line.startswith(("#", "set ", "cd "))]
    assert run == [f"exec {command}"]


def test_links_in_the_documents_exist() -> None:
    for document in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)\)", document.read_text(encoding="utf-8")):
            if "://" not in target:
                assert (document.parent / target).exists(), f"{document.name} links to {target}"
