"""As much of the Hugging Face hub's HTTP API as an upload uses, on this machine: repositories, branches, commits, LFS.

Written from huggingface_hub's own requests. What was committed is in `files`, what was asked in `asked`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

GOOD_TOKEN = "hf_goodtokenxxxxxxxxxxxxxxxxxxxxxxxx"


class FakeHub:
    """with FakeHub() as hub: ... hub.url ..., hub.files[("me/agent", "main")]["README.md"]"""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []
        self.repos: dict[str, dict[str, Any]] = {}
        self.files: dict[tuple[str, str], dict[str, bytes]] = {}
        self.blobs: dict[str, bytes] = {}
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> FakeHub:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def answer(self, method: str, path: str, headers: Any, body: bytes) -> tuple[int, Any]:
        if path.startswith("/blob/"):
            if method == "PUT":
                self.blobs[path.removeprefix("/blob/")] = body
            return 200, {}
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if headers.get("authorization") != f"Bearer {GOOD_TOKEN}":
            return 401, {"error": "Invalid username or password."}
        parts = path.strip("/").split("/")
        if path == "/api/repos/create":
            asked = json.loads(body)
            repo = f"{asked['organization']}/{asked['name']}" if asked.get("organization") else f"me/{asked['name']}"
            if not repo.startswith("me/"):
                return 403, {"error": f"You don't have the rights to create a model under the namespace {repo[:-2]}"}
            known = repo in self.repos
            self.repos.setdefault(repo, asked)
            self.files.setdefault((repo, "main"), {})
            return (409 if known else 200), {"url": f"{self.url}/{repo}", "id": repo, "error": "exists"}
        if parts[:2] == ["api", "models"]:
            repo, rest = "/".join(parts[2:4]), parts[4:]
            if rest[:1] == ["branch"]:
                self.files[repo, rest[1]] = dict(self.files[repo, "main"])
                return 200, {}
            if rest[:1] == ["preupload"]:
                given = json.loads(body)["files"]
                kinds = {f["path"]: "lfs" if f["path"].endswith(".safetensors") else "regular" for f in given}
                return 200, {"files": [{"path": p, "uploadMode": k, "shouldIgnore": False} for p, k in kinds.items()]}
            if rest[:1] == ["commit"]:
                return 200, self._commit(repo, rest[1], body)
            found = {"id": repo, "sha": "0" * 40, "private": True, "siblings": [], "tags": []}
            return (200, found) if repo in self.repos else (404, {"error": "Repository not found"})
        if path.endswith("/info/lfs/objects/batch"):
            objects = json.loads(body)["objects"]
            actions = [{**o, "actions": {"upload": {"href": f"{self.url}/blob/{o['oid']}"}}} for o in objects]
            return 200, {"transfer": "basic", "objects": actions}
        return 404, {"error": f"{method} {path} is not here"}

    def _commit(self, repo: str, branch: str, body: bytes) -> dict[str, Any]:
        files = self.files[repo, branch]
        for line in body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                blob = self.blobs[value["oid"]]
                assert hashlib.sha256(blob).hexdigest() == value["oid"]
                files[value["path"]] = blob
        return {"commitUrl": f"{self.url}/{repo}/commit/{'1' * 40}", "commitOid": "1" * 40, "hookOutput": ""}

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _do(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                if self.headers.get("transfer-encoding") == "chunked":
                    while size := int(self.rfile.readline(), 16):
                        body += self.rfile.read(size)
                        self.rfile.readline()
                    self.rfile.readline()
                path = self.path.partition("?")[0]
                hub.asked.append((self.command, path))
                status, answer = hub.answer(self.command, path, self.headers, body)
                data = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(data)))
                if isinstance(answer, dict) and status >= 400 and "error" in answer:
                    self.send_header("x-error-message", answer["error"])
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = do_PUT = do_HEAD = _do

            def log_message(self, *args: Any) -> None:
                """Nothing on standard error."""

        return Handler
