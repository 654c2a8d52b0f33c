"""Adapters that clients send to `artnb serve`, kept by their SHA-256 in the model's folder until a job adopts them."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator
from pathlib import Path
from tempfile import mkstemp

from ..durable import is_full
from ..errors import CheckpointError
from ..training.adapter_files import WEIGHTS_FILE
from ..training.checkpoints import CheckpointStore
from .safe_files import check_safetensors

HEADER_ROOM = 1 << 20
KEPT_S = 24 * 3600.0


class TooLargeError(Exception):
    """More bytes come than an adapter of this model can have."""


class WrongContentError(Exception):
    """What came is not what its SHA-256 says."""


class Uploads:
    """Those of one model."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "uploads"

    def path(self, sha256: str) -> Path:
        return self.folder / f"{sha256}.safetensors"

    def tidy(self) -> None:
        """Forget what was sent long ago and never adopted."""
        for path in self.folder.iterdir() if self.folder.is_dir() else []:
            if time.time() - path.stat().st_mtime > KEPT_S:
                path.unlink(missing_ok=True)

    def limit(self, store: CheckpointStore) -> int:
        """Bytes that an adapter of this model may have: twice its own, for it may be sent in a longer dtype."""
        latest = store.latest()
        own = 0 if latest is None else (store.path(latest) / WEIGHTS_FILE).stat().st_size
        return 2 * own + HEADER_ROOM

    async def receive(self, sha256: str, parts: AsyncIterator[bytes], limit: int) -> int:
        """Keep what comes; returns its size. Nothing stays of what is too large, cut off, or not of this SHA-256.

        Raises TooLargeError, WrongContentError, CheckpointError (no safetensors file, or it cannot be written).
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        descriptor, name = mkstemp(dir=self.folder, prefix=".tmp-")
        temporary, size, digest = Path(name), 0, hashlib.sha256()
        try:
            with open(descriptor, "wb") as file:
                async for part in parts:
                    size += len(part)
                    if size > limit:
                        raise TooLargeError(f"an adapter of this model has at most {limit} bytes")
                    digest.update(part)
                    await asyncio.to_thread(file.write, part)
            if digest.hexdigest() != sha256:
                raise WrongContentError(f"the SHA-256 of what came is {digest.hexdigest()}, not {sha256}")
            check_safetensors(temporary)
            temporary.replace(self.path(sha256))
        except OSError as error:
            why = "no space left on the server" if is_full(error) else str(error)
            raise CheckpointError(f"the adapter could not be kept: {why}") from error
        finally:
            temporary.unlink(missing_ok=True)
        return size
