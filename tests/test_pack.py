from collections.abc import Callable

import numpy as np
import pytest

from artnb.training.pack import build_packs, cheapest_packs
from artnb.training.types import Pack, Row


def make_row(ids: list[int], sampled: list[int], *, group: int = 0, temperature: float = 1.0) -> Row:
    mask = np.zeros(len(ids), np.bool_)
    mask[sampled] = True
    return Row(
        np.array(ids, np.int64),
        mask,
        np.where(mask, -np.arange(len(ids)), 0).astype(np.float32),
        np.where(mask, temperature, 1.0).astype(np.float32),
        advantage=float(group) + 0.5,
        group=group,
    )


def chain(pack: Pack, segment: int) -> list[int]:
    """Positions of a segment and its ancestors, from the root."""
    out: list[int] = []
    while segment >= 0:
        seg = pack.segments[segment]
        out = list(range(seg.start, seg.end)) + out
        segment = seg.parent
    return out


def check(pack: Pack, rows: list[Row]) -> None:
    """Each row can be read back from the tree, and every sampled token from the position before it."""
    assert [s.start for s in pack.segments] == [0, *[s.end for s in pack.segments[:-1]]]
    assert all(s.parent < i for i, s in enumerate(pack.segments))
    paths = [chain(pack, i) for i in range(len(pack.segments))]
    for r, index in enumerate(pack.rows):
        row = rows[index]
        places = np.flatnonzero(row.sampled)
        matching = [p for p in paths if pack.token_ids_S[p[: len(row)]].tolist() == row.token_ids.tolist()]
        assert matching, "the row is not a path of the tree"
        path = np.array(matching[0])[: len(row)]
        assert pack.position_ids_S[path].tolist() == list(range(len(row)))
        assert pack.mask_RT[r].sum() == len(places)
        assert pack.pred_RT[r, : len(places)].tolist() == path[places - 1].tolist()
        assert pack.target_RT[r, : len(places)].tolist() == row.token_ids[places].tolist()
        assert pack.sampler_logp_RT[r, : len(places)].tolist() == row.logprobs[places].tolist()
        assert pack.temperature_RT[r, : len(places)].tolist() == row.temperatures[places].tolist()
    assert pack.row_tokens == sum(len(rows[i]) for i in pack.rows)


def test_branches_anywhere_and_stores_prefixes_once() -> None:
    rows = [
        make_row([1, 2, 3, 4, 5], [3, 4]),
        make_row([1, 2, 3, 4, 6], [3, 4]),
        make_row([1, 2, 9], [2]),
        make_row([1, 2, 3], [2]),  # ends inside another row
        make_row([7, 8], [1]),  # another tree
    ]
    (pack,) = build_packs(rows, 100)
    check(pack, rows)
    assert len(pack.token_ids_S) == 9
    assert len(pack.segments) == 6
    assert pack.pred_RT[0, 0] == pack.pred_RT[1, 0]  # the shared sampled token shares its position
    assert pack.advantage_R.tolist() == [0.5] * 5


def test_a_row_that_extends_another_makes_one_segment() -> None:
    rows = [make_row([1, 2, 3], [2]), make_row([1, 2, 3, 4, 5], [4])]
    (pack,) = build_packs(rows, 100)
    check(pack, rows)
    assert len(pack.segments) == 1


def test_random_rows_match_a_set_of_prefixes() -> None:
    rng = np.random.default_rng(0)
    rows = []
    for i in range(60):
        ids = rng.integers(0, 3, rng.integers(2, 30)).tolist()
        sampled = np.flatnonzero(rng.random(len(ids)) < 0.5)
        rows.append(make_row(ids, sampled[sampled > 0].tolist(), group=i // 6))
    for limit in (20, 60, 10_000):
        packs = build_packs(rows, limit)
        assert sorted(i for pack in packs for i in pack.rows) == list(range(60))
        for pack in packs:
            check(pack, rows)
            prefixes = {tuple(rows[i].token_ids[:n]) for i in pack.rows for n in range(1, len(rows[i]) + 1)}
            assert len(pack.token_ids_S) == len(prefixes)
            assert len(pack.token_ids_S) <= limit or len(pack.rows) == 1


def test_keeps_a_group_together_where_it_fits() -> None:
    def group(g: int) -> list[Row]:
        return [make_row([100 * g, 100 * g + 1 + i, 5, 5], [2], group=g) for i in range(3)]

    rows = group(1) + group(2) + group(3)  # 10 distinct tokens each
    assert [pack.rows for pack in build_packs(rows, 25)] == [[0, 1, 2, 3, 4, 5], [6, 7, 8]]
    assert [pack.rows for pack in build_packs(rows, 15)] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert [pack.rows for pack in build_packs(rows, 7)][:2] == [[0, 1], [2]]  # a group larger than a pack


def test_groups_share_a_common_prefix_when_counting() -> None:
    system = list(range(50))
    rows = [make_row([*system, 100 + g, 200 + i], [51], group=g) for g in range(5) for i in range(2)]
    (pack,) = build_packs(rows, 50 + 5 * 3)
    check(pack, rows)
    assert len(pack.token_ids_S) == 65


def test_a_long_row_gets_a_pack_of_its_own() -> None:
    rows = [make_row([1, 2], [1]), make_row(list(range(5, 25)), [3], group=1), make_row([1, 3], [1], group=2)]
    packs = build_packs(rows, 10)
    assert [pack.rows for pack in packs] == [[0], [1], [2]]


def test_118_short_rows_fill_their_packs() -> None:
    rng = np.random.default_rng(1)
    rows = [
        make_row(rng.integers(0, 1000, n).tolist(), [5], group=i) for i, n in enumerate(rng.integers(100, 400, 118))
    ]
    packs = build_packs(rows, 6144)
    total = sum(len(pack.token_ids_S) for pack in packs)
    assert len(packs) <= -(-total // 6144) + 1
    assert total / (6144 * len(packs)) > 0.8


def test_refuses_what_it_cannot_predict() -> None:
    with pytest.raises(ValueError, match="row 1: its first token"):
        build_packs([make_row([1, 2], [1]), make_row([1, 2], [0])], 10)
    with pytest.raises(ValueError, match="max_tokens"):
        build_packs([], 0)


def test_nothing_and_rows_without_targets() -> None:
    assert build_packs([], 10) == []
    (pack,) = build_packs([make_row([1, 2, 3], []), make_row([], [])], 10)
    assert pack.rows == [0] and pack.mask_RT.shape == (1, 0)


def test_the_cheapest_packs_are_taken_and_of_nearly_equal_ones_the_smallest() -> None:
    rows = [make_row(list(range(100 * g, 100 * g + 40)), [20], group=g) for g in range(8)]

    def sizes(cost: Callable[[int], float]) -> list[int]:
        return [len(pack.token_ids_S) for pack in cheapest_packs(rows, (40, 80, 160, 320, 640), cost)]

    assert sizes(lambda tokens: tokens) == [40] * 8  # all the same
    assert sizes(lambda tokens: max(tokens, 100)) == [160] * 2  # a pass costs as much as 100 tokens
    assert sizes(lambda tokens: tokens + 2) == [80] * 4  # nearly the least
    assert sizes(lambda tokens: 1.0) == [320]
    assert cheapest_packs([], (40, 80), lambda tokens: tokens) == []
