"""retry, iterate_dataset, and the import paths that ART's users know."""

from __future__ import annotations

import asyncio
import functools
import logging
import random
import subprocess
import sys
from typing import Any

import pytest

from artnb.datasets import DatasetBatch, iterate_dataset
from artnb.errors import ConfigError
from artnb.retrying import retry


class Flaky:
    """Fails `times` times, then answers."""

    def __init__(self, times: int, error: BaseException | None = None) -> None:
        self.times, self.error, self.calls = times, error or ValueError("flaky"), 0

    def sync(self, value: int) -> int:
        """Docs."""
        self.calls += 1
        if self.calls <= self.times:
            raise self.error
        return value

    async def coro(self, value: int) -> int:
        return self.sync(value)


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses that were asked for, without waiting for them."""
    asked: list[float] = []
    real_sleep = asyncio.sleep

    async def sleep(seconds: float) -> None:
        asked.append(seconds)
        await real_sleep(0)

    monkeypatch.setattr("artnb.retrying.time.sleep", asked.append)
    monkeypatch.setattr("artnb.retrying.asyncio.sleep", sleep)
    return asked


async def call(flaky: Flaky, kind: str, **options: Any) -> int:
    if kind == "sync":
        return retry(**options)(flaky.sync)(7)
    return await retry(**options)(flaky.coro)(7)


both = pytest.mark.parametrize("kind", ["sync", "async"])


@both
async def test_it_answers_after_failures_with_growing_pauses(
    kind: str, pauses: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    flaky = Flaky(2)
    with caplog.at_level(logging.WARNING, "artnb"):
        assert await call(flaky, kind) == 7
    assert flaky.calls == 3 and pauses == [0.25, 0.5]
    assert "attempt 1 of 3: ValueError: flaky" in caplog.text


@both
async def test_the_last_error_is_raised_as_it_is(kind: str, pauses: list[float]) -> None:
    flaky = Flaky(9)
    with pytest.raises(ValueError) as raised:
        await call(flaky, kind, max_attempts=4, delay=1, backoff_factor=3)
    assert raised.value is flaky.error and flaky.calls == 4 and pauses == [1, 3, 9]


@both
async def test_other_exceptions_are_not_retried(kind: str, pauses: list[float]) -> None:
    flaky = Flaky(1)
    with pytest.raises(ValueError):
        await call(flaky, kind, exceptions=(KeyError, OSError))
    assert flaky.calls == 1 and pauses == []


@both
@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(), asyncio.CancelledError()])
async def test_interrupts_pass_through_even_if_asked_for(kind: str, error: BaseException, pauses: list[float]) -> None:
    flaky = Flaky(1, error)
    try:
        await call(flaky, kind, exceptions=(BaseException,))
    except BaseException as raised:
        assert raised is error
    assert flaky.calls == 1 and pauses == []


@both
async def test_on_retry_replaces_the_warning(kind: str, pauses: list[float], caplog: pytest.LogCaptureFixture) -> None:
    told: list[tuple[str, int]] = []
    await call(Flaky(2), kind, on_retry=lambda error, attempt: told.append((str(error), attempt)))
    assert told == [("flaky", 1), ("flaky", 2)] and caplog.records == []


async def test_on_retry_may_be_async(pauses: list[float]) -> None:
    told: list[int] = []

    async def on_retry(error: Exception, attempt: int) -> None:
        await asyncio.sleep(0)
        told.append(attempt)

    await call(Flaky(1), "async", on_retry=on_retry)
    assert told == [1]


async def test_partials_and_callable_objects(pauses: list[float]) -> None:
    flaky = Flaky(1)
    assert await retry()(functools.partial(flaky.coro, 3))() == 3

    class Agent:
        async def __call__(self) -> int:
            return await again.coro(4)

    again = Flaky(1)
    assert await retry()(Agent())() == 4  # type: ignore[arg-type]


def test_the_name_and_docs_are_kept() -> None:
    decorated = retry()(Flaky(0).sync)
    assert (decorated.__name__, decorated.__doc__) == ("sync", "Docs.")


def test_wrong_use_is_said_at_once() -> None:
    with pytest.raises(ConfigError, match="brackets"):
        retry(Flaky(0).sync)  # type: ignore[arg-type]
    for options in ({"max_attempts": 0}, {"delay": -1.0}, {"backoff_factor": float("nan")}):
        with pytest.raises(ConfigError):
            retry(**options)  # type: ignore[arg-type]

    async def stream() -> Any:
        yield 1

    with pytest.raises(ConfigError, match="generator"):
        retry()(stream)


def steps(**options: Any) -> list[DatasetBatch[int]]:
    return list(iterate_dataset(list(range(10)), use_tqdm=False, **options))


def test_every_epoch_holds_every_item_once_in_its_own_order() -> None:
    made = steps(groups_per_step=4, num_epochs=3)
    assert [len(batch.items) for batch in made] == [4, 4, 2] * 3
    assert [(b.step, b.epoch, b.epoch_step) for b in made] == [(i, i // 3, i % 3) for i in range(9)]
    epochs = [[item for b in made if b.epoch == e for item in b.items] for e in range(3)]
    assert all(sorted(items) == list(range(10)) for items in epochs)
    assert len({tuple(items) for items in epochs}) == 3


@pytest.mark.parametrize("start", range(0, 11))
def test_a_resumed_run_sees_the_rest_of_the_same_order(start: int) -> None:
    assert steps(groups_per_step=4, num_epochs=3, initial_step=start) == steps(groups_per_step=4, num_epochs=3)[start:]


def test_the_global_generator_is_neither_used_nor_changed() -> None:
    random.seed(5)
    state = random.getstate()
    first = steps(num_epochs=2)
    assert random.getstate() == state
    random.seed(6)
    assert steps(num_epochs=2) == first


def test_empty_and_wrong_datasets() -> None:
    assert list(iterate_dataset([], num_epochs=2)) == []
    assert steps(num_epochs=0) == []
    for options in ({"groups_per_step": 0}, {"num_epochs": -1}, {"initial_step": 1.5}):
        with pytest.raises(ConfigError):
            iterate_dataset([1], **options)  # type: ignore[arg-type]


def test_the_bar_starts_where_the_run_resumes(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in iterate_dataset(list(range(10)), groups_per_step=2, initial_step=3):
        pass
    assert "5/5" in capsys.readouterr().err


def test_the_import_paths_of_art() -> None:
    """In a fresh interpreter, since the order of imports decides what a name of the package is."""
    code = (
        "from artnb.utils.iterate_dataset import iterate_dataset as a\n"
        "from artnb.utils.retry import retry as b\n"
        "from artnb.utils import iterate_dataset, retry\n"
        "assert a is iterate_dataset and b is retry and callable(a) and callable(b)\n"
        "import sys; assert 'torch' not in sys.modules and 'tqdm' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
