"""schemathesis tries `artnb serve` by its own OpenAPI document, and finds nothing."""

from __future__ import annotations

import asyncio
import logging
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from agents import even_groups
from hypothesis import HealthCheck, given, settings
from remote_server import FAST, KEY, Serving, client

from artnb.training.checkpoints import CheckpointStore, model_folder

schemathesis = pytest.importorskip("schemathesis")

# Real names, so that most requests get behind the 404.
CONFIG = """
[parameters]
"path.project" = "tests"
"path.name" = "agent"
"path.step" = 1
"path.split" = "train"
"path.file" = "adapter_config.json"
"""


def chat_never_fails(url: str) -> None:
    """Requests that name a model which is served: answered, or refused with a word of why."""
    headers = {"Authorization": f"Bearer {KEY}"}
    operation = schemathesis.openapi.from_url(f"{url}/openapi.json", headers=headers)["/v1/chat/completions"]["POST"]
    answered = []

    @given(case=operation.as_strategy())
    @settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    def ask(case: Any) -> None:
        case.body |= {"model": "agent", "max_tokens": 2}
        response = case.call(headers=headers)
        answered.append(response.status_code)
        assert response.status_code in (200, 400), response.text
        assert response.status_code == 200 or response.json()["error"]["message"]

    ask()
    assert 400 in answered


@pytest.mark.slow
def test_schemathesis_finds_nothing(tiny_base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "schemathesis.toml").write_text(CONFIG)
    with Serving(tmp_path / "there", tiny_base) as server:

        async def prepare() -> None:
            model, backend = client(server.url, tiny_base, tmp_path / "here")
            async with backend:
                await model.register(backend)
                await model.train(await even_groups(model, 0), FAST)

        asyncio.run(prepare())
        command = [sys.executable, "-m", "schemathesis.cli", "--config-file", "schemathesis.toml"]
        options = ["-H", f"Authorization: Bearer {KEY}", "--max-examples", "5", "--seed", "1", "--no-color"]
        with caplog.at_level(logging.WARNING):
            done = subprocess.run(
                [*command, "run", f"{server.url}/openapi.json", *options], cwd=tmp_path, capture_output=True, text=True
            )
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
        (counts,) = re.findall(r"(\d+) generated, (\d+) passed", done.stdout)
        assert counts[0] == counts[1] and int(counts[0]) > 300
        for phase in ("Coverage", "Fuzzing", "Stateful"):
            assert f"✅ {phase}" in done.stdout
        chat_never_fails(server.url)
        assert "Traceback" not in caplog.text
    store = CheckpointStore(model_folder(tmp_path / "there", "tests", "agent"))
    for step in store.steps():
        store.verify(step)
