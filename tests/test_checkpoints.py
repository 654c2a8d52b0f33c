"""Checkpoints: what is complete, what is refused, and what a full disk or a kill leaves."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from artnb import durable
from artnb.errors import CheckpointError, ConfigError
from artnb.training import seal
from artnb.training.checkpoints import MANIFEST, CheckpointStore, check_name, model_folder, steps_to_delete
from artnb.training.seal import sha256_of


def adapter(content: bytes = b"weights") -> Any:
    def write(folder: Path) -> None:
        (folder / "adapter_model.safetensors").write_bytes(content)
        (folder / "adapter_config.json").write_text("{}")
        (folder / "deep").mkdir()
        (folder / "deep" / "optimizer.bin").write_bytes(content * 3)

    return write


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "model")


def names(store: CheckpointStore) -> list[str]:
    return sorted(p.name for p in store.root.iterdir())


def test_saved_checkpoint_comes_back_with_its_state(store: CheckpointStore) -> None:
    state = {"rng": b"\x00\xff", "metrics": {"loss": math.nan, "n": np.float32(0.5)}, "config": {"seed": 3}}
    path = store.save(3, adapter(), state)
    assert path == store.path(3) == store.root / "0003"
    loaded = store.load_state(3)
    assert loaded["step"] == 3
    assert loaded["rng"] == b"\x00\xff"
    assert math.isnan(loaded["metrics"]["loss"])
    assert loaded["metrics"]["n"] == 0.5
    store.verify(3)
    manifest = json.loads((path / MANIFEST).read_text())
    assert manifest["artnb"] == "checkpoint"
    assert manifest["format"] == 1
    assert set(manifest["files"]) == {"adapter_model.safetensors", "adapter_config.json", "deep/optimizer.bin"}
    assert names(store) == ["0003"]


def test_files_that_are_told_as_finished_are_sealed_as_all_others(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[str] = []
    monkeypatch.setattr(seal, "sha256_of", lambda path: (hashed.append(path.name), sha256_of(path))[1])

    def write(folder: Path) -> None:
        for name in ("first", "second", "third"):
            (folder / name).write_bytes(name.encode() * 1000)
            if name != "third":
                store.finished(folder / name)
                store.finished(folder / name)

    store.save(1, write, {})
    assert sorted(hashed) == ["first", "second", "third"]
    assert {name: entry["sha256"] for name, entry in store.files(1).items()} == {
        name: hashlib.sha256(name.encode() * 1000).hexdigest() for name in ("first", "second", "third")
    }
    store.verify(1)

    def broken(path: Path) -> None:
        raise OSError(errno.EIO, "the disk is broken", str(path))

    monkeypatch.setattr(seal, "sync_file", broken)
    with pytest.raises(CheckpointError, match="the disk is broken"):
        store.save(2, write, {})
    assert names(store) == ["0001"]


def test_steps_and_latest(store: CheckpointStore) -> None:
    assert store.steps() == []
    assert store.latest() is None
    for step in (0, 2, 10_000):
        store.save(step, adapter(), {})
    assert store.steps() == [0, 2, 10_000]
    assert store.latest() == 10_000
    with pytest.raises(CheckpointError, match=r"there is no checkpoint 7 in .*complete ones: 0, 2, 10000"):
        store.path(7)


def test_saving_a_step_again_replaces_it(store: CheckpointStore) -> None:
    store.save(1, adapter(b"old"), {"a": 1})
    store.save(1, adapter(b"new"), {"a": 2})
    assert (store.path(1) / "adapter_model.safetensors").read_bytes() == b"new"
    assert store.load_state(1)["a"] == 2
    assert names(store) == ["0001"]


@pytest.mark.parametrize("renames_before_failure", [0, 1])
def test_failed_replacement_keeps_the_old_checkpoint(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, renames_before_failure: int
) -> None:
    store.save(1, adapter(b"old"), {})
    rename, left = Path.rename, [renames_before_failure]

    def fail(self: Path, target: Path) -> Path:
        if self.parent == store.root and left[0] == 0:
            left[0] = -1
            raise OSError(errno.EIO, "Input/output error")
        left[0] -= 1
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(CheckpointError, match="Input/output error"):
        store.save(1, adapter(b"new"), {})
    assert (store.path(1) / "adapter_model.safetensors").read_bytes() == b"old"
    assert names(store) == ["0001"]


def test_folder_that_cannot_be_flushed_is_not_kept(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.save(1, adapter(), {})
    from artnb.training import checkpoints

    def fail(path: Path) -> None:
        if path == store.root:
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(checkpoints, "sync_folder", fail)
    for step in (1, 2):
        with pytest.raises(CheckpointError, match="Input/output error"):
            store.save(step, adapter(b"new"), {})
    assert store.steps() == [1]
    assert (store.path(1) / "adapter_model.safetensors").read_bytes() == b"weights"
    assert names(store) == ["0001"]


def test_full_disk_says_what_where_how_much_and_what_is_intact(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.save(1, adapter(), {})
    store.save(2, adapter(), {})

    def full(folder: Path) -> None:
        (folder / "adapter_model.safetensors").write_bytes(b"x" * 2_000_000)
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(CheckpointError) as caught:
        store.save(3, full, {})
    text = str(caught.value)
    assert "checkpoint 3 could not be written" in text
    assert str(store.root) in text
    assert "2.0 MB could be written, then" in text
    assert "checkpoint 2 takes 0.0 MB" in text
    assert "MB free on" in text
    assert "checkpoint 2 is intact" in text
    assert names(store) == ["0001", "0002"]
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left on device")))
        with pytest.raises(CheckpointError, match="no space left"):  # while the manifest is written
            store.save(3, adapter(), {})
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda *_: (_ for _ in ()).throw(OSError(errno.EDQUOT, "Disk quota exceeded")))
        with pytest.raises(CheckpointError, match="no space left"):
            store.save(3, adapter(), {})
    assert names(store) == ["0001", "0002"]
    store.save(3, adapter(), {})
    assert store.latest() == 3


def test_full_disk_inside_another_librarys_error_is_recognised(store: CheckpointStore) -> None:
    def write(folder: Path) -> None:
        raise RuntimeError("I/O error: No space left on device (os error 28)")

    with pytest.raises(CheckpointError, match=r"no space left.*there is no earlier checkpoint"):
        store.save(0, write, {})


def test_full_disk_is_recognised_where_the_error_does_not_tell(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(folder: Path) -> None:
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")

    with pytest.raises(CheckpointError, match="unexpected pos"):
        store.save(0, write, {})
    usage = shutil.disk_usage(store.folder)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=0))
    with pytest.raises(CheckpointError, match="no space left"):
        store.save(0, write, {})


LIMITED = """
import resource, signal, sys
from pathlib import Path
from artnb.errors import CheckpointError
from artnb.training.checkpoints import CheckpointStore
store = CheckpointStore(sys.argv[1])
store.save(1, lambda f: (f / "adapter.bin").write_bytes(b"x") and None, {})
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
try:
    store.save(2, lambda f: (f / "adapter.bin").write_bytes(b"x" * 100_000) and None, {})
