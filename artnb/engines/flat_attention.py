"""Attention of one forward pass over a flat batch of sequences whose keys and values lie in a KVPool.

Rows that decode one token are computed together: a range of the pool that several rows read (a shared
prefix) is multiplied once with all their queries, the rest is gathered into one padded batch, and one softmax
runs over both. Query heads that share a key head are folded into the row axis, so keys are never repeated. Rows
with several new tokens (prefill) run one by one, and on CPU also long ones that share nothing. No sequences, no
tokens: ranges of places only.

Axes: K key heads, G query heads of each, B rows that decode, C score columns, D head width, S flat tokens.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from .kv_pool import KVPool, Range

SHARED_TOKENS = 16
"""A shorter range is gathered even if it is shared: two matrix products cost more than a few copied keys."""
LONE_TOKENS = 128
"""On CPU, where copying is what costs, keys of one row alone are read in place from this length on."""
GATHERED_PLACES = 1 << 16
"""Elsewhere starting a kernel costs more than copying: up to this many places are all gathered."""
FOLD_TOKENS = 64
"""Prefill of up to this many tokens folds the query heads instead of repeating the keys for them."""


@dataclass(frozen=True, slots=True)
class AttendRow:
    """`new` flat tokens whose keys go to the last `new` places of `ranges`, which hold the whole sequence."""

    ranges: tuple[Range, ...]
    new: int

    def places(self) -> list[int]:
        """Where the new tokens' keys and values go."""
        return list(itertools.chain.from_iterable(itertools.starmap(range, _last(self.ranges, self.new))))


class _Span(NamedTuple):
    """Places [start, end) read in place by decode rows [first, last), scores at columns from `column`."""

    first: int
    last: int
    start: int
    end: int
    column: int


class _Decode(NamedTuple):
    columns: int
    gathered: int  # the first columns are the gathered places
    places_N: torch.Tensor  # [B * gathered]
    hidden_B1C: torch.Tensor  # columns that are not the row's own
    mask_B11M: torch.Tensor  # the same for the gathered places as a summand: 0 or -inf
    spans: list[_Span]


