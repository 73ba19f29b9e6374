"""The rows of implicit misunderstanding, read of the embedded model's report and of reports that say otherwise."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import probes
from probes.reproduce.items import Found
from probes.reproduce.ivm import ITEMS

REPORT = Path(probes.__file__).parents[1] / "demo" / "reports" / "stme" / "report.json"
ROWS = {item.id: item for item in ITEMS}


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    return dict(json.loads(REPORT.read_text()))


def read(row: int, report: dict[str, Any]) -> Found:
    reads = ROWS[row].read
    assert reads is not None
    return reads(report)


def test_every_row_of_the_paper_is_there_once() -> None:
    assert [item.id for item in ITEMS] == list(range(29, 46))


def test_each_row_that_has_a_run_is_read(measured: dict[str, Any]) -> None:
    for row, item in ROWS.items():
        if item.run is not None:
            reading = read(row, measured)
            assert reading.n is not None
            assert 0 < reading.n <= measured["about"]["samples"]
    assert (
        read(31, measured).ours["looks elsewhere"]
        == measured["conditions"]["baseline"]["samples"]["all"]["ivm"]["value"]
    )


def samples(report: dict[str, Any], setting: str = "all") -> dict[str, Any]:
    return dict(report["conditions"]["baseline"]["samples"])[setting]  # type: ignore[no-any-return]


def _not_focused(report: dict[str, Any]) -> None:
    samples(report)["attention_lnd"]["value_95"][0] = 0.2


def _even(report: dict[str, Any]) -> None:
    report["convergence"]["all"]["last"]["value_95"][0] = 0.9


def _no_rise(report: dict[str, Any]) -> None:
    report["convergence"]["all"]["rise"]["value_95"][0] = -0.1


def _named(report: dict[str, Any]) -> None:
    report["which"]["all"]["share"]["value_95"] = [0.8, 0.97]


def _few_needles(report: dict[str, Any]) -> None:
    report["needles"]["best"]["value_95"][0] = 0.83


@pytest.mark.parametrize(
    ("row", "otherwise"),
    [
        (29, _even), (30, _not_focused), (36, _no_rise), (37, _named), (40, _few_needles),
    ],
)  # fmt: skip
def test_a_finding_that_is_not_there_does_not_appear(
    row: int, otherwise: Callable[[dict[str, Any]], None], measured: dict[str, Any]
) -> None:
    assert read(row, measured).appears
    report = copy.deepcopy(measured)
    otherwise(report)
    assert not read(row, report).appears


def test_a_better_figure_alone_shows_nothing_where_the_intervals_meet(measured: dict[str, Any]) -> None:
    report = copy.deepcopy(measured)
    easy, hard = (report["attention"]["baseline"][name]["right"]["best"] for name in ("easy", "hard"))
    rows = (report["anchor"]["every"][name]["best"] for name in ("image", "text"))
    for row, (high, low) in ((33, (easy, hard)), (35, rows)):
        high.update(value=0.9, value_95=[0.8, 1.0])
        low.update(value=0.7, value_95=[0.6, 0.79])
        assert read(row, report).appears
        low["value_95"] = [0.6, 0.81]
        assert not read(row, report).appears


def test_a_curve_rises_and_falls_by_more_than_a_few_answers(measured: dict[str, Any]) -> None:
    report = copy.deepcopy(measured)
    right = report["attention"]["baseline"]["all"]["right"]
    for values, appears in (([0.5, 0.8, 0.5], True), ([0.78, 0.8, 0.5], False), ([0.9, 0.8, 0.5], False)):
        right["curves"] = {"lnd": values}
        assert read(41, report).appears is appears


def test_orders_are_compared_in_both_groups(measured: dict[str, Any]) -> None:
    report = copy.deepcopy(measured)
    for setting, attention in (("easy", 0.01), ("hard", 0.01)):
        report["shuffles"][setting]["attention_best"]["sd"] = attention
        report["shuffles"][setting]["answers"]["sd"] = 0.04
    assert read(34, report).appears
    report["shuffles"]["hard"]["attention_best"]["sd"] = 0.05
    assert not read(34, report).appears


def test_a_look_elsewhere_is_a_misunderstanding_only_if_the_answer_rests_there(measured: dict[str, Any]) -> None:
    report = copy.deepcopy(measured)
    assert not read(31, report).appears  # all eleven change without the target, and none without the focused picture
    hidden, ivm = report["hidden"]["right, elsewhere"], samples(report)["ivm"]
    hidden["focused"]["value_95"], hidden["other"]["value_95"] = [0.7, 1.0], [0.0, 0.3]
    assert read(31, report).appears
    ivm["value_95"] = [0.001, 0.03]  # one case of 180
    assert not read(31, report).appears


def test_naming_pictures_by_chance_is_no_baseline(measured: dict[str, Any]) -> None:
    assert read(37, measured).nothing.startswith("floor")
    report = copy.deepcopy(measured)
    report["which"]["all"]["share"]["value_95"] = [0.6, 0.7]
    assert (read(37, report).appears, read(37, report).nothing) == (True, "")


def test_rows_that_say_nothing_of_this_model_or_of_any() -> None:
    planted = {number for number, item in ROWS.items() if item.embedded.startswith("planted")}
    assert planted == {29, 30, 36, 40}
    assert ROWS[42].identity.startswith("identity")
    assert ROWS[39].run is None
