"""`artnb serve` in one process, a notebook with only the core install in another, and a line that is cut."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from agents import even_groups
from remote_server import FAST, KEY, LORA, Line

import artnb as art
from artnb.tracking.history import History
from artnb.training.checkpoints import CheckpointStore, model_folder

STEPS = 5


@pytest.fixture
def server(tiny_base: Path, tmp_path: Path) -> Iterator[str]:
    key = tmp_path / "key"
    key.write_text(KEY + "\n")
    key.chmod(0o600)
    command = [sys.executable, "-m", "artnb.cli", "serve", "--port", "0", "--api-key-file", str(key)]
    options = [
        "--device",
        "cpu",
        "--dtype",
        "float32",
        "--base-model",
        str(tiny_base),
        "--path",
        str(tmp_path / "there"),
    ]
    process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        first = process.stdout.readline()
        assert first.startswith("artnb: serving at http://127.0.0.1:"), first + process.stderr.read()
        yield first.split()[3].rstrip(",")
    finally:
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
        assert KEY not in out + err and "Traceback" not in err, err


async def local_losses(base: Path, folder: Path) -> list[float]:
    model = art.TrainableModel("agent", "cut", base, lora=LORA)
    async with art.LocalBackend(path=folder, device="cpu", dtype="float32", verbose=False) as backend:
        await model.register(backend)
        return [(await model.train(await even_groups(model, step), FAST)).metrics["loss"] for step in range(STEPS)]


@pytest.mark.slow
async def test_five_steps_with_a_cut_in_the_third_are_five_steps_with_the_losses_of_a_local_run(
    server: str, tiny_base: Path, tmp_path: Path
) -> None:
    with Line(server) as line:

        def on_answer(data: bytes) -> None:
            if b'"train step 3"' in data and not line.cuts:  # its progress: it has begun
                line.refuse = 2  # nor can it be reached at once
                line.cut()

        line.on_answer = on_answer
        script = Path(__file__).parent / "remote_client_run.py"
        command = [sys.executable, str(script), line.url, str(tiny_base), str(tmp_path / "here"), str(STEPS)]
        environment = {**os.environ, "ARTNB_API_KEY": KEY, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        assert line.cuts == 1 and line.refuse == 0

    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["loaded"] == []
    assert seen["step"] == STEPS and len(seen["losses"]) == STEPS
    assert seen["mismatch"] < 1e-3, "what was trained there is what was sampled for the client"
    assert seen["losses"] == pytest.approx(await local_losses(tiny_base, tmp_path / "local"), abs=2e-6)

    there = model_folder(tmp_path / "there", "cut", "agent")
    assert CheckpointStore(there).steps() == list(range(STEPS + 1))
    records = History(there).metric_records()
    assert [r["step"] for r in records if r["split"] == "train" and "loss" in r["metrics"]] == [1, 2, 3, 4, 5]
    assert seen["history"] == [1, 2, 3, 4, 5] == sorted({r["step"] for r in records if r["split"] == "val"})


def test_a_server_without_what_it_needs_names_the_extra() -> None:
    code = "import sys; sys.meta_path.insert(0, __import__('remote_client_run').Absent()); "
    code += "from artnb.cli import main; sys.exit(main(['serve']))"
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent, capture_output=True, text=True)
    assert done.returncode == 1 and 'pip install "artnb[local]"' in done.stderr, done.stderr
