"""The rules, the opponents, the reading of answers, and whole games through the real endpoint on a scripted engine."""

from __future__ import annotations

import itertools
import random
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from scripted_model import ScriptedModel
from tic_tac_toe import (
    LINES,
    Game,
    Scenario,
    evaluate,
    means,
    opponent_move,
    parse_move,
    reward_of,
    rollout,
    scenarios,
)


def first_free(request: Any) -> str:
    """Plays the first number of the last board it was shown."""
    board = request.prompt_text.rsplit("user\n", 1)[1]
    return next(char for char in board if char.isdigit())


@pytest.mark.parametrize("line", LINES)
def test_every_line_wins(line: tuple[int, ...]) -> None:
    game = Game()
    for square in line:
        assert game.winner() is None and not game.over()
        game.put("X", square)
    assert game.winner() == "X" and game.over()
    with pytest.raises(ValueError, match="over"):
        game.put("O", game.free()[0])


def test_a_full_board_without_a_line_is_over_and_nobody_won() -> None:
    game = Game()
    for square, mark in zip((1, 2, 3, 5, 4, 6, 8, 7, 9), itertools.cycle("XO"), strict=False):
        game.put(mark, square)
    assert game.over() and game.winner() is None and game.free() == []


@pytest.mark.parametrize("square", [0, 10, 5])
def test_squares_that_cannot_be_taken(square: int) -> None:
    game = Game({5: "O"})
    with pytest.raises(ValueError, match="not free"):
        game.put("X", square)


def test_the_board_shows_free_squares_as_numbers() -> None:
    assert Game({5: "O", 1: "X"}).board() == "X23 4O6 789"


@pytest.mark.parametrize(
    ("answer", "move"),
    [
        ("5", 5),
        (" 5.", 5),
        ("I take 7, not 3", 7),
        ("12", 1),
        ("0", 0),
        ("", None),
        ("five", None),
        ("٣ 4", 4),
        ("🎉", None),
    ],
)
def test_the_first_digit_is_the_move(answer: str, move: int | None) -> None:
    assert parse_move(answer) == move


def test_minimax_never_loses_and_takes_a_win() -> None:
    assert opponent_move(Game({1: "O", 2: "O", 4: "X", 5: "X"}), "minimax", random.Random(0)) == 3
    assert opponent_move(Game({4: "X", 5: "X", 1: "O"}), "minimax", random.Random(0)) == 6
    rng = random.Random(1)
    for _ in range(200):
        game = Game()
        while not game.over():
            game.put("X", rng.choice(game.free()))
            if not game.over():
                game.put("O", opponent_move(game, "minimax", rng))
        assert game.winner() != "X"


def test_the_random_opponent_follows_its_seed_and_plays_every_square() -> None:
    moves = [opponent_move(Game(), "random", random.Random(seed)) for seed in range(100)]
    assert moves == [opponent_move(Game(), "random", random.Random(seed)) for seed in range(100)]
    assert set(moves) == set(range(1, 10))
    with pytest.raises(ValueError, match="unknown"):
        opponent_move(Game(), "perfect", random.Random(0))


def test_every_finished_game_is_worth_more_than_any_illegal_one() -> None:
    illegal = [reward_of("illegal", legal) for legal in range(5)]
    assert illegal == sorted(set(illegal)) and illegal[0] == -1.0
    assert illegal[-1] < reward_of("loss", 4) < reward_of("draw", 5) < reward_of("win", 3) == 1.0


async def test_a_whole_game_is_recorded_with_its_tokens() -> None:
    player = ScriptedModel(first_free)
    trajectory = await rollout(player, Scenario(seed=4), seed=3)
    assert sum(trajectory.metrics[name] for name in ("win", "draw", "loss")) == 1.0
    assert trajectory.metrics["illegal"] == 0.0
    assert trajectory.metrics["legal_moves"] == trajectory.metrics["turns"] == len(trajectory.choices()) >= 3
    assert trajectory.messages()[1] == {"role": "user", "content": "123 456 789"}
    seen: list[int] = []  # each turn's prompt goes on exactly where the last turn's tokens ended
    for choice in trajectory.choices():
        extra = choice.model_extra or {}
        assert extra["prompt_token_ids"][: len(seen)] == seen
        seen = extra["prompt_token_ids"] + extra["token_ids"]
    assert len({request.sampling.seed for request in player.engine.requests}) == len(player.engine.requests)


@pytest.mark.parametrize("opponent", ["random", "minimax"])
async def test_the_same_scenario_meets_the_same_opponent(opponent: Any) -> None:
    for scenario in scenarios(6, first_seed=10, opponent=opponent):
        one, two = [await rollout(ScriptedModel(first_free), scenario) for _ in range(2)]
        assert one.messages() == two.messages() and one.reward == two.reward
        board = one.messages()[1]["content"]  # type: ignore[typeddict-item]
        assert ("O" in str(board)) != scenario.begins


@pytest.mark.parametrize("answer", ["hello", "0", ""])
async def test_an_answer_without_a_square_ends_the_game(answer: str) -> None:
    trajectory = await rollout(ScriptedModel(answer), Scenario(seed=0))
    assert trajectory.reward == -1.0 and trajectory.metrics["illegal"] == 1.0 and trajectory.metrics["turns"] == 1
    assert "no free square" in trajectory.logs[0]


async def test_an_occupied_square_ends_the_game_and_the_move_before_counts() -> None:
    trajectory = await rollout(ScriptedModel("5"), Scenario(seed=0, model_begins=True))
    assert trajectory.reward == pytest.approx(-0.9) and trajectory.metrics["legal_moves"] == 1


async def test_evaluate_gives_means() -> None:
    result = await evaluate(ScriptedModel(first_free), scenarios(8), desc=None)
    assert result["legal_move_rate"] == 1.0 and result["illegal"] == 0.0
    assert result["win"] + result["draw"] + result["loss"] == pytest.approx(1.0)
    assert result["reward"] == pytest.approx(result["win"] + 0.5 * result["draw"])
    with pytest.raises(ValueError, match="no games"):
        means([])


async def test_evaluate_keeps_its_games_where_a_split_is_named(tmp_path: Path) -> None:
    model = ScriptedModel(first_free, tmp_path)
    result = await evaluate(model, scenarios(3), split="val", step=2, desc=None)
    history = model.history()
    assert history["val/reward"].tolist() == [pytest.approx(result["reward"])] and history["step"].tolist() == [2]
    assert len(model.trajectories(step=2, split="val")) == 3
