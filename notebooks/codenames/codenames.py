"""Codenames for one team as a rollout: the same model gives the clues as spymaster and guesses as guesser.

Holds the rules, the checks of clues and guesses, both prompts, the reward and the rollout; the words are in
codenames_words.py. It does not train: the notebook does. What is simpler than at the table stands at Scenario; why
the prompts are what they are at PROMPT.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from codenames_words import THEMES, WORDS
from openai.types.chat.chat_completion import Choice

import artnb as art

Role = Literal["target", "bystander", "assassin"]
Result = Literal["won", "stopped", "assassin", "no_word", "bad_clue"]
Spymaster = Literal["choices", "free", "themes"]

RESULTS: tuple[Result, ...] = ("won", "stopped", "assassin", "no_word", "bad_clue")
METRICS = (*RESULTS, "found", "guesses", "first_right")
_CLUE = re.compile(r"\W*([^\W\d_]+)\W*(\d+)?\W*")

FREE_PROMPT = "You are the spymaster in Codenames. Answer with one word that fits your words."


PROMPT = "Answer with one word."
"""Of both roles where the answer is one of a list.

Chosen by measuring SmolLM2-135M-Instruct as spymaster, 40 tables, four clues to pick from, so that guessing is 0.25.
"Mass": the probability that the answer begins with one of the four. "Most likely": how often the right one has the
highest probability of them. "Knows": the same, averaged over the places in which it may stand.

                                       mass   right, sampled   right, most likely   knows
    letters, "A. vehicle", a line each   0.89             0.22                 0.25    0.33
    words, with this prompt              0.01             0.01                 0.55    0.72
    words, after 1 to 3 examples    0.44-0.56        0.07-0.14            0.26-0.31    0.25-0.33

