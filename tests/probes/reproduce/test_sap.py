"""MM-SAP's rows, read off a report of a model whose answers are known."""

from __future__ import annotations

import copy
from typing import Any, get_args

import pytest

from probes.harness.comparison import BASELINE
from probes.mmsap.evaluate import evaluate
from probes.mmsap.samples import Part
from probes.reproduce.sap import ITEMS
from steering import RefusalPrompt
from tests.probes.conftest import Scripted
from tests.probes.mmsap.making import choosing, sample

EACH, REFUSED = 48, 10


def found(*, told: bool, known: int, beyond: int) -> Any:
    """Return a report.

    BasicVisQA is answered rightly; of KnowVisQA, REFUSED are refused, `known` of them known; of BeyondVisQA, `beyond` are
    refused, and all if the model is told that it may, with `told`.
    """

    def choice(label: str, question: Any) -> str | None:
        part, number = label.split()
        if part == "beyond":
            return None if int(number) < beyond or (told and question.interventions) else "blue"
        if (
            part == "know"
            and int(number) < REFUSED
            and any("Sorry" in part["text"] for part in question.chat[0]["content"][1:])
        ):
            return None
        return "red" if part == "basic" or not known <= int(number) < REFUSED else "blue"

    samples = [sample(part, number, f"{part} {number % 2}") for part in get_args(Part) for number in range(EACH)]
    conditions = {BASELINE: (), "refusal prompt": (RefusalPrompt(),)}
    scores, runs = evaluate(Scripted(choosing(choice)), conditions, samples, runs=2, seed=0, quiet=True)
    return {"about": {"questions": 3 * EACH}, "conditions": scores, "runs": runs}


@pytest.fixture(scope="module")
def as_in_the_paper() -> Any:
    return found(told=True, known=1, beyond=28)


@pytest.fixture(scope="module")
def otherwise() -> Any:
    return found(told=False, known=7, beyond=EACH)


def test_the_rows_are_those_of_the_paper() -> None:
    assert [item.id for item in ITEMS] == [*range(46, 53)]


def test_the_papers_findings_appear(as_in_the_paper: Any) -> None:
    readings = {item.id: item.read(as_in_the_paper) for item in ITEMS if item.read}
    assert all(reading.appears for reading in readings.values())
    assert readings[46].ours == {"BasicVisQA kk": 1, "KnowVisQA kk": 38 / 48, "BeyondVisQA ku": 28 / 48}
    assert readings[47].ours == {"kk": 86 / 144, "ku": (9 + 28) / 144, "sa": pytest.approx(123 / 144)}
    assert readings[48].ours == {"BasicVisQA": 1, "KnowVisQA": 38 / 48, "BeyondVisQA": 20 / 48}
    assert readings[49].ours == {"refused": REFUSED, "of these known": 1 / REFUSED}
    assert readings[49].n == EACH
    assert (readings[50].ours["ku plain"], readings[50].ours["ku told"]) == (37 / 144, 57 / 144)
    assert readings[51].ours["deviation"] == 0
    assert readings[52].ours.keys() == {f"{part} {number}" for part in get_args(Part) for number in range(2)} | {"p"}


def test_other_results_do_not_appear(otherwise: Any) -> None:
    verdicts = {item.id: item.read(otherwise).appears for item in ITEMS if item.read}
    assert [number for number, appears in verdicts.items() if not appears] == [46, 49, 50]


def test_the_deviation_of_runs_goes_by_its_interval(as_in_the_paper: Any) -> None:
    row = next(item for item in ITEMS if item.id == 51)
    assert row.read is not None
    allowed = row.read(as_in_the_paper).ours["theirs for as many"]
    for share, appears in ((0.3, True), (0.5, False)):
        runs = {"mean": 0.6, "deviation": share * allowed, "runs": [0.6] * 5}
        report = as_in_the_paper | {"runs": {"baseline": {"total": {"sa": runs}}}}
        reading = row.read(report)
        assert reading.appears is appears
        # Tables of chi square with 4 degrees of freedom: 11.143 and 0.484.
        expected = (share * allowed * (4 / 11.143) ** 0.5, share * allowed * (4 / 0.4844) ** 0.5)
        assert reading.figures()["deviation"].interval == pytest.approx(expected, rel=1e-3)


def test_a_rate_of_few_refusals_says_nothing(as_in_the_paper: Any) -> None:
    row = next(item for item in ITEMS if item.id == 49)
    assert row.read is not None
    assert not row.read(as_in_the_paper).nothing
    report = copy.deepcopy(as_in_the_paper)
    report["runs"]["baseline"]["know"]["refusals"]["mean"] = 4.8
    assert row.read(report).nothing == "floor: it refuses 4.8 questions"
