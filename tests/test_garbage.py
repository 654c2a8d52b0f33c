from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

import artnb as art
from artnb import garbage
from artnb.errors import TooManyExceptionsError


class Node:
    """In a cycle with itself, so that only the collector finds it."""

    def __init__(self) -> None:
        self.me = self


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    assert gc.get_freeze_count() == 0
    yield
    assert gc.get_freeze_count() == 0 and gc.isenabled()


def test_what_was_there_is_spared_until_the_last_block_ends() -> None:
    before = weakref.ref(Node())
    with garbage.heap_spared():
        with garbage.heap_spared():
            assert gc.get_freeze_count() > 1000
        within = weakref.ref(Node())
        gc.collect()
        assert within() is None, "what is new is collected as ever"
        assert gc.get_freeze_count() > 1000
        there = weakref.ref(Node())
        garbage.collect()
        assert there() is None and before() is None, "and all of it where it is asked for"
        assert gc.get_freeze_count() > 1000
    assert gc.get_freeze_count() == 0


def test_a_heap_that_has_grown_is_looked_through_first() -> None:
    with garbage.heap_spared():
        pass
    lost = weakref.ref(Node())
    with garbage.heap_spared():
        assert lost() is not None
    grown = [[] for _ in range(gc.get_count()[0] + int(len(gc.get_objects()) * garbage.GROWTH))]
    with garbage.heap_spared():
        assert lost() is None
    del grown


def test_who_froze_it_himself_keeps_it() -> None:
    gc.freeze()
    try:
        count = gc.get_freeze_count()
        with garbage.heap_spared():
            pass
        garbage.collect()
        assert gc.get_freeze_count() == count
    finally:
        gc.unfreeze()
    gc.disable()
    try:
        with garbage.heap_spared():
            assert gc.get_freeze_count() == 0
    finally:
        gc.enable()


async def test_a_gather_spares_the_heap_and_a_failed_one_lets_go() -> None:
    seen = []

    async def rollout(fails: bool = False) -> art.Trajectory:
        seen.append(gc.get_freeze_count())
        if fails:
            raise ValueError("no")
        return art.Trajectory(messages_and_choices=[], reward=1.0)

    await art.gather_trajectories([rollout(), rollout()], pbar_desc=None)
    await art.gather_trajectory_groups([art.TrajectoryGroup([rollout()])], pbar_desc=None)
    with pytest.raises(TooManyExceptionsError, match="ValueError"):
        await art.gather_trajectories([rollout(fails=True)], pbar_desc=None, max_exceptions=0)
    assert len(seen) == 4 and min(seen) > 1000