class FlatAttend:
    """An `artnb.attention.Attend`. Rows with a common prefix should stand side by side."""

    def __init__(self, pool: KVPool, rows: Sequence[AttendRow], device: torch.device) -> None:
        self._pool = pool
        self._device = device
        self._together, self._alone = _split(rows, device)
        self._together_B = torch.tensor([at for at, _ in self._together], dtype=torch.long, device=device)
        self._places_S = torch.tensor([p for row in rows for p in row.places()], device=device)
        self._longest = max(_length(row.ranges) for row in rows)
        self._decode_plans: dict[int | None, _Decode] = {}
        self._kept: dict[tuple[int, int | None], list[Range]] = {}
        self._masks: dict[tuple[int, int | None, int], torch.Tensor] = {}

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
        self._pool.write(layer, self._places_S, key_KSD, value_KSD)
        keys_KND, values_KND = self._pool.read(layer)
        window = sliding_window if sliding_window is not None and sliding_window < self._longest else None
        if not self._alone:
            return self._decode(query_HSD, keys_KND, values_KND, scaling, window)
        out_SHD = query_HSD.new_empty(query_HSD.shape[1], query_HSD.shape[0], values_KND.shape[2])
        if self._together:
            query = query_HSD.index_select(1, self._together_B)
            out_SHD[self._together_B] = self._decode(query, keys_KND, values_KND, scaling, window)
        for at, row in self._alone:
            query = query_HSD[:, at : at + row.new]
            out_SHD[at : at + row.new] = self._one(at, row, query, keys_KND, values_KND, scaling, window)
        return out_SHD

    # Decode ----------------------------------------------------------------------------------------

    def _decode(
        self,
        query_HBD: torch.Tensor,
        keys_KND: torch.Tensor,
        values_KND: torch.Tensor,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        plan = self._decode_plans.get(window)
        if plan is None:
            plan = self._decode_plans[window] = self._plan(window, query_HBD.dtype)
        heads, rows, _ = query_HBD.shape
        kv, _, width = keys_KND.shape
        out_width = values_KND.shape[2]
        group = heads // kv
        if not plan.spans:
            keys, values = (
                held.index_select(1, plan.places_N).view(kv, rows, plan.gathered, -1).transpose(0, 1)
                for held in (keys_KND, values_KND)
            )
            query_BKGD = query_HBD.view(kv, group, rows, width).permute(2, 0, 1, 3)
            out = F.scaled_dot_product_attention(query_BKGD, keys, values, attn_mask=plan.mask_B11M, scale=scale)
            return out.reshape(rows, heads, out_width)
        query_KBGD = (query_HBD * scale).view(kv, group, rows, width).transpose(1, 2).contiguous()
        scores_KBGC = torch.empty(kv, rows, group, plan.columns, dtype=torch.float32, device=self._device)
        if plan.gathered:
            near_KBMD = keys_KND.index_select(1, plan.places_N).view(kv * rows, plan.gathered, width)
            scores = _product(query_KBGD.view(kv * rows, group, width), near_KBMD.transpose(1, 2))
            scores_KBGC[..., : plan.gathered] = scores.view(kv, rows, group, plan.gathered)
        for span in plan.spans:
            part = query_KBGD[:, span.first : span.last].reshape(kv, -1, width)
            scores = _product(part, keys_KND[:, span.start : span.end].transpose(1, 2))
            columns = slice(span.column, span.column + span.end - span.start)
            scores_KBGC[:, span.first : span.last, :, columns] = scores.view(kv, span.last - span.first, group, -1)
        scores_KBGC.masked_fill_(plan.hidden_B1C, float("-inf"))  # not added: what nobody wrote may be NaN
        weights_KBGC = torch.softmax(scores_KBGC, dim=-1).to(values_KND.dtype)
        if plan.gathered:
            near_KBMD = values_KND.index_select(1, plan.places_N).view(kv * rows, plan.gathered, out_width)
            near_weights = weights_KBGC[..., : plan.gathered].reshape(kv * rows, group, plan.gathered)
            out_KBGD = torch.bmm(near_weights, near_KBMD).view(kv, rows, group, out_width)
        else:
            out_KBGD = values_KND.new_zeros(kv, rows, group, out_width)
        for span in plan.spans:
            columns = slice(span.column, span.column + span.end - span.start)
            part = weights_KBGC[:, span.first : span.last, :, columns].reshape(kv, -1, span.end - span.start)
            product = torch.bmm(part, values_KND[:, span.start : span.end])
            out_KBGD[:, span.first : span.last] += product.view(kv, span.last - span.first, group, out_width)
        return out_KBGD.permute(1, 0, 2, 3).reshape(rows, heads, out_width)

    def _plan(self, window: int | None, dtype: torch.dtype) -> _Decode:
        """Which ranges are read in place and which places are gathered, for rows that see `window` tokens back."""
        rows = [_last(row.ranges, window) for _, row in self._together]
        spans: list[_Span] = []
        spanned = [0] * len(rows)  # columns of each row that spans hold
        rest: list[list[Range]] = [[] for _ in rows]
        lone = LONE_TOKENS if self._device.type == "cpu" else None
        gather_all = lone is None and len(rows) * max(_length(ranges) for ranges in rows) <= GATHERED_PLACES
        for depth in range(max(map(len, rows))):
            first = 0
            while first < len(rows):
                last = first + 1
                if depth < len(rows[first]):
                    head = rows[first][: depth + 1]
                    while last < len(rows) and rows[last][: depth + 1] == head:
                        last += 1
                    start, end = head[-1]
                    if end - start >= SHARED_TOKENS and last - first > 1 and not gather_all:
                        spans.append(_Span(first, last, start, end, spanned[first]))
                        for row in range(first, last):
                            spanned[row] += end - start
                    else:
                        for row in range(first, last):
                            rest[row].append((start, end))
                first = last
        for row, ranges in enumerate(rest):
            rest[row] = []
            for start, end in _touching(ranges):
                if lone is not None and end - start >= lone:
                    spans.append(_Span(row, row + 1, start, end, spanned[row]))
                    spanned[row] += end - start
                else:
                    rest[row].append((start, end))
        near = [_length(ranges) for ranges in rest]
        gathered = max(near)
        columns = gathered + max(spanned)
        places = torch.empty(len(rows), gathered, dtype=torch.long)
        for row, ranges in enumerate(rest):
            places[row] = rows[row][-1][1] - 1  # padding reads the row's own newest place: never another's NaN
            at = 0
            for start, end in ranges:
                torch.arange(start, end, out=places[row, at : at + end - start])
                at += end - start
        column_C = torch.arange(columns)
        near_B1, spanned_B1 = torch.tensor(near)[:, None], torch.tensor(spanned)[:, None]
        seen = (column_C < near_B1) | ((column_C >= gathered) & (column_C < gathered + spanned_B1))
        hidden_B1C = (~seen)[:, None].to(self._device)
        near_hidden = hidden_B1C[:, None, :, :gathered]
        mask_B11M = torch.zeros(near_hidden.shape, dtype=dtype, device=self._device).masked_fill_(
            near_hidden, float("-inf")
        )
        spans = [span._replace(column=span.column + gathered) for span in spans]
        return _Decode(columns, gathered, places.view(-1).to(self._device), hidden_B1C, mask_B11M, spans)

    # One row alone ---------------------------------------------------------------------------------

    def _one(
        self,
        at: int,
        row: AttendRow,
        query_HSD: torch.Tensor,
        keys_KND: torch.Tensor,
        values_KND: torch.Tensor,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        ranges = self._kept.get((at, window))
        if ranges is None:
            ranges = _touching(_last(row.ranges, None if window is None else window + row.new - 1))
            self._kept[at, window] = ranges
        key_KLD = _joined(keys_KND, ranges)
        value_KLD = _joined(values_KND, ranges)
        heads, new, width = query_HSD.shape
        kv, length, _ = key_KLD.shape
        group = heads // kv
        causal = length == new and (window is None or window >= length)
        if new <= FOLD_TOKENS:
            mask = None if new == 1 else self._mask(at, window, new, length, group, query_HSD.dtype)
            folded = query_HSD.reshape(1, kv, group * new, width)
            out = F.scaled_dot_product_attention(folded, key_KLD[None], value_KLD[None], attn_mask=mask, scale=scale)
            return out.reshape(heads, new, -1).transpose(0, 1)
        mask = None if causal else self._mask(at, window, new, length, 1, query_HSD.dtype)
        if group > 1:
            key_KLD, value_KLD = key_KLD.repeat_interleave(group, 0), value_KLD.repeat_interleave(group, 0)
        out = F.scaled_dot_product_attention(
            query_HSD[None], key_KLD[None], value_KLD[None], attn_mask=mask, is_causal=causal, scale=scale
        )
        return out[0].transpose(0, 1)

    def _mask(self, at: int, window: int | None, new: int, length: int, tiles: int, dtype: torch.dtype) -> torch.Tensor:
        """[tiles * new, length]: 0 where query i (the i-th of the last `new` tokens) sees key j, -inf elsewhere."""
        mask = self._masks.get((at, window, tiles))
        if mask is None:
            query = torch.arange(length - new, length, device=self._device)[:, None]
            key = torch.arange(length, device=self._device)[None]
            hidden = key > query
            if window is not None:
                hidden |= key <= query - window
            mask = torch.zeros(new, length, dtype=dtype, device=self._device).masked_fill_(hidden, float("-inf"))
            mask = self._masks[at, window, tiles] = mask.repeat(tiles, 1)
        return mask


def _split(
    rows: Sequence[AttendRow], device: torch.device
) -> tuple[list[tuple[int, AttendRow]], list[tuple[int, AttendRow]]]:
    """Rows that are computed together, and those computed one by one; each with its first flat token."""
    users = Counter(range_ for row in rows if row.new == 1 for range_ in row.ranges)
    lone = LONE_TOKENS if device.type == "cpu" else None
    together: list[tuple[int, AttendRow]] = []
    alone: list[tuple[int, AttendRow]] = []
    at = 0
    for row in rows:
        length = _length(row.ranges)
        shares = any(users[start, end] > 1 and end - start >= SHARED_TOKENS for start, end in row.ranges)
        by_itself = row.new > 1 or (lone is not None and length >= lone and not shares)
        (alone if by_itself else together).append((at, row))
        at += row.new
    return together, alone


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Batched matrix product with a float32 result: scores lose too much in half precision."""
    if a.dtype == torch.float32:
        return torch.bmm(a, b)
    if a.device.type == "cuda":
        return torch.bmm(a, b, out_dtype=torch.float32)
    return torch.bmm(a.float(), b.float())


def _length(ranges: Sequence[Range]) -> int:
    return sum(end - start for start, end in ranges)


def _last(ranges: tuple[Range, ...], count: int | None) -> tuple[Range, ...]:
    """The ranges of the last `count` tokens."""
    if count is None:
        return ranges
    skip = _length(ranges) - count
    kept: list[Range] = []
    for start, end in ranges:
        cut = max(0, min(skip, end - start))
        skip -= end - start
        if start + cut < end:
            kept.append((start + cut, end))
    return tuple(kept)


def _touching(ranges: Sequence[Range]) -> list[Range]:
    """The same places in fewer ranges: those that touch become one."""
    merged: list[Range] = []
    for start, end in ranges:
        if merged and start == merged[-1][1]:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return merged


def _joined(tensor_KND: torch.Tensor, ranges: Sequence[Range]) -> torch.Tensor:
    """The places of `ranges`, one after the other; a view if there is but one range."""
    parts = [tensor_KND[:, start:end] for start, end in ranges]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
