"""The rules, the reading of answers, the reward, and whole rollouts through the real endpoint on a scripted engine."""

from __future__ import annotations

import itertools
import random
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from game_2048 import (
    DIRECTIONS,
    Game,
    Scenario,
    evaluate,
    means,
    parse_move,
    plain_player,
    reward_of,
    rollout,
    scenarios,
    slide,
)
from scripted_model import ScriptedModel

FULL = [[2, 4, 2, 4], [4, 2, 4, 2], [2, 4, 2, 4], [4, 2, 4, 2]]


def turning(request: Any) -> str:
    """L, D, R, U, L, …: one letter for each board it was shown."""
    return "LDRU"[request.prompt_text.count("LRUD ") % 4 - 1]


@pytest.mark.parametrize(
    ("line", "slid", "points"),
    [
        ([0, 0, 0, 0], [0, 0, 0, 0], 0),
        ([0, 0, 0, 2], [2, 0, 0, 0], 0),
        ([2, 0, 0, 2], [4, 0, 0, 0], 4),
        ([2, 2, 2, 0], [4, 2, 0, 0], 4),
        ([2, 2, 4, 0], [4, 4, 0, 0], 4),  # the new 4 does not merge again
        ([4, 2, 2, 0], [4, 4, 0, 0], 4),
        ([2, 2, 2, 2], [4, 4, 0, 0], 8),
        ([4, 4, 8, 8], [8, 16, 0, 0], 24),
        ([2, 4, 2, 4], [2, 4, 2, 4], 0),
        ([2, 0, 4, 2], [2, 4, 2, 0], 0),
    ],
)
def test_a_line_slides_and_each_tile_merges_once(line: list[int], slid: list[int], points: int) -> None:
    assert slide(line) == (slid, points)


def test_each_direction_merges_from_the_side_it_slides_to() -> None:
    game = Game([[2, 2, 2, 0], [0, 0, 0, 0], [2, 0, 0, 0], [2, 0, 0, 8]])
    assert game.after("left") == ([[4, 2, 0, 0], [0, 0, 0, 0], [2, 0, 0, 0], [2, 8, 0, 0]], 4)
    assert game.after("right") == ([[0, 0, 2, 4], [0, 0, 0, 0], [0, 0, 0, 2], [0, 0, 2, 8]], 4)
    assert game.after("up") == ([[4, 2, 2, 8], [2, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]], 4)
    assert game.after("down") == ([[0, 0, 0, 0], [0, 0, 0, 0], [2, 0, 0, 0], [4, 2, 2, 8]], 4)
    with pytest.raises(ValueError, match="unknown"):
        game.after("sideways")


def test_a_move_scores_and_adds_one_tile() -> None:
    game = Game([[2, 2, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]])
    assert game.move("right", random.Random(0)) == 4 and game.score == 4 and game.largest() == 4
    assert game.rows[0][3] == 4 and sum(tile > 0 for row in game.rows for tile in row) == 2


def test_a_direction_that_moves_nothing_is_refused_and_adds_no_tile() -> None:
    game = Game([[2, 0, 0, 0], [4, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]])
    assert game.legal() == ["right", "down"]
    before = [row[:] for row in game.rows]
    with pytest.raises(ValueError, match="left moves no tile; legal: right, down"):
        game.move("left", random.Random(0))
    assert game.rows == before and game.score == 0


def test_it_is_over_when_the_board_is_full_and_nothing_merges() -> None:
    game = Game([row[:] for row in FULL])
    assert game.over() and game.legal() == []
    with pytest.raises(ValueError, match="over"):
        game.move("left", random.Random(0))
    with pytest.raises(ValueError, match="full"):
        game.spawn(random.Random(0))
    game.rows[3][3] = 4  # a full board on which two tiles can merge goes on
    assert game.legal() == ["left", "right", "up", "down"]


def test_new_tiles_are_twos_and_one_in_ten_a_four_on_any_free_square() -> None:
    rng = random.Random(0)
    seen: list[tuple[int, int, int]] = []
    for _ in range(3000):
        game = Game()
        game.spawn(rng)
        seen += [(y, x, tile) for y, row in enumerate(game.rows) for x, tile in enumerate(row) if tile]
    assert len(seen) == 3000 and {(y, x) for y, x, _ in seen} == {(y, x) for y in range(4) for x in range(4)}
    fours = sum(tile == 4 for _, _, tile in seen) / 3000
    assert {tile for _, _, tile in seen} == {2, 4} and 0.08 < fours < 0.12


def test_the_board_has_one_character_a_square() -> None:
    assert Game([[0, 2, 4, 0], [0, 8, 0, 0], [2, 0, 0, 1024], [2048, 131072, 0, 0]]).board() == "0120 0300 100A BH00"


@pytest.mark.parametrize(
    ("answer", "direction"),
    [
        ("L", "left"),
        (" d.", "down"),
        ("U\n", "up"),
        ("right", "right"),
        ("Up, then left", "up"),
        ("*D*", "down"),
        ("I'd say", None),  # no D
        ("LR", None),
        ("The", None),
        ("1", None),
        ("", None),
        ("🎉 위", None),
    ],
)
def test_the_first_direction_in_the_answer_counts(answer: str, direction: str | None) -> None:
    assert parse_move(answer) == direction


