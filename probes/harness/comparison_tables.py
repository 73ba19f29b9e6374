"""Report tables of a comparison: every metric of every condition, and its difference to the baseline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from probes.harness.bootstrap import detectable
from probes.harness.comparison import BASELINE
from probes.reporting.report import Report
from probes.reporting.tables import Measured

READING = """\
Every condition answers the same samples as the baseline. Values have 95 % intervals: Wilson's for shares (reduced to
independent questions where several are about one image; shares of 0 and 1 count each image once), bootstrap over images for
means, F1 and quotients. Differences to the baseline have paired 95 % intervals (bootstrap over images, the same in both)
and, for shares of the same samples, the exact p of McNemar's test. Neither is corrected for the number of comparisons. Where
no resample differs, which does not prove that nothing varies, a share's difference has its score interval (Tango 1998), and
any other metric and its difference have none."""


def power(page: Report, results: Mapping[str, Any], part: str, metric: str, what: str) -> None:
    """Report the detectable difference of a metric that is a share of the samples (`what`).

    results: those of `compare`.
    """
    turned = {name: scores[part]["all"][metric]["turned"] for name, scores in results.items() if name != BASELINE}
    samples = results[BASELINE][part]["all"]["samples"]
    if not turned:
        return
    most = max(turned, key=lambda name: turned[name])
    points = {share: f"{100 * detectable(share, samples):.1f}" for share in (turned[most], 0.02, 0.05)}
    detection = (
        f"{most} has the most changes, {100 * turned[most]:.1f} %, from right to wrong or back; at that rate, four of "
        f"five such evaluations detect a difference of {points[turned[most]]} points"
        if turned[most]
        else "no condition changes any from right to wrong or back"
    )
    page.text(
        f"{samples} {what}. By {metric}, {detection} (where 2 % change, four of five detect {points[0.02]} points; where "
        f"5 % change, {points[0.05]})."
    )


def table(
    page: Report, results: Mapping[str, Any], part: str, metrics: Sequence[str] | Mapping[str, str],
    settings: Sequence[str] = ("all",), differences: bool = True,
) -> None:  # fmt: skip
    """Add a row per condition and setting, with a column per metric.

    metrics: the names of metrics, or a mapping from the column's heading to the name. With `differences`, a table of the
    differences to the baseline follows.
    """
    columns = metrics if isinstance(metrics, Mapping) else {name: name for name in metrics}
    several = list(settings) != ["all"]
    head = ["condition", *(["setting"] if several else []), *columns]

    def rows(conditions: Mapping[str, Any], cell: Any) -> list[list[object]]:
        return [
            [
                name,
                *([setting] if several else []),
                *(cell(scores[part][setting][column]) for column in columns.values()),
            ]
            for name, scores in conditions.items()
            for setting in settings
        ]

    page.table(head, rows(results, _value))
    other_conditions = {name: scores for name, scores in results.items() if name != BASELINE}
    if differences and other_conditions:
        page.text("Differences to the baseline:")
        page.table(head, rows(other_conditions, _difference))


def _value(score: Mapping[str, Any]) -> Measured:
    return Measured(score["value"], score["value_95"])


def _difference(score: Mapping[str, Any]) -> Measured | int | None:
    difference, interval = score.get("difference"), score.get("difference_95")
    if difference is None:
        return None
    return Measured(difference, interval, score["p"], signed=True) if difference or any(interval or ()) else 0