It knows the words, but not that it shall answer with one; what it knows does not reach a letter. With letters 40 steps
of 8 x 8 games taught it nothing (reward -0.75 before, -0.7 at the end). So it answers with words, after a warm start on
`demonstration`s that teaches it the form.
"""


@dataclass
class Game:
    """Words on the table with their roles, and what was guessed so far."""

    roles: dict[str, Role]
    guessed: list[str] = field(default_factory=list)

    def hidden(self, role: Role | None = None) -> list[str]:
        """Words not guessed yet, in the order of the table; of one role, or all."""
        return [w for w, r in self.roles.items() if w not in self.guessed and role in (None, r)]

    def check_clue(self, clue: str) -> None:
        """Raises ValueError unless the clue is one word that is no hidden word, no part of one, and holds none."""
        if not clue.isalpha():
            raise ValueError(f"{clue!r} is not one word")
        for word in self.hidden():
            if clue.lower() in word.lower() or word.lower() in clue.lower():
                raise ValueError(f"the clue {clue!r} gives away {word!r}, which is on the table")

    def guess(self, word: str) -> Role:
        """Turn a word over; returns its role. Raises ValueError for a word that is not hidden, and after the end."""
        if self.over():
            raise ValueError("the game is over")
        if word not in self.hidden():
            raise ValueError(f"{word!r} is not on the table or was guessed; left: {', '.join(self.hidden())}")
        self.guessed.append(word)
        return self.roles[word]

    def found(self) -> int:
        """Targets guessed so far."""
        return sum(self.roles[word] == "target" for word in self.guessed)

    def won(self) -> bool:
        return not self.hidden("target")

    def over(self) -> bool:
        return self.won() or any(self.roles[word] == "assassin" for word in self.guessed)


def parse_clue(answer: str, most: int) -> tuple[str, int] | None:
    """The clue and its number, from an answer that is one word and maybe a number; None for any other answer.

    A number that is missing or not in 1 to `most`, the targets left, becomes `most`.
    """
    match = _CLUE.fullmatch(answer.strip())
    if match is None:
        return None
    number = int(match[2]) if match[2] is not None else most
    return match[1], number if 1 <= number <= most else most


def parse_choice(answer: str, choices: Sequence[str]) -> str | None:
    """The choice that stands first in the answer, in any case; None where there is none.

    Words count as a whole: "teapot" holds neither "tea" nor "pot".
    """
    known = {choice.lower(): choice for choice in choices}
    return next((known[part] for part in re.findall(r"[\w']+", answer.lower()) if part in known), None)


def question(choices: Sequence[str], asked: str) -> str:
    """ "tea, lion or piano: which is animal?" """
    return f"{', '.join(choices[:-1])} or {choices[-1]}: {asked}?"


def ask_clue(choices: Sequence[str], mine: Sequence[str]) -> str:
    """What the spymaster is asked."""
    return question(choices, f"what are {', '.join(mine)}")


def ask_guess(table: Sequence[str], clue: str) -> str:
    """What the guesser is asked first."""
    return question(table, f"which is {clue}")


def ask_again(clue: str) -> str:
    """What the guesser is asked after a right guess."""
    return f"Yes. Which other is {clue}?"


def reward_of(result: Result, found: float) -> float:
    """`found`, the share of targets found (0 to 1), less 0.5 if it ended at an assassin or without a guess that is a
    word of the table; -1 if a clue broke the rules. So from -1 to 1, and winning is 1.
    """
    return -1.0 if result == "bad_clue" else found - 0.5 * (result in ("assassin", "no_word"))


@dataclass(frozen=True)
class Scenario:
    """What the rollouts of a group share: a table of words with their roles, which follow from `seed`.

    They do not share the order in which words and clues are listed: in a common one a single place would be right for
    the whole group, and the shortest way to a better reward would be to say what stands there.

    Simpler than at the table, each on purpose and most of them to be changed here:

    - there is no other team; a wrong guess ends the clue's guesses, an assassin ends the game;
    - `words` 6, of which `targets` 2 and `assassins` 1 (at the table: 25, 9 and 1), and `clues` 1;
    - `themed`: the targets share a theme and no other word is of it, so that a clue of one word can fit them all;
    - `spymaster` "choices": the model picks the clue from `choices` themes, and only the targets' own is accepted;
      "free": it says a clue of its own, as at the table; "themes": plain Python says the theme, the model only guesses;
    - at most as many guesses as the clue's number (at the table: one more); only in "free" the spymaster says it.
    """

    seed: int
    words: int = 6
    targets: int = 2
    assassins: int = 1
    clues: int = 1
    themed: bool = True
    spymaster: Spymaster = "choices"
    choices: int = 4

    def __post_init__(self) -> None:
        if not (self.targets >= 1 and self.assassins >= 0 and self.targets + self.assassins <= self.words):
            raise ValueError(f"{self.words} words cannot hold {self.targets} targets and {self.assassins} assassins")
        if self.themed and (self.targets > 10 or self.words - self.targets > len(THEMES) - 1):
            raise ValueError(f"themed: at most 10 targets and {len(THEMES) - 1} other words")
        if not 2 <= self.words <= len(WORDS) or self.clues < 1:
            raise ValueError(f"words={self.words} must be 2 to {len(WORDS)}, clues={self.clues} at least 1")
        if self.spymaster not in ("choices", "free", "themes") or not (self.themed or self.spymaster == "free"):
            raise ValueError(f"spymaster={self.spymaster!r} must be 'free', or 'choices' or 'themes' with themed=True")
        if not 2 <= self.choices <= len(THEMES):
            raise ValueError(f"choices={self.choices} must be 2 to {len(THEMES)}")

    def start(self, order: int = 0) -> tuple[Game, str | None]:
        """The game, and the targets' theme if they have one. `order` is a seed of the order of the words."""
        rng = random.Random(self.seed)
        theme: str | None = None
        if self.themed:
            theme, *others = rng.sample(list(THEMES), 1 + self.words - self.targets)
            chosen = [*rng.sample(THEMES[theme], self.targets), *(rng.choice(THEMES[other]) for other in others)]
        else:
            chosen = rng.sample(WORDS, self.words)
        ends = self.targets, self.targets + self.assassins  # chosen words: targets, then assassins, then bystanders
        roles: list[Role] = [
            "target" if i < ends[0] else "assassin" if i < ends[1] else "bystander" for i in range(self.words)
        ]
        table = list(zip(chosen, roles, strict=True))
        random.Random(f"table {self.seed} {order}").shuffle(table)
        return Game(dict(table)), theme

    def clue_choices(self, theme: str, turn: int = 0, order: int = 0) -> list[str]:
        """The themes to pick the clue of `turn` from, `theme` among them. `order` as for `start`."""
        others = [other for other in THEMES if other != theme]
        chosen = [theme, *random.Random(self.seed * 1009 + turn).sample(others, self.choices - 1)]
        random.Random(f"clues {self.seed} {turn} {order}").shuffle(chosen)
        return chosen


def scenarios(count: int, first_seed: int = 0, **options: Any) -> list[Scenario]:
    """`count` scenarios with seeds from `first_seed` on; `options` are Scenario's."""
    return [Scenario(seed=first_seed + i, **options) for i in range(count)]


class Player:
    """One conversation of the model: each question is added to it, and each answer as it was sampled."""

    def __init__(self, model: art.Model, system: str, seed: int | None, step: int | None, temperature: float) -> None:
        self.model = model
        self.items: list[Any] = [{"role": "system", "content": system}]
        self.seed = seed
        self.step = step
        self.temperature = temperature

    async def ask(self, question: str, max_tokens: int) -> str:
        self.items.append({"role": "user", "content": question})
        options: dict[str, Any] = {} if self.seed is None else {"seed": self.seed + len(self.items)}
        completion = await self.model.openai_client().chat.completions.create(
            model=self.model.get_inference_name(step=self.step),
            messages=art.History(messages_and_choices=self.items).messages(),
            max_tokens=max_tokens,
            temperature=self.temperature,
            **options,
        )
        choice: Choice = completion.choices[0]
        self.items.append(choice)
        return choice.message.content or ""


