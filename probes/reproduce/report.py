"""The report of a reproduction, on one page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from probes.reporting import plots
from probes.reporting.report import Report
from probes.reproduce.items import ABSENT, APPEARS, IMPOSSIBLE, NOTHING, TITLES, Figure, Found, Outcome
from probes.reproduce.models import SUPERVISED
from probes.reproduce.run import Done


def report(about: Mapping[str, Any], outcomes: Sequence[Outcome], runs: Mapping[str, Done]) -> Report:
    """Return the tables of verdicts and of rows for each paper, the impossible rows with reasons, and the commands."""
    page = Report("The four papers, reproduced")
    page.text(
        "Every table, figure, metric and ablation of the four papers. A finding *appears* where the effect that stands in "
        "its row is seen in what was measured; intervals are of 95 %. *Nothing to measure here*: the row could not have "
        "come out otherwise, as its reason says: the effect was trained in (planted), the baseline left no room above "
        "(ceiling) or below (floor), or the figure follows from how it is computed (identity). What a small model trained "
        "on drawn scenes shows says that the method is computed as the paper has it, not that its figures hold for another "
        "model."
    )
    page.facts(about)
    supervised = {run.model: SUPERVISED[run.model] for run in runs.values() if run.embedded and run.model in SUPERVISED}
    if supervised:
        page.heading("What was supervised")
        page.text("\n".join(f"- {name}: {losses}" for name, losses in supervised.items()))
    page.heading("Verdicts")
    papers = [paper for paper in TITLES if any(outcome.item.paper == paper for outcome in outcomes)]
    verdicts = (APPEARS, ABSENT, NOTHING, IMPOSSIBLE)
    counts = {
        paper: Counter(outcome.verdict for outcome in outcomes if outcome.item.paper == paper) for paper in papers
    }
    rows: list[Sequence[object]] = [
        (TITLES[paper], *(counts[paper][verdict] for verdict in verdicts)) for paper in papers
    ]
    page.table(("paper", *verdicts), rows)
    for paper in papers:
        page.heading(TITLES[paper])
        of_paper = [outcome for outcome in outcomes if outcome.item.paper == paper]
        page.table(
            ("row", "item", "the paper", "model", "here", "n", "appears where", "verdict"),
            [
                (
                    outcome.item.id,
                    outcome.item.what,
                    outcome.item.theirs,
                    outcome.model or None,
                    _format_figures(outcome.found),
                    outcome.found.n if outcome.found else None,
                    outcome.item.effect,
                    outcome.verdict,
                )
                for outcome in of_paper
            ],
        )
        drawn = {
            f"{outcome.item.id}, {outcome.item.what}": outcome.found.figures()
            for outcome in of_paper
            if outcome.found is not None and len(outcome.found.figures()) > 1
        }
        if drawn:
            caption = f"{TITLES[paper]}: the rows of several figures, with their intervals of 95 %"
            page.plot(paper, plots.panels(drawn), caption)
        for verdict in (NOTHING, IMPOSSIBLE):
            if reasons := [outcome for outcome in of_paper if outcome.verdict == verdict]:
                page.text(f"{verdict[0].upper()}{verdict[1:]}:")
                page.text("\n".join(f"- {outcome.item.id}, {outcome.item.what}: {outcome.why}" for outcome in reasons))
    page.heading("Commands")
    page.table(("run", "command", "seconds"), [(name, run.command, round(run.seconds)) for name, run in runs.items()])
    return page


def _format_figures(reading: Found | None) -> str | None:
    """Return a figure with its interval, or several by name."""
    if reading is None:
        return None
    return "; ".join(
        f"{name} = {_format_figure(figure)}" if name else _format_figure(figure)
        for name, figure in reading.figures().items()
    )


def _format_figure(figure: Figure) -> str:
    bounds = "" if figure.interval is None else " ({} to {})".format(*map(_number, figure.interval))
    return _number(figure.value) + bounds


def _number(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
