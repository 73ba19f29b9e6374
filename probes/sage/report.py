"""The report of `helmsight eval sage`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from probes.answering.versions import in_words
from probes.harness.comparison import BASELINE
from probes.harness.comparison_tables import READING, power, table
from probes.harness.missing import left_out
from probes.image_pairs.metrics import TYPES
from probes.image_qa.yes_no import RANKING
from probes.reporting.report import Report
from probes.sage.samples import QUESTIONS

_DIFFERENCES: Mapping[str, Sequence[str]] = {
    "How many differences": ("dqr_exact", "ds_tolerance", "dqr_ratio", "ds_detect", "false_alarms"),
    "Which differences": ("tf1", "cf1", "cf1_released"),
    "Consistency of the claims": ("cr", "cr_all", "cr_clauses", "cr_pairs"),
    "Consistency of yes and no": ("yes_no_consistency", "contradictions", "yes_same"),
}
_BY_SETTING = ("dqr_exact", "tf1", "cf1", "cr", "contradictions")


def report(about: Mapping[str, Any], results: Mapping[str, Any]) -> Report:
    """Return the report of a run; `about` describes it, `results` is the result of `evaluate`."""
    page = Report(f"SAGE on {about['model']}")
    page.facts({
        "Data": about["data"],
        **left_out(about),
        "Model": about["model"],
        "Versions": in_words(about["versions"]),
    })  # fmt: skip
    page.text(READING)
    if "existence" in results[BASELINE]:
        _existence(page, results)
    if "differences" in results[BASELINE]:
        _differences(page, results)
    return page


def _existence(page: Report, results: Mapping[str, Any]) -> None:
    page.heading("Existence (POPE)")
    power(page, results, "existence", "accuracy", "questions")
    settings = list(results[BASELINE]["existence"])
    table(page, results, "existence", ("accuracy", "precision", "recall", "f1", "yes"), settings)
    page.heading("Ranking", 3)
    page.text(RANKING)
    table(page, results, "existence", ("auroc", "best_accuracy"), settings)


def _differences(page: Report, results: Mapping[str, Any]) -> None:
    page.heading("Spot the difference (SPD-Faith)")
    page.text(
        'docs/study.md, "The numbers of SPD-Faith", defines each number. Claims are read off the answers by '
        f'rules; cr is of the answers to "{QUESTIONS[3]}" and "{QUESTIONS[4]}".'
    )
    power(page, results, "differences", "dqr_exact", "pairs of images")
    for heading, metrics in _DIFFERENCES.items():
        page.heading(heading, 3)
        table(page, results, "differences", metrics)
    for part in ("precision", "recall"):
        page.heading(f"{part.capitalize()} by type and category", 3)
        names = {kind: f"{kind}_{part}" for kind in (*TYPES, "category")}
        table(page, results, "differences", names, differences=False)
    settings = [name for name in results[BASELINE]["differences"] if name != "all"]
    if len(settings) > 1:
        page.heading("By number of differences", 3)
        table(page, results, "differences", _BY_SETTING, settings)
