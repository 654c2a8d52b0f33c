"""Summaries as a rollout: one document in, one summary out, scored by which questions it answers.

Holds the generated documents with their questions, the reference summaries of the warm start, the score and the
rollout. It does not train: the notebook does. No model judges: an answer is in the summary, as the document words it,
or it is not.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import artnb as art

METRICS = ("answered", "words", "copied")
PROMPT = "Summarize in one short sentence:\n\n{text}"
"""Measured on SmolLM2-135M-Instruct at temperature 1 with 48 tokens, 6 documents, 8 summaries each:

                                            reward   questions answered   words   spread inside a group
    untouched                                -0.04                 0.20    25.9                    0.18
    after 24 reference summaries, once        0.22                 0.33    12.4                    0.16

All groups have a spread before and after, so it learns without the warm start, too, but first has to stop rambling.
"""
LENGTH_PENALTY = 0.5
"""What a summary of the document's own length, or more, loses; a shorter one loses in proportion."""

FIRST_NAMES = (
    "Ada", "Bruno", "Clara", "Dario", "Elena", "Felix", "Greta", "Hugo", "Irma", "Jonas", "Karin", "Luca",
    "Marta", "Nora", "Oscar", "Paula", "Rolf", "Selma", "Tomas", "Vera",
)  # fmt: skip
LAST_NAMES = (
    "Bell", "Costa", "Dahl", "Engel", "Fischer", "Grant", "Holm", "Keller", "Lopez", "Moss", "Novak", "Parker",
    "Quinn", "Rossi", "Stone", "Torres", "Vogel", "Walsh", "Young", "Zimmer",
)  # fmt: skip
TOWNS = (
    "Ashford", "Bramley", "Carlow", "Denholm", "Elmwood", "Fairview", "Glenmore", "Harwick", "Kingsley", "Lindale",
    "Milbrook", "Northam", "Oakdale", "Redhill", "Seaford", "Thornton", "Upton", "Westbury",
)  # fmt: skip
MONTHS = ("January", "March", "April", "May", "June", "August", "September", "October")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Sunday")
JOBS = ("baker", "painter", "teacher", "nurse", "farmer", "carpenter", "pilot", "dentist")
PETS = ("dog", "cat", "parrot", "rabbit", "horse", "goat")
HOBBIES = ("chess", "tennis", "sailing", "gardening", "cooking", "fishing")
FOODS = ("honey", "cheese", "bread", "apples", "fish", "flowers", "soap", "wool")
BUILDINGS = ("castle", "bridge", "museum", "lighthouse", "library", "tower", "windmill", "theater")
RIVERS = ("Alder", "Birch", "Cole", "Dove", "Fern", "Lark", "Swan", "Trent")


@dataclass(frozen=True)
class Fact:
    """A sentence of a document, the question it answers, and how the reference says it. Braces name its value."""

    sentence: str
    question: str
    value: str
    reference: str


@dataclass(frozen=True)
class Theme:
    """What a document is about: `opening` names it, facts follow, fillers say nothing that is asked."""

    opening: Fact
    facts: tuple[Fact, ...]
    fillers: tuple[str, ...]


