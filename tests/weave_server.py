"""As much of a Weave trace server as tracing and reading back need: the real weave client talks to it on loopback.

It keeps calls and feedback in memory. Objects (the code of ops) are taken and forgotten; a query for calls is answered
with all there are; no key is checked.
"""

from __future__ import annotations

import hashlib
import json
from datetime import UTC, datetime
from typing import Any

from loopback_server import Answer, LoopbackServer, as_json


class WeaveServer(LoopbackServer):
    """WANDB_BASE_URL is its `url`. `calls` are complete ones, `feedback` as it was posted."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.feedback: list[dict[str, Any]] = []
        super().__init__()

    def answer(self, method: str, path: str, body: bytes) -> Answer:
        if path.endswith("/server_info"):
            return as_json({"min_required_weave_python_version": "0.0.1", "trace_server_version": "999.0.0"})
        if path.endswith("/graphql"):
            viewer = {"username": "me", "entity": "team", "defaultEntity": {"name": "team"}}
            return as_json({"data": {"project": {"name": "tests"}, "viewer": viewer}})
        if path.endswith(("/obj/create", "/file/create")):
            return as_json({"digest": hashlib.sha256(body).hexdigest()[:43]})
        if path.endswith("/calls/complete"):
            self.calls += json.loads(body)["batch"]
            return as_json({})
        if path.endswith("/calls/stream_query"):
            return 200, "application/jsonl", "".join(json.dumps(call) + "\n" for call in self.calls).encode()
        if path.endswith("/feedback/batch/create"):
            posted = json.loads(body)["batch"]
            made = {"created_at": datetime.now(UTC).isoformat(), "wb_user_id": "me"}
            self.feedback += [{**item, **made} for item in posted]
            return as_json({"res": [{"id": item["id"], "payload": item["payload"]} for item in posted]})
        if path.endswith("/feedback/query"):
            wanted = json.loads(body)["query"]["$expr"]["$eq"][1]["$literal"]
            return as_json({"result": [item for item in self.feedback if item["weave_ref"] == wanted]})
        return as_json({}, 404)
