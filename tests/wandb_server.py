"""As much of a W&B server as a run needs: it answers the real wandb-core on loopback, and keeps what it is sent.

GraphQL: RunResumeStatus, UpsertBucket, CreateRunFiles. Then the file stream, whose lines are rows of the history. It
checks no key; what it does not know it answers with an empty object.
"""

from __future__ import annotations

import json
import re
from typing import Any

from loopback_server import Answer, LoopbackServer, as_json


class WandbServer(LoopbackServer):
    """`runs` has the history's rows by run id. With another `status` than 200 it refuses whatever is posted."""

    def __init__(self, status: int = 200) -> None:
        self.status = status
        self.runs: dict[str, list[dict[str, Any]]] = {}
        self.configs: dict[str, dict[str, Any]] = {}
        self.deleted: set[str] = set()  # ids that W&B takes no more
        super().__init__()

    def answer(self, method: str, path: str, body: bytes) -> Answer:
        if method in ("GET", "HEAD"):
            return as_json({})
        if self.status != 200:
            return as_json({"errors": [{"message": "refused"}]}, self.status)
        found = self._found(path, body)
        return as_json(found, 409 if "errors" in found else 200)

    def _found(self, path: str, body: bytes) -> dict[str, Any]:
        if path.endswith("/file_stream"):
            return self._stream(path.split("/")[-2], json.loads(body))
        if not path.endswith("/graphql"):
            return {}
        asked = json.loads(body)
        match = re.match(r"\s*(?:query|mutation)\s+(\w+)", asked["query"])
        operation = match[1] if match else ""
        given = asked.get("variables") or {}
        project = {"id": "p", "name": given.get("project"), "entity": {"id": "e", "name": "team"}}
        if operation == "RunResumeStatus":
            return {"data": {"model": {**project, "bucket": self._bucket(given["name"])}}}
        if operation == "UpsertBucket":
            name = given["name"]
            if name in self.deleted:
                said = f"run team/tests/{name} was previously created and deleted; try a new run name"
                return {"data": {"upsertBucket": None}, "errors": [{"message": said, "path": ["upsertBucket"]}]}
            new = name not in self.runs
            self.runs.setdefault(name, [])
            self.configs.setdefault(name, {}).update(json.loads(given.get("config") or "{}"))
            bucket = {**self._required(name), "project": project}
            return {"data": {"upsertBucket": {"bucket": bucket, "inserted": new}}}
        if operation == "CreateRunFiles":
            files = [{"name": name, "uploadUrl": f"{self.url}/upload/{name}"} for name in given["files"]]
            return {"data": {"createRunFiles": {"runID": given["run"], "uploadHeaders": [], "files": files}}}
        return {
            "data": {"viewer": {"id": "u", "username": "me", "entity": "team", "flags": "{}", "teams": {"edges": []}}}
        }

    def _required(self, name: str) -> dict[str, Any]:
        return {"id": f"id-{name}", "name": name, "displayName": name, "historyLineCount": len(self.runs[name])}

    def _bucket(self, name: str) -> dict[str, Any] | None:
        if name not in self.runs or name in self.deleted:
            return None
        rows = self.runs[name]
        state = {"summaryMetrics": "{}", "logLineCount": 0, "eventsLineCount": 0, "eventsTail": "[]", "tags": []}
        tail = json.dumps([json.dumps(rows[-1])] if rows else [])
        config = json.dumps(self.configs[name])
        return {**self._required(name), **state, "historyTail": tail, "config": config, "wandbConfig": "{}"}

    def _stream(self, run: str, sent: dict[str, Any]) -> dict[str, Any]:
        history = (sent.get("files") or {}).get("wandb-history.jsonl")
        if history is not None:
            rows = self.runs[run]
            rows[history["offset"] :] = [json.loads(line) for line in history["content"]]
        return {}
