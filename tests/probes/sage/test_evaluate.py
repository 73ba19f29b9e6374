"""SAGE's evaluation: what is asked, how it is scored, and the comparison with the plain answers."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
from PIL import Image

from probes.answering.base import Question, Reply
from probes.answering.engine import InProcess
from probes.harness.bootstrap import mcnemar
from probes.harness.comparison import BASELINE
from probes.image_pairs.metrics import Claim, PairScores
from probes.image_qa import yes_no
from probes.image_qa.yes_no import YesNo
from probes.sage.evaluate import evaluate, pair_of
from probes.sage.report import report
from probes.sage.samples import QUESTIONS, Difference
from probes.sage.stages import stages
from steering import Engine, Generate, Options, See, Think
from steering.protocol import intervention
from tests.probes.conftest import Scripted, text_of

SHAPES = ("star", "ring", "heart")
PICTURE = Image.new("RGB", (56, 56), "red")


def existence(*present: bool) -> list[YesNo]:
    return [
        YesNo(Image.new("RGB", (8, 8)), f"Question {i}", is_present, "random") for i, is_present in enumerate(present)
    ]


CONDITIONS = {BASELINE: (), "See": (See(),)}


def run(
    plain: dict[str, str], seeing: dict[str, str], existence_questions: list[YesNo], pairs: list[Difference]
) -> dict[str, Any]:
    """Evaluate answers that depend on the question's text, `seeing` ones under SAGE and `plain` ones otherwise."""

    def answer(question: Question) -> str:
        return (seeing if See() in question.interventions else plain)[text_of(question)]

    return evaluate(Scripted(answer, ahead=3), CONDITIONS, existence_questions, pairs, SHAPES, quiet=True)


def test_existence_by_hand() -> None:
    samples, answers = existence(True, True, True, False, False), ["Yes.", "No.", "Yes.", "Yes.", "Well"]
    tallies = [yes_no.tally(sample, [Reply(answer)]) for sample, answer in zip(samples, answers, strict=True)]
    sums = {name: cast("Any", sum(tally[name] for tally in tallies)) for name in tallies[0]}
    assert {name: float(value) for name, value in yes_no.scores(sums).items()} == {
        "accuracy": 2 / 5, "precision": 2 / 3, "recall": 2 / 3, "f1": pytest.approx(2 / 3), "yes": 3 / 5, "unread": 1 / 5,
    }  # fmt: skip


def test_the_answers_about_a_pair_become_what_the_metrics_take() -> None:
    truth = (Claim("color", "star", "blue"), Claim("remove", "ring"))
    answers = (
        "The star changed from red to blue. The heart moved from the left to the top.",
        "No, they are different.",
        "Perhaps.",
        "No. The star changed from red to blue.",
        "The star changed from red to green and the ring was removed.",
    )
    pair = pair_of(Difference(PICTURE, PICTURE, truth), answers, SHAPES)
    claimed = [Claim("color", "star", "blue"), Claim("position", "heart", "top")]
    assert pair == PairScores(
        truth, claimed, None, False, None, ["contradictory", "ambiguous"], ["contradictory", "ambiguous"]
    )


def test_every_condition_answers_the_same_samples_and_is_compared_with_the_plain_answers() -> None:
    existence_samples = existence(*[True] * 8, *[False] * 4)
    plain = {sample.question: "Yes." for sample in existence_samples}  # 8 of 12 right
    seeing = plain | {f"Question {i}": "No." for i in (0, 8, 9, 10)}  # one wrong that was right, three right
    scores = run(plain, seeing, existence_samples, [])
    assert list(scores) == [BASELINE, "See"]
    assert "difference" not in scores[BASELINE]["existence"]["all"]["accuracy"]
    see_scores = scores["See"]["existence"]["all"]
    accuracy = see_scores["accuracy"]
    assert (accuracy["value"], accuracy["difference"]) == (pytest.approx(10 / 12), pytest.approx(2 / 12))
    assert accuracy["p"] == pytest.approx(2 * (1 + 4) / 2**4)
    assert (accuracy["turned"], see_scores["answers_changed"]) == (pytest.approx(4 / 12), pytest.approx(4 / 12))
    assert accuracy["difference_95"][0] < 2 / 12 < accuracy["difference_95"][1]
    assert see_scores["precision"]["value"] == pytest.approx(7 / 8)
    assert see_scores["precision"]["p"] is None


def test_pairs_are_scored_by_the_number_of_their_differences() -> None:
    removed, recolored = Claim("remove", "ring"), Claim("color", "star", "blue")
    pairs = [Difference(PICTURE, PICTURE, true) for true in ((removed,), (removed, recolored), ())]
    answers = dict.fromkeys(QUESTIONS, "No.") | {QUESTIONS[0]: "The ring was removed."}
    better = answers | {QUESTIONS[0]: "The ring was removed. The star turned to blue.", QUESTIONS[1]: "Yes."}
    scores = run(answers, better, [], pairs)
    plain, seeing = (scores[name]["differences"] for name in (BASELINE, "See"))
    assert [plain[setting]["samples"] for setting in ("all", "single", "several", "none")] == [3, 1, 1, 1]
    assert [plain[setting]["dqr_exact"]["value"] for setting in ("single", "several", "none")] == [1, 0, 0]
    assert [seeing[setting]["dqr_exact"]["value"] for setting in ("single", "several", "none")] == [0, 1, 0]
    assert seeing["all"]["dqr_exact"]["difference"] == 0
    assert seeing["all"]["dqr_exact"]["turned"] == pytest.approx(2 / 3)
    assert plain["all"]["cr"] == {"value": None, "value_95": None}  # a bare no claims nothing
    assert (plain["all"]["yes_no_consistency"]["value"], seeing["all"]["yes_no_consistency"]["value"]) == (-1, 1)
    assert seeing["all"]["answers_changed"] == 1


