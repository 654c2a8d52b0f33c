"""Checkpoints over the line: an adapter fetched into the model's folder here, or sent to the server.

Safetensors and JSON only, by name and by content, each file against its SHA-256: nothing that came from the network is
unpickled. Nothing stays of a checkpoint that is not whole. Needs the core install only.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from ..training.adapter_files import CONFIG_FILE, WEIGHTS_FILE, read_adapter_config
from ..training.checkpoints import CheckpointStore
from ..training.seal import sha256_of
from .connection import AGAIN, Connection, understood
from .registered import Registered
from .safe_files import check_safetensors, is_allowed
from .wire import API, NOT_REGISTERED

PART = 1 << 20
MOST_FILES = 16
LARGEST_JSON = 16 << 20
LARGEST_WEIGHTS = 16 << 30


async def fetch_checkpoint(connection: Connection, registered: Registered, step: int) -> Path:
    """The folder of checkpoint `step`, below the model's folder here. On the connection's own loop."""
    doing = f"checkpoint {step} of {registered.name}"
    path = f"{registered.path}/checkpoints/{step}"
    listed = await connection.json("GET", path, doing=doing)
    with understood(doing, connection.url):
        files = [(str(entry["name"]), int(entry["size"]), str(entry["sha256"])) for entry in listed["files"]]
    with tempfile.TemporaryDirectory() as name:
        got = Path(name)
        for file, size, sha256 in files[:MOST_FILES]:
            largest = LARGEST_JSON if file.endswith(".json") else LARGEST_WEIGHTS
            if not is_allowed(file) or not 0 < size <= largest:
                raise CheckpointError(f"{doing}: the server names a file {file!r} of {size} bytes; it is not fetched")
            await _fetch(connection, f"{path}/files/{file}", size, sha256, got / file, doing)
        missing = [file for file in (CONFIG_FILE, WEIGHTS_FILE) if not (got / file).is_file()]
        if missing:
            raise CheckpointError(f"{doing}: the server has no {missing[0]} of it")

        def put(folder: Path) -> None:
            for file in got.iterdir():
                shutil.copyfile(file, folder / file.name)

        state = {"model": registered.name, "base_model": registered.base_model, "from": registered.url}
        return await asyncio.to_thread(CheckpointStore(registered.folder).save, step, put, state)


async def _fetch(connection: Connection, path: str, size: int, sha256: str, to: Path, doing: str) -> None:
    """One file; where the line is cut, it goes on behind what is there already."""
    patience = connection.patience()
    to.write_bytes(b"")
    while (have := to.stat().st_size) < size:
        try:
            headers = {"range": f"bytes={have}-"} if have else {}
            async with connection.stream(path, doing=doing, headers=headers) as response:
                with open(to, "r+b") as file:
                    file.seek(have if response.status_code == 206 else 0)
                    async with contextlib.aclosing(response.aiter_bytes()) as parts:
                        async for part in parts:
                            if file.tell() + len(part) > size:
                                raise CheckpointError(f"{doing}: {to.name} is longer than the server said")
                            await asyncio.to_thread(file.write, part)
            patience.well()
            break
        except connection.cut as error:
            await patience.wait(error, doing)
    digest = await asyncio.to_thread(sha256_of, to)
    if digest != sha256:
        raise CheckpointError(f"{doing}: {to.name} arrived damaged (its SHA-256 is not the server's); fetch it again")
    if to.suffix == ".json":
        try:
            json.loads(to.read_bytes())
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{doing}: {to.name} is not JSON ({error})") from None
    else:
        await asyncio.to_thread(check_safetensors, to)


def read_adapter(folder: Path) -> tuple[dict[str, Any], Path, str]:
    """(configuration, weights file, its SHA-256) of a PEFT adapter folder. Raises CheckpointError."""
    config = read_adapter_config(folder)
    check_safetensors(folder / WEIGHTS_FILE)
    return config, folder / WEIGHTS_FILE, sha256_of(folder / WEIGHTS_FILE)


async def send_adapter(
    connection: Connection, registered: Registered, weights: Path, sha256: str, restore: Callable[[], Awaitable[None]]
) -> None:
    """Upload the weights. Sent again as a whole where the line is cut: their name at the server is their SHA-256."""
    doing, patience = f"push to {registered.name}", connection.patience()
    while True:
        try:
            response = await connection.client.put(
                f"{API}{registered.path}/adapters/{sha256}",
                content=_parts(weights),
                headers={"content-type": "application/octet-stream", "content-length": str(weights.stat().st_size)},
            )
        except connection.cut as error:
            await patience.wait(error, doing)
            continue
        if response.status_code < 300:
            return
        refused = connection.refused(response, doing)
        if refused.code == NOT_REGISTERED:
            await restore()
        elif refused.code == "bad_adapter":
            raise CheckpointError(str(refused))
        elif refused.status in AGAIN:
            await patience.wait(refused, doing, response.headers.get("retry-after"))
        else:
            raise refused


async def _parts(path: Path) -> AsyncIterator[bytes]:
    with open(path, "rb") as file:
        while part := await asyncio.to_thread(file.read, PART):
            yield part
