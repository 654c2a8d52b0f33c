"""Documents and their questions, the score and its bounds, and whole rollouts through the real endpoint."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from artnb.engines.byte_tokenizer import ByteTokenizer
from artnb.serving.chat import ChatFormat
from artnb.training.rows import rows_from_trajectory
from artnb.training.sft import sft_rows

sys.path.insert(0, str(Path(__file__).parents[1]))

from scripted_model import ScriptedModel
from summarizer import (
    Document,
    Question,
    answered,
    copied,
    demonstration,
    documents,
    evaluate,
    generate_document,
    means,
    reward_of,
    rollout,
    words_of,
)

SMALL = Document(
    seed=0,
    text="Ada Bell is a baker from Upton who was born in 1962.",
    questions=(Question("Who?", "Ada Bell"), Question("When?", "1962"), Question("What?", "baker")),
    reference="Ada Bell is a baker.",
)


def test_a_document_answers_its_own_questions_and_no_braces_are_left() -> None:
    for document in documents(300):
        assert answered(document, document.text) == [True] * 6
        assert not set("{}") & set(document.text + document.reference + str(document.questions))
        assert 50 <= len(words_of(document.text)) <= 65
        assert 0 < sum(answered(document, document.reference)) < 6  # the reference leaves something to learn
        assert len({question.text for question in document.questions}) == 6


def test_a_seed_names_its_document() -> None:
    assert generate_document(7) == generate_document(7)
    assert len({document.text for document in documents(200)}) == 200
    assert [document.seed for document in documents(2, first_seed=40)] == [40, 41]


@pytest.mark.parametrize(
    ("summary", "marks"),
    [
        ("ADA BELL, baker, 1962!", [True, True, True]),
        ("Bell Ada was born in 1962.", [False, True, False]),  # the name is not in order
        ("Ada Bellamy, 19620, bakery", [False, False, False]),  # parts of words do not count
        ("Ada\nBell", [True, False, False]),
        ("", [False, False, False]),
        ("🎉 한글", [False, False, False]),
    ],
)
def test_exact_words_answer(summary: str, marks: list[bool]) -> None:
    assert answered(SMALL, summary) == marks


def test_facts_pay_and_words_cost_within_bounds() -> None:
    assert reward_of(SMALL, "") == 0.0
    assert reward_of(SMALL, SMALL.text) == pytest.approx(0.5)
    assert reward_of(SMALL, "nothing " * 1000) == -0.5
    assert reward_of(SMALL, "Ada Bell, baker, 1962") == pytest.approx(1 - 0.5 * 4 / 12)
    for document in documents(50):
        listed = " ".join(question.answer for question in document.questions)
        rewards = [reward_of(document, text) for text in ("", document.reference, document.text, listed)]
        assert rewards[0] < rewards[1] < rewards[2] < rewards[3] <= 1.0


def test_copied_is_the_share_of_runs_from_the_document() -> None:
    assert copied(SMALL, SMALL.text) == 1.0
    assert copied(SMALL, "too short here") == 0.0
    assert copied(SMALL, "Ada Bell is a painter") == pytest.approx(0.5)


async def test_a_rollout_is_scored_and_trains_exactly_its_summary() -> None:
    document = generate_document(3)
    writer = ScriptedModel(document.reference)
    trajectory = await rollout(writer, document, seed=5, max_tokens=999)
    assert trajectory.reward == reward_of(document, document.reference)
    assert trajectory.metrics["answered"] == pytest.approx(sum(answered(document, document.reference)) / 6)
    assert document.text in str(trajectory.messages()[0])
    assert sum(line.startswith("yes") for line in trajectory.logs) == sum(answered(document, document.reference))
    (row,) = rows_from_trajectory(trajectory)  # type: ignore[misc]
    assert bytes(row.token_ids[row.sampled][:-1].tolist()).decode() == document.reference
    assert writer.engine.requests[0].sampling.seed == 5


async def test_a_summary_that_is_cut_is_scored_by_what_is_there() -> None:
    document = generate_document(3)
    trajectory = await rollout(ScriptedModel("x" * 100), document, max_tokens=10)
    assert trajectory.choices()[0].finish_reason == "length"
    assert trajectory.metrics["answered"] == 0.0 and -0.5 <= (trajectory.reward or 0.0) < 0.0


def test_the_warm_start_learns_the_reference_alone() -> None:
    document = generate_document(11)
    batch = sft_rows([demonstration(document)], ChatFormat(ByteTokenizer()), max_row_tokens=None)
    (row,) = batch.rows
    assert bytes(row.token_ids[row.sampled][:-1].tolist()).decode() == document.reference


async def test_evaluate_summarizes_every_document_once_and_logs_where_it_is_told(tmp_path: Path) -> None:
    writer = ScriptedModel("nothing", tmp_path)
    result = await evaluate(writer, documents(3), split="val", desc=None)
    assert result["words"] == 1.0 and writer.history()["val/answered"].tolist() == [0.0]
    assert len(writer.trajectories(split="val")) == 3
    assert len({request.sampling.seed for request in writer.engine.requests}) == 3


async def test_means() -> None:
    document = generate_document(1)
    both = [await rollout(ScriptedModel(text), document, max_tokens=999) for text in ("", document.text)]
    assert means(both) == {
        "reward": pytest.approx(0.25),
        "answered": pytest.approx(0.5),
        "words": len(words_of(document.text)) / 2,
        "copied": 0.5,
    }
    with pytest.raises(ValueError, match="no rollouts"):
        means([])
