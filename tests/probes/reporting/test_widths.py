"""In a window of 1,100 pixels no table of a report scrolls, at the sizes that reports have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from probes.reporting.report import Report
from probes.sage.report import report as sage_report

REPORTS = Path(__file__).parents[3] / "demo" / "reports"
SINCE = {
    "existence": {"auroc": "accuracy", "best_accuracy": "accuracy"},
    "differences": {"cr_all": "cr", "cr_clauses": "cr"},
}
"""Metrics that are newer than the reports, each with an older one whose values are as wide."""
TABLES = """() => [...document.querySelectorAll(".wide:has(table)")].map((box) => [box.scrollWidth, box.clientWidth])"""


@pytest.fixture(scope="module")
def window(chromium: Any) -> Any:
    return chromium.new_page(viewport={"width": 1100, "height": 800})


def widths(window: Any, page: Path) -> list[tuple[int, int]]:
    """Return for every table the width that it needs and the width that it has."""
    window.goto(page.as_uri())
    assert window.evaluate("document.documentElement.scrollWidth") == 1100
    return [(needed, available) for needed, available in window.evaluate(TABLES)]


@pytest.mark.parametrize("name", ["auto", "mc2", "probe"])
def test_a_report_fits(window: Any, name: str) -> None:
    found_widths = widths(window, REPORTS / name / "report.html")
    assert found_widths
    assert all(needed <= available for needed, available in found_widths), found_widths


@pytest.mark.parametrize("name", ["sage", "sage-noisy", "sage-sweep"])
def test_a_comparison_of_many_conditions_fits(window: Any, name: str, tmp_path: Path) -> None:
    conditions = json.loads((REPORTS / f"{name}.json").read_text())
    for parts in conditions.values():
        for part, metrics in SINCE.items():
            for scores in parts.get(part, {}).values():
                for metric, like in metrics.items():
                    scores.setdefault(metric, scores[like])
    sage_report({"model": "a model", "data": "", "versions": {}}, conditions).write(tmp_path)
    found_widths = widths(window, tmp_path / "report.html")
    assert len(found_widths) == 16
    assert all(needed <= available for needed, available in found_widths), found_widths


def test_a_table_that_does_not_fit_is_detected(window: Any, tmp_path: Path) -> None:
    page = Report("Wide")
    page.table([f"column_{index}" for index in range(20)], [[0.5] * 20])
    page.write(tmp_path)
    ((needed, available),) = widths(window, tmp_path / "report.html")
    assert needed > available


def test_no_table_of_a_report_has_more_than_ten_columns() -> None:
    for page in REPORTS.rglob("*.md"):
        heads = [line for line in page.read_text().splitlines() if line.startswith("| ---")]
        assert all(line.count("|") - 1 <= 10 for line in heads), page
