"""Rows that lists of questions measure, read from reports like theirs."""

from __future__ import annotations

from typing import Any

import pytest

from probes.reproduce.items import UnreadableRun
from probes.reproduce.mp import ITEMS as MP
from probes.reproduce.runs import RUNS
from probes.reproduce.spd import ITEMS as SPD

ROWS = {item.id: item for item in (*MP, *SPD) if item.id in (8, 9, 11, 60, 61, 62, 64, 65, 66)}
PARTS = {
    "pope": ["existence"],
    "mme": ["MME"],
    "chair": ["CHAIR"],
    "phd": ["PhD-iac", "PhD-icc"],
    "tallyqa": ["TallyQA"],
}
METRICS = ("accuracy", "f1", "acc_plus", "chair_s", "chair_i", "recall")


def report(run: str, low: float, high: float) -> dict[str, Any]:
    """Return a report in which all conditions move all metrics alike, and SAGE raises MME's total by the lower end."""
    plain = {name: {"value": 0.5} for name in (*METRICS, "unread")} | {"samples": 20}
    now = {name: {"value": 0.5 + (low + high) / 2, "difference_95": [low, high]} for name in METRICS}
    conditions = {
        name: {part: {"all": plain if name == "baseline" else now | {"samples": 20}} for part in PARTS[run]}
        for name in ("baseline", "SAGE", "ICD", "opera", "AGLA", "toward vision")
    }
    return {"conditions": conditions, "totals": {"baseline": {"perception": 500}, "SAGE": {"perception": 500 + low}}}


def verdicts(low: float, high: float) -> dict[int, bool]:
    return {number: item.read(report(str(item.run), low, high)).appears for number, item in ROWS.items() if item.read}


def test_a_finding_appears_only_if_its_interval_excludes_zero() -> None:
    falls = {61}  # CHAIR's share of hallucinating descriptions
    measured = {8, 9, 60, 61, 62, 64, 65, 66}
    assert {number for number, appears in verdicts(0.1, 0.3).items() if appears} == measured - falls
    assert {number for number, appears in verdicts(-0.3, -0.1).items() if appears} == falls
    assert {number for number, appears in verdicts(-0.1, 0.3).items() if appears} == set()


def test_each_row_has_a_run_or_a_reason() -> None:
    assert {item.run for item in ROWS.values() if item.run} == PARTS.keys()
    assert PARTS.keys() <= RUNS.keys()
    assert {number for number, item in ROWS.items() if item.why} == {11}


def test_the_figures_name_the_condition() -> None:
    read = ROWS[9].read
    assert read is not None
    assert read(report("phd", 0.1, 0.3)).ours == {
        "iac plain": 0.5, "iac toward vision": 0.7, "icc plain": 0.5, "icc toward vision": 0.7,
    }  # fmt: skip


def test_a_difference_without_an_interval_is_none() -> None:
    """It has none where no resample differs."""
    for item in ROWS.values():
        if item.read is None:
            continue
        measured = report(str(item.run), 0.1, 0.3)
        for parts in measured["conditions"].values():
            for part in parts.values():
                for score in (score for score in part["all"].values() if isinstance(score, dict)):
                    score["difference_95"] = None
        assert not item.read(measured).appears


@pytest.mark.parametrize("row", [8, 60, 62])
def test_unread_answers_and_full_scores_are_no_evidence(row: int) -> None:
    item = ROWS[row]
    assert item.read is not None
    measured = report(str(item.run), 0.1, 0.3)
    (plain,) = (part["all"] for part in measured["conditions"]["baseline"].values())
    assert not item.read(measured).nothing
    plain["unread"]["value"] = 0.77
    with pytest.raises(UnreadableRun, match="77% of the plain answers"):
        item.read(measured)
    plain["unread"]["value"] = 0.1
    for metric in METRICS:
        plain[metric]["value"] = 0.963
    assert item.read(measured).nothing.startswith("ceiling")
