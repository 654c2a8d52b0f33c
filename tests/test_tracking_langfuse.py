"""Langfuse: the real SDK against an OTLP receiver on loopback (langfuse_server.py).

What Langfuse's own service makes of the spans is not tested here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("langfuse")
TESTS = Path(__file__).parent


def test_a_traced_rollout_has_its_generations_and_its_later_reward_as_a_score(tmp_path: Path) -> None:
    from langfuse_server import LangfuseServer, Span

    keys = {"LANGFUSE_PUBLIC_KEY": "pk-lf-1", "LANGFUSE_SECRET_KEY": "sk-lf-0123456789"}
    with LangfuseServer() as server:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", str(TESTS / "traced_langfuse.py"), str(tmp_path / "art")],
            capture_output=True,
            text=True,
            timeout=200,
            env=os.environ | keys | {"LANGFUSE_BASE_URL": server.url},
        )
    assert done.returncode == 0 and server.unknown == [], done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    found: dict[str, Any] = json.loads(line.removeprefix("FOUND "))
    kind, model = "langfuse.observation.type", "langfuse.observation.model.name"
    roots = [span for span in server.spans if span.name == "rollout"]
    assert len(roots) == 2 and len({root.trace for root in roots}) == 2
    rewards: dict[str, float] = {}
    for root in roots:
        turns = sorted((s for s in server.spans if s.parent == root.id), key=lambda s: s.start)
        assert [(turn.trace, turn.attributes[kind]) for turn in turns] == [(root.trace, "generation")] * 2
        assert all(root.start <= turn.start <= turn.end <= root.end for turn in turns)
        assert [turn.attributes[model] for turn in turns] == ["agent@0"] * 2, "the checkpoint that answered"
        for turn in turns:
            usage = _json(turn, "usage_details")
            assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] > 6
            assert _json(turn, "model.parameters")["max_tokens"] == 6
        asked = [_json(turn, "input") for turn in turns]
        answers = [_json(turn, "output") for turn in turns]
        assert asked[0] == [{"role": "user", "content": "hello"}]
        assert asked[1] == [*asked[0], answers[0], {"role": "user", "content": "go on"}]
        rewards[root.trace] = found["said"][answers[1]["content"]]
    # The reward that came after the rollout had ended, on its own trace.
    scores = {(score["traceId"], score["name"]): score for score in server.scores}
    assert len(server.scores) == len(scores) == 4
    assert {trace: scores[trace, "reward"]["value"] for trace in rewards} == rewards
    assert sorted(rewards.values()) == [0.25, 1.25]
    assert all(scores[trace, "won"]["value"] == float(reward > 1) for trace, reward in rewards.items())
    about = {"project": "tests", "model": "agent", "split": "train", "step": 1}
    assert all(score["metadata"] == about and score["dataType"] == "NUMERIC" for score in server.scores)

    # Outside of a rollout: model.chat, and a stream.
    def alone(text: str) -> Span:
        (span,) = [s for s in server.spans if s.attributes.get("langfuse.observation.input") == json.dumps(_user(text))]
        assert span.parent == "" and span.attributes[model] == "agent@0"
        return span

    assert _json(alone("in a cell"), "output")["role"] == "assistant"
    assert alone("streamed").attributes["langfuse.observation.output"] == found["text"]
    # Token ids and log-probs are not sent; keys are nowhere but in the requests' headers.
    assert "token_ids" not in str(server.spans) and "logprob" not in str(server.spans)
    written = [path.read_bytes() for path in (tmp_path / "art").rglob("*") if path.is_file()]
    assert not any(keys["LANGFUSE_SECRET_KEY"].encode() in content for content in written)
    assert keys["LANGFUSE_SECRET_KEY"] not in done.stdout + done.stderr


def _json(span: Any, name: str) -> Any:
    return json.loads(span.attributes[f"langfuse.observation.{name}"])


def _user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]