def test_p_is_that_of_the_shares_and_no_other_metric() -> None:
    answers = dict.fromkeys(QUESTIONS, "Yes.")
    pairs = [Difference(PICTURE, PICTURE, (Claim("remove", "ring"),))] * 4
    metrics = run(answers, answers | {QUESTIONS[2]: "No."}, [], pairs)["See"]["differences"]["all"]
    assert {name for name, metric in metrics.items() if isinstance(metric, dict) and metric.get("p") is not None} == {
        "dqr_exact", "ds_detect", "cr_pairs", "contradictions", "yes_same",  # false_alarms: no pair is without a difference
    }  # fmt: skip
    assert metrics["contradictions"]["difference"] == -1
    assert metrics["contradictions"]["p"] == mcnemar(np.zeros(4), np.ones(4)) == 2 / 2**4


def test_conditions_without_the_plain_answers_first_are_refused() -> None:
    with pytest.raises(ValueError, match="baseline"):
        evaluate(Scripted(lambda question: "Yes."), {"See": ()}, existence(True), [], SHAPES)


ABOUT = {"model": "a model", "data": "some questions", "versions": {}}


def test_the_report_holds_every_condition_with_its_difference_and_says_what_it_can_find() -> None:
    existence_samples = existence(*[True] * 300, *[False] * 100)
    plain = {sample.question: "Yes." for sample in existence_samples} | dict.fromkeys(QUESTIONS, "No.")
    turned = plain | {f"Question {i}": "No." for i in (*range(4), *range(300, 312))}
    pairs = [Difference(PICTURE, PICTURE, ())]
    page = report(ABOUT, run(plain, turned, existence_samples, pairs)).markdown().replace("\u00a0", " ")
    # 16 of 400 turned: 2.8 standard errors of sqrt(.04 / 400) are 2.8 points
    assert (
        "See has the most changes, 4.0 %, from right to wrong or back; at that rate, four of five such evaluations detect "
        "a difference of 2.8 points" in page
    )
    assert (
        "1 pairs of images. By dqr_exact, no condition changes any from right to wrong or back (where 2 % change"
        in page
    )
    assert (
        "| baseline | all | 0.750 (0.705 to 0.790) |" in page
    )  # Wilson's of 300 of 400: each picture has one question
    assert "| See | all | 0.770 (" in page
    assert "| See | all | +0.020 (" in page
    assert f"p {2 * 2517 / 2**16:.3f} |" in page
    for heading in (
        "How many differences", "Which differences", "Consistency", "Precision by type and category",
        "Recall by type and category",
    ):  # fmt: skip
        assert f"### {heading}" in page
    assert "By number of differences" not in page  # there is one number only
    assert "| See | - | - | - |" in page  # which differences: none, and none claimed


def test_a_tiny_model_runs_every_condition(tiny: Engine) -> None:
    conditions = {
        name: way
        for name, way in stages().items()
        if name in (BASELINE, "+ See", "See as scale", "See as transfer", "ICD")
    }
    scores = evaluate(InProcess(tiny), conditions, existence(True, False), [], (), quiet=True)
    assert len(scores) == 4


def test_the_stages_are_the_papers_and_what_it_leaves_open() -> None:
    plain = stages()
    assert list(plain)[:6] == [BASELINE, "+ See", "+ Think", "+ Generate", "SAGE, refresh 1", "SAGE, refresh 4"]
    assert [name for name in plain if name in ("VCD", "ICD", "PAI")] == ["VCD", "ICD", "PAI"]
    assert plain["+ Think"] == (See(alpha=0.1), Think(gamma=0.9))
    assert plain["+ Generate"] == (See(alpha=0.1), Think(gamma=0.9), Generate(weight=0.5, refresh=0))
    assert plain["SAGE, refresh 4"] == (See(), Think(), Generate(refresh=4))
    readings = {stage.reading for way in plain.values() for stage in way if isinstance(stage, See)}
    assert readings == {"scale", "transfer"}
    assert set(plain) < set(stages(sweep=True))


class Shout(Options):
    """Does nothing, and needs not be told how."""

    path = ("shout",)
    loud: bool = True


class Whisper(Shout):
    """Needs to be told how."""

    path = ("whisper",)
    words: int


def test_other_interventions_are_conditions_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    before = stages()
    monkeypatch.setattr(intervention, "REGISTRY", REGISTRY := dict(intervention.REGISTRY))
    monkeypatch.setattr("probes.harness.conditions.REGISTRY", REGISTRY)
    for kind in (Shout, Whisper):
        intervention.register(kind)
    assert stages() == before | {"shout": (Shout(),)}
