"""2048 as a rollout: the model slides the tiles a few times from a seeded position and is paid for the points.

Holds the rules, the prompt, the reading of answers, the reward and the rollout. It does not train: the notebook does.
Why the prompt is what it is stands at SYSTEM_PROMPT.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import artnb as art

Direction = Literal["left", "right", "up", "down"]

DIRECTIONS: tuple[Direction, ...] = ("left", "right", "up", "down")
CELLS = "0123456789ABCDEFGH"  # CELLS[k] is the tile 2 ** k; on 4 × 4 squares 2 ** 17 is the largest there can be
_WORD = re.compile(r"[a-z']+")  # with the apostrophe: the d of "I'd" is no answer
METRICS = ("score", "largest_tile", "moves", "blocked", "no_move", "turns")
HALF_SCORE = 48
"""Points that give half of the reward for points: a little more than six random moves of a scenario make."""

SYSTEM_PROMPT = "You play 2048. Multiple choice. Answer with one letter: L, D, R or U."
"""The user's turn is "LRUD 0120 0300 1000 0000": the four letters and the board, 23 tokens.

Chosen by measuring SmolLM2-135M-Instruct at temperature 1. First the probability that its first token is a move, on
random boards; the two figures are letters or words, and digits, where 1 to 4 stood for the moves:

    system prompt; user turn                                        letter or word  digit
    "... Answer with one word: left, right, up or down."; the board           0.02   0.08
    "... Pick one number. Answer with the number only."; the board,
        "Pick one number."                                                    0.00   0.35  (0.26 of it the digit 1)
    "... Answer with one letter: L, R, U or D."; the board                    0.21   0.07
    the same; "LRUD" and the board                                            0.38   0.02
    "Multiple choice. Answer with one letter: L, R, U or D."; the board       0.38   0.02

Then 64 rollouts each (8 groups of 8) with "LRUD" and the board:

    "You play 2048. Multiple choice: answer with one letter, L, R, U or D."
        reward -0.38, spread in groups 0.19, answers that are moves 0.39, most of them D
    "Multiple choice. Answer with one letter: L, R, U or D."
        reward -0.40, spread in groups 0.16, answers that are moves 0.35, most of them D
    "2048. Multiple choice. Answer with one letter: L, R, U or D."
        reward -0.36, spread in groups 0.20, answers that are moves 0.43, more D than L or R
    "You play 2048. Multiple choice. Answer with one letter: L, D, R or U." (this one)
        reward -0.34, spread in groups 0.23, answers that are moves 0.45, and R, D, U and L alike

