"""A small HTTP server on loopback, in threads: what the servers of other tests answer with is in `answer`."""

from __future__ import annotations

import gzip
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

Answer = tuple[int, str, bytes]  # status, content type, body


def as_json(value: Any, status: int = 200) -> Answer:
    return status, "application/json", json.dumps(value).encode()


class _Quiet(ThreadingHTTPServer):
    daemon_threads = True  # a client keeps its connection open

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that ends drops its connections."""


class LoopbackServer:
    """`with LoopbackServer() as server:` serves at `server.url`."""

    def __init__(self) -> None:
        self._http = _Quiet(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._http.server_port}"

    def answer(self, method: str, path: str, body: bytes) -> Answer:
        """What to send for a request; its body is unpacked already."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._http.serve_forever)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None:
                return None

            def _serve(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                status, kind, answer = server.answer(self.command, self.path.partition("?")[0], body)
                self.send_response(status)
                self.send_header("content-type", kind)
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(answer)

            do_HEAD = do_GET = do_POST = do_PUT = _serve

        return Handler
