"""Tic-tac-toe as a rollout: the model is X and talks, the opponent is O and is plain Python.

Holds the rules, two opponents, the prompt, the reading of answers, the reward and the rollout. It does
not train: the notebook and `artnb quickstart` do. Why the prompt is what it is stands at SYSTEM_PROMPT.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

import artnb as art

Mark = Literal["X", "O"]
Result = Literal["win", "draw", "loss", "illegal"]
Opponent = Literal["random", "minimax"]

RESULTS: tuple[Result, ...] = ("win", "draw", "loss", "illegal")
METRICS = (*RESULTS, "legal_moves", "turns")
LINES = ((1, 2, 3), (4, 5, 6), (7, 8, 9), (1, 4, 7), (2, 5, 8), (3, 6, 9), (1, 5, 9), (3, 5, 7))

SYSTEM_PROMPT = "You play X in tic-tac-toe. Pick one number from the board. Answer with the number only."
"""The user's turn is the board alone, "123 4O6 789": 11 tokens say what is free, what is taken and by whom.

Chosen by measuring SmolLM2-135M-Instruct at temperature 1 with two tokens an answer, over 64 to 96 games; "after" is
256 held-out games after 16 steps of 6 groups of 8 (LoRA r 16, learning rate 5e-4 or 6e-4; the board: mean of 3 seeds):

    user turn                          digit first  legal moves  won    tokens a game   after: reward   won
    the board (this one)                      0.45         0.41  0.03              18           +0.70  0.69
    "O took 5. Pick one number."              0.50         0.35  0.05              14           +0.23  0.45
    the free squares: "1 2 3 4 6 7 8 9"       0.62         0.58  0.14              24           +0.56  0.54
    the board, "Pick one number."             0.65         0.43  0.06              23           +0.58  0.68

A list of free squares gives the most reward at first. But "the first number of the list" is always legal, and the
model finds that within three steps: all games of a group are then the same, every group has equal rewards, and it
never learns to win: always taking the first free square wins 0.54 of the games. The board has no such shortcut.
"""


@dataclass
class Game:
    """A board and the rules. Squares are 1 to 9, row by row."""

    squares: dict[int, Mark] = field(default_factory=dict)

    def free(self) -> list[int]:
        return [square for square in range(1, 10) if square not in self.squares]

    def put(self, mark: Mark, square: int) -> None:
        """Raises ValueError for a square that is taken or not on the board, and after the end."""
        if square not in self.free():
            raise ValueError(f"square {square} is not free; free: {self.free()}")
        if self.over():
            raise ValueError("the game is over")
        self.squares[square] = mark

    def winner(self) -> Mark | None:
        for line in LINES:
            marks = {self.squares.get(square) for square in line}
            if len(marks) == 1 and (mark := marks.pop()) is not None:
                return mark
        return None

    def over(self) -> bool:
        return self.winner() is not None or not self.free()

    def board(self) -> str:
        """Rows apart by a space; a free square shows its number: "123 4O6 789"."""
        cells = [self.squares.get(square, str(square)) for square in range(1, 10)]
        return " ".join("".join(cells[row : row + 3]) for row in (0, 3, 6))


def opponent_move(game: Game, opponent: Opponent, rng: random.Random) -> int:
    """O's next square. "minimax" never loses; among equally good moves `rng` chooses."""
    if opponent == "random":
        return rng.choice(game.free())
    if opponent != "minimax":
        raise ValueError(f"opponent={opponent!r} is unknown; known: 'random', 'minimax'")
    cells = "".join(game.squares.get(square, ".") for square in range(1, 10))
    values = {square: _value(_with(cells, "O", square), "X") for square in game.free()}
    return rng.choice([square for square, value in values.items() if value == max(values.values())])


def _with(cells: str, mark: str, square: int) -> str:
    return cells[: square - 1] + mark + cells[square:]


@cache
def _value(cells: str, to_move: Mark) -> int:
    """What O gets under best play of both from here: 1 win, 0 draw, -1 loss."""
    for a, b, c in LINES:
        if cells[a - 1] != "." and cells[a - 1] == cells[b - 1] == cells[c - 1]:
            return 1 if cells[a - 1] == "O" else -1
    free = [square for square in range(1, 10) if cells[square - 1] == "."]
    if not free:
        return 0
    following = [_value(_with(cells, to_move, square), "O" if to_move == "X" else "X") for square in free]
    return max(following) if to_move == "O" else min(following)


def parse_move(answer: str) -> int | None:
    """The first digit of the answer, 0 included; None where there is no digit.

    A small model does not answer with a bare digit at first: if only that counted it would never earn anything.
    """
    return next((int(char) for char in answer if char in "0123456789"), None)


