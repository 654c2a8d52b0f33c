"""Files of a checkpoint on their way to the disk: flushed, and their SHA-256 known, while others are still written."""

from __future__ import annotations

import hashlib
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

from ..durable import sync_file


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file's content, in hex."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Sealer:
    """Flushing waits for the disk and hashing lets other threads run, so each file gets two threads at once."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(8, thread_name_prefix="artnb-seal")
        self._begun: dict[Path, tuple[Future[None], Future[str]]] = {}

    def begin(self, path: Path) -> None:
        """The file has its content. A second call changes nothing."""
        if path not in self._begun:
            self._begun[path] = (self._pool.submit(sync_file, path), self._pool.submit(sha256_of, path))

    def sha256(self, path: Path) -> str:
        """Of a file that was begun, as soon as it is on the disk. Raises: OSError."""
        flushed, sha256 = self._begun[path]
        flushed.result()
        return sha256.result()

    def __enter__(self) -> Sealer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(cancel_futures=True)
