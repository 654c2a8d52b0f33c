"""Weave: the real client against a trace server on loopback (weave_server.py), read back with the same client.

Weave has no offline mode and its server is not public; what W&B's own service does with the calls is not tested here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from weave_server import WeaveServer

pytest.importorskip("weave")
TESTS = Path(__file__).parent


def test_a_traced_rollout_has_its_calls_below_it_and_its_later_reward_as_feedback(tmp_path: Path) -> None:
    with WeaveServer() as server:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", str(TESTS / "traced_weave.py"), str(tmp_path / "art")],
            capture_output=True,
            text=True,
            timeout=200,
            env=os.environ
            | {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": "0123456789abcdef" * 3, "HOME": str(tmp_path)}
            | {"WEAVE_PRINT_CALL_LINK": "false"},
        )
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    found: dict[str, Any] = json.loads(line.removeprefix("FOUND "))
    calls = found["calls"]
    assert len(found["tokens"]) == 4 and min(found["tokens"]) > 0, "what is trained on keeps its tokens"
    roots = [call for call in calls if call["op"] == "rollout"]
    assert [root["parent"] for root in roots] == [None, None]
    assert {root["inputs"]["prompt"] for root in roots} == {"hello"}
    for root in roots:
        turns = [call for call in calls if call["parent"] == root["id"]]
        assert [turn["op"] for turn in turns] == ["openai.chat.completions.create"] * 2
        assert [len(turn["inputs"]["messages"]) for turn in turns] == [1, 3]
        for turn in turns:
            assert turn["inputs"]["model"] == "agent"
            (usage,) = turn["usage"].values()
            assert usage["completion_tokens"] > 0 and usage["prompt_tokens"] > 6
        said = turns[-1]["output"]["choices"][0]["message"]["content"]
        messages = root["output"]["messages"]
        assert messages[-1] == {"role": "assistant", "content": said, "trainable": True}
    assert {root["output"]["messages"][-1]["content"] for root in roots} == set(found["said"])
    assert '_ids"' not in line and '"logprob"' not in line
    # The reward that came after the rollout had ended, once though it was logged twice.
    feedback = [root["feedback"] for root in roots]
    assert [[f["type"] for f in one] for one in feedback] == [["reward"], ["reward"]]
    payloads = [one[0]["payload"] for one in feedback]
    assert sorted(p["value"] for p in payloads) == [0.0, 1.0]
    assert all((p["model"], p["split"], p["step"]) == ("agent", "train", 1) for p in payloads)
    # Outside of a rollout: model.chat, and a stream.
    alone = {
        call["inputs"]["messages"][0]["content"]: call for call in calls if call["parent"] is None and call not in roots
    }
    assert set(alone) == {"in a cell", "streamed"}
    assert alone["streamed"]["output"]["choices"][0]["delta"]["content"] == found["text"]