def test_the_reward_is_bounded_and_grows_with_points_and_turns_used() -> None:
    assert reward_of(0, 6, 6) == -0.5 and reward_of(0, 0, 6) == 0.0 and reward_of(48, 0, 6) == 0.5
    assert reward_of(10**6, 0, 6) < 1.0
    for lost in range(6):
        assert reward_of(20, lost, 6) > reward_of(20, lost + 1, 6)
        assert reward_of(24, lost, 6) > reward_of(20, lost, 6)


@pytest.mark.parametrize("warm_up", [0, 20, 400])  # 400 random moves end more than one game
def test_a_scenario_starts_where_its_seed_says(warm_up: int) -> None:
    boards = set()
    for scenario in scenarios(5, first_seed=40, warm_up=warm_up):
        (one, rng), (two, again) = scenario.start(), scenario.start()
        assert one == two and rng.random() == again.random() and one.score == 0 and not one.over()
        boards.add(one.board())
    assert len(boards) == 5
    for options in ({"turns": 0}, {"warm_up": -1}):
        with pytest.raises(ValueError, match="must be"):
            Scenario(seed=0, **options)


async def test_a_whole_rollout_is_recorded_with_its_tokens() -> None:
    player = ScriptedModel(turning)
    scenario = Scenario(seed=4, turns=8)
    trajectory = await rollout(player, scenario, seed=3)
    metrics = trajectory.metrics
    assert metrics["turns"] == len(trajectory.choices()) == 8 == metrics["moves"] + metrics["blocked"]
    assert trajectory.messages()[1]["content"] == f"LRUD {scenario.start()[0].board()}"
    assert trajectory.reward == reward_of(int(metrics["score"]), int(metrics["blocked"]), 8) and metrics["score"] > 0
    seen: list[int] = []  # each turn's prompt goes on exactly where the last turn's tokens ended
    for choice in trajectory.choices():
        extra = choice.model_extra or {}
        assert extra["prompt_token_ids"][: len(seen)] == seen
        seen = extra["prompt_token_ids"] + extra["token_ids"]
    assert len({request.sampling.seed for request in player.engine.requests}) == 8


async def test_the_same_moves_meet_the_same_tiles() -> None:
    one, two = [await rollout(ScriptedModel(turning), Scenario(seed=9)) for _ in range(2)]
    other = await rollout(ScriptedModel(turning), Scenario(seed=10))
    assert one.messages() == two.messages() and one.reward == two.reward and other.messages() != one.messages()


async def test_an_answer_without_a_direction_ends_it_and_all_turns_left_are_lost() -> None:
    trajectory = await rollout(ScriptedModel("The"), Scenario(seed=0))
    assert trajectory.reward == -0.5 and trajectory.metrics["no_move"] == 1 and trajectory.metrics["turns"] == 1
    assert "no direction" in trajectory.logs[0]


async def test_a_direction_that_moves_nothing_loses_only_its_turn() -> None:
    trajectory = await rollout(ScriptedModel("L"), Scenario(seed=1, turns=12))
    metrics = trajectory.metrics
    assert metrics["blocked"] > 0 and metrics["moves"] > 0 and metrics["turns"] == 12 and metrics["no_move"] == 0
    boards = [message["content"] for message in trajectory.messages()[1::2]]
    assert sum(one == two for one, two in itertools.pairwise(boards)) >= metrics["blocked"] - 1


async def test_it_stops_when_the_game_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    last = Game([[2, 2, 8, 16], [32, 64, 128, 256], [8, 16, 32, 64], [128, 256, 8, 16]])
    monkeypatch.setattr(Scenario, "start", lambda self: (last, random.Random(0)))
    trajectory = await rollout(ScriptedModel("L"), Scenario(seed=0, turns=5))
    assert last.over() and trajectory.metrics["turns"] == 1 and trajectory.metrics["largest_tile"] == 256
    assert trajectory.reward == reward_of(4, 0, 5)  # a game that is over loses no turns


async def test_evaluate_gives_means_and_keeps_the_rollouts(tmp_path: Path) -> None:
    model = ScriptedModel(turning, tmp_path)
    result = await evaluate(model, scenarios(6), desc=None)
    assert not model.folder.exists()
    assert result == await evaluate(model, scenarios(6), step=3, split="val", desc=None)
    assert model.history()["val/legal_move_rate"].tolist() == [result["legal_move_rate"]]
    assert len(model.trajectories(step=3, split="val")) == 6
    assert result["legal_move_rate"] == result["moves"] / 6 and result["largest_tile"] >= 8
    with pytest.raises(ValueError, match="no rollouts"):
        means([])


def test_taking_the_most_points_beats_moving_at_random() -> None:
    total = {
        player: sum(plain_player(scenario, player, seed=1).score for scenario in scenarios(200))
        for player in ("random", "greedy")
    }
    assert total["greedy"] > 1.15 * total["random"]
    assert plain_player(Scenario(seed=3), "random") == plain_player(Scenario(seed=3), "random")
    assert set(DIRECTIONS) == {"left", "right", "up", "down"}
