"""The sections of the report of `eval mc2` beside the conditions: ablations, and steering whose way is found."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from probes.conflicts.samples import SIDES
from probes.mc2 import report_ablations, report_automatic
from probes.mc2.ablate import Knee, Latency
from probes.reporting.report import Report
from tests.probes.mc2.pages import AUTOMATIC, an_automatic, ranged, row, strengths, tables


@pytest.fixture
def page(undrawn: None) -> Report:
    return Report("Modality preference of a model")


# ------------------------------------------------------------------------------------------------------- ablations


def test_rows_of_an_ablation_carry_both_sides(page: Report) -> None:
    rows = {25: row((15, 2, 3), (4, 12, 4)), 250: row((16, 2, 2), (2, 13, 5))}
    report_ablations.samples(page, {str(size): row.to_json() for size, row in rows.items()})
    (table,) = tables(page)
    assert list(table) == ["25", "250"]
    vision, text = (rows[25].shares[side] for side in SIDES)
    assert table["25"] == {
        "samples": "25", "S_v toward vision": ranged(vision, "s_vision"),
        "Vision Ratio toward vision": "0.882", "S_o toward vision": ranged(vision, "s_others"),
        "S_t toward text": ranged(text, "s_text"), "Vision Ratio toward text": "0.250",
        "S_o toward text": ranged(text, "s_others"),
    }  # fmt: skip
    assert (vision.s_vision, text.s_text, text.vision_ratio) == (0.75, 0.6, 0.25)
    assert "25 samples and 250 samples differ by 5.0 points at most" in page.markdown()


@pytest.mark.parametrize(
    ("least", "most", "expected"),
    [(96, 100, "4.0 points at most (within 5)"), (90, 100, "10.0 points at most (NOT within 5)"),
     (100, 90, "10.0 points at most (NOT within 5)")],
)  # fmt: skip
def test_the_least_probe_is_judged_by_the_worse_side(page: Report, least: int, most: int, expected: str) -> None:
    fixed = (50, 25, 25)
    rows = {
        250: row(fixed, (0, most, 100 - most)),
        100: row(fixed, (0, 5, 95)),
        25: row(fixed, (0, least, 100 - least)),
    }
    report_ablations.samples(page, {str(size): row.to_json() for size, row in rows.items()})
    assert expected in page.markdown()


def test_one_task_only(page: Report) -> None:
    rows = {"color": row((1, 0, 0), (0, 0, 1)), "all tasks": row((0, 1, 0), (0, 1, 0))}
    report_ablations.tasks(page, {task: row.to_json() for task, row in rows.items()})
    (table,) = tables(page)
    followed = {task: (cells["S_v toward vision"][:5], cells["S_t toward text"][:5]) for task, cells in table.items()}
    assert followed == {"color": ("1.000", "0.000"), "all tasks": ("0.000", "1.000")}


@pytest.mark.parametrize(
    ("bend", "expected"),
    [
        (
            Knee(1.0, 0.5, -0.25, 2.0),
            "Knee visible: at strength 1 the effect is within 5 points of its greatest; it grows by 50 points a unit of "
            "strength before and falls by 25 after; it breaks at 2.",
        ),
        (
            Knee(0.5, 0.2, 0.1, None),
            "Knee NOT visible: at strength 0.5 the effect is within 5 points of its greatest; it grows by 20 points a unit "
            "of strength before and grows by 10 after; no strength tried breaks the effect.",
        ),
    ],
)
def test_the_knee_in_words(page: Report, bend: Knee, expected: str) -> None:
    report_ablations.strength(page, strengths({0.0: row((1, 1, 0), (1, 1, 0)), 1.5: row((2, 0, 0), (0, 2, 0))}, bend))
    assert expected in page.markdown()
    (table,) = tables(page)
    assert list(table) == ["0.000", "1.500"]
    assert table["1.500"]["S_v toward vision"] == "1.000 (0.342 to 1.000)"


def test_strengths_stand_in_both_units(tmp_path: Path) -> None:
    page = Report("Modality preference of a model")
    rows = {0.0: row((1, 1, 0), (1, 1, 0)), 0.5: row((2, 0, 0), (0, 2, 0)), 3.0: row((0, 0, 2), (0, 0, 2))}
    report_ablations.strength(page, strengths(rows, Knee(0.5, 1.0, -0.4, 3.0), published=0.4))
    page.write(tmp_path)
    text = page.markdown()
    assert "Strengths are in published units; the vector's own strength 1.0 is 0.4 of them." in text
    head, _, *lines = [line for line in text.splitlines() if line.startswith("|")]
    assert head.startswith("| published | calibrated | S_v toward vision |")
    assert [line.split(" | ")[:2] for line in lines] == [
        ["| 0.000", "0.000"],
        ["| 0.500", "1.250"],
        ["| 3.000", "7.500"],
    ]
    drawn = (tmp_path / "strength.svg").read_text()
    assert all(label in drawn for label in ("strength (published)", "strength (calibrated)", "strength 1.0", "knee"))


def test_latencies(page: Report) -> None:
    ways = {"plain": Latency(0.05, 1, (1, 1)), "steering": Latency(0.0612345, 1.2345, (1.1, 1.3004), 812.6)}
    report_ablations.latency(page, {name: way.to_json() for name, way in ways.items()})
    (table,) = tables(page)
    assert table["plain"] == {
        "way": "plain",
        "seconds (median)": "0.0500",
        "ratio to plain": "1.000 (1.000 to 1.000)",
        "peak memory (MB, median)": "-",
    }
    assert list(table["steering"].values()) == ["steering", "0.0612", "1.234 (1.100 to 1.300)", "813"]


# ------------------------------------------------------------------------------------------------------- automatic


def test_the_gap_that_a_criterion_closes(page: Report) -> None:
    report_automatic.automatic(page, AUTOMATIC.to_json())
    pooled, decided, first, _, second, _, alone = tables(page)
    assert list(pooled) == list(decided)
    assert list(pooled) == ["either", "image", "text", "image, unfamiliar text", "either, unfamiliar text"]
    assert list(pooled["text"].values())[1:5] == ["drop", "0.500", "1.000", "0.750"]
    assert pooled["text"]["gap closed"].startswith("0.500 (")
    assert list(first["text"].values())[4:] == ["0.500", "0.000 (0.000 to 0.000)"]
    assert list(second["text"].values())[4:] == ["1.000", "1.000 (1.000 to 1.000)"]
    assert pooled["either"]["gap closed"].startswith("0.250 (")
    assert pooled["image, unfamiliar text"]["gap closed"].startswith("-1.000 (")
    assert [decided["text"][name] for name in ("decided", "toward vision", "right if decided")] == [
        "0.500",
        "0.500",
        "1.000",
    ]
    assert decided["text"]["points to the plain answer's side"] == "1.000"
    assert (decided["text"]["tasks by majority"], decided["image"]["tasks by majority"]) == ("1.000", "0.000")
    assert list(alone["text"].values()) == ["text", "0.7", "0.950", "0.450"]


def test_the_gap_that_a_criterion_closes_in_words(page: Report) -> None:
    report_automatic.automatic(page, AUTOMATIC.to_json())
    text = page.markdown()
    assert (
        "drop: closes 25 % of the gap (25 to 25 % closed); with a degraded image it leaves the gap as it is (0 to 0 % "
        "closed), with a degraded text it closes 50 % of the gap"
    ) in text
    assert "in an unfamiliar wording it widens the gap by 25 % (" in text
    assert "It decides 50 % of the questions, 50 % of those rightly" in text
    assert "steers away from 50 % of the sound texts, 50 % of those in an unfamiliar wording and 50 % of" in text


@pytest.mark.parametrize(
    ("closed", "interval", "expected"),
    [
        (0.24, [0.2, 0.28], "closes 24 % of the gap (20 to 28 % closed)"),
        (0.24, [-0.05, 0.5], "closes 24 % of the gap (5 % wider to 50 % closed)"),
        (-1.606, [-1.891, -1.37], "widens the gap by 161 % (137 to 189 % wider)"),
        (-0.001, [-0.011, 0.004], "leaves the gap as it is (1 % wider to 0 % closed)"),
        (None, None, "finds no gap to close"),
    ],
)
def test_no_sign_stands_beside_closed_or_wider(
    page: Report, closed: float | None, interval: list[float] | None, expected: str
) -> None:
    report = AUTOMATIC.to_json()
    for cell in report["rows"]:
        cell |= {"gap_closed": closed, "gap_closed_95": interval}
    report_automatic.automatic(page, report)
    assert f"drop: {expected}; with a degraded image it {expected}, with" in page.markdown()


def test_a_criterion_that_always_abstains_is_reported(page: Report, tmp_path: Path) -> None:
    report = an_automatic("--")
    report_automatic.automatic(page, report.to_json())
    assert not re.search(r"\bnan\b", page.markdown().lower())
    assert "It decides 0 % of the questions, none of those rightly" in page.markdown()
    page.write(tmp_path, report.to_json())
