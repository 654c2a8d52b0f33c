"""The stream that a dashboard listens to."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from agents import even_groups

import artnb as art
from artnb.events import EVENTS, Event, Events


def test_listeners_get_events_until_they_leave() -> None:
    events, seen = Events(), []
    assert not events
    leave = events.subscribe(seen.append)
    events.emit("log", "p/m", step=1, split="val", metrics={"reward": 1.0})
    leave()
    leave()
    events.emit("log", "p/m", step=2, split="val", metrics={})
    assert [(e.kind, e.model, e.data["step"]) for e in seen] == [("log", "p/m", 1)]


def test_a_listener_that_raises_is_dropped_and_named(caplog: pytest.LogCaptureFixture) -> None:
    events, seen = Events(), []

    def bad(event: Event) -> None:
        raise ValueError("broken display")

    events.subscribe(bad)
    events.subscribe(seen.append)
    with caplog.at_level(logging.ERROR, "artnb"):
        for step in range(3):
            events.emit("log", step=step)
    assert len(seen) == 3 and len(caplog.records) == 1 and "broken display" in caplog.text


async def test_a_step_tells_its_phases_in_order(tiny_base: Path, tmp_path: Path) -> None:
    seen: list[Event] = []
    async with art.LocalBackend(path=tmp_path, device="cpu", verbose=False) as backend:
        model = art.TrainableModel("agent", "tests", tiny_base, lora=art.LoraConfig(r=2))
        await model.register(backend)
        leave = EVENTS.subscribe(seen.append)
        try:
            await model.train(await even_groups(model, 0))
            await model.log([art.Trajectory(reward=0.5)], split="val")
        finally:
            leave()
    phases = list(dict.fromkeys(e.data["phase"] for e in seen if e.kind == "progress"))
    assert phases == ["gather", "train", "save", "swap"]
    gather = [e.data for e in seen if e.kind == "progress" and e.data["phase"] == "gather"]
    assert gather[-1]["done"] == gather[-1]["total"] == 8 and gather[-1]["closed"]
    step, log = [e for e in seen if e.kind != "progress"]
    assert (step.kind, step.model, step.data["step"]) == ("step", "tests/agent", 1)
    assert step.data["metrics"]["grad_norm"] > 0
    assert (log.kind, log.data["split"], log.data["metrics"]["reward"]) == ("log", "val", 0.5)
