"""The report of a list benchmark."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from probes.answering.versions import in_words
from probes.harness.comparison import BASELINE
from probes.harness.comparison_tables import READING, power, table
from probes.harness.missing import left_out
from probes.image_qa.task import Task
from probes.reporting.report import Report


def report(task: Task[Any], about: Mapping[str, Any], results: Mapping[str, Any], totals: Mapping[str, Any]) -> Report:
    """Return the report of a run.

    `about` describes the run, `results` is the result of `compare`, `totals` the task's further figures.
    """
    page = Report(f"{task.title} on {about['model']}")
    page.facts({
        "Data": about["data"],
        **left_out(about),
        "Model": about["model"],
        "Versions": in_words(about["versions"]),
    })  # fmt: skip
    page.text(task.reading)
    page.text(READING)
    if totals:
        page.heading("Totals")
        columns = list(next(iter(totals.values())))
        page.table(
            ["condition", *columns], [[name, *(total[key] for key in columns)] for name, total in totals.items()]
        )
    for part, settings in results[BASELINE].items():
        page.heading(part)
        if task.share is not None:
            power(page, results, part, task.share, task.unit)
        table(page, results, part, task.metrics)
        if len(settings) > 2:
            page.heading("By setting", 3)
            table(page, results, part, task.metrics, [name for name in settings if name != "all"])
    return page
