"""W&B as a user meets it: the real library, offline, online against a server on loopback, and with nothing to talk to.

Offline runs are read back with W&B's own reader. What W&B's real service does is not tested here.
"""

from __future__ import annotations

import json
import os
import pty
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from agents import even_groups
from wandb_files import records, rows, run_folders, run_id, summary
from wandb_server import WandbServer

import artnb as art
from artnb.tracking import wandb as tracking_wandb
from artnb.tracking.follow import TRACKING
from artnb.tracking.history import History
from artnb.tracking.wandb import WandbTracker, why_not_online

wandb = pytest.importorskip("wandb")
TESTS = Path(__file__).parent
KEY = "0123456789abcdef" * 3
LORA = art.LoraConfig(r=4)


async def test_every_metric_of_every_step_is_in_the_offline_run(
    tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", KEY)  # no report_metrics: the key is the wish
    monkeypatch.setenv("WANDB_MODE", "offline")
    config = {"scenario": "even", "api_key": "sk-secret-1", "judge": KEY, "pad_token": "<pad>"}
    async with art.LocalBackend(path=tmp_path / "art", device="cpu", verbose=False) as backend:
        model = art.TrainableModel("agent", "tests", tiny_base, lora=LORA, run_name="first try", config=config)
        await model.register(backend)
        for step in range(3):
            await model.train(await even_groups(model, step), art.TrainConfig(learning_rate=1e-3))
            await model.log([art.Trajectory(reward=0.5 + step / 10)], split="val")
        await model.log([art.Trajectory(reward=0.25, metrics={"won": True})], split="val", step=1)
    folder = backend.history(model).folder
    (run,) = run_folders(folder)
    history = model.history().set_index("step")
    found: dict[tuple[int, str], float] = {}
    for row in rows(run):
        found |= {(row["training_step"], name): value for name, value in row.items() if "/" in name}
    expected = {
        (int(step), str(name)): float(history.loc[step, name])
        for step in history.index
        for name in history.columns
        if history[name].notna()[step]
    }
    assert len(expected) > 60
    assert found == pytest.approx(expected)
    # The axis of each split, and what the run says of itself.
    axes = {m["glob_name"]: m["step_metric"] for m in records(run, "metric") if "glob_name" in m}
    assert axes == {"train/*": "training_step", "val/*": "training_step"}
    end = summary(run)
    assert end["name"] == "first try" and end["project"] == "tests" and end["state"] == "finished"
    assert end["config"]["base_model"] == str(tiny_base) and end["config"]["lora"]["r"] == 4
    assert end["config"]["train"]["learning_rate"] == 1e-3 and end["config"]["scenario"] == "even"
    assert end["config"]["pad_token"] == "<pad>"
    assert end["summary"]["val/reward"] == pytest.approx(0.7), "a late value is not the newest"
    assert end["summary"]["val/won"] == 1.0 and end["summary"]["training_step"] == 3
    # No key anywhere below the model's folder, and none on the screen.
    for path in folder.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            assert KEY.encode() not in content and b"sk-secret-1" not in content, path
    assert KEY not in "".join(capsys.readouterr())


TRAIN = """
import asyncio, sys
from pathlib import Path
import artnb as art
from agents import even_groups

async def main(base, path):  # as in a notebook: nothing is closed
    model = art.TrainableModel("agent", "tests", base, lora=art.LoraConfig(r=2))
    await model.register(art.LocalBackend(path=path, device="cpu", verbose=False))
    for step in range(7):
        await model.train(await even_groups(model, step, groups=1, size=2))
    await model.log([art.Trajectory(reward=0.25)], split="val", step=3)

asyncio.run(main(sys.argv[1], sys.argv[2]))
"""


@pytest.mark.slow
def test_a_run_without_network_and_stdin_ends_with_its_metrics_on_disk(tiny_base: Path, tmp_path: Path) -> None:
    """user-reports #77, with a key, W&B wanted, and nobody at the other end."""
    done = subprocess.run(
        ["/bin/sh", "-c", 'exec "$0" -c "$1" "$2" "$3" <&-', sys.executable, TRAIN, str(tiny_base), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=200,
        env=clean_environment(tmp_path) | {"WANDB_API_KEY": KEY, "WANDB_BASE_URL": closed_port()},
    )
    assert done.returncode == 0, done.stderr
    (warning,) = warnings_of(done)
    (run,) = run_folders(tmp_path / "tests" / "models" / "agent")
    assert "cannot be reached" in warning and warning.endswith(f"wandb sync {run}")
    history = History(tmp_path / "tests" / "models" / "agent").metrics().set_index("step")
    assert list(history.index) == list(range(1, 8)) and history["train/reward"].notna().all()
    assert history["val/reward"][3] == 0.25
    late = rows(run)[-1]
    assert (late["training_step"], late["val/reward"]) == (3, 0.25), "logged after step 7, kept at step 3"
    assert [row["training_step"] for row in rows(run)] == [1, 2, 3, 4, 5, 6, 7, 3]
    assert [ended["exit_code"] for ended in records(run, "exit")] == [0]
    assert KEY not in done.stdout + done.stderr


def test_without_a_key_nobody_is_asked_for_one(tmp_path: Path) -> None:
    """In a terminal, where wandb would ask: with a network, and with weave imported, which would ask, too."""
    with WandbServer() as server:
        code = (
            "import asyncio, weave, artnb as art\n"
            f"model = art.Model('agent', 'tests', base_path={str(tmp_path / 'art')!r}, report_metrics=['wandb'])\n"
            "asyncio.run(model.log(metrics={'reward': 1.0}, step=1))\n"
        )
        ours, theirs = pty.openpty()
        try:
            done = subprocess.run(
                [sys.executable, "-W", "ignore", "-c", code],
                stdin=theirs,
                stdout=theirs,
                stderr=subprocess.PIPE,
                text=True,
                timeout=100,
                env=clean_environment(tmp_path) | {"WANDB_BASE_URL": server.url},
            )
        finally:
            os.close(theirs)
            os.close(ours)
    assert done.returncode == 0, done.stderr
    (warning,) = warnings_of(done)
    assert "no API key was found" in warning and "wandb sync" in warning
    assert "Paste" not in done.stderr and server.runs == {}


async def test_a_relative_folder_is_of_this_process_and_not_of_wandbs_service(
    tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service writes the files; started earlier, or by a parent process, it has another working folder."""
    wandb.setup()
    monkeypatch.chdir(tmp_path)
    tracker = WandbTracker(mode="offline", directory="elsewhere")
    async with art.LocalBackend(path="art", device="cpu", verbose=False) as backend:
        model = art.TrainableModel("agent", "tests", tiny_base, lora=LORA, report_metrics=[tracker])
        await model.register(backend)
        await model.log(metrics={"solved": 1.0}, split="val")
    assert len(run_folders(tmp_path / "elsewhere")) == 1


def test_sessions_of_a_model_are_one_run_and_a_killed_one_is_made_up_for(tmp_path: Path) -> None:
    with WandbServer() as server:
        online = {"WANDB_API_KEY": KEY, "WANDB_BASE_URL": server.url}
        first = session(tmp_path, 0, 7, **online)
        assert first.returncode == 0 and not warnings_of(first), first.stderr
        killed = session(tmp_path, 8, 9, "crash", **online)
        assert killed.returncode == 1 and "history 10" in killed.stdout
        last = session(tmp_path, 10, 10, **online)
        assert last.returncode == 0 and not warnings_of(last), last.stderr
    assert "/team/tests/runs/" in first.stdout
    ((name, sent),) = server.runs.items()
    state = json.loads((tmp_path / "art" / "tests" / "models" / "agent" / "tracking" / "wandb.json").read_text())
    assert state["id"] == name
    values = {(row["training_step"], name): v for row in sent for name, v in row.items() if "/" in name}
    expected = {(step, "train/reward"): step / 10 for step in range(11)} | {(3, "val/reward"): 0.3}
    assert values == pytest.approx(expected)
    numbers = [row["_step"] for row in sent]
    assert numbers == sorted(set(numbers)), "W&B takes no row twice and none below the last"
    assert server.configs[name]["scenario"]["value"] == "s"


async def test_wandb_can_be_turned_on_and_off_in_the_middle_of_a_models_life(tmp_path: Path) -> None:
    folder = tmp_path / "tests" / "models" / "agent"

    async def log(step: int, *trackers: WandbTracker) -> None:
        model = art.Model("agent", "tests", base_path=tmp_path, report_metrics=trackers)
        await model.log(metrics={"reward": float(step)}, step=step)
        TRACKING.detach("tests/agent")

    await log(0)
    await log(1, WandbTracker(mode="disabled"))
    assert run_folders(folder) == []
    await log(2, WandbTracker(mode="offline"))
    await log(3, WandbTracker(mode="disabled"))
    await log(4, WandbTracker(mode="offline"))
    before, after = run_folders(folder)
    assert [(row["training_step"], row["_step"]) for row in rows(before)] == [(0, 0), (1, 1), (2, 2)]
    assert [(row["training_step"], row["_step"]) for row in rows(after)] == [(3, 3), (4, 4)]
    assert run_id(before) == run_id(after), "two folders of one run"
    with WandbServer() as server:
        done = subprocess.run(
            [sys.executable, "-m", "wandb", "sync", str(before), str(after)],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
            env=clean_environment(tmp_path) | {"WANDB_API_KEY": KEY, "WANDB_BASE_URL": server.url},
        )
    assert done.returncode == 0, done.stderr
    ((known, sent),) = server.runs.items()
    assert known == run_id(before) and [row["training_step"] for row in sent] == [0, 1, 2, 3, 4]
    # Elsewhere it is another run, with everything.
    await log(5, WandbTracker(mode="offline", project="other"))
    *_, other = run_folders(folder)
    assert [row["training_step"] for row in rows(other)] == [0, 1, 2, 3, 4, 5]
    assert run_id(other) != run_id(after)


def test_a_key_that_the_server_refuses(tmp_path: Path) -> None:
    with WandbServer(status=401) as server:
        done = session(tmp_path, 0, 3, WANDB_API_KEY=KEY, WANDB_BASE_URL=server.url)
    assert done.returncode == 0 and "history 4" in done.stdout
    (warning,) = warnings_of(done)
    assert "Failed to authenticate" in warning and "wandb sync" in warning and KEY not in done.stdout + done.stderr
    (run,) = run_folders(tmp_path / "art" / "tests" / "models" / "agent")
    assert [row["training_step"] for row in rows(run)] == [0, 1, 2, 3]


def test_a_run_that_somebody_deleted_at_wandb_is_made_anew(tmp_path: Path) -> None:
    """W&B takes the id of a deleted run no more: https://github.com/wandb/wandb/issues/4897"""
    folder = tmp_path / "art" / "tests" / "models" / "agent"
    History(folder).log_metrics(0, "train", {"reward": 0.0})
    state = folder / "tracking" / "wandb.json"
    state.parent.mkdir()
    state.write_text(json.dumps({"id": "gone", "project": "tests", "entity": None, "rows": 5, "until": 4e9}))
    with WandbServer() as server:
        server.deleted.add("gone")
        online = {"WANDB_API_KEY": KEY, "WANDB_BASE_URL": server.url}
        done = session(tmp_path, 1, 2, "impatient", **online)  # wandb asks again until its time is up
        ((new, sent),) = server.runs.items()
    assert done.returncode == 0 and not warnings_of(done), done.stderr
    assert [row["training_step"] for row in sent] == [0, 1, 2], "with its whole history"
    assert json.loads(state.read_text())["id"] == new != "gone"


def test_a_network_that_goes_away_holds_up_no_step_and_not_the_end(tmp_path: Path) -> None:
    code = (
        "import asyncio, artnb as art\n"
        "from artnb.tracking.wandb import WandbTracker\n"
        "async def main():\n"
        f"    model = art.Model('agent', 'tests', base_path={str(tmp_path / 'art')!r},\n"
        "                      report_metrics=[WandbTracker(finish_timeout=1.0)])\n"
        "    await model.log(metrics={'reward': 1.0}, step=1)\n"
        "    input()\n"  # the network is gone by the time that this is answered
        "    await model.log(metrics={'reward': 2.0}, step=2)\n"
        "    print('history', len(model.history()))\n"
        "asyncio.run(main())\n"
    )
    server = WandbServer()
    with server:
        running = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=clean_environment(tmp_path) | {"WANDB_API_KEY": KEY, "WANDB_BASE_URL": server.url},
        )
        assert running.stdout is not None
        assert "is reported to http" in running.stdout.readline()
    out, err = running.communicate("\n", timeout=100)
    assert running.returncode == 0 and "history 2" in out
    (run,) = run_folders(tmp_path / "art" / "tests" / "models" / "agent")
    assert f"not all of the run was uploaded to W&B in time; send the rest with: wandb sync {run}" in err
    assert [row["val/reward"] for row in rows(run)] == [1.0, 2.0]


def test_a_server_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        monkeypatch.setattr(tracking_wandb, "REACH_S", 0.2)
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        assert why_not_online(wandb.Settings(base_url=url)) == f"{url} cannot be reached (ReadTimeout)"


async def test_trajectories_as_a_table_and_options_of_the_run(tmp_path: Path) -> None:
    options = {"mode": "offline", "trajectories": True, "tags": ("baseline",), "directory": tmp_path / "elsewhere"}
    model = art.Model("agent", "tests", base_path=tmp_path / "art", report_metrics=[WandbTracker(**options)])
    messages: list[Any] = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    await model.log([art.Trajectory(messages_and_choices=messages, reward=1.0)], split="val", step=2)
    model.update_wandb_config({"judge": {"model": "m"}, "judge_api_key": "sk-1"})
    TRACKING.detach("tests/agent")
    (run,) = run_folders(tmp_path / "elsewhere")
    (row,) = rows(run)
    assert row["val/trajectories._type"] == "table-file" and row["val/trajectories.nrows"] == 1
    table = json.loads((run / "files" / row["val/trajectories.path"]).read_text())
    shown = dict(zip(table["columns"], table["data"][0], strict=True))
    assert shown["reward"] == 1.0 and shown["messages"] == "user: 2+2?\n\nassistant: 4"
    end = summary(run)
    assert end["tags"] == ["baseline"] and end["config"]["judge"] == {"model": "m"}
    assert "judge_api_key" not in end["config"]


def session(folder: Path, first: int, last: int, *more: str, **env: str) -> subprocess.CompletedProcess[str]:
    """`tracked_session.py` without a terminal."""
    command = [sys.executable, str(TESTS / "tracked_session.py"), str(folder / "art"), str(first), str(last), *more]
    return subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        env=clean_environment(folder) | env,
    )


def clean_environment(folder: Path) -> dict[str, str]:
    """A home of its own and nothing of W&B's settings; what else a process needs is as here."""
    home = folder / "home"
    home.mkdir(exist_ok=True)
    own = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB", "XDG_"))}
    return own | {"HOME": str(home), "PYTHONPATH": str(TESTS)}


def warnings_of(done: subprocess.CompletedProcess[str]) -> list[str]:
    # Where nobody watches, a progress bar may stand on the same line.
    return re.findall(r"agent is not reported.*", done.stderr)


def closed_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"
