"""Attention over a prefix tree: each token sees its ancestors and itself, and nothing else.

The flat positions are cut into blocks; a block's queries meet the keys of their ancestors in one call of
torch's own fused attention. Short siblings share a block where the few masked scores cost less than another
call. There is no tokens × tokens mask: only one per block, made once and shared by all layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from .types import Segment

QUERIES = 512
"""Most queries in a block with a mask: bounds the mask, and the scores above the diagonal that are computed in vain."""
CALL_COST = 4096
"""What one more call costs, in query × key scores (measured on CPU: about 0.1 ms a call, 45 ns a score)."""
KEY_COST = 16
"""What gathering one more key and value costs, in the same unit."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """Some of the queries of one segment, and the keys they see: of each segment on the path, [low, high)."""

    start: int
    end: int
    keys: dict[int, tuple[int, int]]

    @property
    def scores(self) -> int:
        return (self.end - self.start) * _count(self.keys)


@dataclass(frozen=True, slots=True)
class _Block:
    start: int
    end: int
    keys: list[tuple[int, int, int]]  # segment, and which of its keys: [low, high), counted from its start
    mask_QK: torch.Tensor | None  # added to the scores; None: plain causal attention of the block to itself


def _count(keys: dict[int, tuple[int, int]]) -> int:
    return sum(high - low for low, high in keys.values())


def _union(a: dict[int, tuple[int, int]], b: dict[int, tuple[int, int]]) -> dict[int, tuple[int, int]]:
    merged = dict(a)
    for segment, (low, high) in b.items():
        other = merged.get(segment, (low, high))
        merged[segment] = (min(low, other[0]), max(high, other[1]))
    return merged


class TreeAttend:
    """A `PackAttend` out of torch's own attention, on any device.

    `segments` cover the positions from 0 without a gap, parents before children (as in `Pack`). Exact,
    sliding windows included; differentiable. Keep it for all layers and passes over the same pack.
    """

    def __init__(self, segments: Sequence[Segment], device: torch.device | str = "cpu") -> None:
        self._segments = list(segments)
        self.size = self._segments[-1].end if self._segments else 0
        self._sizes = [segment.end - segment.start for segment in self._segments]
        self._device = torch.device(device)
        self._blocks: dict[tuple[int | None, torch.dtype], list[_Block]] = {}
        self._paths: list[list[int]] = []  # of each segment: its ancestors from the root, and itself
        self._depths: list[int] = []  # place of the segment's first token in its row
        for index, segment in enumerate(self._segments):
            if segment.parent >= index or segment.start != (self._segments[index - 1].end if index else 0):
                raise ValueError(f"segment {index} ({segment}) is out of order")
            path = [] if segment.parent < 0 else self._paths[segment.parent]
            self._depths.append(sum(self._sizes[i] for i in path))
            self._paths.append([*path, index])

    def __call__(
        self,
        layer: int,
        query_HSD: torch.Tensor,
        key_KSD: torch.Tensor,
        value_KSD: torch.Tensor,
        *,
        scaling: float,
        sliding_window: int | None,
    ) -> torch.Tensor:
        """See `Attend`."""
        heads, _, width = query_HSD.shape
        kv_heads, shared = key_KSD.shape[0], heads // key_KSD.shape[0]
        blocks = self._plan(sliding_window, query_HSD.dtype)
        # One split instead of many slices: the gradient of a slice is a zero tensor of the full size.
        keys, values = key_KSD.split(self._sizes, dim=1), value_KSD.split(self._sizes, dim=1)
        queries = query_HSD.split([block.end - block.start for block in blocks], dim=1)
        outputs = []
        for block, query_HQD in zip(blocks, queries, strict=True):
            key_KXD = torch.cat([keys[i][:, low:high] for i, low, high in block.keys], dim=1)
            value_KXD = torch.cat([values[i][:, low:high] for i, low, high in block.keys], dim=1)
            # Key/value heads are the batch, and the queries that share one are its heads: the keys are
            # broadcast by stride, not repeated in memory.
            out_KHQD = F.scaled_dot_product_attention(
                query_HQD.unflatten(0, (kv_heads, shared)),
                key_KXD.unsqueeze(1).expand(-1, shared, -1, -1),
                value_KXD.unsqueeze(1).expand(-1, shared, -1, -1),
                attn_mask=block.mask_QK,
                is_causal=block.mask_QK is None,
                scale=scaling,
            )
            outputs.append(out_KHQD.permute(2, 0, 1, 3).reshape(-1, heads, width))
        return torch.cat(outputs)

    def scores(self, sliding_window: int | None = None) -> int:
        """Query × key scores of one layer and head, masked ones included: what the attention costs."""
        blocks = self._plan(sliding_window, torch.float32)
        return sum((b.end - b.start) * sum(high - low for _, low, high in b.keys) for b in blocks)

    def _plan(self, window: int | None, dtype: torch.dtype) -> list[_Block]:
        plan = self._blocks.get((window, dtype))
        if plan is None:
            plan = self._blocks[window, dtype] = [self._block(pieces, window, dtype) for pieces in self._merge(window)]
        return plan

    def _pieces(self, window: int | None) -> list[_Piece]:
        pieces = []
        for index, segment in enumerate(self._segments):
            size, depth = self._sizes[index], self._depths[index]
            plain = segment.parent < 0 and (window is None or size <= window)
            step = size if plain else QUERIES
            for start in range(0, size, step):
                end = min(size, start + step)
                first = 0 if window is None else max(0, depth + start - window + 1)  # earliest place in the row
                keys: dict[int, tuple[int, int]] = {}
                for i in self._paths[index]:
                    low = max(0, first - self._depths[i])
                    high = end if i == index else self._sizes[i]
                    if low < high:
                        keys[i] = (low, high)
                pieces.append(_Piece(segment.start + start, segment.start + end, keys))
        return pieces

    def _merge(self, window: int | None) -> list[list[_Piece]]:
        """Join neighbours whose keys overlap, as long as scores computed in vain cost less than a call of their own."""
        blocks: list[list[_Piece]] = []
        keys: dict[int, tuple[int, int]] = {}
        queries = cost = 0
        for piece in self._pieces(window):
            size = piece.end - piece.start
            if blocks and queries + size <= QUERIES:
                both = _union(keys, piece.keys)
                saved = CALL_COST + KEY_COST * (_count(keys) + _count(piece.keys) - _count(both))
                joint = (queries + size) * _count(both)
                if joint <= cost + piece.scores + saved:
                    blocks[-1].append(piece)
                    queries, keys, cost = queries + size, both, joint
                    continue
            blocks.append([piece])
            queries, keys, cost = size, piece.keys, piece.scores
        return blocks

    def _block(self, pieces: list[_Piece], window: int | None, dtype: torch.dtype) -> _Block:
        keys: dict[int, tuple[int, int]] = {}
        for piece in pieces:
            keys = _union(keys, piece.keys)
        spans = [(i, *keys[i]) for i in sorted(keys)]
        start, end = pieces[0].start, pieces[-1].end
        only = self._segments[spans[0][0]]
        if len(spans) == len(pieces) == 1 and (start, end) == (only.start, only.end):
            size = end - start
            if spans[0][1:] == (0, size) and (window is None or size <= window):
                return _Block(start, end, spans, None)
        place_X = torch.cat([torch.arange(low, high) + self._depths[i] for i, low, high in spans])
        owner_X = torch.cat([torch.full((high - low,), i) for i, low, high in spans])
        rows = []
        for piece in pieces:
            own = max(piece.keys)  # the deepest segment on the path is the queries' own
            on_path_X = torch.isin(owner_X, torch.tensor(self._paths[own]))
            offset = self._depths[own] - self._segments[own].start
            place_Q1 = (torch.arange(piece.start, piece.end) + offset).unsqueeze(1)
            seen_QX = on_path_X & (place_X <= place_Q1)
            if window is not None:
                seen_QX &= place_X > place_Q1 - window
            rows.append(seen_QX)
        seen_QX = torch.cat(rows)
        mask_QX = torch.zeros(seen_QX.shape, dtype=dtype).masked_fill_(~seen_QX, float("-inf"))
        return _Block(start, end, spans, mask_QX.to(self._device))
