"""Coroutines run from synchronous code: scripts, running loops, interrupts, threads, a real kernel."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from artnb.errors import ConfigError
from artnb.notebook import loop as loop_module
from artnb.notebook.loop import LoopThread, run_sync, spawn, ticking


@pytest.fixture
def thread() -> Iterator[LoopThread]:
    with LoopThread("test-loop") as made:
        yield made


async def add(a: int, b: int) -> int:
    await asyncio.sleep(0)
    return a + b


async def hang() -> None:
    await asyncio.Event().wait()


def test_a_coroutine_a_factory_and_an_awaitable(thread: LoopThread) -> None:
    class Later:
        def __await__(self) -> Any:
            return add(3, 4).__await__()

    assert thread.run(add(1, 2)) == 3
    assert thread.run(lambda: add(2, 2)) == 4
    assert thread.run(Later()) == 7
    with pytest.raises(TypeError, match="not int"):
        thread.run(lambda: 3)  # type: ignore[arg-type, return-value]


def test_the_thread_starts_lazily_runs_once_and_can_be_closed_twice() -> None:
    made = LoopThread("lazy")
    made.close()
    assert not made.running

    async def where() -> tuple[str, asyncio.AbstractEventLoop]:
        return threading.current_thread().name, asyncio.get_running_loop()

    first, second = made.run(where()), made.run(where())
    assert first == second and first[0] == "lazy" and made.running
    made.close()
    made.close()
    assert not made.running and first[1].is_closed()
    assert made.run(add(1, 1)) == 2  # a cell that is run again starts it anew
    made.close()


def test_exceptions_come_with_their_own_type(thread: LoopThread) -> None:
    async def fails() -> None:
        raise LookupError("x")

    with pytest.raises(LookupError):
        thread.run(fails())


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_raised_by_a_coroutine_reaches_the_caller_and_the_loop_goes_on(
    thread: LoopThread, error: type[BaseException]
) -> None:
    async def fails() -> None:
        raise error

    other = thread.spawn(asyncio.sleep(0.02, "kept"))
    with pytest.raises(error):
        thread.run(fails())
    assert other.result(10) == "kept"


async def test_it_works_inside_a_running_loop_and_from_its_threads(thread: LoopThread) -> None:
    assert thread.run(add(1, 2)) == 3
    assert await asyncio.to_thread(thread.run, lambda: add(3, 3)) == 6
    assert await asyncio.wrap_future(thread.spawn(add(4, 4))) == 8


def test_nothing_of_asyncio_is_patched() -> None:
    code = (
        "import asyncio\n"
        "before = (asyncio.run, asyncio.get_event_loop, asyncio.Task, asyncio.new_event_loop,"
        " asyncio.BaseEventLoop.run_until_complete, type(asyncio.get_event_loop_policy()))\n"
        "from artnb.notebook.loop import run_sync\n"
        "import threading; assert threading.active_count() == 1, 'importing starts no thread'\n"
        "assert run_sync(asyncio.sleep(0, 5)) == 5\n"
        "assert asyncio.run(asyncio.sleep(0, 6)) == 6\n"
        "assert before == (asyncio.run, asyncio.get_event_loop, asyncio.Task, asyncio.new_event_loop,"
        " asyncio.BaseEventLoop.run_until_complete, type(asyncio.get_event_loop_policy()))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stderr == "", done.stderr


def test_under_uvloop(thread: LoopThread) -> None:
    uvloop = pytest.importorskip("uvloop")

    async def main() -> int:
        return thread.run(add(1, 2))

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(main()) == 3


def test_a_timeout_cancels_waits_and_raises(thread: LoopThread) -> None:
    ended = []

    async def slow() -> None:
        try:
            await hang()
        finally:
            await asyncio.sleep(0.02)
            ended.append(True)

    with pytest.raises(TimeoutError, match=r"0\.05 s"):
        thread.run(slow(), timeout=0.05)
    assert ended == [True]
    assert thread.run(add(1, 2), timeout=10) == 3
    with pytest.raises(ConfigError):
        thread.run(hang(), timeout=0)


def test_a_coroutine_that_ignores_its_cancellation_does_not_hold_the_caller(
    thread: LoopThread, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loop_module, "CLOSE_LIMIT_S", 0.02)
    release = threading.Event()

    async def stubborn() -> None:
        while not release.is_set():
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                continue

    with pytest.raises(TimeoutError):
        thread.run(stubborn(), timeout=0.02)
    assert "ignores its cancellation" in caplog.text
    release.set()


@pytest.mark.skipif(os.name == "nt", reason="signals as on POSIX")
def test_an_interrupt_of_the_waiting_thread_cancels_and_waits(thread: LoopThread) -> None:
    ended = []

    async def interrupted() -> None:
        try:
            asyncio.get_running_loop().call_later(0.02, os.kill, os.getpid(), signal.SIGINT)
            await hang()
        finally:
            await asyncio.sleep(0.02)  # cleanup is waited for
            ended.append(True)

    with pytest.raises(KeyboardInterrupt):
        thread.run(interrupted())
    assert ended == [True]
    assert thread.run(add(1, 1)) == 2


def test_the_callers_context_is_copied_in(thread: LoopThread) -> None:
    setting: contextvars.ContextVar[str] = contextvars.ContextVar("setting", default="none")
    setting.set("mine")

    async def reads() -> str:
        seen = setting.get()
        setting.set("changed")
        return seen

    assert thread.run(reads()) == "mine" and thread.run(lambda: reads()) == "mine"
    assert thread.spawn(reads()).result(10) == "mine"
    assert setting.get() == "mine"


def test_waiting_for_the_loop_thread_on_itself_raises(thread: LoopThread) -> None:
    async def nested() -> None:
        thread.run(add(1, 2))

    with pytest.raises(RuntimeError, match="it would wait for itself"):
        thread.run(nested())

    async def nested_future() -> None:
        thread.spawn(add(1, 2)).result()

    with pytest.raises(RuntimeError, match="it would wait for itself"):
        thread.run(nested_future())

    async def nested_close() -> None:
        thread.close()

    with pytest.raises(RuntimeError, match="it would wait for itself"):
        thread.run(nested_close())

    async def two_loops() -> int:  # another loop's thread is no deadlock
        with LoopThread("inner") as inner:
            return inner.run(add(1, 2))

    assert thread.run(two_loops()) == 3

    async def starts_only() -> int:
        return await asyncio.wrap_future(thread.spawn(add(2, 3)))

    assert thread.run(starts_only()) == 5


def test_spawn_returns_at_once_and_its_future_cancels_the_coroutine(thread: LoopThread) -> None:
    started, ended = threading.Event(), threading.Event()

    async def slow() -> None:
        started.set()
        try:
            await hang()
        finally:
            ended.set()

    future = thread.spawn(slow())
    assert started.wait(10) and not future.done()
    assert future.cancel() and ended.wait(10)
    with pytest.raises(concurrent.futures.CancelledError):
        future.result()
    thread.spawn(hang()).cancel()  # perhaps before it has begun: no "never awaited"


def test_close_cancels_what_runs_and_lets_it_clean_up() -> None:
    made = LoopThread()
    ended = []

    async def slow() -> None:
        try:
            await hang()
        finally:
            await asyncio.sleep(0.01)
            ended.append(True)

    future = made.spawn(slow())
    made.run(asyncio.sleep(0))
    made.close()
    assert ended == [True] and future.cancelled()


def test_many_threads_share_one_loop_thread(thread: LoopThread) -> None:
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        results = list(pool.map(lambda i: thread.run(add(i, i)), range(200)))
    assert results == [2 * i for i in range(200)]
    assert sum(t.name == "test-loop" for t in threading.enumerate()) == 1


def test_the_shared_loop_ends_with_the_interpreter() -> None:
    """Coroutines clean up at exit, the process does not hang, and nothing is printed about it."""
    code = (
        "import asyncio\n"
        "from artnb.notebook.loop import run_sync, spawn\n"
        "async def forever():\n"
        "    try: await asyncio.Event().wait()\n"
        "    finally: print('cleaned')\n"
        "spawn(forever()); run_sync(asyncio.to_thread(print, 'worked'))\n"
    )
    done = subprocess.run([sys.executable, "-X", "dev", "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "worked\ncleaned\n", "")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_after_a_fork_the_child_has_its_own_thread() -> None:
    code = (
        "import asyncio, os, warnings\n"
        "warnings.simplefilter('ignore')\n"
        "from artnb.notebook.loop import run_sync\n"
        "run_sync(asyncio.sleep(0))\n"
        "pid = os.fork()\n"
        "if pid == 0: os._exit(run_sync(asyncio.sleep(0, 7)))\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_in_a_kernel_whose_loop_runs(tmp_path: Path) -> None:
    """A real kernel: synchronous helpers in a cell, a gather awaited in a cell, the progress line as a widget."""
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    cells = [
        "import asyncio\nfrom artnb.notebook.loop import run_sync, spawn\nasyncio.get_running_loop()\n"
        "print(run_sync(asyncio.sleep(0, 'sync')), spawn(asyncio.sleep(0, 'spawned')).result())",
        "from artnb.gather import gather_trajectory_groups\n"
        "from artnb.trajectories import Trajectory, TrajectoryGroup\n"
        "async def rollout(i):\n    return Trajectory(reward=i)\n"
        "groups = await gather_trajectory_groups(TrajectoryGroup(rollout(i) for i in range(4)) for _ in range(2))\n"
        "print(groups)",
        "print(run_sync(lambda: gather_trajectory_groups([TrajectoryGroup([rollout(5)])], pbar_desc=None)))",
        # The stop button sends this signal: once while a gather is awaited, once while a synchronous helper waits.
        "import os, signal, threading\nended = []\n"
        "async def hang():\n    try:\n        await asyncio.Event().wait()\n    finally:\n"
        "        await asyncio.sleep(0.01)\n        ended.append(1)\n"
        "asyncio.get_running_loop().call_later(0.2, os.kill, os.getpid(), signal.SIGINT)\n"
        "await gather_trajectory_groups([TrajectoryGroup(hang() for _ in range(8))], pbar_desc=None, "
        "max_concurrency=5)",
        "threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()\nrun_sync(hang())",
        "print([t for t in asyncio.all_tasks() if t.get_name().startswith('artnb')], len(ended), run_sync(rollout(1)))",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    for cell in notebook.cells[3:5]:
        cell.metadata["tags"] = ["raises-exception"]
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    root = Path(__file__).parent.parent
    environment = {**os.environ, "PYTHONPATH": str(root), "IPYTHONDIR": str(tmp_path)}
    client = nbclient.NotebookClient(notebook, timeout=60, resources={"metadata": {"path": str(tmp_path)}})
    client.execute(env=environment)
    texts = ["".join(o.get("text", "") for o in cell.outputs if o.get("name") == "stdout") for cell in notebook.cells]
    assert texts[0] == "sync spawned\n"
    assert texts[1].count("TrajectoryGroup(4 trajectories, rewards [0, 1, 2, 3])") == 2
    assert "rewards [5]" in texts[2]
    raised = [o["ename"] for cell in notebook.cells[3:5] for o in cell.outputs if o["output_type"] == "error"]
    assert len(raised) == 2 and set(raised) <= {"KeyboardInterrupt", "CancelledError"}
    assert texts[5] == "[] 6 Trajectory(reward=1.0, metrics={}, metadata={})\n"
    outputs = [output for cell in notebook.cells for output in cell.outputs]
    widget = "application/vnd.jupyter.widget-view+json"
    (bar,) = [output["data"]["text/plain"] for output in outputs if widget in output.get("data", {})]
    assert "100%" in bar and "8/8" in bar and "reward=1.5" in bar  # a saved notebook shows the end, not the start
    assert not any("Error" in output.get("text", "") for output in outputs if output.get("name") == "stderr")


def test_the_module_functions_use_one_shared_thread() -> None:
    async def where() -> threading.Thread:
        return threading.current_thread()

    assert run_sync(where()) is spawn(where()).result(10)
    loop_module.SHARED.close()


def test_a_loop_that_only_waits_wakes_while_it_is_ticking() -> None:
    """What tornado's add_callback does in ipykernel's signal handler: a call_soon that wakes nobody."""

    async def main() -> None:
        loop, fired = asyncio.get_running_loop(), asyncio.Event()
        timer = threading.Timer(0.3, lambda: loop._ready.append(asyncio.Handle(fired.set, (), loop)))
        timer.start()
        with ticking():
            async with asyncio.timeout(20):  # an end for a loop that does not wake
                await fired.wait()
        assert all(handle.cancelled() for handle in loop._scheduled), "the ticks end with the block"

    asyncio.run(main())
