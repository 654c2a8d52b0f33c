"""Two kernels on one model folder: the second is told who has it."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from artnb import durable
from artnb.errors import CheckpointError
from artnb.local import lockfile
from artnb.local.lockfile import FolderLock

HOLDER = """
import errno, sys
from artnb.local import lockfile
if sys.argv[2] == "no flock":
    def fail(descriptor):
        raise OSError(errno.ENOSYS, "Function not implemented")
    lockfile._os_lock = fail
lock = lockfile.FolderLock(sys.argv[1]).acquire()
print("locked", flush=True)
sys.stdin.readline()
lock.release()
print("released", flush=True)
sys.stdin.readline()
"""


@pytest.fixture(params=["flock", "no flock"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "no flock":

        def fail(descriptor: int) -> None:
            raise OSError(errno.ENOSYS, "Function not implemented")

        monkeypatch.setattr(lockfile, "_os_lock", fail)
    return str(request.param)


@pytest.fixture
def holder(tmp_path: Path, way: str) -> Iterator[subprocess.Popen[str]]:
    child = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path), way], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "locked\n"
    yield child
    child.kill()
    child.communicate()


def test_second_process_is_told_who_has_it(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    with pytest.raises(CheckpointError) as caught:
        FolderLock(tmp_path).acquire()
    text = str(caught.value)
    assert str(tmp_path) in text
    assert f"process {holder.pid} on {durable.this_process().host} (since 20" in text
    assert "Close the other notebook kernel, or use another model name" in text
    assert not FolderLock(tmp_path).held
    assert holder.stdin is not None and holder.stdout is not None
    holder.stdin.write("\n")
    holder.stdin.flush()
    assert holder.stdout.readline() == "released\n"
    with FolderLock(tmp_path) as lock:
        assert lock.held


def test_a_killed_process_gives_the_folder_back(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    holder.kill()
    holder.wait()
    with FolderLock(tmp_path) as lock:
        assert lock.held


def test_the_same_process_may_lock_again(tmp_path: Path, way: str) -> None:
    first = FolderLock(tmp_path / "model").acquire()
    assert first.acquire() is first
    second = FolderLock(tmp_path / "." / "model").acquire()
    first.release()
    first.release()
    assert second.held
    assert _other_process_is_refused(tmp_path / "model", way)
    second.close()
    assert not _other_process_is_refused(tmp_path / "model", way)
    with first:
        assert first.held
    assert not first.held


def _other_process_is_refused(folder: Path, way: str) -> bool:
    child = subprocess.run(
        [sys.executable, "-c", HOLDER, str(folder), way], input="\n\n", capture_output=True, text=True, timeout=60
    )
    assert ("CheckpointError" in child.stderr) != (child.returncode == 0), child.stderr
    return child.returncode != 0


def test_a_forked_child_neither_has_nor_frees_the_lock(tmp_path: Path, way: str) -> None:
    lock = FolderLock(tmp_path).acquire()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            lock.release()
            try:
                FolderLock(tmp_path).acquire()
            except CheckpointError:
                status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert lock.held
    assert _other_process_is_refused(tmp_path, way)
    lock.release()


def _pid_file(folder: Path, **fields: Any) -> Path:
    me = durable.this_process()
    record = {"artnb": "lock", "pid": me.pid, "started": me.started, "host": me.host, "since": "2026-01-01", **fields}
    path = folder / "lock.pid"
    path.write_text(json.dumps(record))
    return path


@pytest.mark.parametrize("way", ["no flock"], indirect=True)
def test_pid_file_of_another_machine_says_how_to_go_on(tmp_path: Path, way: str) -> None:
    path = _pid_file(tmp_path, host="colab-1234", pid=77)
    with pytest.raises(CheckpointError, match=r"process 77 on colab-1234 .*Colab.* delete .*lock\.pid") as caught:
        FolderLock(tmp_path).acquire()
    assert path.exists()
    path.unlink()
    assert "another model name" in str(caught.value)
    FolderLock(tmp_path).acquire().release()
    assert not path.exists()


@pytest.mark.parametrize("way", ["no flock"], indirect=True)
def test_pid_file_of_a_reused_process_number_is_stale(tmp_path: Path, way: str) -> None:
    me = durable.this_process()
    if not me.started:
        pytest.skip("this system does not tell when a process started")
    _pid_file(tmp_path, started=me.started + 1)
    with FolderLock(tmp_path):
        assert json.loads((tmp_path / "lock.pid").read_text())["started"] == me.started
    assert sorted(p.name for p in tmp_path.iterdir()) == ["lock"]


@pytest.mark.parametrize("way", ["no flock"], indirect=True)
@pytest.mark.parametrize("content", ["", "{", "[]", "3"])
def test_unreadable_pid_file_counts_as_in_use(tmp_path: Path, way: str, content: str) -> None:
    (tmp_path / "lock.pid").write_text(content)
    with pytest.raises(CheckpointError, match=r"in use by another process.*delete"):
        FolderLock(tmp_path).acquire()


def test_lock_file_of_another_machine_is_mentioned(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    record = {"artnb": "lock", "pid": 5, "started": 0, "host": "colab-1234", "since": "2026-01-01"}
    (tmp_path / "lock").write_text(json.dumps(record))
    FolderLock(tmp_path).acquire().release()
    assert "last used by process 5 on colab-1234" in caplog.text


def test_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="cannot be locked"):
        FolderLock(tmp_path / "file").acquire()
