"""Questions about mailboxes: generated mailboxes with exact answers, and the loader of questions about real ones.

The generated ones are made from the templates below, so that their answers are known and no data has to be shipped.
Does not know about models or rewards.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

from inbox import Email, Mailbox

PEOPLE = (
    "Ada", "Ben", "Cleo", "Dana", "Emil", "Fay", "Gus", "Hana", "Igor", "Jill", "Karl", "Lena",
    "Mira", "Nils", "Olga", "Paul", "Rosa", "Sven", "Tara", "Vera", "Walt", "Yara",
)  # fmt: skip
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday")
CITIES = ("Paris", "Rome", "Berlin", "Madrid", "Oslo", "Vienna", "Dublin", "Prague")
THINGS = ("printer", "desk", "carpet", "laptop", "camera", "heater", "coffee", "window")
TOPICS = ("budget", "hiring", "safety", "website", "training", "garden", "kitchen", "parking")
HOTELS = ("Astra", "Bellevue", "Crown", "Delta", "Eden", "Palace", "Riviera", "Savoy")
COLORS = ("red", "blue", "green", "black", "white", "yellow", "brown", "silver")


@dataclass(frozen=True)
class Kind:
    """A kind of email. `{what}` is one of `about`; every question asks for a value that the body holds once."""

    about: tuple[str, ...]
    subject: str
    body: str
    questions: tuple[tuple[str, str], ...]  # the question, and which value answers it


KINDS = (
    Kind(
        TOPICS,
        "{what} meeting",
        "The {what} meeting is on {day} in room {room}.",
        (
            ("On which day is the {what} meeting of {sender}?", "day"),
            ("In which room is the {what} meeting of {sender}?", "room"),
        ),
    ),
    Kind(
        THINGS,
        "{what} invoice",
        "The {what} costs {amount} dollars. Please pay by {day}.",
        (
            ("How many dollars does the {what} of {sender} cost?", "amount"),
            ("By which day must the {what} of {sender} be paid?", "day"),
        ),
    ),
    Kind(
        CITIES,
        "trip to {what}",
        "I go to {what} on {day} and stay at hotel {hotel}.",
        (
            ("At which hotel in {what} does {sender} stay?", "hotel"),
            ("On which day does {sender} go to {what}?", "day"),
        ),
    ),
    Kind(
        ("bike", "car", "jacket", "umbrella", "suitcase", "scarf"),
        "lost {what}",
        "I lost my {color} {what} in room {room}.",
        (
            ("Which color is the {what} that {sender} lost?", "color"),
            ("In which room did {sender} lose the {what}?", "room"),
        ),
    ),
)


@dataclass(frozen=True)
class Question:
    text: str
    answer: str
    message_ids: tuple[str, ...]  # the emails that hold the answer
    keywords: tuple[str, ...] = ()  # the words of its subject, then its sender; known for generated mailboxes only


def generate_mailbox(seed: int, emails: int = 24) -> tuple[Mailbox, list[Question]]:
    """A mailbox and two questions about each of its emails. The same seed gives the same mailbox.

    Six people write about few things, so most questions have emails beside the right one that are about the same
    thing, or from the same person; no two emails are both. Raises ValueError for more than 36 emails.
    """
    if not 1 <= emails <= 36:
        raise ValueError(f"emails={emails}: a mailbox of six people and six subjects holds 1 to 36")
    rng = random.Random(f"mailbox {seed}")
    people = rng.sample(PEOPLE, 6)
    subjects = rng.sample([(kind, what) for kind in KINDS for what in kind.about], 6)
    pairs = rng.sample([(sender, *subject) for sender in people for subject in subjects], emails)
    made, questions = [], []
    for number, (sender, kind, what) in enumerate(pairs, start=1):
        values = {
            "day": rng.choice(DAYS),
            "room": str(rng.randint(2, 99)),
            "amount": str(rng.randint(20, 999)),
            "hotel": rng.choice(HOTELS),
            "color": rng.choice(COLORS),
        }
        subject = kind.subject.format(what=what)
        body = kind.body.format(what=what, **values)
        date = f"2024-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"
        made.append(Email(sender, "you", date, subject, body, f"<{number}.{seed}@generated>"))
        for text, value in kind.questions:
            keywords = (*subject.replace("to ", "").split(), sender)
            question = text.format(what=what, sender=sender)
            questions.append(Question(question, values[value], (str(number),), keywords))
    return Mailbox(made), questions


def load_questions(path: str | Path, mailbox: Mailbox) -> list[Question]:
    """Questions about real emails: one JSON object a line, `{"question", "answer", "message_ids": [Message-ID, …]}`.

    Raises ValueError for a question none of whose emails is in the mailbox.
    """
    questions = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), start=1):
        if line.strip():
            entry = json.loads(line)
            ids = [mailbox.number_of(original) for original in entry["message_ids"]]
            known = tuple(i for i in ids if i is not None)
            if not known:
                raise ValueError(f"{path}, line {number}: none of the emails {entry['message_ids']} is in the mailbox")
            questions.append(Question(entry["question"], str(entry["answer"]), known))
    return questions


@dataclass(frozen=True)
class Scenario:
    """What the rollouts of a group share."""

    mailbox: Mailbox
    question: Question
    seed: int = 0


def scenarios(count: int, first_seed: int = 0, emails: int = 24) -> list[Scenario]:
    """`count` questions, each about a generated mailbox of its own, with seeds from `first_seed` on."""
    made = []
    for seed in range(first_seed, first_seed + count):
        mailbox, questions = generate_mailbox(seed, emails)
        made.append(Scenario(mailbox, random.Random(f"question {seed}").choice(questions), seed))
    return made
