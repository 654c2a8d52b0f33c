import math
from collections import Counter
from dataclasses import replace

import pytest
import torch

from artnb.engines import sampling
from artnb.engines.base import SamplingParams
from artnb.engines.sampling import sample, uniform


def draws(logits: torch.Tensor, params: SamplingParams, count: int = 4000) -> Counter[int]:
    tokens, _ = sample(logits.expand(count, -1), [params] * count, [uniform(7, i) for i in range(count)])
    return Counter(tokens)


def expected(logits: torch.Tensor, params: SamplingParams) -> list[float]:
    """The distribution after the cuts, token by token, written the slow way."""
    prob = torch.softmax(logits.double() / params.temperature, -1).tolist()
    order = sorted(range(len(prob)), key=lambda i: -prob[i])
    if params.top_k:
        order = order[: params.top_k]
    left = sum(prob[i] for i in order)
    kept, mass = [], 0.0
    for i in order:
        if params.top_p < 1 and mass >= params.top_p * left:
            break
        kept.append(i)
        mass += prob[i]
    kept = [i for i in kept if prob[i] >= params.min_p * prob[order[0]]]
    total = sum(prob[i] for i in kept)
    return [prob[i] / total if i in kept else 0.0 for i in range(len(prob))]


CUTS = [
    SamplingParams(),
    SamplingParams(temperature=0.6),
    SamplingParams(temperature=1.7),
    SamplingParams(top_k=5),
    SamplingParams(top_p=0.7),
    SamplingParams(min_p=0.2),
    SamplingParams(temperature=1.3, top_k=12, top_p=0.9, min_p=0.05),
]


@pytest.mark.parametrize("params", CUTS, ids=str)
def test_the_distribution_is_the_one_asked_for(params: SamplingParams) -> None:
    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(3)) * 2
    count = 4000
    seen = draws(logits, params, count)
    wanted = expected(logits[0], params)
    assert all(wanted[token] > 0 for token in seen), "a token that was cut came"
    # Rare tokens are counted together: chi-square wants at least about five of each.
    common = [i for i, p in enumerate(wanted) if p * count >= 5]
    cells = [(seen[i], wanted[i] * count) for i in common]
    rare = 1 - sum(wanted[i] for i in common)
    if rare * count >= 5:
        cells.append((count - sum(seen[i] for i in common), rare * count))
    chi2 = sum((o - e) ** 2 / e for o, e in cells)
    freedom = len(cells) - 1
    assert chi2 < freedom + 4 * math.sqrt(2 * freedom) + 4, f"chi-square {chi2:.1f} at {freedom} degrees of freedom"


@pytest.mark.parametrize("params", CUTS[1:], ids=str)
def test_logprobs_are_those_before_the_cuts(params: SamplingParams) -> None:
    logits = torch.randn(64, 40, generator=torch.Generator().manual_seed(1))
    tokens, logprobs = sample(logits, [params] * 64, [uniform(0, i) for i in range(64)])
    wanted = torch.log_softmax(logits / params.temperature, -1)[range(64), tokens]
    assert torch.allclose(torch.tensor(logprobs), wanted, atol=1e-5)


def test_greedy_takes_the_likeliest_and_reports_temperature_one() -> None:
    logits = torch.randn(8, 40, generator=torch.Generator().manual_seed(1))
    tokens, logprobs = sample(logits, [SamplingParams(temperature=0, top_p=0.5)] * 8, [0.99] * 8)
    assert tokens == logits.argmax(-1).tolist()
    assert torch.allclose(torch.tensor(logprobs), torch.log_softmax(logits, -1).amax(-1), atol=1e-5)


def test_a_row_does_not_depend_on_its_company() -> None:
    logits = torch.randn(len(CUTS), 3000, generator=torch.Generator().manual_seed(1)) * 3
    uniforms = [uniform(5, i) for i in range(len(CUTS))]
    together = sample(logits, CUTS, uniforms)
    alone = [sample(logits[i : i + 1], [p], [uniforms[i]]) for i, p in enumerate(CUTS)]
    assert together[0] == [tokens[0] for tokens, _ in alone]
    assert together[1] == pytest.approx([logprobs[0] for _, logprobs in alone], abs=1e-6)


def test_few_candidates_give_what_sorting_everything_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = torch.Generator().manual_seed(0)  # of other numbers, rounding decides now and then
    flat, peaked = (torch.randn(1, 300, generator=rng) * scale for scale in (0.1, 5))
    for logits in (flat, peaked):  # in the flat one the candidates hold too little mass
        for params in [*CUTS[3:], SamplingParams(top_p=0.95, top_k=200)]:
            uniforms = [i / 50 for i in range(50)]
            monkeypatch.setattr(sampling, "CANDIDATES", 300)
            full = sample(logits.expand(50, -1), [params] * 50, uniforms)
            monkeypatch.setattr(sampling, "CANDIDATES", 16)
            assert sample(logits.expand(50, -1), [params] * 50, uniforms) == full


def test_uniform_numbers() -> None:
    assert uniform(1, 0) == uniform(1, 0) != uniform(2, 0) != uniform(1, 1)
    assert uniform(-1, 3) == uniform(2**64 - 1, 3)
    numbers = [uniform(seed, position) for seed in range(60) for position in range(60)]
    assert min(numbers) >= 0 and max(numbers) < 1
    assert abs(sum(numbers) / len(numbers) - 0.5) < 0.02
    tenths = Counter(int(10 * u) for u in numbers)
    assert all(abs(tenths[i] - 360) < 90 for i in range(10))


@pytest.mark.parametrize("u", [0.0, 1 - 2**-24])
def test_the_ends_of_the_unit_interval(u: float) -> None:
    logits = torch.tensor([[float("-inf"), 0.0, 0.0, float("-inf")]])
    for params in CUTS:
        tokens, logprobs = sample(logits, [params], [u])
        assert tokens[0] in (1, 2), "a token of probability zero came"
        assert logprobs[0] == pytest.approx(math.log(0.5), abs=1e-6)


def test_nan_logits_are_an_error_not_a_token() -> None:
    logits = torch.zeros(2, 8)
    logits[1, 3] = float("nan")
    for params in (SamplingParams(), SamplingParams(temperature=0), SamplingParams(top_p=0.5)):
        with pytest.raises(ValueError, match="NaN"):
            sample(logits, [params, replace(params)], [0.5, 0.5])
