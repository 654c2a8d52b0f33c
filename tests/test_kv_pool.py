import random

import pytest
import torch

from artnb.engines.kv_pool import KVPool
from artnb.engines.prefix_tree import Node, PrefixTree


def put(pool: KVPool, places: list[int], number: float) -> None:
    keys = torch.full((2, len(places), 4), number)
    pool.write(0, torch.tensor(places), keys, -keys)


def test_ranges_are_contiguous_and_merge_again() -> None:
    pool = KVPool(100)
    first, second, third = (pool.allocate(n) for n in (30, 20, 50))
    assert (first, second, third) == ([(0, 30)], [(30, 50)], [(50, 100)])
    assert pool.allocate(1) is None
    pool.free(0, 30)
    pool.free(50, 100)
    assert pool.allocate(70) == [(50, 100), (0, 20)], "no gap is long enough: the longest first"
    pool.free(50, 100)
    pool.free(0, 20)
    pool.free(30, 50)
    assert pool.free_tokens == 100
    assert pool.allocate(100) == [(0, 100)]


def test_what_continues_a_range_is_put_right_after_it() -> None:
    pool = KVPool(100)
    pool.allocate(60)
    pool.free(0, 10)
    pool.free(30, 40)
    assert pool.allocate(5, after=30) == [(30, 35)]
    assert pool.allocate(6, after=35) == [(0, 6)], "not enough room there: the first gap that is long enough"


def test_freeing_twice_is_an_error() -> None:
    pool = KVPool(10)
    pool.allocate(6)
    pool.free(0, 3)
    for start, end in ((0, 3), (2, 4), (5, 8)):
        with pytest.raises(ValueError, match="twice"):
            pool.free(start, end)


def test_tensors_grow_with_use_and_keep_what_they_hold() -> None:
    pool = KVPool(10_000)
    assert pool.allocated_bytes == 0
    (start, _), *_ = pool.allocate(4) or []
    put(pool, [start, start + 1], 3.0)
    small = pool.allocated_bytes
    assert 0 < small < 2 * 2 * 10_000 * 4 * 4 / 4
    (start, _), *_ = pool.allocate(5000) or []
    put(pool, [start + 4999], 5.0)
    keys, values = pool.read(0)
    assert pool.allocated_bytes > small
    assert keys[:, 0].eq(3).all() and values[:, 1].eq(-3).all() and keys[:, start + 4999].eq(5).all()
    with pytest.raises(ValueError, match="in use"):
        pool.release_memory()


class Forest:
    """A tree and what should be in it, the slow way."""

    def __init__(self, limit: int) -> None:
        self.pool = KVPool(limit)
        self.tree = PrefixTree(self.pool)

    def add(self, tokens: list[int], adapter: str | None = None, leader: object = None) -> Node:
        known = self.tree.match(adapter, tokens)
        self.tree.enter(known)
        ranges = self.pool.allocate(len(tokens) - known.end)
        assert ranges is not None
        node = self.tree.append(known, tokens[known.end :], ranges, leader)
        self.tree.enter(node)
        self.tree.leave(known, leader)
        return node


def tokens_of(node: Node) -> list[int]:
    return [token for above in node.path() for token in above.tokens]


def test_shared_prefixes_are_stored_once_and_split_where_they_part() -> None:
    forest = Forest(1000)
    a = forest.add([1, 2, 3, 4, 5])
    b = forest.add([1, 2, 3, 9])
    assert tokens_of(a) == [1, 2, 3, 4, 5] and tokens_of(b) == [1, 2, 3, 9]
    assert a.parent is b.parent and forest.pool.used_tokens == 6
    assert forest.tree.match(None, [1, 2, 3, 4, 5, 6]) is a
    assert forest.tree.match(None, [7]).end == 0
    assert forest.tree.match("other", [1, 2, 3]).end == 0, "another adapter's keys"


def test_what_is_known_meanwhile_is_given_back() -> None:
    forest = Forest(100)
    forest.add([1, 2, 3, 4])
    root = forest.tree.match(None, [])
    ranges = forest.pool.allocate(5)
    assert ranges is not None
    node = forest.tree.append(root, [1, 2, 8, 9, 9], ranges, leader=None)
    assert tokens_of(node) == [1, 2, 8, 9, 9]
    assert forest.pool.used_tokens == 4 + 3


def test_eviction_spares_what_is_used_and_takes_the_oldest_first() -> None:
    forest = Forest(100)
    nodes = [forest.add([i, i, i, i]) for i in range(1, 6)]
    for node in nodes[:4]:
        forest.tree.leave(node, None)
    forest.tree.match(None, [1, 1])  # a look alone does not count
    assert forest.tree.evict(5) == 8
    left = [forest.tree.match(None, [i] * 4).end for i in range(1, 6)]
    assert left == [0, 0, 4, 4, 4]
    forest.tree.evict(100)
    assert forest.pool.used_tokens == 4


def test_a_leader_that_leaves_hands_over_or_is_forgotten() -> None:
    forest = Forest(100)
    leader, follower = object(), object()
    a = forest.add([1, 2, 3, 4], leader=leader)
    b = forest.add([1, 2, 7], leader=follower)
    shared = a.parent
    assert shared is not None and shared.leader is leader and not shared.computed
    forest.tree.leave(a, leader)
    assert shared.leader is None and b.parent is shared, "the follower needs it still"
    assert forest.pool.used_tokens == 3
    forest.tree.leave(b, follower)
    assert forest.pool.used_tokens == 0, "nobody computed it, so it is no cache"


def test_drop_forgets_one_adapter() -> None:
    forest = Forest(100)
    kept, gone = forest.add([1, 2, 3], "a"), forest.add([1, 2, 3], "b")
    with pytest.raises(ValueError, match="still uses"):
        forest.tree.drop("b")
    forest.tree.leave(gone, None)
    forest.tree.drop("b")
    assert forest.pool.used_tokens == 3 and forest.tree.match("a", [1, 2, 3]) is kept
    forest.tree.drop("unknown")


def test_random_use_never_loses_or_doubles_a_place() -> None:
    rng = random.Random(0)
    forest = Forest(600)
    live: list[tuple[Node, list[int]]] = []
    for _ in range(1500):
        if live and rng.random() < 0.45:
            node, tokens = live.pop(rng.randrange(len(live)))
            assert tokens_of(node) == tokens
            forest.tree.leave(node, None)
        else:
            tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 12))]
            if forest.pool.free_tokens < len(tokens):
                forest.tree.evict(len(tokens))
            if forest.pool.free_tokens < len(tokens):
                continue
            live.append((forest.add(tokens), tokens))
        held = [(n.start, n.start + len(n.tokens)) for n in forest.tree._nodes()]
        places = [place for start, end in held for place in range(start, end)]
        assert len(places) == len(set(places)) == forest.pool.used_tokens
    for node, _ in live:
        forest.tree.leave(node, None)
    forest.tree.evict(600)
    assert forest.pool.free_tokens == 600 and forest.pool.allocate(600) == [(0, 600)]
