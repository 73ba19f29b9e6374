"""The report of `helmsight eval mc2`, made from the numbers in report.json: tables, plots, and one-line conclusions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from probes.answering.versions import in_words
from probes.conflicts.words import INSTRUCTIONS
from probes.harness.missing import left_out
from probes.mc2 import report_ablations as ablations
from probes.mc2 import report_conditions as sections
from probes.mc2.report_automatic import automatic
from probes.mc2.report_conditions import Numbers
from probes.reporting.report import Report

SECTIONS: Mapping[str, Callable[[Report, Any], None]] = {
    "sizes": sections.sizes,
    "samples": ablations.samples,
    "tasks": ablations.tasks,
    "strength": ablations.strength,
    "latency": ablations.latency,
    "auto": automatic,
}
"""The optional sections of a report, in order."""


def report(data: Numbers) -> Report:
    """Return the whole report of the contents of report.json."""
    about = data["about"]
    page = Report(f"Modality preference of {about['model']}")
    page.facts({
        "Data": about["data"],
        **left_out(about),
        "Model": about["model"],
        "Instructions": f"{INSTRUCTIONS[about['wording']]}, word for word",
        "Steering": _steering(about),
        "Versions": in_words(about["versions"]),
    })  # fmt: skip
    conditions = data["conditions"]
    sections.conditions(page, conditions)
    sections.alone(page, conditions)
    sections.attention_by_task(page, conditions, data.get("words", {}), data.get("attention", {}))
    sections.attention_by_layer(page, conditions, about.get("layers", ()), about.get("model layers"))
    if "lens" in data:
        sections.lens(page, data["lens"], about.get("layers", ()))
    for name, section in SECTIONS.items():
        if name in data:
            section(page, data[name])
    return page


def _steering(about: Numbers) -> str | None:
    if "vector" not in about:
        return None
    published = about["published strength"]
    units = "" if published is None else f" ({published:g} in published units)"
    return f"vector {about['vector']} at strength {about['strength']:g}{units}"
