"""The report of `helmsight eval sage`: every metric of every condition, and its difference to the plain answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from probes.harness.bootstrap import detectable
from probes.harness.report import Report
from probes.sage.differences import TYPES
from probes.sage.evaluate import PLAIN, QUESTIONS

_READING = """\
Every condition answers the same samples as the baseline. A baseline cell is the value with its 95 % interval; another cell
is the value, its difference to the baseline's with the paired 95 % interval (bootstrap over pictures, the same in both),
and for shares of samples the exact p of McNemar's test. Neither is corrected for the number of comparisons. An interval of
no width says that no resample differs, not that nothing does: of n samples without a case, shares up to 3 / n stay
possible."""

_DIFFERENCES: Mapping[str, Sequence[str]] = {
    "How many differences": ("dqr_exact", "ds_tolerance", "dqr_ratio", "ds_detect", "false_alarms"),
    "Which differences": ("tf1", "cf1", "cf1_released"),
    "Consistency": ("cr", "cr_pairs", "yes_no_consistency", "contradictions", "yes_same"),
}
_BY_SETTING = ("dqr_exact", "tf1", "cf1", "cr", "contradictions")


def report(title: str, found: Mapping[str, Any]) -> Report:
    """`found` is what `probes.sage.evaluate.evaluate` returns."""
    page = Report(title)
    page.text(_READING)
    if "existence" in found[PLAIN]:
        page.heading("Existence (POPE)")
        _power(page, found, "existence", "accuracy", "questions")
        _table(
            page, found, "existence", ("accuracy", "precision", "recall", "f1", "yes"), list(found[PLAIN]["existence"])
        )
    if "differences" in found[PLAIN]:
        page.heading("Spot the difference (SPD-Faith)")
        page.text(
            "The definitions stand in probes/sage/differences.py. Claims are read off the answers by rules; cr is of the "
            f'answers to "{QUESTIONS[3]}" and "{QUESTIONS[4]}".'
        )
        _power(page, found, "differences", "dqr_exact", "pairs of pictures")
        for heading, columns in _DIFFERENCES.items():
            page.heading(heading, 3)
            _table(page, found, "differences", columns, ["all"])
        page.heading("By type, and of categories", 3)
        names = [f"{kind}_{part}" for kind in (*TYPES, "category") for part in ("precision", "recall")]
        _table(page, found, "differences", names, ["all"], differences=False)
        settings = [name for name in found[PLAIN]["differences"] if name != "all"]
        if len(settings) > 1:
            page.heading("By number of differences", 3)
            _table(page, found, "differences", _BY_SETTING, settings)
    return page


def _power(page: Report, found: Mapping[str, Any], part: str, metric: str, what: str) -> None:
    turned = {name: scores[part]["all"][metric]["turned"] for name, scores in found.items() if name != PLAIN}
    samples = found[PLAIN][part]["all"]["samples"]
    if not turned:
        return
    most = max(turned, key=lambda name: turned[name])
    points = {share: f"{100 * detectable(share, samples):.1f}" for share in (turned[most], 0.02, 0.05)}
    seen = (
        f"the condition that turns most of them, {most}, turns {100 * turned[most]:.1f} % from right to wrong or back; "
        f"where as many turn, a difference of {points[turned[most]]} points is found in four of five such evaluations"
        if turned[most]
        else "no condition turns any from right to wrong or back"
    )
    page.text(
        f"{samples} {what}. By {metric}, {seen} (where 2 % turn, a difference of {points[0.02]} points is found in four of "
        f"five; where 5 % do, one of {points[0.05]})."
    )


def _table(
    page: Report, found: Mapping[str, Any], part: str, columns: Sequence[str], settings: Sequence[str],
    differences: bool = True,
) -> None:  # fmt: skip
    head = ["condition", *(["setting"] if settings != ["all"] else []), *columns]
    rows = [
        [
            name,
            *([setting] if settings != ["all"] else []),
            *(_cell(scores[part][setting][c], differences) for c in columns),
        ]
        for name, scores in found.items()
        for setting in settings
    ]
    page.table(head, rows)


def _cell(one: Mapping[str, Any], difference: bool) -> str | None:
    if one["value"] is None:
        return None
    text = f"{one['value']:.3f}"
    if "difference" not in one:
        return text + " ({:.3f} to {:.3f})".format(*one["value_95"])
    if not difference or one["difference"] is None:
        return text
    text += f", {one['difference']:+.3f} ({one['difference_95'][0]:+.3f} to {one['difference_95'][1]:+.3f})"
    return text if one["p"] is None else f"{text}, p {one['p']:.3f}"
