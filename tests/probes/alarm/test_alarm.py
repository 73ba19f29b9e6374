"""Detection of wrong answers: arithmetic by hand, numbers that are known to tell, and invalid files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from demo.world.checked import checked_samples
from probes.alarm.evaluate import LEAST, Judged, ask, check_enough, evaluate, fit, halves, numbers, scores, select
from probes.alarm.report import report
from probes.alarm.samples import Checked, load
from probes.answering.base import Question, Reply
from probes.harness.ledger import Remembering
from steering.model.alarm import Alarm

IMAGE = Image.new("RGB", (84, 84), "red")


pytestmark = pytest.mark.usefixtures("few_resamples", "undrawn")


def judged(count: int = 2000, seed: int = 0) -> Judged:
    """`tells` and `also` are greater for wrong answers; `level` only tells how hard a question is; `noise` nothing."""
    rng = np.random.default_rng(seed)
    hard = rng.random(count) < 0.5
    wrong = rng.random(count) < np.where(hard, 0.5, 0.1)
    values = {
        "tells": rng.normal(wrong, 1.0),
        "also": -rng.normal(wrong, 1.0),
        "level": hard + 0.0,
        "noise": rng.normal(size=count),
        "rarely": np.where(rng.random(count) < 0.5, rng.normal(wrong, 1.0), np.nan),
    }
    return Judged(wrong, np.full(count, "made"), np.where(hard, "hard", "easy"), values)


def test_the_area_of_shifted_normals_is_that_of_the_formula() -> None:
    """The area is Phi(1 / sqrt 2) = 0.760 for N(1, 1) against N(0, 1); two such numbers together have Phi(1) = 0.841."""
    found = evaluate(judged(5000))
    areas = found["parts"]["all"]["auroc"]
    assert areas["tells"]["auroc"] == pytest.approx(0.760, abs=0.02)
    assert areas["tells"]["auroc_95"][0] < 0.760 < areas["tells"]["auroc_95"][1]
    assert (found["signs"]["tells"], found["signs"]["also"]) == (1, -1)
    assert areas["also"]["auroc"] == pytest.approx(0.760, abs=0.02)
    assert areas["noise"]["auroc"] == pytest.approx(0.5, abs=0.03)
    assert areas["level"]["auroc"] > 0.6
    assert areas["level"]["alike"] == pytest.approx(0.5)
    assert areas["combination"]["alike"] > 0.84
    assert areas["rarely"]["n"] < areas["tells"]["n"]
    assert "alarm" not in areas, "none of these is what an alarm goes by"


def test_the_alarm_is_raised_on_as_many_right_answers_as_were_allowed() -> None:
    fitted = judged(5000)
    combined = fit(fitted)
    assert combined is not None
    right = scores(combined, fitted)[~fitted.wrong]
    assert (right > combined.threshold).mean() == pytest.approx(0.05, abs=0.002)
    found = evaluate(fitted, among=("tells", "also"))
    assert set(found["alarm"]["numbers"]) == {"tells", "also"}
    alarm = found["parts"]["all"]["alarm"]
    assert alarm["false_alarms"] == pytest.approx(0.05, abs=0.015)
    assert alarm["caught"] > 0.3
    assert alarm["caught_95"][0] < alarm["caught"] < alarm["caught_95"][1]
    assert found["alarm"]["raised"]["wrong"] == [alarm["caught"], *alarm["caught_95"]]
    assert Alarm.of(json.loads(json.dumps(found["alarm"]))) == Alarm(**found["alarm"])


def test_what_decides_is_not_what_is_reported() -> None:
    """Numbers that tell nothing, as many as half of the answers, tell the half that is fitted and no other."""
    rng = np.random.default_rng(1)
    wrong = rng.random(120) < 0.4
    values = {f"x{number}": rng.normal(size=120) for number in range(50)}
    many = Judged(wrong, np.full(120, "made"), np.full(120, ""), values)
    fitted, _ = halves(many, 0)
    combined = fit(fitted)
    assert combined is not None
    told = scores(combined, fitted)
    assert told[fitted.wrong].mean() > told[~fitted.wrong].mean() + 1
    low, high = evaluate(many)["parts"]["all"]["auroc"]["combination"]["auroc_95"]
    assert low < 0.5 < high


def test_too_few_wrong_answers_are_refused() -> None:
    few = Judged(np.arange(100) < LEAST, np.full(100, ""), np.full(100, ""), {"x": np.arange(100.0)})
    with pytest.raises(ValueError, match=r"^10 of 100 answers are wrong: .* at least 10 right and 10 wrong answers"):
        evaluate(few)


class Scripted:
    """Says "red", and of every third question "blue", with a log-probability that betrays it."""

    identity = "scripted"

    def answers(self, questions: Any) -> Iterator[Reply]:
        for number, question in enumerate(questions):
            assert isinstance(question, Question)
            assert "confidence" in question.diagnose.include
            wrong = number % 3 == 0
            flags = {"perceptual_blindness": wrong, "dissociation": None}
            sure = {"mean_logprob": -2.0 if wrong else -1.5, "least_logprob": -3.0 if wrong else -2.0}
            said = {"version": 2, "flags": flags, "decay": {"slope": -0.5 * wrong}, "confidence": sure}
            yield Reply("It is blue." if wrong else "It is RED!", said)


def test_answers_are_checked_and_their_numbers_kept() -> None:
    samples = [Checked((IMAGE,), f"What colour, {number}?", ("red",)) for number in range(66)]
    found = ask(Scripted(), samples, quiet=True)
    assert found.wrong.sum() == 22
    assert set(found.values) == {"perceptual_blindness", "decay_slope", "mean_logprob", "least_logprob"}
    assert found.values["mean_logprob"][:2].tolist() == [-2.0, -1.5]
    scored = evaluate(found)
    assert scored["parts"]["all"]["auroc"]["least_logprob"]["auroc"] == 1.0
    assert scored["signs"]["least_logprob"] == -1
    text = report({"model": "m", "data": "d", "versions": {}}, scored).markdown().replace("\u00a0", " ")
    # All are told apart, of which 12 wrong answers in the other half show no more than Wilson's bound, 12 / (12 + 1.96^2).
    assert "| least_logprob | - | 1.000 (0.758 to 1.000) |" in text
    assert numbers(Reply("x")) == {} or set(numbers(Reply("x")).values()) == {None}


def test_whole_words_count() -> None:
    sample = Checked((IMAGE,), "How many?", ("two", "2"))
    assert [sample.right(text) for text in ("There are 2 shapes.", "TWO", "12", "twofold", "")] == [
        True, True, False, False, False,
    ]  # fmt: skip


def test_the_demo_worlds_questions_have_every_noise() -> None:
    samples = checked_samples(12, 0, (0.0, 80.0))
    assert {sample.part for sample in samples} == {"facts", "existence", "several"}
    for part in ("facts", "existence", "several"):
        assert {one.alike.rsplit(" ", 1)[1] for one in samples if one.part == part} == {"0", "80"}
    assert all(len(sample.images) > 1 for sample in samples if sample.part == "several")
    again = checked_samples(12, 0, (0.0, 80.0))
    assert [one.question for one in samples] == [one.question for one in again]


ROW: dict[str, Any] = {"images": "a.png", "question": "What?", "answer": "red"}


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("{", "not JSON"),
        ([], "it is not an object"),
        ({"images": "a.png"}, "it has no 'question'"),
        (ROW | {"answer": []}, "'answer' must be a string, or a list of strings"),
        (ROW | {"question": ["a", "b"]}, "'question' must be a string$"),
        (ROW | {"answer": "?"}, "'answer' must contain words"),
        (ROW | {"images": "b.png"}, "there is no image .*b.png"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, row: Any, said: str) -> None:
    IMAGE.save(tmp_path / "a.png")
    file = tmp_path / "checked.jsonl"
    file.write_text("".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in (ROW, row)))
    with pytest.raises(ValueError, match=f"2: .*{said}"):
        load(file)
    file.write_text(json.dumps(ROW | {"answer": ["red", "crimson"], "part": "colours"}))
    (one,) = load(file)
    assert (one.part, one.accepted, one.right("Crimson.")) == ("colours", ("red", "crimson"), True)


def test_the_alarm_goes_by_what_adds_to_it() -> None:
    """A number that repeats another, or tells nothing, is left out."""
    made = judged(3000)
    rng = np.random.default_rng(7)
    values = {**made.values, "again": made.values["tells"] + rng.normal(0, 0.1, 3000)}
    found = select(Judged(made.wrong, made.part, made.alike, values), ["noise", "tells", "also", "again"])
    assert set(found) in ({"tells", "also"}, {"again", "also"})
    assert select(made, ["unknown"]) == []


def test_every_question_is_told_with_its_answer_and_its_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = [Checked((IMAGE,), f"What colour, {number}?", ("red",), alike="a") for number in range(40)]
    found = ask(Remembering(Scripted(), tmp_path / "answers.jsonl"), samples, seed=5, quiet=True)
    rows = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert [(one["questions"], one["alike"], one["expected"]) for one in rows] == [
        ([one.question], "a", ["red"]) for one in samples
    ]
    assert [(one["answers"], one["wrong"]) for one in rows[:2]] == [(["It is blue."], True), (["It is RED!"], False)]
    assert all(one["numbers"]["mean_logprob"] is not None for one in rows)
    deciding, reported = (sum(one["wrong"] for one in rows if one["half"] == half) for half in ("deciding", "reported"))
    monkeypatch.setattr("probes.alarm.evaluate.LEAST", 1)
    assert [int(half.wrong.sum()) for half in halves(found, 5)] == [deciding, reported]


def test_what_can_have_no_result_is_refused_before_anything_is_asked() -> None:
    check_enough(4 * LEAST)
    with pytest.raises(ValueError, match=r"^39 questions are too few: .* at least 10 right and 10 wrong answers, 40"):
        check_enough(4 * LEAST - 1)
