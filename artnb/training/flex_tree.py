"""Attention over a prefix tree on a GPU: one FlexAttention call a layer, blocks that nobody sees skipped.

Positions are in depth-first order, so a token's descendants are one run: token k is seen by query q exactly where
k ≤ q < end[k], `end` being the first position after k's subtree. From that rule alone follow both the mask inside a
block and, through the least and greatest `end` of a block of keys, which blocks are empty, full or mixed: no tokens ×
tokens mask is ever made. FlexAttention: Dong et al. 2024, https://arxiv.org/abs/2412.05496.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from .types import Ints, Segment

BLOCK = 128
"""Queries and keys of one block; positions are padded to a multiple."""


@functools.cache
def _compiled() -> Callable[..., Any]:
    # One compilation for all lengths of a pack; each dtype, head shape and gradient mode has its own.
    compiled: Callable[..., Any] = torch.compile(flex_attention, dynamic=True)
    return compiled


def subtree_ends(segments: Sequence[Segment]) -> Ints:
    """[S]: for each position the first one after the subtree that its token is an ancestor in."""
    ends = [segment.end for segment in segments]
    for index in range(len(segments) - 1, -1, -1):
        parent = segments[index].parent
        if parent >= 0:
            ends[parent] = max(ends[parent], ends[index])
    return np.repeat(np.array(ends, np.int64), [segment.end - segment.start for segment in segments])


def block_kinds(end_S: Ints, place_S: Ints, window: int | None, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Which [query block, key block] pairs hold any visible pair, and which hold only visible ones.

    `end_S`, `place_S`: padded to a multiple of `block`. A pair said to be mixed may be empty, never the other way.
    """
    end_KB, place_KB = end_S.reshape(-1, block), place_S.reshape(-1, block)
    starts_K = np.arange(len(end_KB)) * block
    q, k = starts_K[:, None], starts_K[None, :]
    some = (k <= q + block - 1) & (q < end_KB.max(1)[None, :])
    full = (k + block - 1 <= q) & (q + block - 1 < end_KB.min(1)[None, :])
    if window is not None:
        distance_near = place_KB.min(1)[:, None] - place_KB.max(1)[None, :]
        distance_far = place_KB.max(1)[:, None] - place_KB.min(1)[None, :]
        some &= distance_near < window
        full &= distance_far < window
    return some & ~full, full


class FlexTreeAttend:
    """A `PackAttend` in one kernel a layer. `windows`: the sliding windows of the model's layers."""

    def __init__(
        self, segments: Sequence[Segment], device: torch.device, windows: Iterable[int | None] = (None,)
    ) -> None:
        self._device = device
        tokens = segments[-1].end if segments else 0
        self.size = tokens + -tokens % BLOCK
        end_S = subtree_ends(segments)
        depths: list[int] = []
        for segment in segments:
            parent = segment.parent
            above = 0 if parent < 0 else depths[parent] + segments[parent].end - segments[parent].start
            depths.append(above)
        place_S = np.concatenate(
            [depth + np.arange(s.end - s.start) for s, depth in zip(segments, depths, strict=True)]
        )
        # Padding comes after everything: each such position sees itself, and nobody sees it.
        tail = np.arange(tokens, self.size)
        self._end_np = np.concatenate([end_S, tail + 1])
        self._place_np = np.concatenate([place_S, tail])
        self._end_S = torch.from_numpy(self._end_np).to(device)
        self._place_S = torch.from_numpy(self._place_np).to(device)
        # Made here, not where they are asked for: a layer that is compiled only reads them.
        self._masks = {window: self._mask(window) for window in windows}

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
        # In a layer that is compiled as a whole it is compiled with it.
        flex = flex_attention if torch.compiler.is_compiling() else _compiled()
        # A key head for each query head: the backward kernel goes through all query heads of a key head one after the
        # other, and with few key heads most of the GPU waits for it.
        each = query_HSD.shape[0] // key_KSD.shape[0]
        out_1HSD = flex(
            query_HSD.unsqueeze(0),
            key_KSD.repeat_interleave(each, 0).unsqueeze(0),
            value_KSD.repeat_interleave(each, 0).unsqueeze(0),
            block_mask=self._masks[sliding_window],
            scale=scaling,
        )
        out_SHD: torch.Tensor = out_1HSD[0].transpose(0, 1)
        return out_SHD

    def _mask(self, window: int | None) -> BlockMask:
        partial, full = block_kinds(self._end_np, self._place_np, window, BLOCK)
        partial_count, partial_index = _ordered(partial, self._device)
        full_count, full_index = _ordered(full, self._device)
        return BlockMask.from_kv_blocks(
            partial_count,
            partial_index,
            full_count,
            full_index,
            BLOCK_SIZE=BLOCK,
            mask_mod=self._visible(window),
        )

    def _visible(self, window: int | None) -> Callable[..., torch.Tensor]:
        end_S, place_S = self._end_S, self._place_S

        def visible(batch: Any, head: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            return (k <= q) & (q < end_S[k])

        def windowed(batch: Any, head: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            return (k <= q) & (q < end_S[k]) & (place_S[q] - place_S[k] < window)

        return visible if window is None else windowed


def _ordered(chosen_QK: np.ndarray, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """How many key blocks each query block has, and their indices first: [1, 1, Q] and [1, 1, Q, K], int32."""
    count = chosen_QK.sum(1, dtype=np.int32)
    index = np.argsort(~chosen_QK, axis=1, kind="stable").astype(np.int32)
    return torch.from_numpy(count).to(device)[None, None], torch.from_numpy(index).to(device)[None, None]
