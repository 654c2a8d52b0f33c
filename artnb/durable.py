"""Files that survive a kill: whole-file replacement, appended lines, and the identity of the process that writes.

A file is either replaced as a whole (temporary file, fsync, rename) or grows by whole lines (one write, fsync; a
torn last line is cut off before the next append). Knows nothing of what the files mean. No torch, no pandas.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import shutil
import socket
import sys
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger(__name__)

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
TEMPORARY = ".tmp-"


def sync_file(path: Path) -> None:
    """Bring a written file's content to the disk."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    """Bring a folder's entries (new names, renames) to the disk. Windows keeps them by itself."""
    if sys.platform == "win32":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Network and FUSE mounts (Google Drive) cannot sync a folder; their renames are kept by the server.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF):
            raise
    finally:
        os.close(descriptor)


def write_all(descriptor: int, data: bytes) -> None:
    """One os.write; goes on only where the system took part of it."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def replace_file(path: Path, chunks: Iterable[bytes]) -> None:
    """Write `chunks` as the new content of `path`: readers see the old file or the new one, never a part."""
    temporary = path.with_name(f"{TEMPORARY}{path.name}-{this_process().mark}-{secrets.token_hex(4)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        try:
            for chunk in chunks:
                write_all(descriptor, chunk)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def append_lines(path: Path, data: bytes) -> None:
    """Append whole lines with one write and one fsync. On any failure the file is as it was before."""
    if not data.endswith(b"\n"):
        raise ValueError("append_lines needs whole lines; the data does not end with a line feed")
    new = not path.exists()
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        end = _cut_torn_line(descriptor)
        os.lseek(descriptor, end, os.SEEK_SET)
        try:
            write_all(descriptor, data)
            os.fsync(descriptor)
        except BaseException:
            os.ftruncate(descriptor, end)
            raise
    finally:
        os.close(descriptor)
    if new:
        sync_folder(path.parent)


def _cut_torn_line(descriptor: int) -> int:
    """Cut off what follows the last line feed; returns the length of what is left."""
    size = os.lseek(descriptor, 0, os.SEEK_END)
    end, keep = size, 0
    while end > 0:
        start = max(0, end - 65536)
        os.lseek(descriptor, start, os.SEEK_SET)
        block = b""
        while len(block) < end - start and (part := os.read(descriptor, end - start - len(block))):
            block += part
        if (found := block.rfind(b"\n")) >= 0:
            keep = start + found + 1
            break
        end = start
    if keep < size:
        os.ftruncate(descriptor, keep)
    return keep


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """(line number from 1, line without its feed) of every whole line, read one by one; a torn last one is left out."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if line.endswith(b"\n"):
                yield number, line[:-1]


def is_full(error: BaseException) -> bool:
    """Whether the error, or one it came from, means that no more can be written (disk, quota or file-size limit)."""
    seen: BaseException | None = error
    while seen is not None:
        # torch and safetensors turn the system's error into their own kind and keep only its text.
        if (isinstance(seen, OSError) and seen.errno in FULL) or "No space left on device" in str(seen):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def no_space(folder: Path) -> bool:
    """Whether the file system is full now: torch.save on a full disk fails with an error that does not say so."""
    try:
        return shutil.disk_usage(folder).free < 65536
    except OSError:
        return False


def megabytes(count: float) -> str:
    return f"{count / 1e6:,.1f} MB"


def free_space(folder: Path) -> str:
    """'123.4 MB free on <folder>', or that the system does not say."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        return f"{megabytes(shutil.disk_usage(folder).free)} free on {folder}"
    except OSError as error:
        return f"free space on {folder} unknown ({error})"


def remove_tree(folder: Path) -> None:
    """Remove a folder of ours; what cannot be removed is logged and stays, under its temporary name."""
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        return
    except OSError as error:
        log.warning("%s could not be removed (%s); it can be deleted by hand", folder, error)


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process that can be told from a later one with the same number: pid, start time, machine."""

    pid: int
    started: int  # clock ticks since boot; 0 where the system does not tell
    host: str

    @property
    def mark(self) -> str:
        """A short form for file names; `parse_mark` reads it back."""
        return f"{self.pid}.{self.started}.{zlib.crc32(self.host.encode()):08x}"

    def alive(self) -> bool | None:
        """Whether it still runs; None for another machine's process, which cannot be known here."""
        if self.host != socket.gethostname():
            return None
        return _runs(self.pid, self.started)


def this_process() -> ProcessId:
    pid = os.getpid()
    return ProcessId(pid, _start_time(pid) or 0, socket.gethostname())


def mark_alive(mark: str) -> bool | None:
    """`ProcessId.alive` for a mark in a file name; None also where it is not such a mark."""
    try:
        pid, started, host = mark.split(".")
        number, ticks = int(pid), int(started)
    except ValueError:
        return None
    if host != f"{zlib.crc32(socket.gethostname().encode()):08x}":
        return None
    return _runs(number, ticks)


def _start_time(pid: int) -> int | None:
    """Start of a process in clock ticks since boot (field 22 of /proc/<pid>/stat); None if ended or not Linux."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError, NotADirectoryError):
        return None
    return None if fields[0] in ("Z", "X") else int(fields[19])


def _runs(pid: int, started: int) -> bool:
    if sys.platform == "win32":
        import ctypes

        # os.kill(pid, 0) would send Ctrl+C here.
        handle = ctypes.windll.kernel32.OpenProcess(0x1000, False, pid)  # PROCESS_QUERY_LIMITED_INFORMATION
        if not handle:
            return False
        code = ctypes.c_ulong()
        ctypes.windll.kernel32.GetExitCodeProcess(handle, ctypes.byref(code))
        ctypes.windll.kernel32.CloseHandle(handle)
        return code.value == 259  # STILL_ACTIVE
    if started:
        return _start_time(pid) == started
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
