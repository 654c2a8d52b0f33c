"""Words, rules, the reading of clues and guesses, the reward, and whole games through the real endpoint."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from artnb.config import TrainConfig
from artnb.training.rows import rows_from_groups
from artnb.trajectories import Trajectory, TrajectoryGroup

sys.path.insert(0, str(Path(__file__).parents[1]))

from codenames import (
    FREE_PROMPT,
    PROMPT,
    RESULTS,
    Game,
    Scenario,
    demonstration,
    evaluate,
    means,
    parse_choice,
    parse_clue,
    question,
    reward_of,
    rollout,
    scenarios,
)
from codenames_words import THEMES, WORDS
from scripted_model import ScriptedModel

Answer = Callable[[str], str] | str
"""What is answered, or how it follows from the conversation."""


def of_role(scenario: Scenario, role: Any) -> Callable[[str], str]:
    """Guesses the next word of a role that was not said before in the conversation."""
    words = scenario.start()[0].hidden(role)
    return lambda text: next(word for word in words if f"assistant\n{word}" not in text)


def right(text: str) -> str:
    """The clue that fits the words asked about."""
    word = text.split("what are ")[1].split(",")[0]
    return next(theme for theme, words in THEMES.items() if word in words)


def wrong(text: str) -> str:
    """Another clue of those to pick from."""
    return next(
        theme for theme in THEMES if theme in text.rsplit("user\n", 1)[1].split(":")[0] and theme != right(text)
    )


def both(clue: Answer, guess: Answer, base_path: Path | str = ".art") -> ScriptedModel:
    """A model that plays both roles."""

    def answer(request: Any) -> str:
        text = request.prompt_text
        spymaster = FREE_PROMPT in text or "what are" in text
        said = clue if spymaster else guess
        return said if isinstance(said, str) else said(text)

    return ScriptedModel(answer, base_path)


async def play(scenario: Scenario, clue: Answer, guess: Answer, **options: Any) -> Trajectory:
    # The tokens of the scripted model are bytes.
    return await rollout(both(clue, guess), scenario, **({"max_tokens": 20} | options))


def test_there_are_enough_words_and_each_stands_once() -> None:
    assert len(WORDS) == len({word.lower() for word in WORDS}) == 240 >= 200
    assert all(word.isalpha() for word in WORDS) and all(len(words) == 10 for words in THEMES.values())
    assert not set(THEMES) & {word.lower() for word in WORDS}


def test_a_theme_is_a_legal_clue_for_its_words_on_almost_every_table() -> None:
    bad = 0
    for scenario in scenarios(500):
        game, theme = scenario.start()
        try:
            game.check_clue(str(theme))
        except ValueError:
            bad += 1
    assert bad <= 5


@pytest.mark.parametrize("clue", ["lion", "LION", "lions", "lio", "piano", "big cat", "cat2", "", "🎉"])
def test_clues_that_break_the_rules(clue: str) -> None:
    game = Game({"lion": "target", "piano": "bystander"})
    with pytest.raises(ValueError, match=r"gives away|not one word"):
        game.check_clue(clue)


def test_a_word_that_was_guessed_may_be_part_of_a_clue() -> None:
    game = Game({"lion": "target", "tiger": "target", "piano": "bystander"})
    assert game.guess("lion") == "target" and game.hidden() == ["tiger", "piano"] and game.found() == 1
    game.check_clue("lioness")
    game.check_clue("고양이")


def test_guesses_turn_words_over_until_the_end() -> None:
    game = Game({"lion": "target", "rain": "bystander", "bank": "assassin", "tiger": "target"})
    assert game.guess("rain") == "bystander" and not game.over()
    for word in ("rain", "Lion", "ocean"):
        with pytest.raises(ValueError, match="not on the table"):
            game.guess(word)
    assert game.guess("bank") == "assassin" and game.over() and not game.won()
    with pytest.raises(ValueError, match="over"):
        game.guess("lion")
    won = Game({"lion": "target", "rain": "bystander"})
    won.guess("lion")
    assert won.over() and won.won()


@pytest.mark.parametrize(
    ("answer", "clue"),
    [
        ("Animals", ("Animals", 2)),
        ("animals, 1", ("animals", 1)),
        (' "Cats" 2.\n', ("Cats", 2)),
        ("cats 7", ("cats", 2)),
        ("cats 0", ("cats", 2)),
        ("고양이", ("고양이", 2)),
        ("The clue", None),
        ("cats 1 2", None),
        ("2", None),
        ("", None),
        ("🎉", None),
        ("a_b", None),
    ],
)
def test_a_clue_is_one_word_and_maybe_a_number(answer: str, clue: tuple[str, int] | None) -> None:
    assert parse_clue(answer, 2) == clue


@pytest.mark.parametrize(
    ("answer", "word"),
    [
        ("lion", "lion"),
        ("FRANCE.", "France"),
        ("It is tea, not lion", "tea"),
        ("lions", None),
        ("teapot", None),
        ("A", None),
        ("", None),
        ("🎉 tea", "tea"),
    ],
)
def test_the_first_word_of_the_list_is_the_choice(answer: str, word: str | None) -> None:
    assert parse_choice(answer, ["tea", "lion", "France"]) == word


def test_a_question_lists_the_choices() -> None:
    assert question(["tea", "lion", "France"], "which is animal") == "tea, lion or France: which is animal?"


def test_the_reward_is_bounded_and_in_order() -> None:
    rewards = [reward_of(result, found) for result in RESULTS for found in (0.0, 0.5, 1.0)]
    assert min(rewards) == -1.0 and max(rewards) == reward_of("won", 1.0) == 1.0
    assert reward_of("bad_clue", 0.5) < reward_of("no_word", 0.0) < reward_of("stopped", 0.0)
    assert reward_of("no_word", 0.5) < reward_of("stopped", 0.5) < reward_of("won", 1.0)
    assert reward_of("assassin", 0.5) == 0.0


@pytest.mark.parametrize(
    "options", [{}, {"words": 25, "targets": 9, "themed": False, "spymaster": "free"}, {"words": 9, "targets": 3}]
)
def test_a_table_follows_from_its_seed(options: dict[str, Any]) -> None:
    tables = set()
    for scenario in scenarios(20, first_seed=5, **options):
        game, theme = scenario.start()
        assert list(game.roles) == list(scenario.start()[0].roles) and len(game.roles) == scenario.words
        assert game == scenario.start(order=1)[0], "the same words and roles"
        assert len(game.hidden("target")) == scenario.targets and len(game.hidden("assassin")) == 1
        if scenario.themed:
            assert {word for word in game.roles if word in THEMES[str(theme)]} == set(game.hidden("target"))
        else:
            assert theme is None
        tables.add(tuple(game.roles.items()))
    assert len(tables) == 20


@pytest.mark.parametrize(
    "options",
    [
        {"words": 2, "targets": 2, "assassins": 1},
        {"targets": 0},
        {"clues": 0},
        {"words": 241, "spymaster": "free", "themed": False},
        {"words": 26, "targets": 2},
        {"words": 1, "targets": 1, "assassins": 0},
        {"spymaster": "themes", "themed": False},
        {"spymaster": "choices", "themed": False},
        {"spymaster": "me"},
        {"choices": 1},
    ],
)
def test_tables_that_cannot_be_laid(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        Scenario(seed=0, **options)


def test_the_clues_to_pick_from_follow_from_the_seed() -> None:
    scenario = Scenario(seed=3, choices=5)
    theme = str(scenario.start()[1])
    picks = scenario.clue_choices(theme)
    assert picks == scenario.clue_choices(theme) != scenario.clue_choices(theme, 1)
    assert theme in picks and len(set(picks)) == 5 and set(picks) <= set(THEMES)
    assert sorted(scenario.clue_choices(theme, order=1)) == sorted(picks), "the same clues in any order"


async def test_each_game_of_a_group_has_its_own_order_so_that_no_place_is_right_for_all() -> None:
    scenario = Scenario(seed=5)
    group = [await play(scenario, right, of_role(scenario, "target"), seed=1000 * 5 + i) for i in range(8)]
    for at in (0, 1):  # the guesser's conversation, the spymaster's
        histories = [(game.messages(), game.additional_histories[0].messages())[at] for game in group]
        listed = [str(messages[1]["content"]).split(":")[0].replace(" or ", ", ").split(", ") for messages in histories]
        assert len({tuple(sorted(choices)) for choices in listed}) == 1, "the same choices"
        places = [
            choices.index(str(messages[2]["content"])) for choices, messages in zip(listed, histories, strict=True)
        ]
        assert len(set(places)) > 2, "the right one stands elsewhere"
    again = await play(scenario, right, of_role(scenario, "target"), seed=5003)
    assert again.messages() == group[3].messages(), "the order follows from the seed"
    without = [await play(scenario, right, "none") for _ in range(8)]
    assert len({str(game.messages()[1]) for game in without}) > 2, "preflight gives no seed"


async def test_a_won_game_holds_both_conversations_with_their_tokens() -> None:
    scenario = Scenario(seed=3, words=9, targets=3)
    player = both(right, of_role(scenario, "target"))
    trajectory = await rollout(player, scenario, seed=5, max_tokens=20)
    assert trajectory.reward == 1.0 and trajectory.metrics["won"] == 1.0 and trajectory.metrics["first_right"] == 1.0
    assert trajectory.metrics["found"] == trajectory.metrics["guesses"] == 3
    (spymaster,) = trajectory.additional_histories
    assert spymaster.messages()[0]["content"] == PROMPT
    assert trajectory.messages()[0]["content"] == PROMPT
    assert f"which is {scenario.start()[1]}?" in str(trajectory.messages()[1])
    seen: list[int] = []  # each guess's prompt goes on exactly where the last guess's tokens ended
    for choice in trajectory.choices()[:3]:
        extra = choice.model_extra or {}
        assert extra["prompt_token_ids"][: len(seen)] == seen
        seen = extra["prompt_token_ids"] + extra["token_ids"]
    assert len({request.sampling.seed for request in player.engine.requests}) == len(player.engine.requests) == 4


async def test_the_guesser_sees_the_table_and_no_role_the_spymaster_his_words() -> None:
    scenario = Scenario(seed=8)
    game, _ = scenario.start(order=9)
    trajectory = await play(scenario, right, "none", seed=9)
    asked = str(trajectory.messages()[1]["content"])
    assert asked == question([*game.roles], f"which is {scenario.start()[1]}")
    secret = str(trajectory.additional_histories[0].messages()[1]["content"])
    assert f"what are {', '.join(game.hidden('target'))}?" in secret


async def test_a_clue_that_does_not_fit_ends_the_game_before_a_guess() -> None:
    scenario = Scenario(seed=2)
    for answer in (wrong, "The", ""):
        trajectory = await play(scenario, answer, "A")
        assert trajectory.reward == -1.0 and trajectory.metrics["bad_clue"] == 1.0
        assert "does not fit" in trajectory.logs[0] and len(trajectory.choices()) == 1
        assert trajectory.messages()[0]["content"] == PROMPT
        assert not trajectory.additional_histories


@pytest.mark.parametrize(("clue", "why"), [("the clue is", "not one word"), ("", "not one word"), (None, "gives away")])
async def test_a_free_clue_must_keep_the_rules(clue: str | None, why: str) -> None:
    scenario = Scenario(seed=2, spymaster="free", themed=False)
    trajectory = await play(scenario, clue if clue is not None else scenario.start()[0].hidden()[0], "A")
    assert trajectory.reward == -1.0 and trajectory.metrics["bad_clue"] == 1.0 and why in trajectory.logs[0]
    assert trajectory.messages()[0]["content"] == FREE_PROMPT


@pytest.mark.parametrize(("role", "result", "reward"), [("bystander", "stopped", 0.0), ("assassin", "assassin", -0.5)])
async def test_a_wrong_guess_ends_it(role: str, result: str, reward: float) -> None:
    scenario = Scenario(seed=6)
    trajectory = await play(scenario, right, of_role(scenario, role))
    assert trajectory.reward == reward and trajectory.metrics[result] == 1.0 and trajectory.metrics["guesses"] == 1


async def test_an_answer_that_is_no_hidden_word_ends_it() -> None:
    scenario = Scenario(seed=6)
    trajectory = await play(scenario, right, "The word is")
    assert trajectory.reward == -0.5 and trajectory.metrics["no_word"] == 1.0 and "is none of" in trajectory.logs[1]
    target = scenario.start()[0].hidden("target")[0]
    again = await play(scenario, right, target)  # the same word a second time
    assert again.reward == 0.0 and again.metrics["no_word"] == 1.0 and again.metrics["found"] == 1


async def test_the_number_limits_the_guesses_and_a_second_clue_goes_on() -> None:
    scenario = Scenario(seed=7, clues=2, spymaster="free")
    trajectory = await play(scenario, "xylo 1", of_role(scenario, "target"))
    assert trajectory.metrics["won"] == 1.0 and trajectory.metrics["guesses"] == 2
    (spymaster,) = trajectory.additional_histories
    found = scenario.start()[0].hidden("target")[0]
    questions = [str(message["content"]) for message in spymaster.messages() if message["role"] == "user"]
    assert len(questions) == 2 and found in questions[0] and found not in questions[1]
    one = Scenario(seed=7, spymaster="free")
    trajectory = await play(one, "xylo 1", of_role(one, "target"))
    assert trajectory.reward == 0.5 and trajectory.metrics["stopped"] == 1.0


async def test_plain_python_as_spymaster_asks_the_model_for_guesses_only() -> None:
    scenario = Scenario(seed=1, spymaster="themes")
    trajectory = await play(scenario, "never asked", of_role(scenario, "target"))
    assert trajectory.reward == 1.0 and not trajectory.additional_histories and len(trajectory.choices()) == 2
    assert f"which is {scenario.start()[1]}?" in str(trajectory.messages()[1])


async def test_both_conversations_are_trained() -> None:
    scenario = Scenario(seed=3)
    good = await play(scenario, right, of_role(scenario, "target"))
    bad = await play(scenario, "The", "A")
    batch = rows_from_groups([TrajectoryGroup([good, bad])], TrainConfig(), max_row_tokens=None)
    assert [row.trajectory for row in batch.rows] == [0, 0, 1]
    assert [row.advantage > 0 for row in batch.rows] == [True, True, False]


@pytest.mark.parametrize("options", [{}, {"spymaster": "themes"}, {"words": 9, "targets": 3}])
async def test_a_demonstration_is_the_conversation_of_a_won_game(options: dict[str, Any]) -> None:
    scenario = Scenario(seed=12, **options)
    shown = demonstration(scenario)
    won = await play(scenario, right, of_role(scenario, "target"), seed=12)
    assert won.reward == shown.reward == 1.0
    said = [[message.get("content") for message in history] for history in (shown.messages(), won.messages())]
    assert sorted(said[0]) == sorted(said[1]) and said[0][1] == said[1][1]
    assert [history.messages() for history in shown.additional_histories] == [
        [{key: message[key] for key in ("role", "content")} for message in history.messages()]  # type: ignore[literal-required]
        for history in won.additional_histories
    ]
    with pytest.raises(ValueError, match="themed"):
        demonstration(Scenario(seed=1, themed=False, spymaster="free"))


async def test_evaluate_gives_means_and_keeps_the_games(tmp_path: Path) -> None:
    model = both(right, "none", tmp_path)
    result = await evaluate(model, scenarios(4, spymaster="themes"), step=3, split="val", desc=None)
    assert result["no_word"] == 1.0 and result["reward"] == -0.5
    assert model.history()["val/no_word"].tolist() == [1.0] and len(model.trajectories(step=3, split="val")) == 4
    with pytest.raises(ValueError, match="no games"):
        means([])