THEMES = (
    Theme(
        Fact("{name} is a {job}.", "What is {name}'s job?", "job", "{name} is a {job}"),
        (
            Fact("{first} was born in {town}.", "Where was {name} born?", "town", "from {town}"),
            Fact("The year of birth was {year}.", "When was {name} born?", "year", "born in {year}"),
            Fact("At home {first} keeps a {pet}.", "Which animal does {name} keep?", "pet", "with a {pet}"),
            Fact("The favorite hobby is {hobby}.", "What is {name}'s hobby?", "hobby", "who likes {hobby}"),
            Fact("Every {day} is a day off.", "Which day does {name} have off?", "day", "free on {day}"),
        ),
        (
            "Friends say that this is a very kind person.",
            "Nobody in the street has ever complained.",
            "The neighbors often stop for a chat.",
        ),
    ),
    Theme(
        Fact("{town} is famous for its {building}.", "What is it famous for?", "building", "{town} has a {building}"),
        (
            Fact("It was built in {year}.", "In which year was it built?", "year", "built in {year}"),
            Fact("The river {river} flows past it.", "Which river flows past it?", "river", "by the {river}"),
            Fact("The market sells {food}.", "What does the market sell?", "food", "selling {food}"),
            Fact("The fair is held in {month}.", "When is the fair?", "month", "with a fair in {month}"),
            Fact("The mayor is called {name}.", "Who is the mayor?", "name", "led by {name}"),
        ),
        (
            "Visitors like to walk along the old streets.",
            "The weather there is mostly mild.",
            "Many people come back the next year.",
        ),
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Question:
    text: str
    answer: str


@dataclass(frozen=True)
class Document:
    """A text of 50 to 65 words, what is asked about it, and a short summary of half of its facts."""

    seed: int
    text: str
    questions: tuple[Question, ...]
    reference: str


def generate_document(seed: int) -> Document:
    """The document of a seed, always the same. Its facts stand in random order between sentences nobody asks about."""
    rng = random.Random(f"document {seed}")
    theme = rng.choice(THEMES)
    first = rng.choice(FIRST_NAMES)
    values = {
        "first": first,
        "name": f"{first} {rng.choice(LAST_NAMES)}",
        "town": rng.choice(TOWNS),
        "year": str(rng.randint(1900, 1999)),
        "job": rng.choice(JOBS),
        "pet": rng.choice(PETS),
        "hobby": rng.choice(HOBBIES),
        "day": rng.choice(DAYS),
        "building": rng.choice(BUILDINGS),
        "river": rng.choice(RIVERS),
        "food": rng.choice(FOODS),
        "month": rng.choice(MONTHS),
    }
    facts = list(theme.facts)
    rng.shuffle(facts)
    sentences = [fact.sentence for fact in facts] + list(theme.fillers)
    rng.shuffle(sentences)
    text = " ".join([theme.opening.sentence, *sentences]).format(**values)
    asked = (theme.opening, *facts)
    questions = tuple(Question(fact.question.format(**values), values[fact.value]) for fact in asked)
    told = [theme.opening.reference, *(fact.reference for fact in facts[:2])]
    return Document(seed, text, questions, (", ".join(told) + ".").format(**values))


def documents(count: int, first_seed: int = 0) -> list[Document]:
    """`count` documents with seeds from `first_seed` on."""
    return [generate_document(seed) for seed in range(first_seed, first_seed + count)]


# The score -----------------------------------------------------------------------------------------------------------


def words_of(text: str) -> list[str]:
    return re.findall(r"\w+", text.casefold())


def contains(words: list[str], wanted: list[str]) -> bool:
    """Whether `wanted` stands in `words`, whole words in a row."""
    return bool(wanted) and any(words[i : i + len(wanted)] == wanted for i in range(len(words) - len(wanted) + 1))


def answered(document: Document, summary: str) -> list[bool]:
    """For each question, whether its exact answer is in the summary."""
    words = words_of(summary)
    return [contains(words, words_of(question.answer)) for question in document.questions]


def reward_of(document: Document, summary: str) -> float:
    """The share of questions answered, 0 to 1, less up to LENGTH_PENALTY for length.

    An empty summary gets 0, the document itself 1 - LENGTH_PENALTY, the bare list of all answers about 0.9: facts pay,
    words cost. Between -0.5 and 1.
    """
    share = sum(answered(document, summary)) / len(document.questions)
    length = len(words_of(summary)) / len(words_of(document.text))
    return share - LENGTH_PENALTY * min(1.0, length)


def copied(document: Document, summary: str) -> float:
    """The share of the summary's runs of four words that stand in the document as they are; 0 for shorter summaries."""
    words, source = words_of(summary), words_of(document.text)
    runs = [words[i : i + 4] for i in range(len(words) - 3)]
    return sum(contains(source, run) for run in runs) / len(runs) if runs else 0.0


# The rollout ---------------------------------------------------------------------------------------------------------


def prompt(document: Document) -> list[Any]:
    return [{"role": "user", "content": PROMPT.format(text=document.text)}]


async def rollout(
    model: art.Model,
    document: Document,
    *,
    seed: int | None = None,
    max_tokens: int = 48,
    temperature: float = 1.0,
    step: int | None = None,
) -> art.Trajectory:
    """Ask for one summary and return the trajectory, scored. `seed` makes the sampling repeatable."""
    options: dict[str, Any] = {} if seed is None else {"seed": seed}
    trajectory = art.Trajectory(messages_and_choices=prompt(document), metadata={"seed": document.seed})
    completion = await model.openai_client().chat.completions.create(
        model=model.get_inference_name(step=step),
        messages=trajectory.messages(),
        max_tokens=max_tokens,
        temperature=temperature,
        **options,
    )
    trajectory.messages_and_choices.append(completion.choices[0])
    summary = completion.choices[0].message.content or ""
    marks = answered(document, summary)
    trajectory.reward = reward_of(document, summary)
    trajectory.metrics |= {
        "answered": sum(marks) / len(marks),
        "words": len(words_of(summary)),
        "copied": copied(document, summary),
    }
    for question, mark in zip(document.questions, marks, strict=True):
        trajectory.log(f"{'yes' if mark else 'no '} {question.text} {question.answer}")
    return trajectory.finish()


def demonstration(document: Document) -> art.Trajectory:
    """The reference summary as a trajectory to imitate: three facts in one sentence, no filler."""
    answer: Any = {"role": "assistant", "content": document.reference}
    return art.Trajectory(messages_and_choices=[*prompt(document), answer], reward=1.0)


def means(trajectories: Iterable[art.Trajectory]) -> dict[str, float]:
    """Mean reward and metrics."""
    done = list(trajectories)
    if not done:
        raise ValueError("there are no rollouts to average")
    rows = [{"reward": t.reward or 0.0} | {name: float(t.metrics[name]) for name in METRICS} for t in done]
    return {name: sum(row[name] for row in rows) / len(rows) for name in ("reward", *METRICS)}


async def evaluate(
    model: art.Model,
    documents: Iterable[Document],
    *,
    seed: int = 0,
    step: int | None = None,
    split: str | None = None,
    desc: str | None = "evaluate",
) -> dict[str, float]:
    """Summarize each document once and return `means`.

    `step` asks checkpoint `step` instead of the newest. With `split` rollouts and means are kept in the model's history
    under that name. Use seeds that training does not use:

        await evaluate(model, documents(64, first_seed=1_000_000), split="val")
    """
    done = await art.gather_trajectories(
        (rollout(model, document, seed=seed + 1000 * i, step=step) for i, document in enumerate(documents)),
        pbar_desc=desc,
    )
    result = means(done)
    if split is not None:
        await model.log(done, split=split, metrics=result, step=step)
    return result
