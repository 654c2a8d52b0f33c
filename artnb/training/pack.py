"""Lay rows out in packs: a prefix tree over token ids, so that what rows share is stored and computed once.

Rows of a group share their prompt, turns of a tree share their history; rows of different groups share a
system prompt. Needs numpy only. Does not decide which rows train, and does not know about attention.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np

from .types import Ints, Pack, Row, Segment


@dataclass(slots=True, eq=False)
class _Node:
    """A run of tokens that every row below it shares. Rows may end anywhere inside it."""

    token_ids: Ints
    depth: int  # place of the first token in its row
    children: dict[int, _Node] = field(default_factory=dict)  # by first token, in order of insertion
    start: int = 0  # first position in the pack, once laid out


def _common_prefix(a_N: Ints, b_N: Ints) -> int:
    n = min(len(a_N), len(b_N))
    differs_N = a_N[:n] != b_N[:n]
    return int(differs_N.argmax()) if differs_N.any() else n


class _Forest:
    """The prefix trees of one pack."""

    def __init__(self) -> None:
        self.roots: dict[int, _Node] = {}
        self.size = 0  # distinct tokens
        self.rows: list[int] = []

    def shared(self, token_ids_S: Ints) -> int:
        """Length of the longest prefix of the row that the forest already holds."""
        children, at = self.roots, 0
        while at < len(token_ids_S) and (node := children.get(int(token_ids_S[at]))) is not None:
            n = _common_prefix(node.token_ids, token_ids_S[at:])
            at += n
            if n < len(node.token_ids):
                break
            children = node.children
        return at

    def insert(self, index: int, token_ids_S: Ints) -> None:
        self.rows.append(index)
        self.size += len(token_ids_S) - self.shared(token_ids_S)
        children, at = self.roots, 0
        parent: _Node | None = None
        while at < len(token_ids_S):
            node = children.get(int(token_ids_S[at]))
            if node is None:
                rest = token_ids_S[at:]
                if parent is not None and not parent.children:
                    # The row goes on where another one ended: one longer run, not two.
                    parent.token_ids = np.concatenate([parent.token_ids, rest])
                else:
                    children[int(rest[0])] = _Node(rest, at)
                return
            n = _common_prefix(node.token_ids, token_ids_S[at:])
            at += n
            if n < len(node.token_ids):
                if at < len(token_ids_S):
                    self._split(node, n)
                    node.children[int(token_ids_S[at])] = _Node(token_ids_S[at:], at)
                return
            parent, children = node, node.children

    @staticmethod
    def _split(node: _Node, at: int) -> None:
        tail = _Node(node.token_ids[at:], node.depth + at, node.children)
        node.token_ids = node.token_ids[:at]
        node.children = {int(tail.token_ids[0]): tail}

    def layout(self) -> tuple[list[_Node], list[Segment]]:
        """Nodes in depth-first order, so that a node's subtree is one run of positions."""
        nodes: list[_Node] = []
        segments: list[Segment] = []
        stack: list[tuple[_Node, int]] = [(root, -1) for root in reversed(self.roots.values())]
        start = 0
        while stack:
            node, parent = stack.pop()
            node.start = start
            start += len(node.token_ids)
            segments.append(Segment(node.start, start, parent))
            nodes.append(node)
            stack.extend((child, len(nodes) - 1) for child in reversed(node.children.values()))
        return nodes, segments

    def positions(self, token_ids_S: Ints) -> Ints:
        """The pack position of each token of a row that was inserted."""
        parts: list[Ints] = []
        children, at = self.roots, 0
        while at < len(token_ids_S):
            node = children[int(token_ids_S[at])]
            n = min(len(node.token_ids), len(token_ids_S) - at)
            parts.append(np.arange(node.start, node.start + n, dtype=np.int64))
            at += n
            children = node.children
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def build_packs(rows: Sequence[Row], max_tokens: int) -> list[Pack]:
    """Pack rows, in their order, into prefix trees of at most `max_tokens` distinct tokens.

    A group stays together where it fits in one pack. A row longer than `max_tokens` gets a pack of
    its own; an empty row is left out. The same rows always give the same packs.

        packs = build_packs(batch.rows, max_tokens=8192)

    Raises: ValueError for max_tokens < 1, or for a row whose first token counts as sampled: nothing
    comes before it that could predict it.
    """
    return [_pack(forest, rows) for forest in _deal(rows, max_tokens)]


