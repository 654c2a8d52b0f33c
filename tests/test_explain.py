"""When a step says that answers were cut by length: where the cut costs something, and not where it is meant."""

from __future__ import annotations

from typing import Any

import pytest
from test_rows import build, choice, trajectory

from artnb.training.explain import SHORT_BY_DESIGN, cut_short, explain
from artnb.trajectories import Trajectory, TrajectoryGroup

LONG = 3 * SHORT_BY_DESIGN


def cut(reward: float, tokens: int = LONG) -> Trajectory:
    return trajectory(reward, choice([1], [*range(2, tokens + 2)], finish="length"))


def whole(reward: float) -> Trajectory:
    return trajectory(reward, choice([1], [2, 3]))


def warned(*groups: list[Trajectory], **options: Any) -> bool:
    batch = build(*map(TrajectoryGroup, groups), **options)
    warning = cut_short(batch)
    assert set(warning) <= set(batch.notes), "what is printed is in the step's notes, too"
    return bool(warning)


def test_cut_answers_that_earn_nothing_are_warned_about() -> None:
    """Thoughts that do not reach the answer: whoever is cut gets 0; user-reports #24."""
    assert warned([cut(0.0), cut(0.0), cut(0.0), whole(1.0)], [cut(0.0), cut(0.0), whole(0.0), whole(1.0), cut(0.0)])
    (warning,) = cut_short(build(TrajectoryGroup([cut(0.0), cut(0.0), whole(1.0)])))
    assert warning.startswith(
        f"67% of the answers were cut by length, the longest after {LONG} tokens: raise max_tokens"
    )


def test_cut_answers_that_earn_much_less_are_warned_about() -> None:
    assert warned([cut(0.1), cut(0.2), cut(0.0), whole(1.0)])


def test_cut_answers_that_all_earn_the_same_are_not_read_at_all() -> None:
    """Not even where whole ones earn less: then being cut is what is rewarded."""
    assert warned([cut(0.0), cut(0.0), cut(0.0), whole(-1.0)])


def test_cut_answers_that_earn_like_the_others_are_as_intended() -> None:
    assert not warned([cut(0.2), cut(0.9), cut(0.6), whole(0.5)])
    assert not warned([cut(0.2), cut(0.9), cut(0.6)]), "all are cut, and told apart all the same"
    assert not warned([cut(0.2), cut(0.9), cut(0.6), whole(0.5)], scale_rewards="none")


@pytest.mark.parametrize(("tokens", "says"), [(1, False), (SHORT_BY_DESIGN, False), (SHORT_BY_DESIGN + 1, True)])
def test_a_letter_or_a_number_is_meant_to_be_cut(tokens: int, says: bool) -> None:
    """Where nothing trained there are no rewards to tell by."""
    group = [cut(-1.0, tokens), cut(-1.0, tokens)]
    assert warned(group) is says
    assert ("max_tokens" in explain(build(TrajectoryGroup(group)))) is says


def test_cut_answers_that_are_masked_always_matter() -> None:
    assert warned([cut(0.2, 1), cut(0.9, 1), whole(0.5)], mask_truncated_completions=True)


def test_few_cut_answers_are_no_matter() -> None:
    assert not warned([cut(0.0), whole(1.0), whole(0.5)])