def reward_of(result: Result, legal_moves: int) -> float:
    """Win 1, draw 0.5, loss 0; ended by an illegal answer: -1 + 0.1 for each legal move before (at most -0.6).

    Any finished game is worth more than any illegal one, and among illegal ones the longer is better: so the groups of
    the first steps, in which hardly a game is finished, still tell better from worse.
    """
    return {"win": 1.0, "draw": 0.5, "loss": 0.0, "illegal": -1.0 + 0.1 * legal_moves}[result]


@dataclass(frozen=True)
class Scenario:
    """What the games of a group share. The opponent's choices follow from `seed`, not from who plays it."""

    seed: int
    opponent: Opponent = "random"
    model_begins: bool | None = None  # None: it begins where the seed is even

    @property
    def begins(self) -> bool:
        return self.seed % 2 == 0 if self.model_begins is None else self.model_begins


def scenarios(count: int, first_seed: int = 0, opponent: Opponent = "random") -> list[Scenario]:
    """`count` scenarios with seeds from `first_seed` on; the two sides begin in turn."""
    return [Scenario(seed=first_seed + i, opponent=opponent) for i in range(count)]


async def rollout(
    model: art.Model,
    scenario: Scenario,
    *,
    seed: int | None = None,
    max_tokens: int = 2,
    temperature: float = 1.0,
    step: int | None = None,
) -> art.Trajectory:
    """Play one game and return it, scored.

    `seed` makes the sampling repeatable; games of one group need different ones. `max_tokens` 2 is a digit and the
    end of the turn. `step` asks an older checkpoint.
    """
    client = model.openai_client()
    rng = random.Random(scenario.seed)
    game = Game()
    trajectory = art.Trajectory(
        messages_and_choices=[{"role": "system", "content": SYSTEM_PROMPT}],
        metadata={"seed": scenario.seed, "opponent": scenario.opponent, "model_begins": scenario.begins},
    )
    legal_moves = turns = 0
    if not scenario.begins:
        game.put("O", opponent_move(game, scenario.opponent, rng))
    result: Result | None = None
    while result is None:
        trajectory.messages_and_choices.append({"role": "user", "content": game.board()})
        options: dict[str, Any] = {} if seed is None else {"seed": seed * 16 + turns}  # a game has at most five turns
        completion = await client.chat.completions.create(
            model=model.get_inference_name(step=step),
            messages=trajectory.messages(),
            max_tokens=max_tokens,
            temperature=temperature,
            **options,
        )
        choice = completion.choices[0]
        trajectory.messages_and_choices.append(choice)
        turns += 1
        move = parse_move(choice.message.content or "")
        if move is None or move not in game.free():
            result = "illegal"
            trajectory.log(f"turn {turns}: {choice.message.content!r} is no free square of {game.board()}")
            break
        game.put("X", move)
        legal_moves += 1
        if not game.over():
            game.put("O", opponent_move(game, scenario.opponent, rng))
        if game.over():
            winner = game.winner()
            result = "draw" if winner is None else "win" if winner == "X" else "loss"
    trajectory.reward = reward_of(result, legal_moves)
    trajectory.metrics |= {name: float(result == name) for name in RESULTS}
    trajectory.metrics |= {"legal_moves": legal_moves, "turns": turns}
    trajectory.log(f"{result} on {game.board()}")
    return trajectory.finish()


def means(trajectories: Iterable[art.Trajectory]) -> dict[str, float]:
    """Mean reward and metrics, and `legal_move_rate`: legal moves as a share of all answers."""
    games = list(trajectories)
    if not games:
        raise ValueError("there are no games to average")
    rows = [{"reward": game.reward or 0.0} | {name: float(game.metrics[name]) for name in METRICS} for game in games]
    mean = {name: sum(row[name] for row in rows) / len(rows) for name in ("reward", *METRICS)}
    return mean | {"legal_move_rate": mean["legal_moves"] / mean["turns"]}


async def evaluate(
    model: art.Model,
    games: Iterable[Scenario],
    *,
    seed: int = 0,
    step: int | None = None,
    split: str | None = None,
    desc: str | None = "evaluate",
) -> dict[str, float]:
    """Play each scenario once and return `means` over the games.

    `step` plays checkpoint `step` instead of the newest. With `split` games and means are kept in the model's history
    under that name. Use seeds that training does not use:

        await evaluate(model, scenarios(64, first_seed=1_000_000), split="val")
    """
    played = await art.gather_trajectories(
        (rollout(model, scenario, seed=seed + 1000 * i, step=step) for i, scenario in enumerate(games)), pbar_desc=desc
    )
    result = means(played)
    if split is not None:
        await model.log(played, split=split, metrics=result, step=step)
    return result
