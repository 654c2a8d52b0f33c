"""As much of a W&B server as a run needs: it answers the real wandb-core on loopback, and keeps what it is sent.

GraphQL: RunResumeStatus, UpsertBucket, CreateRunFiles. Then the file stream, whose lines are rows of the history. It
checks no key; what it does not know it answers with an empty object.
"""

from __future__ import annotations

import gzip
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self


class _Quiet(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """wandb-core drops connections when it ends."""


class WandbServer:
    """`runs` has the history's rows by run id; `requests` every request as (path, GraphQL operation)."""

    def __init__(self, status: int = 200) -> None:
        self.status = status
        self.runs: dict[str, list[dict[str, Any]]] = {}
        self.configs: dict[str, dict[str, Any]] = {}
        self.deleted: set[str] = set()  # ids that W&B takes no more
        self.requests: list[tuple[str, str]] = []
        self._http = _Quiet(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._http.server_port}"

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._http.serve_forever)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def answer(self, path: str, body: bytes) -> tuple[int, dict[str, Any]]:
        if self.status != 200:
            return self.status, {"errors": [{"message": "refused"}]}
        found = self._found(path, body)
        return (409 if "errors" in found else 200), found

    def _found(self, path: str, body: bytes) -> dict[str, Any]:
        if path.endswith("/file_stream"):
            return self._stream(path.split("/")[-2], json.loads(body))
        if not path.endswith("/graphql"):
            return {}
        asked = json.loads(body)
        match = re.match(r"\s*(?:query|mutation)\s+(\w+)", asked["query"])
        operation = match[1] if match else ""
        self.requests.append((path, operation))
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

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None:
                return None

            def do_HEAD(self) -> None:
                self._send(200, b"")

            def do_GET(self) -> None:
                self._send(200, b"{}")

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                status, found = server.answer(self.path, body)
                self._send(status, json.dumps(found).encode())

            do_PUT = do_POST

            def _send(self, status: int, body: bytes) -> None:
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

        return Handler
