"""kill -9 at 20 random instants while a process logs history and saves checkpoints; every resume goes on.

The processes are forks of one script that has its imports done, so twenty lives take seconds. Where the kills fall
is seeded; what the machine was doing at that moment is not, and need not be.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = r"""
import json, os, random, signal, sys, time
from pathlib import Path

import pandas as pd
from artnb.local.lockfile import FolderLock
from artnb.tracking.history import History
from artnb.training.checkpoints import CheckpointStore
from artnb.trajectories import Trajectory, TrajectoryGroup

folder, seed = Path(sys.argv[1]), int(sys.argv[2])


def content(step):
    return random.Random(step).randbytes(20_000)


def metrics(step):
    return {"reward": random.Random(step).random(), "loss": -step / 3}


def groups(step):
    messages = [{"role": "user", "content": f"step {step} " + "한" * 300}]
    return [TrajectoryGroup([Trajectory(messages_and_choices=messages, reward=float(step + i)) for i in range(3)])
            for _ in range(2)]


def write(step):
    def fill(target):
        (target / "adapter_model.safetensors").write_bytes(content(step))
        (target / "optimizer.bin").write_bytes(content(step) * 2)
    return fill


def one_step(store, history, step):
    history.log_trajectories(step, "train", groups(step))
    history.log_metrics(step, "train", metrics(step))
    history.log_metrics(max(0, step - 2), "val", metrics(step - 2))  # late
    store.save(step, write(step), {"rng": content(step)[:8], "metrics": metrics(step)})
    if step % 3 == 0:
        store.save(step, write(step), {"rng": content(step)[:8], "metrics": metrics(step)})  # replaces
    if step % 5 == 0:
        store.keep(history.metrics(), "train/reward", keep_last=3)


def resume():
    FolderLock(folder).acquire()
    store, history = CheckpointStore(folder), History(folder)
    store.clean()
    latest = store.latest()
    history.truncate_after(-1 if latest is None else latest)
    return store, history, 0 if latest is None else latest + 1


def live(steps):
    store, history, step = resume()
    while step < steps:
        one_step(store, history, step)
        step += 1


def check(say):
    store, history = CheckpointStore(folder), History(folder)
    latest = store.latest()
    for step in store.steps():
        store.verify(step)
        assert (store.path(step) / "adapter_model.safetensors").read_bytes() == content(step)
        assert store.load_state(step)["rng"] == content(step)[:8]
    frame = history.metrics().set_index("step")
    for step in range(0 if latest is None else latest + 1):
        assert frame.loc[step, "train/reward"] == metrics(step)["reward"], step
        if step <= latest - 2:
            assert frame.loc[step, "val/reward"] == metrics(step)["reward"], step
        assert history.load_groups(step, "train") == expected(step), step
    history.trajectories()
    say["latest"].append(-1 if latest is None else latest)
    say["left"].append(sum(p.name.startswith(".") for p in store.root.iterdir()) if store.root.is_dir() else 0)


def expected(step):
    made = groups(step)
    loaded = History(folder).load_groups(step, "train")
    for group, other in zip(made, loaded, strict=True):
        for one, two in zip(group.trajectories, other.trajectories, strict=True):
            one.start_time = two.start_time
    return made


def child(work):
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return pid


say = {"latest": [], "left": [], "killed": 0}
rng = random.Random(seed)
for _ in range(20):
    pid = child(lambda: live(1_000_000))
    time.sleep(rng.uniform(0.01, 0.3))
    os.kill(pid, signal.SIGKILL)
    say["killed"] += os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    check(say)

last = say["latest"][-1] + 3
assert os.waitstatus_to_exitcode(os.waitpid(child(lambda: live(last + 1)), 0)[1]) == 0
check(say)
store = CheckpointStore(folder)
store.clean()
say["names"] = sorted(p.name for p in store.root.iterdir())
say["steps"] = store.steps()
resumed, whole = History(folder).metrics(), History(folder / "whole")
for step in range(last + 1):
    whole.log_metrics(step, "train", metrics(step))
    whole.log_metrics(max(0, step - 2), "val", metrics(step - 2))
pd.testing.assert_frame_equal(resumed, whole.metrics(), check_like=True)
print(json.dumps(say))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork and SIGKILL")
def test_twenty_kills(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "model"), "7"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    said = json.loads(done.stdout)
    assert said["killed"] == 20
    assert said["latest"] == sorted(said["latest"])  # no completed step is ever lost
    assert said["latest"][-1] == said["latest"][-2] + 3  # the last life ran undisturbed
    assert said["names"] == [f"{step:04d}" for step in said["steps"]]  # nothing half-written is left after clean()
