"""REPORTS.md names tests that exist, and has a line for every report that this part of the project is held against."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent
TABLE = (HERE / "REPORTS.md").read_text(encoding="utf-8")


def test_every_report_has_a_line() -> None:
    numbers = [int(number) for number in re.findall(r"^\| (\d+) \|", TABLE, re.MULTILINE)]
    assert numbers == [*range(1, 79)]


def test_every_test_that_is_named_exists() -> None:
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", TABLE)
    assert len(named) > 60
    missing = [
        f"{file}::{name}"
        for file, name in named
        if not re.search(rf"^(async )?def {name}\(", (HERE / file).read_text(encoding="utf-8"), re.MULTILINE)
    ]
    assert not missing
