"""The report of `helmsight eval alarm`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from probes.alarm.evaluate import FALSE_ALARMS
from probes.answering.versions import in_words
from probes.harness.missing import left_out
from probes.reporting import plots
from probes.reporting.report import Report
from probes.reporting.tables import Measured

READING = f"""\
AUROC: how often a wrong answer has a greater number than a right one (a smaller one, where the sign is -); 0.5 is chance.
One half of the answers sets the signs, the weights of the combination and its threshold; all figures are measured on the
other half, with 95 % intervals. *alike*: compares only answers to the same kind of question on images with as much noise,
so that a number that merely separates hard questions from easy ones is at 0.5. *combination*: a logistic regression on all
numbers. *best accuracy*: of telling wrong answers by the number, at the threshold that makes it greatest. *alarm*: a
regression on those numbers that the `alarm` readout reads beside every answer and that raise the area in folds of the first
half. The alarm's threshold has {100 * (1 - FALSE_ALARMS):g} % of that half's right answers below it."""


def report(about: Mapping[str, Any], results: Mapping[str, Any]) -> Report:
    """Return the report of a run; `results` are those of `evaluate`."""
    page = Report(f"Which numbers tell wrong answers on {about['model']}")
    page.facts(
        {"Data": about["data"], **left_out(about), "Model": about["model"], "Versions": in_words(about["versions"])}
    )
    page.text(READING)
    parts = {name: result for name, result in results["parts"].items() if "auroc" in result}
    names = list(parts["all"]["auroc"])
    order = sorted(names, key=lambda name: -(parts["all"]["auroc"][name]["auroc"] or 0))
    page.heading("All answers")
    page.text(f"{parts['all']['answers']} answers, {parts['all']['wrong']} of them wrong.")
    rows: list[list[object]] = []
    for name in order:
        areas = parts["all"]["auroc"][name]
        sign = {1: "+", -1: "-"}.get(results["signs"].get(name, 0), "")
        measures = (_measured(areas, measure) for measure in ("auroc", "alike", "best_accuracy"))
        rows.append([name, sign, *measures, areas["n"]])
    page.table(["number", "sign", "AUROC", "alike", "best accuracy", "answers"], rows)
    values = {name: parts["all"]["auroc"][name]["auroc"] for name in order}
    intervals = {name: tuple(parts["all"]["auroc"][name]["auroc_95"]) for name in order}
    page.plot("auroc", plots.bars(values, intervals=intervals, xlabel="AUROC (0.5: chance)"), "AUROC of every number.")
    page.heading("The alarm")
    page.table(
        ["part", "answers", "wrong", "raised on right", "raised on wrong", "wrong of those raised"],
        [
            [part, result["answers"], result["wrong"], *(_measured(result["alarm"], name) for name in _SHARES)]
            for part, result in parts.items()
            if result["alarm"] is not None
        ],
    )
    page.heading("By part")
    page.table(
        ["number", *parts],
        [[name, *(_measured(result["auroc"].get(name), "auroc") for result in parts.values())] for name in order],
    )
    if few := [name for name, result in results["parts"].items() if "auroc" not in result]:
        page.text(f"Too few right or wrong answers to tell: {', '.join(few)}.")
    return page


_SHARES = ("false_alarms", "caught", "precision")


def _measured(areas: Mapping[str, Any] | None, name: str) -> Measured | None:
    return None if areas is None or areas[name] is None else Measured(areas[name], areas[f"{name}_95"])
