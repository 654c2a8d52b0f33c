"""The inspector in a real browser without a notebook: a page whose `model` asks a local server instead of a comm.

The server answers with `Inspector.answer`, so what is tested is the real script against the real Python half; only
the transport between them is replaced. A scenario is JavaScript that runs on the page and returns a value.
"""

from __future__ import annotations

import base64
import contextlib
import json
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from artnb.notebook.inspector import Inspector, script, stylesheet

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
WITHOUT = "needs chromium (apt-get install chromium); none was found"

PAGE = (Path(__file__).parent / "inspector_page.html").read_text(encoding="utf-8")

# What JupyterLab's own themes set; "system" sets nothing, so that the system's theme decides.
HOSTS = {
    "system": ("Canvas", ":root { color-scheme: light dark; }"),
    "jupyter-light": (
        "#fff",
        ":root { --jp-layout-color0: #ffffff; --jp-content-font-color0: rgba(0,0,0,1); --jp-border-color2: #e0e0e0; }",
    ),
    "jupyter-dark": (
        "#111",
        ":root { --jp-layout-color0: #111111; --jp-content-font-color0: rgba(255,255,255,1); "
        "--jp-border-color2: #424242; }",
    ),
}


class Page:
    """The page, served on 127.0.0.1. `run` opens it in the browser and gives what the scenario returned."""

    def __init__(self, inspector: Inspector, host: str = "system") -> None:
        self.inspector = inspector
        self.host = host
        self._scenario = "return null;"
        self._silent = False
        self._result: Any = None
        self._done = threading.Event()
        page = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args: object) -> None:
                pass

            def do_GET(self) -> None:
                kind, text = page._get(self.path)
                self._reply(kind, text)

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self._reply("application/json", json.dumps(page._post(self.path, body), allow_nan=False))

            def _reply(self, kind: str, text: str) -> None:
                data = text.encode()
                self.send_response(200)
                self.send_header("Content-Type", f"{kind}; charset=utf-8")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                with contextlib.suppress(ConnectionError):  # the browser was closed meanwhile
                    self.wfile.write(data)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def run(
        self,
        scenario: str,
        *,
        width: int = 1280,
        height: int = 900,
        dark: bool = False,
        picture: Path | None = None,
        silent: bool = False,
        patience_s: float = 60,
    ) -> Any:
        """What `scenario` returns. Raises AssertionError with the page's error. `silent`: no kernel answers."""
        self._scenario, self._silent = scenario, silent
        self._done.clear()
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:  # Chromium may still write into it
            command = [
                str(CHROMIUM), "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run",
                "--disable-dev-shm-usage", f"--user-data-dir={profile}", f"--window-size={width},{height}",
                f"--blink-settings=preferredColorScheme={0 if dark else 1}",
            ]  # fmt: skip
            if picture is not None:
                # The picture is taken when the page has been quiet for so many (virtual) ms.
                command += [f"--screenshot={picture}", "--virtual-time-budget=15000"]
            port = self._server.server_address[1]
            browser = subprocess.Popen(
                [*command, f"http://127.0.0.1:{port}/"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            try:
                assert self._done.wait(patience_s), "the page gave no result"
                if picture is not None:
                    browser.wait(patience_s)
            finally:
                browser.terminate()
                browser.wait(20)
        assert "error" not in self._result, self._result["error"]
        return self._result["value"]

    def _get(self, path: str) -> tuple[str, str]:
        if path == "/widget.js":
            return "text/javascript", script()
        if path == "/style.css":
            return "text/css", stylesheet()
        if path == "/state":
            state = {name: getattr(self.inspector, name) for name in ("selected", "preview", "static_class")}
            return "application/json", json.dumps(state, allow_nan=False)
        background, variables = HOSTS[self.host]
        html = (
            PAGE.replace("STATIC", self.inspector.static_class)
            .replace("HOST_BG", background)
            .replace("HOST_VARIABLES", variables)
        )
        return "text/html", html.replace("SILENT", str(self._silent).lower()).replace("SCENARIO", self._scenario)

    def _post(self, path: str, body: Any) -> Any:
        if path == "/ask":
            return [(m, [base64.b64encode(b).decode() for b in buffers]) for m, buffers in self.inspector.answer(body)]
        if path == "/save":
            self.inspector.selected = body["selected"]
        if path == "/result":
            self._result = body
            self._done.set()
        return None


@contextmanager
def served(inspector: Inspector, host: str = "system") -> Iterator[Page]:
    page = Page(inspector, host)
    try:
        yield page
    finally:
        page.close()
