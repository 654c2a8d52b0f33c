"""Keys and values of every sequence of an engine: one flat tensor pair per layer, handed out in ranges.

A range is contiguous, so reading the keys of a range is a view and no copy. The tensors grow as ranges
are first used, up to `limit` tokens; nothing is allocated at the start. Knows no sequences and no prefixes
(prefix_tree.py) and no attention (flat_attention.py).
"""

from __future__ import annotations

import bisect

import torch

Range = tuple[int, int]
"""Pool places [start, end)."""

FIRST_TOKENS = 1024
"""Places that a layer's tensors have when they are first written."""


class KVPool:
    """Ranges of places, and each layer's keys and values at those places."""

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise ValueError(f"a pool of {limit} tokens cannot hold anything")
        self.limit = limit
        self.free_tokens = limit
        self._free: list[Range] = [(0, limit)]  # sorted, never adjacent
        self._high = 0  # places ever handed out since the last release
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    # Ranges ----------------------------------------------------------------------------------------

    def allocate(self, tokens: int, after: int = -1) -> list[Range] | None:
        """Ranges of `tokens` places in all: one where the pool has a gap that long, else several. None: not enough.

        Best right after place `after`: what continues a sequence is then read together with it.
        """
        if tokens > self.free_tokens:
            return None
        taken: list[Range] = []
        rest = tokens
        while rest:
            gaps = [i for i, (start, end) in enumerate(self._free) if end - start >= rest]
            at = next((i for i in gaps if self._free[i][0] == after), gaps[0] if gaps else None)
            if at is None:  # no gap is long enough: take the longest and go on
                at = max(range(len(self._free)), key=lambda i: self._free[i][1] - self._free[i][0])
            start, end = self._free[at]
            size = min(rest, end - start)
            if size == end - start:
                del self._free[at]
            else:
                self._free[at] = (start + size, end)
            taken.append((start, start + size))
            self._high = max(self._high, start + size)
            rest -= size
        self.free_tokens -= tokens
        return taken

    def free(self, start: int, end: int) -> None:
        """Give places back. An empty range is fine; one that is free already is an error of the caller."""
        if start == end:
            return
        at = bisect.bisect_left(self._free, (start, end))
        before = self._free[at - 1] if at else None
        after = self._free[at] if at < len(self._free) else None
        if (before and before[1] > start) or (after and after[0] < end):
            raise ValueError(f"places [{start}, {end}) are freed twice")
        self.free_tokens += end - start
        first, last = at, at
        if before and before[1] == start:
            start, first = before[0], at - 1
        if after and after[0] == end:
            end, last = after[1], at + 1
        self._free[first:last] = [(start, end)]

    # Tensors ---------------------------------------------------------------------------------------

    def write(self, layer: int, places_S: torch.Tensor, key_KSD: torch.Tensor, value_KSD: torch.Tensor) -> None:
        """Store keys and values of S tokens at their places."""
        held = self._layers.get(layer)
        if held is None or held[0].shape[1] < self._high:
            held = self._layers[layer] = (
                self._grown(held and held[0], key_KSD),
                self._grown(held and held[1], value_KSD),
            )
        held[0].index_copy_(1, places_S, key_KSD)
        held[1].index_copy_(1, places_S, value_KSD)

    def read(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [kv_heads, places, D] of a layer that has been written."""
        return self._layers[layer]

    def _grown(self, old: torch.Tensor | None, like_KSD: torch.Tensor) -> torch.Tensor:
        heads, _, width = like_KSD.shape
        places = max(self._high, FIRST_TOKENS if old is None else 2 * old.shape[1])
        # Zeros, not empty memory: padded places are read and multiplied by a weight of 0, and 0 × NaN is NaN.
        new = like_KSD.new_zeros(heads, min(places, self.limit), width)
        if old is not None:
            new[:, : old.shape[1]] = old
        return new

    @property
    def used_tokens(self) -> int:
        return self.limit - self.free_tokens

    @property
    def allocated_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for pair in self._layers.values() for t in pair)

    def release_memory(self) -> None:
        """Give the tensors back. Only with every range freed."""
        if self.used_tokens:
            raise ValueError(f"{self.used_tokens} tokens of the pool are in use")
        self._layers.clear()
        self._high = 0
