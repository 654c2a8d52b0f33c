"""Which token sequences the pool holds: a prefix tree per adapter, each node a contiguous range of the pool.

A prefix that several sequences share is one node: stored once, computed once. Keys and values depend on the
adapter that computed them, so every adapter has a tree of its own. A node may be entered before it is
computed: its `leader` is computing it and everyone else below waits. Does not compute, and holds no tensors.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterator, Sequence

from .kv_pool import KVPool, Range


class Node:
    """Tokens at positions [pos, pos + len(tokens)) of every sequence below, at places start… of the pool."""

    __slots__ = ("children", "computed", "leader", "parent", "pos", "start", "tokens", "used", "users")

    def __init__(self, parent: Node | None, tokens: list[int], start: int, pos: int) -> None:
        self.parent = parent
        self.tokens = tokens
        self.start = start
        self.pos = pos
        self.children: dict[int, Node] = {}  # by first token
        self.users = 0  # sequences whose deepest node this is
        self.leader: Hashable | None = None  # who computes it
        self.computed = False
        self.used = 0  # the tree's clock when it was last entered or left

    @property
    def end(self) -> int:
        """The position after its last token."""
        return self.pos + len(self.tokens)

    def path(self) -> list[Node]:
        """From the first node below the root down to this one."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None and node.parent is not None:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes


class PrefixTree:
    """The trees of one pool."""

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        self._roots: dict[Hashable, Node] = {}
        self._clock = 0

    def match(self, adapter: Hashable, tokens: Sequence[int]) -> Node:
        """The node that ends exactly where the longest known prefix of `tokens` ends (the root: nothing is known).

        A node that is matched in part is split, so that the shared part is a node of its own.
        """
        root = self._roots.get(adapter)
        if root is None:
            root = self._roots[adapter] = Node(None, [], 0, 0)
            root.computed = True
        return self._descend(root, tokens)

    def enter(self, node: Node) -> None:
        """A sequence stands at `node`: neither it nor its ancestors can be evicted."""
        node.users += 1
        self._touch(node)

    def leave(self, node: Node, sequence: Hashable) -> None:
        """The sequence is gone. What it was computing is left to the others who need it, or forgotten."""
        node.users -= 1
        self._touch(node)
        above: Node | None = node
        while above is not None and above.parent is not None:
            parent = above.parent
            if above.leader is sequence:
                above.leader = None
            if not above.computed and not above.users and not above.children and above.leader is None:
                self._remove(above)
            above = parent

    def append(self, node: Node, tokens: Sequence[int], ranges: Sequence[Range], leader: Hashable | None) -> Node:
        """Add `tokens`, stored at `ranges`, below `node`; returns the deepest node. leader=None: they are computed.

        What the tree already holds is not stored twice: those places are given back.
        """
        places = _Places(ranges)
        deepest = self._descend(node, tokens)
        known = deepest.end - node.end
        for start, end in places.take(known):
            self._pool.free(start, end)
        while known < len(tokens):
            start, end = places.next()
            child = Node(deepest, list(tokens[known : known + end - start]), start, deepest.end)
            child.leader = leader
            child.computed = leader is None
            deepest.children[child.tokens[0]] = child
            self._touch(child)
            known += end - start
            deepest = child
        return deepest

    def evict(self, tokens: int) -> int:
        """Forget nodes that no sequence needs, the longest unused first, until `tokens` are free; returns how many."""
        heap = [(node.used, id(node), node) for node in self._nodes() if not node.users and not node.children]
        heapq.heapify(heap)
        freed = 0
        while heap and freed < tokens:
            _, _, node = heapq.heappop(heap)
            parent = node.parent
            assert parent is not None
            freed += len(node.tokens)
            self._remove(node)
            if parent.parent is not None and not parent.users and not parent.children:
                heapq.heappush(heap, (parent.used, id(parent), parent))
        return freed

    def drop(self, adapter: Hashable) -> None:
        """Forget an adapter's tree. No sequence may stand in it."""
        root = self._roots.get(adapter)
        if root is None:
            return
        nodes = list(_below(root))
        if root.users or any(node.users for node in nodes):
            raise ValueError(f"a sequence still uses the keys and values of {adapter}")
        del self._roots[adapter]
        for node in nodes:
            self._pool.free(node.start, node.start + len(node.tokens))

    def _descend(self, node: Node, tokens: Sequence[int]) -> Node:
        at = 0
        while at < len(tokens):
            child = node.children.get(tokens[at])
            if child is None:
                break
            common = _common(child.tokens, tokens, at)
            at += common
            if common < len(child.tokens):
                return self._split(child, common)
            node = child
        return node

    def _split(self, node: Node, at: int) -> Node:
        """Cut `node` after `at` tokens. The lower part stays the same object: sequences hold it."""
        parent = node.parent
        assert parent is not None
        upper = Node(parent, node.tokens[:at], node.start, node.pos)
        upper.leader, upper.computed, upper.used = node.leader, node.computed, node.used
        upper.children = {node.tokens[at]: node}
        parent.children[upper.tokens[0]] = upper
        node.parent, node.tokens, node.start, node.pos = upper, node.tokens[at:], node.start + at, node.pos + at
        return upper

    def _remove(self, node: Node) -> None:
        assert node.parent is not None
        del node.parent.children[node.tokens[0]]
        self._pool.free(node.start, node.start + len(node.tokens))
        node.parent = None

    def _touch(self, node: Node) -> None:
        self._clock += 1
        above: Node | None = node
        while above is not None:
            above.used = self._clock
            above = above.parent

    def _nodes(self) -> Iterator[Node]:
        for root in self._roots.values():
            yield from _below(root)


class _Places:
    """Takes places from the front of a list of ranges."""

    def __init__(self, ranges: Sequence[Range]) -> None:
        self._ranges = list(ranges)

    def next(self) -> Range:
        return self._ranges.pop(0)

    def take(self, count: int) -> list[Range]:
        taken: list[Range] = []
        while count:
            start, end = self._ranges.pop(0)
            cut = min(end, start + count)
            taken.append((start, cut))
            count -= cut - start
            if cut < end:
                self._ranges.insert(0, (cut, end))
        return taken


def _below(root: Node) -> Iterator[Node]:
    stack = list(root.children.values())
    while stack:
        node = stack.pop()
        stack.extend(node.children.values())
        yield node


def _common(stored: list[int], tokens: Sequence[int], at: int) -> int:
    """How many tokens of `stored` equal tokens[at:]; compares slices, which is fast, and halves on a difference."""
    low, high = 0, min(len(stored), len(tokens) - at)
    while low < high:
        middle = (low + high + 1) // 2
        if stored[low:middle] == list(tokens[at + low : at + middle]):
            low = middle
        else:
            high = middle - 1
    return low
