"""The questions of a set of conditions, and how their replies become letters, by a scripted answerer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from probes.answering.base import Push, Question, Reply
from probes.conflicts.asking import CHAIN_TOKENS, MAX_TOKENS, Answers, Condition, ask
from probes.conflicts.samples import messages
from probes.conflicts.shares import Shares
from probes.harness.ledger import Remembering
from tests.probes.conftest import Scripted, make_samples, seen, text_of

CONDITIONS = [Condition(), Condition("image_only"), Condition("plain", Push("text", "v", 0.5))]


def test_every_sample_is_asked_in_both_orders_under_every_condition() -> None:
    samples = make_samples(3)
    answerer = Scripted(lambda question: "A")
    ask(answerer, samples, CONDITIONS, quiet=True)
    assert answerer.asked == [
        Question(messages(sample, condition.setting, swapped), condition.push, MAX_TOKENS)
        for sample in samples for condition in CONDITIONS for swapped in (False, True)
    ]  # fmt: skip


@pytest.mark.parametrize("ahead", [0, 1, 5, 100])
def test_replies_find_their_condition_sample_and_order(ahead: int) -> None:
    numbers = iter(range(1000))
    answerer = Scripted(lambda question: Reply(f"number {next(numbers)}", seen(0.5)), ahead=ahead)
    answers = ask(answerer, make_samples(4), CONDITIONS, quiet=True)
    texts = [
        [[reply.text for reply in pair] for pair in answers_of_condition.replies] for answers_of_condition in answers
    ]
    for condition, answers_of_condition in enumerate(texts):
        assert answers_of_condition == [
            [f"number {6 * i + 2 * condition}", f"number {6 * i + 2 * condition + 1}"] for i in range(4)
        ]


@pytest.mark.parametrize(
    ("replies", "letters", "outcome"),
    [
        (lambda text: "red", ("A", "B"), "vision"),
        (lambda text: "blue", ("B", "A"), "text"),
        (lambda text: "A", ("A", "A"), "others"),
        (lambda text: "B.", ("B", "B"), "others"),
        (lambda text: "red or blue", (None, None), "others"),
        (lambda text: "blue" if "A. red" in text else "B", ("B", "B"), "others"),
    ],
)
def test_letters_are_read_in_the_order_that_was_asked(replies: Any, letters: Any, outcome: str) -> None:
    (answers,) = ask(Scripted(lambda question: replies(text_of(question))), make_samples(2), [Condition()], quiet=True)
    assert answers.letters == [letters] * 2
    assert answers.outcomes == [outcome] * 2


def test_shares_of_right_answers_by_hand() -> None:
    answers = Answers([("A", "B"), ("A", "A"), (None, "B"), ("B", "A"), (None, None)])
    assert answers.right("vision") == [1.0, 0.5, 0.5, 0.0, 0.0]
    assert answers.right("text") == [0.0, 0.5, 0.0, 1.0, 0.0]
    assert answers.accuracy() == pytest.approx(2 / 5)
    assert answers.accuracy("text") == pytest.approx(1.5 / 5)
    assert Answers().accuracy() == 0.0


def test_the_attention_ratio_is_the_mean_of_what_was_measured() -> None:
    ratios = iter([0.2, None, 0.4, 0.9])
    (answers,) = ask(
        Scripted(lambda question: Reply("A", seen(next(ratios)))), make_samples(2), [Condition()], quiet=True
    )
    assert answers.attention_ratio == pytest.approx(0.5)
    assert Answers(replies=[(Reply("A"), Reply("B"))]).attention_ratio is None


def test_a_chain_of_thought_has_room() -> None:
    sample = make_samples(1)[0]
    for setting in ("chain_vision", "chain_text"):
        assert Condition(setting).question(sample, False).max_tokens == CHAIN_TOKENS
    assert Condition("vision").question(sample, False).max_tokens == MAX_TOKENS


def test_shots_stand_before_the_question() -> None:
    sample, *shots = make_samples(3)
    question = Condition("shots_text", shots=tuple(shots)).question(sample, True)
    assert question.chat == messages(sample, "shots_text", True, shots)
    assert [message["role"] for message in question.chat] == ["user", "assistant"] * 2 + ["user"]


def test_without_samples_no_question_is_asked() -> None:
    answerer = Scripted(lambda question: "A")
    assert ask(answerer, [], CONDITIONS, quiet=True) == [Answers()] * 3
    assert not answerer.asked


def test_the_shares_can_be_computed_anew_from_what_is_kept_of_the_samples(tmp_path: Path) -> None:
    def says(question: Question) -> str:
        """Follows the picture of three samples of four, always says A of the last one."""
        return "A" if "number 3" in text_of(question) else "red"

    steered = Condition("plain", Push("text", "v", 0.5, (2,)))
    for _ in range(2):  # of which the second replaces what the first told
        answerer = Remembering(Scripted(says), tmp_path / "answers.jsonl")
        plain, _ = ask(answerer, make_samples(4), [Condition(), steered], title="Conditions", quiet=True)
    rows = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert len(rows) == 2 * 4 * 2
    sides: dict[str, list[str]] = {}
    for row in rows:
        if row["condition"] == "plain":
            chosen = "red" if row["answer"] == "red" else row["options"][row["answer"]]
            assert row["side"] == {"red": "vision", "blue": "text"}[chosen]
            sides.setdefault(row["id"], []).append(row["side"])
    followed = [set(sides_of_pair) == {"vision"} for sides_of_pair in sides.values()]
    assert sum(followed) / 4 == Shares.of(plain.outcomes).s_vision == 0.75
    row = rows[-1]
    assert row["push"] == {"vector": "v", "toward": "text", "strength": 0.5, "layers": [2], "criterion": None}
    assert (row["id"], row["swapped"], row["options"], row["counts_for"]) == (
        "3", True, {"A": "blue", "B": "red"}, "others",
    )  # fmt: skip
    assert row["question"] == text_of(Question(messages(make_samples(4)[3], "plain", True)))
