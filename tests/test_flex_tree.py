"""FlexAttention over prefix trees: its rule and its blocks against a dense mask, its result against `TreeAttend`.

The compiled kernel needs a GPU (marker `gpu`); here FlexAttention's own plain version runs.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from artnb.training import flex_tree
from artnb.training.flex_tree import BLOCK, FlexTreeAttend, block_kinds, subtree_ends
from artnb.training.pack import build_packs
from artnb.training.tree_attention import TreeAttend
from artnb.training.types import Pack, Row


def random_pack(seed: int, *, rows: int = 12, longest: int = 300) -> Pack:
    """Rows that branch off each other at random places."""
    rng = np.random.default_rng(seed)
    made: list[np.ndarray] = []
    for _ in range(rows):
        fresh = rng.integers(0, 50, rng.integers(20, longest))
        if made and rng.random() < 0.8:
            parent = made[rng.integers(len(made))]
            keep = rng.integers(1, len(parent) + 1)
            fresh = np.concatenate([parent[:keep], fresh])[:longest]
        made.append(fresh.astype(np.int64))
    rng.shuffle(made)
    batch = [
        Row(ids, np.arange(len(ids)) > 0, np.zeros(len(ids), np.float32), np.ones(len(ids), np.float32)) for ids in made
    ]
    (pack,) = build_packs(batch, 100_000)
    return pack


def dense(pack: Pack, window: int | None) -> np.ndarray:
    """[S, S]: which keys each query sees, from the definition of a segment alone."""
    size = len(pack.token_ids_S)
    seen = np.zeros((size, size), bool)
    for index, segment in enumerate(pack.segments):
        path = [index]
        while pack.segments[path[-1]].parent >= 0:
            path.append(pack.segments[path[-1]].parent)
        keys = np.concatenate([np.arange(pack.segments[i].start, pack.segments[i].end) for i in path])
        for q in range(segment.start, segment.end):
            seen[q, keys[keys <= q]] = True
    if window is not None:
        place = pack.position_ids_S
        seen &= place[:, None] - place[None, :] < window
    return seen


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("window", [None, 40])
def test_blocks_say_what_the_dense_mask_says(seed: int, window: int | None) -> None:
    pack = random_pack(seed)
    attend = FlexTreeAttend(pack.segments, torch.device("cpu"))
    size = len(pack.token_ids_S)
    assert attend.size % BLOCK == 0 and 0 <= attend.size - size < BLOCK
    seen = np.zeros((attend.size, attend.size), bool)
    seen[:size, :size] = dense(pack, window)
    seen[range(size, attend.size), range(size, attend.size)] = True  # padding sees itself

    end_S = np.concatenate([subtree_ends(pack.segments), np.arange(size, attend.size) + 1])
    q, k = np.arange(attend.size)[:, None], np.arange(attend.size)[None, :]
    rule = (k <= q) & (q < end_S[None, :])
    place_S = np.concatenate([pack.position_ids_S, np.arange(size, attend.size)])
    if window is not None:
        rule &= place_S[:, None] - place_S[None, :] < window
    assert (rule == seen).all()

    blocks = seen.reshape(attend.size // BLOCK, BLOCK, -1, BLOCK)
    mixed, full = block_kinds(end_S, place_S, window, BLOCK)
    assert not (mixed & full).any()
    assert (full <= blocks.all((1, 3))).all(), "a block that is said to be full is"
    assert (blocks.any((1, 3)) <= (mixed | full)).all(), "no block that somebody sees is left out"
    assert (~full | ~mixed).all() and (full.sum() > 0 or window is not None or size < 3 * BLOCK)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("window", [None, 40])
def test_same_values_as_tree_attend(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex_tree, "_compiled", lambda: flex_attention)
    pack = random_pack(7, rows=6, longest=120)
    size = len(pack.token_ids_S)
    torch.manual_seed(0)
    inputs = [torch.randn(heads, size, 16, dtype=torch.float64) for heads in (4, 2, 2)]
    results = []
    for attend in (TreeAttend(pack.segments), FlexTreeAttend(pack.segments, torch.device("cpu"), [window])):
        padded = [torch.nn.functional.pad(x, (0, 0, 0, attend.size - size)) for x in inputs]
        results.append(attend(0, *padded, scaling=0.25, sliding_window=window)[:size])
    torch.testing.assert_close(results[1], results[0], rtol=1e-6, atol=1e-8)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # the compiler looks at it
@pytest.mark.parametrize("window", [None, 256])
def test_the_compiled_kernel_gives_the_same(window: int | None) -> None:
    device = torch.device("cuda")
    torch.manual_seed(0)
    for seed, rows, longest in ((1, 12, 300), (2, 24, 900)):  # two lengths through one compilation
        pack = random_pack(seed, rows=rows, longest=longest)
        size = len(pack.token_ids_S)
        inputs = [torch.randn(heads, size, 64, device=device) for heads in (6, 2, 2)]
        results = []
        for attend, dtype in (
            (TreeAttend(pack.segments, device), torch.float32),
            (FlexTreeAttend(pack.segments, device, [window]), torch.bfloat16),
        ):
            leaves = [x.to(dtype).requires_grad_() for x in inputs]
            padded = [torch.nn.functional.pad(x, (0, 0, 0, attend.size - size)) for x in leaves]
            out = attend(0, *padded, scaling=0.125, sliding_window=window)[:size]
            out.float().square().sum().backward()
            results.append([out.detach().float(), *(x.grad.float() for x in leaves)])
        for tree, mine in zip(*results, strict=True):
            error = float((mine - tree).norm() / tree.norm())
            assert error < 2e-2, error
