"""A model as the judge: what it is told, how strictly it is read, and what its failures cost."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from probes.answering.base import Question, Reply
from probes.answering.patient import Patient
from probes.harness.ledger import Remembering
from probes.image_pairs.faithfulness import Faithfulness
from probes.image_pairs.metrics import Claim
from probes.spd.judging.model import SIDE, ModelJudge, consistency, faithfulness
from probes.spd.judging.rules import Statement
from probes.spd.samples import PicturePair
from probes.spd.scoring import Verdict
from tests.probes.conftest import Scripted, text_of

PAIR = PicturePair(
    "1", (Claim("color", "car", "red"), Claim("remove", "dog")), *[Image.new("RGB", (2 * SIDE, 100))] * 2
)
STATEMENT = Statement(PAIR, "The car is red.", "The dog is gone.", "The car is blue. The dog is gone.")
CONSISTENT = {"total_claims": 4, "consistent_claims": 2, "contradictory_claims": 1, "ambiguous_claims": 1}
FAITHFUL = {
    "total_claims": 3,
    "faithful_claims": 1,
    "summary": {"type_category_mismatches": 0, "type_confusions": 0, "attribute_errors": 1, "fabrications": 1},
}


def test_a_judgement_is_a_block_or_all_of_the_answer() -> None:
    labels = ["consistent", "consistent", "contradictory", "ambiguous"]
    for text in (json.dumps(CONSISTENT), f"Here:\n```json\n{json.dumps(CONSISTENT, indent=1)}\n```\nDone."):
        assert consistency(text) == labels
    verdict = faithfulness(json.dumps(FAITHFUL), true=2)
    assert verdict == Faithfulness(1, {"attribute_error": 1, "fabrication": 1}, quantity_error=True)
    assert verdict is not None
    assert verdict.claims == 3
    assert faithfulness(json.dumps(FAITHFUL), true=3) == Faithfulness(1, verdict.errors, quantity_error=False)


@pytest.mark.parametrize(
    "wrong",
    [
        {"total_claims": 5}, {"ambiguous_claims": None}, {"consistent_claims": "2"}, {"consistent_claims": 2.0},
        {"contradictory_claims": True}, {"ambiguous_claims": -1, "total_claims": 2},
    ],
)  # fmt: skip
def test_counts_that_are_missing_or_do_not_add_up_are_no_judgement_of_consistency(wrong: dict[str, Any]) -> None:
    assert consistency(json.dumps(CONSISTENT | wrong)) is None


@pytest.mark.parametrize("wrong", [{"faithful_claims": 2}, {"summary": {}}, {"summary": None}, {"total_claims": None}])
def test_errors_that_do_not_add_up_are_no_judgement_of_faithfulness(wrong: dict[str, Any]) -> None:
    assert faithfulness(json.dumps(FAITHFUL | wrong), 2) is None
    assert faithfulness("The model is right.", 2) is None
    assert faithfulness("[1]", 2) is None


def test_the_judge_gets_the_pictures_and_the_true_differences() -> None:
    answerer = Scripted(lambda question: json.dumps(CONSISTENT if "CONSISTENCY" in text_of(question) else FAITHFUL))
    judge = ModelJudge(answerer, quiet=True)
    (verdict,) = judge([STATEMENT])
    assert verdict == Verdict(consistency(json.dumps(CONSISTENT)), faithfulness(json.dumps(FAITHFUL), 2))
    same, described = map(text_of, answerer.asked)
    assert "Total differences: 2\n\n1. Type: color, Object: car, Color: red\n2. Type: remove, Object: dog\n" in same
    assert "1. Type: color, Object: car\n" in described  # as published: without the colour
    assert "**Model's Response to Question B:**\nThe dog is gone.\n" in same
    assert "**Model's CoT Response:**\nThe car is blue. The dog is gone.\n" in described
    sizes = [part["image"].size for part in answerer.asked[0].chat[0]["content"][:2]]
    assert sizes == [(SIDE, 50)] * 2
    assert judge.counts == {"asked": 2, "failed": 0, "unreadable": 0}


def test_an_answer_that_is_nested_beyond_measure_cannot_be_read() -> None:
    judge = ModelJudge(Scripted(lambda _: "[" * 100_000), quiet=True)
    assert judge([STATEMENT]) == [Verdict(None, None)]
    assert judge.counts["unreadable"] == judge.counts["asked"] > 0


def test_empty_answers_are_not_judged() -> None:
    judge = ModelJudge(Scripted(lambda question: "{}"), quiet=True)
    assert judge([Statement(PAIR, "", "The dog is gone.", "")]) == [Verdict((), Faithfulness(0, {}, True))]
    assert judge.counts["asked"] == 0


class Flaky:
    """A server, in the place of an endpoint, that does not answer every second question."""

    identity, concurrency = "a judge", 2

    def __init__(self) -> None:
        self.asked = 0

    def answers(self, questions: Iterable[Question]) -> Iterator[Reply]:
        for question in questions:
            self.asked += 1
            if "CONSISTENCY" in text_of(question):
                raise ValueError("http://there/v1 did not answer: timed out")
            yield Reply("I think so.")


def test_failures_cost_their_own_judgement_and_are_asked_again(tmp_path: Path) -> None:
    server = Flaky()
    for count in (6, 3):  # what could not be read was an answer, and is kept
        server.asked = 0
        judge = ModelJudge(Remembering(Patient(server), tmp_path / "judge.jsonl"), quiet=True)  # type: ignore[arg-type]
        assert (
            judge([STATEMENT] * 1 + [Statement(PAIR, "a", "b", str(i)) for i in range(2)]) == [Verdict(None, None)] * 3
        )
        assert judge.counts == {"asked": 6, "failed": 3, "unreadable": 3}
        assert server.asked == count