def cheapest_packs(
    rows: Sequence[Row], sizes: Sequence[int], cost: Callable[[int], float], nearly: float = 1.03
) -> list[Pack]:
    """`build_packs` for that of the `sizes` (ascending) by which all passes together cost least.

    `cost`: of a pass over so many distinct tokens. Of sizes that cost `nearly` as little the smallest is taken: small
    packs need less memory.
    """
    tried: list[tuple[float, list[_Forest]]] = []
    for size in sizes:
        forests = _deal(rows, size)
        tried.append((sum(cost(forest.size) for forest in forests), forests))
        if len(forests) <= 1:  # and so with all larger ones
            break
    least = min(total for total, _ in tried)
    return [_pack(forest, rows) for forest in next(forests for total, forests in tried if total <= nearly * least)]


def _deal(rows: Sequence[Row], max_tokens: int) -> list[_Forest]:
    """The rows' trees, one forest for each pack."""
    if max_tokens < 1:
        raise ValueError(f"max_tokens is {max_tokens}; it must be at least 1")
    for index, row in enumerate(rows):
        if len(row) and row.sampled[0]:
            raise ValueError(f"row {index}: its first token is marked as sampled, but nothing comes before it")
    forests: list[_Forest] = [_Forest()]
    for _, members in groupby((i for i in range(len(rows)) if len(rows[i])), key=lambda i: rows[i].group):
        group = list(members)
        trial = _Forest()
        for index in group:
            trial.insert(index, rows[index].token_ids)
        fits_alone = trial.size <= max_tokens
        if fits_alone and not _fits(forests[-1], group, rows, trial, max_tokens):
            forests.append(_Forest())
        for index in group:
            ids_S = rows[index].token_ids
            if forests[-1].rows and forests[-1].size + len(ids_S) - forests[-1].shared(ids_S) > max_tokens:
                forests.append(_Forest())
            forests[-1].insert(index, ids_S)
    return [forest for forest in forests if forest.rows]


def _fits(forest: _Forest, group: list[int], rows: Sequence[Row], trial: _Forest, max_tokens: int) -> bool:
    if not forest.rows or forest.size + trial.size <= max_tokens:
        return True
    # The group's tree hangs below what it shares with the pack; that part is counted in both.
    both = _Forest()
    for index in (*forest.rows, *group):
        both.insert(index, rows[index].token_ids)
        if both.size > max_tokens:
            return False
    return True


def _pack(forest: _Forest, rows: Sequence[Row]) -> Pack:
    nodes, segments = forest.layout()
    chosen = [rows[index] for index in forest.rows]
    positions = [forest.positions(row.token_ids) for row in chosen]
    sampled = [np.flatnonzero(row.sampled) for row in chosen]
    shape_RT = (len(chosen), max(len(places) for places in sampled))
    pack = Pack(
        token_ids_S=np.concatenate([node.token_ids for node in nodes]).astype(np.int64),
        position_ids_S=np.concatenate(
            [np.arange(node.depth, node.depth + len(node.token_ids), dtype=np.int64) for node in nodes]
        ),
        segments=segments,
        pred_RT=np.zeros(shape_RT, np.int64),
        target_RT=np.zeros(shape_RT, np.int64),
        mask_RT=np.zeros(shape_RT, np.bool_),
        sampler_logp_RT=np.zeros(shape_RT, np.float32),
        temperature_RT=np.ones(shape_RT, np.float32),
        advantage_R=np.array([row.advantage for row in chosen], np.float32),
        rows=list(forest.rows),
        row_tokens=sum(len(row) for row in chosen),
    )
    for r, (row, at_S, places) in enumerate(zip(chosen, positions, sampled, strict=True)):
        t = len(places)
        pack.pred_RT[r, :t] = at_S[places - 1]
        pack.target_RT[r, :t] = row.token_ids[places]
        pack.mask_RT[r, :t] = True
        pack.sampler_logp_RT[r, :t] = row.logprobs[places]
        pack.temperature_RT[r, :t] = row.temperatures[places]
    return pack