async def rollout(
    model: art.Model,
    scenario: Scenario,
    *,
    seed: int | None = None,
    max_tokens: int = 6,
    temperature: float = 1.0,
    step: int | None = None,
) -> art.Trajectory:
    """Play one game and return it, scored: the guesser's conversation, the spymaster's as additional history.

    A game that ends at its first clue has the spymaster's only. `seed` makes the sampling repeatable, and the order in
    which words and clues are listed; games of one group need different ones. `max_tokens` 6 is any word of the game and
    the end of the turn. `step` asks an older checkpoint.
    """
    order = random.getrandbits(32) if seed is None else seed
    game, theme = scenario.start(order)
    table = list(game.roles)
    base = None if seed is None else seed * 1024
    free = scenario.spymaster == "free"
    spymaster = Player(model, FREE_PROMPT if free else PROMPT, base, step, temperature)
    guesser = Player(model, PROMPT, None if base is None else base + 512, step, temperature)
    logs: list[str] = []
    guesses = 0
    first_right = False
    result: Result = "stopped"
    for turn in range(scenario.clues):
        try:
            choices = [] if theme is None else scenario.clue_choices(theme, turn, order)
            clue, number = await _clue(spymaster, scenario, game, theme, choices, max_tokens)
        except ValueError as error:
            result = "bad_clue"
            logs.append(f"clue {turn + 1}: {error}")
            break
        logs.append(f"clue {turn + 1}: {clue} {number} for {', '.join(game.hidden('target'))}")
        asked = ask_guess(table, clue)
        for _ in range(number):
            answer = await guesser.ask(asked, max_tokens)
            word = parse_choice(answer, table)
            guesses += 1
            if word not in game.hidden():
                result = "no_word"
                logs.append(f"guess {guesses}: {answer!r} is none of {', '.join(game.hidden())}")
                break
            role = game.guess(word)
            first_right = first_right or (guesses == 1 and role == "target")
            logs.append(f"guess {guesses}: {word} is a {role}")
            if role != "target" or game.over():
                break
            asked = ask_again(clue)
        if result == "no_word" or game.over():
            break
    if game.over():
        result = "won" if game.won() else "assassin"
    both = guesses > 0 and len(spymaster.items) > 1
    trajectory = art.Trajectory(
        messages_and_choices=guesser.items if guesses else spymaster.items,
        additional_histories=[art.History(messages_and_choices=spymaster.items)] if both else [],
        metadata={"seed": scenario.seed, "spymaster": scenario.spymaster, "words": scenario.words},
        reward=reward_of(result, game.found() / scenario.targets),
        logs=[*logs, f"{result}: {game.found()} of {scenario.targets} found"],
    )
    trajectory.metrics |= {name: float(result == name) for name in RESULTS}
    trajectory.metrics |= {"found": game.found(), "guesses": guesses, "first_right": float(first_right)}
    return trajectory.finish()


async def _clue(
    spymaster: Player, scenario: Scenario, game: Game, theme: str | None, choices: Sequence[str], max_tokens: int
) -> tuple[str, int]:
    """The spymaster's clue and number. Raises ValueError for a clue that the rules, or the scenario, do not accept."""
    mine = game.hidden("target")
    if scenario.spymaster == "free":
        others = [word for word in game.hidden() if word not in mine]
        answer = await spymaster.ask(f"Your words: {', '.join(mine)}. Not: {', '.join(others)}.", max_tokens)
        said = parse_clue(answer, len(mine))
        if said is None:
            raise ValueError(f"{answer!r} is not one word")
        game.check_clue(said[0])
        return said
    assert theme is not None  # checked by Scenario
    if scenario.spymaster == "choices":
        answer = await spymaster.ask(ask_clue(choices, mine), max_tokens)
        picked = parse_choice(answer, choices)
        if picked != theme:
            raise ValueError(f"{answer!r} ({picked or 'no choice'}) does not fit {', '.join(mine)}")
    return theme, len(mine)


def demonstration(scenario: Scenario) -> art.Trajectory:
    """A game that is won, as plain Python plays it: the clue is the targets' theme, the guesses are the targets."""
    game, theme = scenario.start(order=scenario.seed)
    if theme is None:
        raise ValueError("without a theme there is no clue that surely fits; demonstrations need themed=True")
    mine = game.hidden("target")

    roles = ("user", "assistant")

    def conversation(*turns: tuple[str, str]) -> list[Any]:
        said = [{"role": role, "content": text} for turn in turns for role, text in zip(roles, turn, strict=True)]
        return [{"role": "system", "content": PROMPT}, *said]

    guesses = [(ask_again(theme) if i else ask_guess([*game.roles], theme), word) for i, word in enumerate(mine)]
    clue = conversation((ask_clue(scenario.clue_choices(theme, order=scenario.seed), mine), theme))
    return art.Trajectory(
        messages_and_choices=conversation(*guesses),
        additional_histories=[art.History(messages_and_choices=clue)] if scenario.spymaster == "choices" else [],
        reward=1.0,
    )


def means(trajectories: Iterable[art.Trajectory]) -> dict[str, float]:
    """Mean reward and metrics."""
    played = list(trajectories)
    if not played:
        raise ValueError("there are no games to average")
    rows = [{"reward": game.reward or 0.0} | {name: float(game.metrics[name]) for name in METRICS} for game in played]
    return {name: sum(row[name] for row in rows) / len(rows) for name in ("reward", *METRICS)}


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
