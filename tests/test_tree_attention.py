import numpy as np
import pytest
import torch
from tiny_models import ARCHITECTURES, branching_rows, make_model, make_row

from artnb.config import LoraConfig
from artnb.training import tree_attention
from artnb.training.pack import build_packs
from artnb.training.policy import Policy, load_policy
from artnb.training.tree_attention import TreeAttend
from artnb.training.types import Row, Segment


@pytest.fixture(scope="module", params=ARCHITECTURES)
def policy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Policy:
    folder = make_model(request.param, tmp_path_factory.mktemp(request.param))
    policy = load_policy(folder, lora=LoraConfig(r=4), device="cpu", dtype="float32")
    policy.add_adapter("a")
    rng = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in policy.adapter_parameters("a").values():
            weight.add_(torch.randn(weight.shape, generator=rng) * 0.05)
    return policy


def plain(policy: Policy, row: Row) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies of a row's sampled tokens by the model's ordinary forward pass over it alone."""
    ids = torch.from_numpy(row.token_ids)[None]
    logits_SV = policy.base(input_ids=ids, use_cache=False).logits[0].float()
    places = np.flatnonzero(row.sampled)
    logits_TV = logits_SV[places - 1] / torch.from_numpy(row.temperatures[places])[:, None]
    logp_TV = logits_TV.log_softmax(-1)
    return logp_TV[torch.arange(len(places)), ids[0, places]], -(logp_TV.exp() * logp_TV).sum(-1)


def row_sets() -> dict[str, list[Row]]:
    rng = np.random.default_rng(5)
    system = rng.integers(0, 400, 60).tolist()
    siblings = [make_row([*system, *rng.integers(0, 400, 20).tolist()], [61, 65, 79]) for _ in range(12)]
    chain = make_row(rng.integers(0, 400, 90).tolist(), list(range(30, 90)))
    return {"branching": branching_rows(), "siblings": siblings, "alone": [chain], "more": branching_rows(3, 20, 60)}


@pytest.mark.parametrize("rows", row_sets().values(), ids=row_sets())
def test_a_tree_gives_what_each_row_gives_alone(policy: Policy, rows: list[Row]) -> None:
    (pack,) = build_packs(rows, 10_000)
    if len(rows) > 1:
        assert len(pack.token_ids_S) < pack.row_tokens
    logp_RT, entropy_RT = policy.token_logprobs(pack, adapter="a", entropy=True)
    assert entropy_RT is not None
    with policy.using("a"), torch.no_grad():
        for r, index in enumerate(pack.rows):
            logp_T, entropy_T = plain(policy, rows[index])
            n = len(logp_T)
            assert float((logp_RT[r, :n] - logp_T).abs().max()) <= 1e-4
            assert float((entropy_RT[r, :n] - entropy_T).abs().max()) <= 1e-4
            assert float(logp_RT[r, n:].abs().sum()) == 0.0


def test_adapter_gradients_equal_the_sum_over_rows(policy: Policy) -> None:
    rows = branching_rows(1)
    (pack,) = build_packs(rows, 10_000)
    weight_RT = torch.randn(pack.mask_RT.shape, generator=torch.Generator().manual_seed(2))
    parameters = list(policy.adapter_parameters("a").values())
    gradients = {}
    for recompute in (False, True):
        policy.gradient_checkpointing = recompute
        with policy.using("a", train=True):
            logp_RT, entropy_RT = policy.token_logprobs(pack, adapter="a", entropy=True, grad=True)
            assert entropy_RT is not None
            loss = (logp_RT * weight_RT).sum() + 0.1 * entropy_RT.sum()
            gradients[recompute] = torch.autograd.grad(loss, parameters)
    with policy.using("a", train=True):
        total = torch.zeros(())
        for r, row in enumerate(rows):
            logp_T, entropy_T = plain(policy, row)
            total = total + (logp_T * weight_RT[r, : len(logp_T)]).sum() + 0.1 * entropy_T.sum()
        expected = torch.autograd.grad(total, parameters)
    assert max(float(g.abs().max()) for g in expected) > 0.1
    for ours in gradients.values():
        for a, b in zip(ours, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def dense(
    segments: list[Segment], query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int | None
) -> torch.Tensor:
    """The same attention by a full tokens × tokens mask."""
    n = query.shape[1]
    seen = torch.zeros(n, n, dtype=torch.bool)
    for segment in segments:
        path, at = [list(range(segment.start, segment.end))], segment.parent
        while at >= 0:
            path.insert(0, list(range(segments[at].start, segments[at].end)))
            at = segments[at].parent
        order = [p for part in path for p in part]
        for place, position in enumerate(order):
            if position >= segment.start:
                low = 0 if window is None else max(0, place - window + 1)
                seen[position, order[low : place + 1]] = True
    shared = query.shape[0] // key.shape[0]
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key.repeat_interleave(shared, 0), value.repeat_interleave(shared, 0), attn_mask=seen, scale=0.3
    )
    return out.transpose(0, 1)


TREES = {
    "one": [(70, -1)],
    "root and leaves": [(50, -1), *[(9, 0)] * 6],
    "long leaves": [(20, -1), (45, 0), (38, 0)],
    "deep": [(12, -1), (7, 0), (5, 1), (30, 2), (4, 2), (6, 1), (11, 0), (25, -1), (3, 7), (1, 8)],
}


@pytest.mark.parametrize("window", [None, 1, 7, 40])
@pytest.mark.parametrize("queries", [8, 512])
@pytest.mark.parametrize("cost", [0, 4096])
@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_equals_a_dense_mask(
    tree: list[tuple[int, int]], window: int | None, queries: int, cost: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tree_attention, "QUERIES", queries)
    monkeypatch.setattr(tree_attention, "CALL_COST", cost)
    monkeypatch.setattr(tree_attention, "KEY_COST", cost // 256)
    segments, at = [], 0
    for size, parent in tree:
        segments.append(Segment(at, at + size, parent))
        at += size
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(h, at, 16, generator=generator, requires_grad=True) for h in (6, 2, 2)]
    weight = torch.randn(at, 6, 16, generator=generator)
    attend = TreeAttend(segments)
    ours = attend(0, *inputs, scaling=0.3, sliding_window=window)
    reference = dense(segments, *inputs, window)
    torch.testing.assert_close(ours, reference, rtol=1e-4, atol=1e-5)
    for a, b in zip(
        torch.autograd.grad((ours * weight).sum(), inputs),
        torch.autograd.grad((reference * weight).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_short_siblings_share_calls_and_long_ones_do_not() -> None:
    def tree(root: int, leaf: int, count: int) -> TreeAttend:
        starts = [root + leaf * i for i in range(count)]
        return TreeAttend([Segment(0, root, -1), *[Segment(s, s + leaf, 0) for s in starts]])

    useful = 1200 * 1200 + 200 * 20 * 1220
    many = tree(1200, 20, 200)
    assert len(many._plan(None, torch.float32)) < 25
    assert many.scores() < 1.4 * useful
    assert tree(1200, 360, 8).scores() == 1200 * 1200 + 8 * 360 * 1560


def test_refuses_segments_out_of_order() -> None:
    with pytest.raises(ValueError, match="segment 1"):
        TreeAttend([Segment(0, 5, -1), Segment(6, 8, 0)])
    with pytest.raises(ValueError, match="segment 0"):
        TreeAttend([Segment(0, 5, 0)])
