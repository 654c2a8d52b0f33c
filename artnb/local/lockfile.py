"""One process at a time on a model's folder.

An OS lock on `<folder>/lock`, given back by the system when the process dies; where the file system has no such locks
(some mounted drives), a file `lock.pid` that is created exclusively. Does not keep apart threads of one process.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import secrets
import sys
import threading
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar

from ..durable import ProcessId, this_process, write_all
from ..errors import CheckpointError

log = logging.getLogger(__name__)

NO_LOCKS = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL}
BUSY = {errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES, errno.EDEADLK}


@dataclass(slots=True)
class _Held:
    """A lock that this process holds, and how many FolderLocks share it."""

    descriptor: int | None  # None: held by `lock.pid`
    owner: ProcessId
    count: int = 1


class FolderLock:
    """A model folder is written by one process. The same process may lock it again: a cell that is re-run, a
    second handle; the folder is given back when the last of them releases.

        with FolderLock(folder): ...

    Raises CheckpointError on `acquire` when another process has it, naming that process.
    """

    # Locks belong to the process, not to an object, so the table of those held is the process's, too.
    _held: ClassVar[dict[Path, _Held]] = {}
    _mutex: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self._mine: _Held | None = None

    @property
    def held(self) -> bool:
        return self._mine is not None

    def acquire(self) -> FolderLock:
        """Take the folder; a second call changes nothing."""
        with self._mutex:
            if self._mine is not None and self._mine.owner == this_process():
                return self
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                key = self.folder.resolve()
                known = self._held.get(key)
                if known is not None and known.owner == this_process():  # else inherited by a fork, and the parent's
                    known.count += 1
                    self._mine = known
                else:
                    self._mine = self._held[key] = _take(self.folder)
            except OSError as error:
                raise CheckpointError(f"{self.folder} cannot be locked: {error}") from error
        return self

    def release(self) -> None:
        """Give the folder back; may be called again."""
        with self._mutex:
            mine, self._mine = self._mine, None
            if mine is None:
                return
            mine.count -= 1
            if mine.count or mine.owner != this_process():
                return
            self._held.pop(self.folder.resolve(), None)
            _give_back(self.folder, mine)

    close = release

    def __enter__(self) -> FolderLock:
        return self.acquire()

    def __exit__(self, *exception: object) -> None:
        self.release()


def _take(folder: Path) -> _Held:
    me = this_process()
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        _os_lock(descriptor)
    except OSError as error:
        found = _read(folder / "lock")
        os.close(descriptor)
        if error.errno in BUSY:
            raise CheckpointError(_refusal(folder, found)) from None
        if error.errno in NO_LOCKS:
            return _take_pid_file(folder, me)
        raise
    try:
        before = _read(folder / "lock")
        if before and before.get("host") not in (None, me.host):
            log.warning(
                "%s was last used by %s and not closed; if that still runs, close one of the two", folder, _who(before)
            )
        os.ftruncate(descriptor, 0)
        os.lseek(descriptor, 0, os.SEEK_SET)
        write_all(descriptor, _record(me))
    except BaseException:
        os.close(descriptor)
        raise
    return _Held(descriptor, me)


def _give_back(folder: Path, held: _Held) -> None:
    if held.descriptor is None:
        if (_read(folder / "lock.pid") or {}).get("pid") == held.owner.pid:
            (folder / "lock.pid").unlink(missing_ok=True)
        return
    try:
        os.ftruncate(held.descriptor, 0)  # the file itself stays: removing it would let two processes lock two files
    finally:
        os.close(held.descriptor)


def _take_pid_file(folder: Path, me: ProcessId) -> _Held:
    path = folder / "lock.pid"
    for _ in range(10):
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            found = _read(path)
            if not _stale(found):
                raise CheckpointError(_refusal(folder, found, path)) from None
            # Renamed before it is removed, so that of two processes that find it stale only one goes on with it.
            aside = path.with_name(f".stale-{secrets.token_hex(4)}")
            try:
                path.rename(aside)
            except FileNotFoundError:
                continue
            aside.unlink()
            continue
        try:
            write_all(descriptor, _record(me))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        return _Held(None, me)
    raise CheckpointError(f"{path} comes and goes: several processes want {folder} at once; try again")


def _os_lock(descriptor: int) -> None:
    """Lock without waiting; OSError with one of BUSY when another has it."""
    if sys.platform == "win32":
        import msvcrt

        os.lseek(descriptor, 1 << 30, os.SEEK_SET)  # a byte far behind the text, which others may then read
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
    else:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _record(me: ProcessId) -> bytes:
    since = datetime.now().astimezone().isoformat(timespec="seconds")
    record = {"artnb": "lock", "pid": me.pid, "started": me.started, "host": me.host, "since": since}
    return json.dumps(record).encode() + b"\n"


def _read(path: Path) -> dict[str, Any] | None:
    """The record in a lock file; None while it is empty, half-written, or not ours."""
    try:
        record = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    return record if isinstance(record, dict) and isinstance(record.get("pid"), int) else None


def _process(record: dict[str, Any]) -> ProcessId:
    return ProcessId(record["pid"], int(record.get("started") or 0), str(record.get("host")))


def _stale(record: dict[str, Any] | None) -> bool:
    """Whether the process of a `lock.pid` has ended. Unknown (another machine, no record yet) counts as running."""
    return record is not None and _process(record).alive() is False


def _who(record: dict[str, Any]) -> str:
    return f"process {record['pid']} on {record.get('host')} (since {record.get('since')})"


def _refusal(folder: Path, record: dict[str, Any] | None, pid_file: Path | None = None) -> str:
    who = _who(record) if record else "another process"
    text = f"{folder} is in use by {who}"
    alive = _process(record).alive() if record else None
    if pid_file is not None and alive is None:
        text += f". If that has ended (e.g. a cut-off Colab session), delete {pid_file} and run the cell again"
    elif pid_file is None and alive is False:
        text += "; that one has ended, but a process it started still holds the lock: end it"
    return text + ". Close the other notebook kernel, or use another model name"