except CheckpointError as error:
    print(error)
print(store.steps(), sorted(p.name for p in store.root.iterdir()))
"""


def test_a_real_limit_on_file_size(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", LIMITED, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "no space left" in done.stdout
    assert "checkpoint 1 is intact" in done.stdout
    assert done.stdout.endswith("[1] ['0001']\n")


def test_error_of_the_writer_is_the_cause_and_interrupts_pass(store: CheckpointStore) -> None:
    def broken(folder: Path) -> None:
        (folder / "half").write_bytes(b"x")
        raise ValueError("no adapter")

    def interrupted(folder: Path) -> None:
        (folder / "half").write_bytes(b"x")
        raise KeyboardInterrupt

    with pytest.raises(CheckpointError, match="ValueError: no adapter") as caught:
        store.save(1, broken, {})
    assert isinstance(caught.value.__cause__, ValueError)
    with pytest.raises(KeyboardInterrupt):
        store.save(1, interrupted, {})
    with pytest.raises(CheckpointError, match="nothing was written"):
        store.save(1, lambda folder: None, {})
    with pytest.raises(CheckpointError, match=f"{MANIFEST} is taken"):
        store.save(1, lambda folder: (folder / MANIFEST).write_text("x") and None, {})
    with pytest.raises(CheckpointError, match="state holds a object"):
        store.save(1, adapter(), {"thing": object()})
    assert names(store) == []


def _break(folder: Path, how: str) -> None:
    manifest = folder / MANIFEST
    content = json.loads(manifest.read_text())
    if how == "no manifest":
        manifest.unlink()
    elif how == "torn manifest":
        manifest.write_bytes(manifest.read_bytes()[:40])
    elif how == "list manifest":
        manifest.write_text("[]")
    elif how == "foreign manifest":
        manifest.write_text(json.dumps({"epoch": 1.0, "log_history": []}))  # transformers' file of the same name
    elif how == "newer format":
        manifest.write_text(json.dumps({**content, "format": 2}))
    elif how == "no files":
        manifest.write_text(json.dumps({**content, "files": {}}))
    elif how == "other step":
        manifest.write_text(json.dumps({**content, "step": 9}))
    elif how == "file missing":
        (folder / "adapter_model.safetensors").unlink()
    elif how == "file short":
        (folder / "deep" / "optimizer.bin").write_bytes(b"x")
    elif how == "outside":
        content["files"]["../../secret"] = {"size": 1, "sha256": ""}
        manifest.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("no manifest", "trainer_state.json is missing"),
        ("torn manifest", "trainer_state.json cannot be read"),
        ("list manifest", "trainer_state.json cannot be read .*not a JSON object"),
        ("foreign manifest", "another program wrote this folder"),
        ("newer format", "has format 2; this artnb reads format 1"),
        ("no files", "trainer_state.json is incomplete"),
        ("other step", "is of step 9: the folder was renamed"),
        ("file missing", "adapter_model.safetensors is missing"),
        ("file short", r"deep/optimizer.bin has 1 bytes, not 21"),
        ("outside", "outside the folder"),
    ],
)
def test_incomplete_or_foreign_folder_is_never_loaded_never_deleted(
    store: CheckpointStore, caplog: pytest.LogCaptureFixture, how: str, said: str
) -> None:
    store.save(1, adapter(), {})
    bad = store.save(2, adapter(), {})
    _break(bad, how)
    before = sorted((str(p), p.read_bytes()) for p in bad.rglob("*") if p.is_file())
    with caplog.at_level(logging.WARNING):
        assert store.steps() == [1]
        assert store.latest() == 1
        assert store.steps() == [1]
    assert sum("is skipped" in r.getMessage() for r in caplog.records) == 1
    for refused in (
        lambda: store.path(2),
        lambda: store.load_state(2),
        lambda: store.verify(2),
        lambda: store.check_free(2),
        lambda: store.save(2, adapter(), {}),
        lambda: store.delete([1, 2]),
    ):
        with pytest.raises(CheckpointError, match=said):
            refused()
    assert store.clean() == []
    assert sorted((str(p), p.read_bytes()) for p in bad.rglob("*") if p.is_file()) == before
    assert store.steps() == [1]  # delete([1, 2]) deleted nothing


def test_other_things_beside_the_checkpoints_are_left_alone(store: CheckpointStore) -> None:
    store.save(1, adapter(), {})
    for name in ("3", "00002", "notes", "0003.bak", ".tmp-mine"):
        (store.root / name).mkdir()
    (store.root / "0007").write_text("a file")
    assert store.steps() == [1]
    assert store.clean() == []
    assert len(names(store)) == 7
    with pytest.raises(CheckpointError, match="it is not a folder"):
        store.save(7, adapter(), {})


def test_verify_finds_changed_content_of_the_same_size(store: CheckpointStore) -> None:
    path = store.save(1, adapter(b"weights"), {})
    (path / "adapter_model.safetensors").write_bytes(b"weighty")
    assert store.steps() == [1]
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors does not have the content"):
        store.verify(1)


def test_delete_and_keep(store: CheckpointStore) -> None:
    for step in range(5):
        store.save(step, adapter(), {})
    store.delete([0])
    assert store.steps() == [1, 2, 3, 4]
    history = pd.DataFrame({"step": [1, 2, 3, 4], "val/reward": [0.1, 0.9, 0.3, 0.2]})
    assert store.keep(history) == [1, 3]
    assert names(store) == ["0002", "0004"]


@pytest.mark.parametrize("step", [-1, True, "3", "../3", 1.0, None])
def test_a_step_is_a_whole_number(store: CheckpointStore, step: Any) -> None:
    with pytest.raises(ConfigError, match="whole number from 0"):
        store.path(step)
    with pytest.raises(ConfigError, match="whole number from 0"):
        store.save(step, adapter(), {})


@pytest.mark.parametrize(
    "name", ["..", "../other", "a/b", "a\\b", ".", "", " ", "a..b", "a\nb", "a\0", " a", "ä" * 150]
)
def test_names_that_lead_elsewhere_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="name="):
        model_folder(tmp_path, "project", name)
    with pytest.raises(ConfigError, match="project="):
        model_folder(tmp_path, name, "name")


@pytest.mark.parametrize("name", ["agent-001", "모델", "v1.2", "a b", "😀", ".hidden"])
def test_names_that_are_fine(tmp_path: Path, name: str) -> None:
    assert check_name(name) == name
    assert model_folder(tmp_path, "p", name) == tmp_path / "p" / "models" / name


# What processes that were killed leave ------------------------------------------------------------


def _dead_mark() -> str:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    started = durable._start_time(child.pid) or 0
    mark = durable.ProcessId(child.pid, started, durable.this_process().host).mark
    child.kill()
    child.communicate()
    return mark


def test_clean_removes_folders_of_dead_processes_only(store: CheckpointStore) -> None:
    store.save(1, adapter(), {})
    dead, mine = _dead_mark(), durable.this_process().mark
    other = durable.ProcessId(1, 1, "another-machine").mark
    for name in (f".tmp-0002-{dead}-aa", f".del-0001-{dead}-bb", f".tmp-0002-{mine}-cc", f".tmp-0002-{other}-dd"):
        (store.root / name).mkdir()
        (store.root / name / "half").write_text("x")
    abandoned = store.root / f".tmp-0002-{other}-ee"
    abandoned.mkdir()
    os.utime(abandoned, (1e9, 1e9))
    removed = [p.name for p in store.clean()]
    assert sorted(removed) == sorted([f".del-0001-{dead}-bb", f".tmp-0002-{dead}-aa", abandoned.name])
    assert names(store) == sorted(["0001", f".tmp-0002-{mine}-cc", f".tmp-0002-{other}-dd"])


def test_kill_between_the_two_renames_of_a_replacement(store: CheckpointStore) -> None:
    store.save(1, adapter(b"old"), {})
    store.save(2, adapter(b"old"), {})
    dead = _dead_mark()
    (store.root / "0002").rename(store.root / f".old-0002-{dead}-aa")
    assert store.steps() == [1, 2]
    assert (store.path(2) / "adapter_model.safetensors").read_bytes() == b"old"
    (store.root / f".old-0002-{dead}-bb").mkdir()  # killed after both: what was replaced goes
    store.clean()
    assert names(store) == ["0001", "0002"]


def test_a_reused_process_number_is_not_the_same_process() -> None:
    me = durable.this_process()
    assert me.alive() is True
    if me.started:
        assert durable.ProcessId(me.pid, me.started + 1, me.host).alive() is False
    assert durable.ProcessId(me.pid, me.started, "another-machine").alive() is None
    assert durable.mark_alive(me.mark) is True
    assert durable.mark_alive("not a mark") is None


# Which to delete ----------------------------------------------------------------------------------


def frame(**columns: Any) -> pd.DataFrame:
    return pd.DataFrame({name.replace("__", "/"): values for name, values in columns.items()})


def test_newest_and_best_are_kept() -> None:
    history = frame(step=[0, 1, 2, 3], val__reward=[0.0, 0.8, 0.2, 0.5])
    assert steps_to_delete([0, 1, 2, 3], history) == [0, 2]
    assert steps_to_delete([0, 1, 2, 3], history, keep_last=2) == [0]
    assert steps_to_delete([0, 1, 2, 3], history, keep_last=9) == []
    assert steps_to_delete([0, 2, 3], history) == [0, 2]  # 1, the best, is gone already; 3 is the best of the rest
    assert steps_to_delete([3], history) == []


def test_newest_of_equals_nan_and_infinite_values() -> None:
    history = frame(step=[0, 1, 2, 3, 4], val__reward=[0.5, math.nan, 0.5, math.inf, 0.1])
    assert steps_to_delete([0, 1, 2, 3, 4], history) == [0, 1, 3]


def test_several_values_of_a_step_are_averaged() -> None:
    history = frame(step=[1, 1, 2, 3], val__reward=[1.0, 0.0, 0.6, 0.1])
    assert steps_to_delete([1, 2, 3], history) == [1]


def test_unknown_best_deletes_nothing_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    history = frame(step=[1, 2], train__reward=[1.0, 2.0])
    with caplog.at_level(logging.WARNING):
        assert steps_to_delete([1, 2], history, "train/rewards") == []
    assert "did you mean 'train/reward'?" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert steps_to_delete([0], pd.DataFrame({"step": []})) == []
    assert caplog.text == ""


@pytest.mark.parametrize("keep_last", [0, -1, 1.5, True])
def test_keep_last_keeps_at_least_one(keep_last: Any) -> None:
    with pytest.raises(ConfigError, match="keep_last"):
        steps_to_delete([1, 2], pd.DataFrame({"step": []}), keep_last=keep_last)
