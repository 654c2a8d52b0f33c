"""Cells in a real kernel: run again, interrupted, left behind by background work, cut off and resumed.

Those of ipykernel 7 share one kernel and go on from one another, as the cells of a notebook do; user-reports #12, #78.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from jupyter_kernels import Kernel

SETUP = """
import asyncio, artnb as art
from agents import even_groups, even_rollout
FAST = art.TrainConfig(learning_rate=5e-3)
SLOW = art.TrainConfig(learning_rate=1e-3, num_iterations=3000, max_tokens_per_pack=64)
model = art.TrainableModel("agent", "tests", {base!r}, lora=art.LoraConfig(r=4))
backend = art.LocalBackend(device="cpu")
model.register(backend)
"""
TRAIN = """
for step in range(await model.get_step(), {steps}):
    await model.train(await even_groups(model, step), FAST)
print("REWARDS", [round(r, 6) for r in model.history()["train/reward"]])
"""
GATHER = """
running = 0
async def hang():
    global running
    running += 1
    if running == 8:
        print("GO")
    try:
        await asyncio.Event().wait()
    finally:
        running -= 1
await art.gather_trajectory_groups(art.TrajectoryGroup(hang() for _ in range(4)) for _ in range(2))
"""
STEP = """
groups = await even_groups(model, 7)
asyncio.get_running_loop().call_later(0.3, print, "GO")
await model.train(groups, SLOW)
"""
LEFT = """
left = [task.get_name() for task in asyncio.all_tasks() if task.get_name().startswith("artnb")]
print("LEFT", running, left, len(backend._models["agent"]._stops), await model.get_step())
"""
CHAT = """
print(model.chat([{"role": "user", "content": "hi"}], max_tokens=3).choices[0].message.role)
"""
CHAT_LONG = """
import os, signal, threading
threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
for _ in range(1000):
    model.chat([{"role": "user", "content": "hi"}], max_tokens=400, extra_body={"ignore_eos": True})
"""
BACKGROUND = "auto = model.auto_train(groups_per_step=1, group_size=2, config=FAST)"
PLAY = """
for seed in range(2):
    async with art.trajectory(group="one") as t:
        t.reward = (await even_rollout(model, "one", seed=seed)).reward
"""
WAIT = """
print("TRAINED", [result.step for result in await auto.wait(1)])
auto.stop()
"""


def environment() -> dict[str, str]:
    return {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("notebook")


@pytest.fixture(scope="module")
def kernel(folder: Path) -> Iterator[Kernel]:
    with Kernel(folder, environment()) as kernel:
        yield kernel


def rewards(text: str) -> str:
    return next(line for line in text.splitlines() if line.startswith("REWARDS"))


def interrupted(kernel: Kernel, code: str) -> None:
    ran = kernel.run(code, when="GO", do=kernel.interrupt)
    assert ran.error in ("KeyboardInterrupt", "CancelledError"), (ran.error, ran.detail or ran.text)


def test_run_all_twice_gives_one_engine_and_the_same_result(kernel: Kernel, tiny_base: Path) -> None:
    setup, train = SETUP.format(base=str(tiny_base)), TRAIN.format(steps=2)
    first = kernel.said(setup + "await model.ready()") + kernel.said(train)
    kernel.said("before = backend._bases; import threading; threads = threading.active_count()")
    second = kernel.said(setup + "await model.ready()") + kernel.said(train)
    assert rewards(first) == rewards(second)
    assert "starts at step 0" in first and "loaded already, at step 2" in second
    assert kernel.said("print(backend._bases is before, len(before), threading.active_count() <= threads)") == (
        "True 1 True\n"
    )


def test_interrupting_a_gather_ends_its_rollouts(kernel: Kernel) -> None:
    interrupted(kernel, GATHER)
    assert kernel.said(LEFT) == "LEFT 0 [] 0 2\n"


def test_interrupting_a_step_keeps_the_last_one_and_the_next_cell_works(kernel: Kernel) -> None:
    answer = "print(model.chat([{'role': 'user', 'content': 'hi'}], temperature=0, max_tokens=8).choices[0].message)"
    before = kernel.said(answer)
    interrupted(kernel, STEP)
    assert kernel.said(LEFT) == "LEFT 0 [] 0 2\n"
    assert kernel.said(answer) == before
    kernel.said(TRAIN.format(steps=3))
    assert kernel.said(LEFT) == "LEFT 0 [] 0 3\n"


def test_chat_needs_no_await_in_a_running_loop_and_can_be_interrupted(kernel: Kernel) -> None:
    assert kernel.said(CHAT) == "assistant\n"
    assert kernel.run(CHAT_LONG).error == "KeyboardInterrupt"
    assert kernel.said(CHAT) == "assistant\n"


def test_background_work_lives_on_after_its_cell(kernel: Kernel) -> None:
    for cell in (BACKGROUND, PLAY):
        kernel.said(cell)
    assert kernel.said(WAIT).endswith("TRAINED [4]\n")
    assert kernel.said(LEFT) == "LEFT 0 [] 0 4\n"


def test_a_session_that_was_cut_off_goes_on_at_the_right_step(kernel: Kernel, folder: Path, tiny_base: Path) -> None:
    """user-reports #78 (d). The last test of the shared kernel: it is killed in the middle of a step."""
    known = rewards(kernel.said(TRAIN.format(steps=4)))
    with pytest.raises(RuntimeError, match="killed"):
        kernel.run(STEP, when="GO", do=lambda: _kill(kernel))
    with Kernel(folder, environment()) as again:
        text = again.said(SETUP.format(base=str(tiny_base)) + "await model.ready()")
        assert "resumes at step 4" in text
        text = again.said(TRAIN.format(steps=5))
        assert rewards(text).startswith(known[:-1])
        assert again.said("print(await model.get_step())") == "5\n"


def _kill(kernel: Kernel) -> None:
    kernel.kill()
    raise RuntimeError("killed")


@pytest.mark.slow
def test_the_same_on_ipykernel_6(tmp_path: Path, tiny_base: Path) -> None:
    """Colab has ipykernel 6: https://github.com/googlecolab/colabtools/issues/3373"""
    place = tmp_path / "ipykernel6"
    needs = ["ipykernel>=6.29,<7", "nest-asyncio"]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(place), *needs]
    done = subprocess.run(pip, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        pytest.skip(f"pip cannot install ipykernel 6: {(done.stderr.strip() or 'no message').splitlines()[-1]}")
    with Kernel(tmp_path, environment(), first=place) as kernel:
        assert kernel.said("import ipykernel; print(ipykernel.__version__)").startswith("6.")
        kernel.said("running = 0\n" + SETUP.format(base=str(tiny_base)))
        kernel.said(TRAIN.format(steps=2))
        interrupted(kernel, GATHER)
        assert kernel.said(LEFT) == "LEFT 0 [] 0 2\n"
        interrupted(kernel, STEP)
        assert kernel.said(LEFT) == "LEFT 0 [] 0 2\n"
        assert kernel.said(CHAT) == "assistant\n"
        for cell in (BACKGROUND, PLAY):
            kernel.said(cell)
        assert kernel.said(WAIT).endswith("TRAINED [3]\n")
