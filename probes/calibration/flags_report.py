"""The report of `helmsight probe --calibrate-flags`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from probes.answering.versions import in_words, versions
from probes.calibration.flags import NUMBERS, RATE, SEVERITIES, Answered, area_of, halves, right_and_wrong
from probes.reporting.report import Report
from steering.model.thresholds import FLAGS, Thresholds
from steering.readouts.flags import TOP


def report(name: str, data_from: str, answers: Answered, thresholds: Thresholds) -> Report:
    """Return the report on the thresholds, and on how well each number alone separates wrong from right answers.

    All is measured on the held-out half.
    """
    _, held_out = halves(answers)
    raised = held_out.raised(thresholds)
    page = Report(f"Flags on {name}")
    page.facts({"Data": data_from, "Model": name, "Versions": in_words(versions())})
    page.text(
        f"{len(answers.right)} questions, each with its image alone, of which none to {SEVERITIES[-1]:.0%} is noise. "
        f"{thresholds.answers} of them choose the thresholds: the greatest that raise either flag on at most {RATE:.0%} of "
        f"the right answers. All other figures are measured on the remaining {len(held_out.right)}, of which "
        f"{int(held_out.right.sum())} are answered rightly. Intervals are of 95 %: Wilson's for shares, "
        "bootstrap for comparisons of pairs of answers."
    )
    page.text(
        f"Thresholds: attention is concentrated from {thresholds.attention:.3f}, activation from "
        f"{thresholds.activation:.3f} (the share of a map in its strongest {TOP:.0%}); both agree from "
        f"{thresholds.agreement:.3f} (their correlation)."
    )
    _rates(page, thresholds)
    _numbers(page, held_out)
    for heading, groups in (("By task", held_out.task), ("By severity", held_out.severity)):
        _groups(page, heading, groups, held_out, raised)
    return page


def _rates(page: Report, thresholds: Thresholds) -> None:
    page.heading("How often each flag is raised")
    page.text(
        "Alike are questions of one task with images of one severity. The last columns compare only answers to these: the "
        "share of pairs of a right and a wrong answer in which the wrong one raises the flag (neither or both: half; .5 is "
        "chance). So neither the kind of the question nor the noise can separate them."
    )
    rows = [
        (flag, *(_range(rates.get(name)) for name in ("right", "wrong", "area")), rates["separates"])
        for flag, rates in thresholds.raised.items()
    ]
    page.table(["flag", "on right answers", "on wrong answers", "among alike questions", "above chance"], rows)
    for flag, rates in thresholds.raised.items():
        if not rates["separates"]:
            page.text(
                f"{flag} does NOT tell wrong answers from right ones to alike questions on this model: it only describes "
                "the maps."
            )


def _numbers(page: Report, held_out: Answered) -> None:
    page.heading("Each number alone")
    page.text(
        "How often the wrong answer of a right and a wrong one has the lower number; .5 is chance. Overlap is the share of "
        "common patches among the strongest fifths; no flag uses it."
    )
    page.table(
        ["number", "all answers", "among alike questions"],
        [
            (name, *(_range(area_of(-held_out.values[name], held_out, strata)) for strata in (None, held_out.alike)))
            for name in NUMBERS
        ],
    )


def _groups(
    page: Report, heading: str, groups: np.ndarray, held_out: Answered, raised: Mapping[str, np.ndarray]
) -> None:
    page.heading(heading)
    rows = []
    for group in np.unique(groups):
        chosen = groups == group
        cells = [
            float(some.mean()) if len(some) else None
            for flag in FLAGS
            for _, some in right_and_wrong(held_out.right[chosen], raised[flag][chosen])
        ]
        rows.append((str(group), int(chosen.sum()), float(held_out.right[chosen].mean()), *cells))
    columns = [f"{flag} on {side} ones" for flag in FLAGS for side in ("right", "wrong")]
    page.table([heading[3:], "answers", "right", *columns], rows)


def _range(rate: Sequence[float] | None) -> str | None:
    return None if rate is None else f"{rate[0]:.3f} ({rate[1]:.3f} to {rate[2]:.3f})"