With digits four answers of five are "1", and a move that is always the same soon moves no tile. Legal moves are not
listed: "the first one listed" would be a way to be right without a look at the board, as in tic-tac-toe.
"""


def slide(line: list[int]) -> tuple[list[int], int]:
    """Slide one line to its start; returns it and the points.

    Equal neighbours become one tile of twice the value, nearest to the start first, and a tile that was just made does
    not merge again: [2, 2, 4, 0] becomes [4, 4, 0, 0].
    """
    tiles = [tile for tile in line if tile]
    merged: list[int] = []
    points = at = 0
    while at < len(tiles):
        if at + 1 < len(tiles) and tiles[at] == tiles[at + 1]:
            merged.append(2 * tiles[at])
            points += 2 * tiles[at]
            at += 2
        else:
            merged.append(tiles[at])
            at += 1
    return merged + [0] * (len(line) - len(merged)), points


@dataclass
class Game:
    """A square board, row by row, and the rules. 0 is an empty square."""

    rows: list[list[int]] = field(default_factory=lambda: [[0] * 4 for _ in range(4)])
    score: int = 0

    def after(self, direction: Direction) -> tuple[list[list[int]], int]:
        """The board as it would be after sliding, without a new tile, and the points."""
        if direction not in DIRECTIONS:
            raise ValueError(f"direction={direction!r} is unknown; known: {', '.join(DIRECTIONS)}")
        lines = self.rows if direction in ("left", "right") else _turned(self.rows)
        backwards = direction in ("right", "down")
        slid = [slide(line[::-1] if backwards else line) for line in lines]
        moved = [line[::-1] if backwards else line for line, _ in slid]
        return (moved if direction in ("left", "right") else _turned(moved)), sum(points for _, points in slid)

    def legal(self) -> list[Direction]:
        """Directions in which at least one tile moves or merges."""
        return [direction for direction in DIRECTIONS if self.after(direction)[0] != self.rows]

    def move(self, direction: Direction, rng: random.Random) -> int:
        """Slide, then a new tile appears; returns the points. Raises ValueError if no tile would move."""
        rows, points = self.after(direction)
        if rows == self.rows:
            raise ValueError(f"{direction} moves no tile; legal: {', '.join(self.legal()) or 'none, the game is over'}")
        self.rows = rows
        self.score += points
        self.spawn(rng)
        return points

    def spawn(self, rng: random.Random) -> None:
        """A 2 (9 of 10) or a 4 on a free square, each as likely. Raises ValueError on a full board."""
        free = [(y, x) for y, row in enumerate(self.rows) for x, tile in enumerate(row) if not tile]
        if not free:
            raise ValueError("the board is full")
        y, x = rng.choice(free)
        self.rows[y][x] = 2 if rng.random() < 0.9 else 4

    def over(self) -> bool:
        return not self.legal()

    def largest(self) -> int:
        return max(max(row) for row in self.rows)

    def board(self) -> str:
        """Rows apart by a space, a character a square: "0120 0300 1000 0000" has a 2 twice, a 4 and an 8."""
        return " ".join("".join(CELLS[tile.bit_length() - 1] if tile else "0" for tile in row) for row in self.rows)


def _turned(rows: list[list[int]]) -> list[list[int]]:
    return [list(column) for column in zip(*rows, strict=True)]


def parse_move(answer: str) -> Direction | None:
    """The first letter or word of the answer that is a direction: L, R, U, D or left, right, up, down, in any case.

    None where there is none. A small model does not answer with a bare letter at first: if only that counted it would
    never earn anything.
    """
    for word in _WORD.findall(answer.lower()):
        for direction in DIRECTIONS:
            if word in (direction, direction[0]):
                return direction
    return None


def reward_of(points: int, lost_turns: int, turns: int) -> float:
    """points / (points + 48), less half of the share of turns in which no tile moved: from -0.5 up to, never at, 1.

    Turns are lost by a direction in which no tile moves, and all that are left by an answer without a direction. That
    share tells better from worse in the first steps, in which hardly an answer is a move; the points do so later.
    """
    return points / (points + HALF_SCORE) - 0.5 * lost_turns / turns


@dataclass(frozen=True)
class Scenario:
    """What the rollouts of a group share: the position, and where new tiles appear as long as the moves are the same.

    The position is what `warm_up` random moves make of an empty board. `turns` is how often the model is asked.
    """

    seed: int
    turns: int = 6
    warm_up: int = 20

    def __post_init__(self) -> None:
        if self.turns < 1 or self.warm_up < 0:
            raise ValueError(f"turns={self.turns} must be 1 or more, warm_up={self.warm_up} 0 or more")

    def start(self) -> tuple[Game, random.Random]:
        """The position with score 0, and the generator that its new tiles come from."""
        rng = random.Random(self.seed)
        game = new_game(rng)
        for _ in range(self.warm_up):
            if game.over():
                game = new_game(rng)
            game.move(rng.choice(game.legal()), rng)
        if game.over():
            game = new_game(rng)
        game.score = 0
        return game, rng


def new_game(rng: random.Random) -> Game:
    """An empty board with two tiles."""
    game = Game()
    game.spawn(rng)
    game.spawn(rng)
    return game


def scenarios(count: int, first_seed: int = 0, *, turns: int = 6, warm_up: int = 20) -> list[Scenario]:
    """`count` scenarios with seeds from `first_seed` on."""
    return [Scenario(seed=first_seed + i, turns=turns, warm_up=warm_up) for i in range(count)]


async def rollout(
    model: art.Model,
    scenario: Scenario,
    *,
    seed: int | None = None,
    max_tokens: int = 2,
    temperature: float = 1.0,
    step: int | None = None,
) -> art.Trajectory:
    """Play the scenario's turns and return them, scored.

    `seed` makes the sampling repeatable; rollouts of one group need different ones. `max_tokens` 2 is a letter and the
    end of the turn. `step` asks an older checkpoint.
    """
    client = model.openai_client()
    game, rng = scenario.start()
    trajectory = art.Trajectory(
        messages_and_choices=[{"role": "system", "content": SYSTEM_PROMPT}],
        metadata={"seed": scenario.seed, "turns": scenario.turns, "warm_up": scenario.warm_up},
    )
    turns = moves = blocked = no_move = 0
    while turns < scenario.turns and not no_move and not game.over():
        trajectory.messages_and_choices.append({"role": "user", "content": f"LRUD {game.board()}"})
        options: dict[str, Any] = {} if seed is None else {"seed": seed * 256 + turns}
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
        direction = parse_move(choice.message.content or "")
        if direction is None:
            no_move = 1
            trajectory.log(f"turn {turns}: {choice.message.content!r} is no direction")
        elif direction in game.legal():
            trajectory.log(f"turn {turns}: {direction} made {game.move(direction, rng)} points")
            moves += 1
        else:
            blocked += 1
            trajectory.log(f"turn {turns}: {direction} moves no tile of {game.board()}")
    lost = blocked + (scenario.turns - turns + 1 if no_move else 0)  # a game that is over loses no turns
    trajectory.reward = reward_of(game.score, lost, scenario.turns)
    values = (game.score, game.largest(), moves, blocked, no_move, turns)
    trajectory.metrics |= dict(zip(METRICS, values, strict=True))
    return trajectory.finish()


def means(trajectories: Iterable[art.Trajectory]) -> dict[str, float]:
    """Mean reward and metrics, and `legal_move_rate`: moves as a share of all answers."""
    played = list(trajectories)
    if not played:
        raise ValueError("there are no rollouts to average")
    rows = [{"reward": one.reward or 0.0} | {name: float(one.metrics[name]) for name in METRICS} for one in played]
    mean = {name: sum(row[name] for row in rows) / len(rows) for name in ("reward", *METRICS)}
    return mean | {"legal_move_rate": mean["moves"] / mean["turns"]}


async def evaluate(
    model: art.Model,
    games: Iterable[Scenario],
    *,
    seed: int = 0,
    step: int | None = None,
    split: str | None = None,
    desc: str | None = "evaluate",
) -> dict[str, float]:
    """Play each scenario once and return `means` over them.

    `step` plays checkpoint `step` instead of the newest. With `split` rollouts and means are kept in the model's
    history under that name. Use seeds that training does not use:

        await evaluate(model, scenarios(64, first_seed=1_000_000), split="val")
    """
    played = await art.gather_trajectories(
        (rollout(model, scenario, seed=seed + 1000 * i, step=step) for i, scenario in enumerate(games)), pbar_desc=desc
    )
    result = means(played)
    if split is not None:
        await model.log(played, split=split, metrics=result, step=step)
    return result


def plain_player(scenario: Scenario, player: Literal["random", "greedy"], seed: int = 0) -> Game:
    """The game after the scenario's turns by a player without a model: any legal move, or the one with most points."""
    game, rng = scenario.start()
    choose = random.Random(seed * 1_000_003 + scenario.seed)
    for _ in range(scenario.turns):
        if game.over():
            break
        legal = game.legal()
        best = max(game.after(direction)[1] for direction in legal)
        good = [direction for direction in legal if player == "random" or game.after(direction)[1] == best]
        game.move(choose.choice(good), rng)
    return game
