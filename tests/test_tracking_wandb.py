"""W&B as a user meets it: the real library, offline or without a network, read back with its own reader."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from agents import even_groups

import artnb as art

wandb = pytest.importorskip("wandb")

from wandb_files import records, rows, run_folders, summary

from artnb.tracking.wandb import WandbTracker

KEY = "0123456789abcdef" * 3
LORA = art.LoraConfig(r=4)


async def test_every_metric_of_every_step_is_in_the_offline_run(
    tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_MODE", "offline")
    config = {"scenario": "even", "api_key": "sk-secret-1", "judge": KEY, "pad_token": "<pad>"}
    async with art.LocalBackend(path=tmp_path / "art", device="cpu", verbose=False) as backend:
        model = art.TrainableModel("agent", "tests", tiny_base, lora=LORA, run_name="first try", config=config)
        await model.register(backend)
        for step in range(3):
            await model.train(await even_groups(model, step), art.TrainConfig(learning_rate=1e-3))
            await model.log([art.Trajectory(reward=0.5 + step / 10)], split="val")
        await model.log([art.Trajectory(reward=0.25, metrics={"won": True})], split="val", step=1)
    folder = backend.history(model).folder
    (run,) = run_folders(folder)
    history = model.history().set_index("step")
    found: dict[tuple[int, str], float] = {}
    for row in rows(run):
        step = row["training_step"]
        found |= {(step, name): value for name, value in row.items() if "/" in name}
    expected = {
        (int(step), str(name)): float(history.loc[step, name])
        for step in history.index
        for name in history.columns
        if history[name].notna()[step]
    }
    assert len(expected) > 60
    assert found == pytest.approx(expected)
    # The axis of each split, and what the run says of itself.
    axes = {m["glob_name"]: m["step_metric"] for m in records(run, "metric") if "glob_name" in m}
    assert axes == {"train/*": "training_step", "val/*": "training_step"}
    end = summary(run)
    assert end["name"] == "first try" and end["project"] == "tests" and end["state"] == "finished"
    assert end["config"]["base_model"] == str(tiny_base) and end["config"]["lora"]["r"] == 4
    assert end["config"]["train"]["learning_rate"] == 1e-3 and end["config"]["scenario"] == "even"
    assert end["config"]["pad_token"] == "<pad>"
    assert end["summary"]["val/reward"] == pytest.approx(0.7), "a late value is not the newest"
    assert end["summary"]["val/won"] == 1.0 and end["summary"]["training_step"] == 3
    # No key anywhere below the model's folder, and none on the screen.
    for path in folder.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            assert KEY.encode() not in content and b"sk-secret-1" not in content, path
    assert KEY not in "".join(capsys.readouterr())
