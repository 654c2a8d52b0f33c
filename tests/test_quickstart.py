"""The quickstart on a tiny random model: everything but the learning, which LOG.md has for the real one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from artnb.cli import main
from artnb.errors import ConfigError
from artnb.quickstart import Plan, load_game

OPTIONS = ["--groups", "2", "--group-size", "3", "--eval-games", "4"]


def test_it_trains_reports_and_resumes(tiny_base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = ["quickstart", "--out", str(tmp_path / "run"), "--base-model", str(tiny_base), *OPTIONS]
    assert main([*run, "--steps", "2"]) == 0
    first = capsys.readouterr().out
    assert "starts at step 0" in first and "model.chat(" in first
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["plan"]["steps"] == 2
    assert {"reward", "legal_move_rate", "win"} <= set(summary["before"]) <= set(summary["after"])
    assert (tmp_path / "run" / "curve.png").read_bytes().startswith(b"\x89PNG")

    assert main([*run, "--steps", "3"]) == 0
    assert "resumes at step 2" in capsys.readouterr().out
    resumed = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert resumed["before"]["reward"] == pytest.approx(summary["before"]["reward"])

    assert main([*run, "--steps", "3"]) == 0, "a finished run shows its result again"
    again = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert again["after"]["reward"] == pytest.approx(resumed["after"]["reward"])


def test_what_it_prints_runs(tiny_base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = ["quickstart", "--out", str(tmp_path / "run"), "--base-model", str(tiny_base), *OPTIONS, "--steps", "1"]
    assert main(run) == 0
    printed = capsys.readouterr().out.split("in Python or a notebook:")[1]
    code = "\n".join(line.removeprefix("    ") for line in printed.strip("\n").splitlines())
    scope: dict[str, object] = {}
    exec(compile(code, "printed", "exec"), scope)
    answer = capsys.readouterr().out.strip().splitlines()
    assert answer, "the model answered"
    import asyncio

    asyncio.run(scope["model"].backend().close())  # type: ignore[attr-defined]


def test_errors_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quickstart", "--out", str(tmp_path), "--base-model", str(tmp_path / "none")]) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]  # before it, the progress of loading
    assert error.startswith("artnb: ") and "no such folder" in error
    with pytest.raises(ConfigError, match="steps"):
        Plan(steps=0)
    with pytest.raises(ConfigError, match="did you mean 'groups'"):
        Plan(group=3)


def test_the_game_is_the_notebooks() -> None:
    game = load_game()
    assert Path(game.__file__).parts[-2:] == ("tic_tac_toe", "tic_tac_toe.py")
