"""A comparison in a report: every metric of every condition, and its difference to the baseline's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from probes.harness.bootstrap import detectable
from probes.harness.comparison import BASELINE
from probes.harness.report import Report

READING = """\
Every condition answers the same samples as the baseline. A baseline cell is the value with its 95 % interval; another cell
is the value, its difference to the baseline's with the paired 95 % interval (bootstrap over pictures, the same in both),
and for shares of samples the exact p of McNemar's test. Neither is corrected for the number of comparisons. An interval of
no width says that no resample differs, not that nothing does: of n samples without a case, shares up to 3 / n stay
possible."""


def power(page: Report, found: Mapping[str, Any], part: str, metric: str, what: str) -> None:
    """Say which difference of a metric, a share of the samples (`what`), can be found. `found` is what `compare` returns."""
    turned = {name: scores[part]["all"][metric]["turned"] for name, scores in found.items() if name != BASELINE}
    samples = found[BASELINE][part]["all"]["samples"]
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


def table(
    page: Report, found: Mapping[str, Any], part: str, metrics: Sequence[str], settings: Sequence[str] = ("all",),
    differences: bool = True,
) -> None:  # fmt: skip
    """Add a row a condition and setting, a column a metric; with `differences` also those to the baseline."""
    several = list(settings) != ["all"]
    head = ["condition", *(["setting"] if several else []), *metrics]
    rows = [
        [name, *([setting] if several else []), *(_cell(scores[part][setting][one], differences) for one in metrics)]
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
