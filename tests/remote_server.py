"""An `artnb serve` in a thread of the test, a line to it that can be cut, and a client for it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import artnb as art
from artnb.remote.backend import RemoteBackend
from artnb.remote.hub import Hub
from artnb.remote.serve import RemoteServer

KEY = "a-key-of-the-tests"
LORA = art.LoraConfig(r=4)
FAST = art.TrainConfig(learning_rate=5e-3)


class Serving:
    """A server in a thread, with its own event loop; `close` ends it as a signal would."""

    def __init__(self, folder: Path, base: Path | None = None, *, port: int = 0, **options: Any) -> None:
        self.folder = folder
        backend = art.LocalBackend(path=folder, device="cpu", dtype="float32", verbose=False)
        self.hub: Any = None
        self._ready = threading.Event()
        self._error: BaseException | None = None
        bases = None if base is None else [str(base)]

        async def run() -> None:
            self.hub = Hub(backend, bases)
            self.loop = asyncio.get_running_loop()
            self.server = RemoteServer(self.hub, KEY, port=port, **options)
            self.url = self.server.url
            self._ready.set()
            await self.server.run()

        def main() -> None:
            try:
                asyncio.run(run())
            except BaseException as error:
                self._error = error
            finally:
                self._ready.set()

        self._thread = threading.Thread(target=main, name="remote-server-of-a-test")
        self._thread.start()
        self._ready.wait()
        if self._error is not None:
            self._thread.join()
            raise self._error

    def changing(self, name: str) -> Any:
        """The job that makes a step of the model now."""
        return self.hub.hosted("tests", name).changing

    @contextlib.contextmanager
    def held(self, name: str) -> Iterator[threading.Event]:
        """The next step of the model begins, and goes on when the block ends; the event says that it has begun."""
        trainer = self.hub.hosted("tests", name).trained.trainer
        real, begun, released = trainer.step, threading.Event(), threading.Event()

        def step(batch: Any, config: Any, *, step: int, on_progress: Any) -> Any:
            on_progress(0, total=1)
            begun.set()
            while not released.wait(0.005):
                on_progress(0)  # which ends a step that was cancelled
            return real(batch, config, step=step, on_progress=on_progress)

        trainer.step = step
        try:
            yield begun
        finally:
            released.set()
            del trainer.step

    def close(self) -> None:
        if self._thread.is_alive():
            self.server.stop()
            self._thread.join()
        if self._error is not None:
            raise self._error

    def __enter__(self) -> Serving:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Line:
    """A TCP proxy in a thread. `cut()` ends every connection; `on_bytes` sees what the server sends."""

    def __init__(self, url: str) -> None:
        host, _, port = url.partition("://")[2].partition(":")
        self._there = (host, int(port))
        self.on_request: Callable[[bytes], None] = self.ignore
        self.on_answer: Callable[[bytes], None] = self.ignore
        self.cuts = 0
        self.refuse = 0  # so many connections more
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._threads: list[threading.Thread] = []
        self._accepting = self._start(self._accept)

    @staticmethod
    def ignore(data: bytes) -> None:
        """What `on_…` does unless told otherwise."""

    def _start(self, target: Callable[..., None], *args: Any) -> threading.Thread:
        thread = threading.Thread(target=target, args=args, daemon=True)
        thread.start()
        self._threads.append(thread)
        return thread

    def _accept(self) -> None:
        while True:
            try:
                here, _ = self._listener.accept()
            except OSError:
                return
            if self.refuse:
                self.refuse -= 1
                here.close()
                continue
            try:
                there = socket.create_connection(self._there)
            except OSError:
                here.close()
                continue
            with self._lock:
                self._open |= {here, there}
            self._start(self._pump, here, there, lambda data: self.on_request(data))
            self._start(self._pump, there, here, lambda data: self.on_answer(data))

    def _pump(self, source: socket.socket, target: socket.socket, seen: Callable[[bytes], None]) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                seen(data)
                target.sendall(data)
        self._end(source, target)

    def _end(self, *sockets: socket.socket) -> None:
        for one in sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        with self._lock:
            self._open -= set(sockets)

    def cut(self) -> None:
        """End every connection, in the middle of whatever goes over it."""
        with self._lock:
            open_now = list(self._open)
        self.cuts += bool(open_now)
        self._end(*open_now)

    def close(self) -> None:
        self._listener.close()
        self.cut()

    def __enter__(self) -> Line:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def client(
    url: str, base: Path, folder: Path, name: str = "agent", **options: Any
) -> tuple[art.TrainableModel, RemoteBackend]:
    """A model handle and its backend, with a folder of its own as another machine has."""
    backend = RemoteBackend(url, KEY, **{"verbose": False, "reconnect_seconds": 20, **options})
    model = art.TrainableModel(name, "tests", base, lora=LORA, base_path=folder)
    return model, backend
