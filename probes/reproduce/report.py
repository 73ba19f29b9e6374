"""The report of a reproduction, on one page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from probes.reporting import plots
from probes.reporting.report import Report
from probes.reproduce.items import ABSENT, APPEARS, IMPOSSIBLE, TITLES, Figure, Found, Outcome
from probes.reproduce.run import Done


def report(about: Mapping[str, Any], outcomes: Sequence[Outcome], done: Mapping[str, Done]) -> Report:
    """Return the tables of verdicts and of rows for each paper, the impossible rows with reasons, and the commands."""
    page = Report("The four papers, reproduced")
    page.text(
        "Every table, figure, metric and ablation of the four papers, on one model. A finding *appears* where the effect "
        "that stands in its row is seen in what was measured; intervals are of 95 %. What a small model trained on drawn "
        "scenes shows says that the method is computed as the paper has it, not that its figures hold for another model."
    )
    page.facts(about)
    page.heading("Verdicts")
    papers = [paper for paper in TITLES if any(one.item.paper == paper for one in outcomes)]
    verdicts = (APPEARS, ABSENT, IMPOSSIBLE)
    counts = {paper: Counter(one.verdict for one in outcomes if one.item.paper == paper) for paper in papers}
    rows: list[Sequence[object]] = [
        (TITLES[paper], *(counts[paper][verdict] for verdict in verdicts)) for paper in papers
    ]
    page.table(("paper", *verdicts), rows)
    for paper in papers:
        page.heading(TITLES[paper])
        own = [one for one in outcomes if one.item.paper == paper]
        page.table(
            ("row", "item", "the paper", "here", "n", "appears where", "verdict"),
            [
                (
                    one.item.id,
                    one.item.what,
                    one.item.theirs,
                    _said(one.found),
                    one.found.n if one.found else None,
                    one.item.effect,
                    one.verdict,
                )
                for one in own
            ],
        )
        drawn = {
            f"{one.item.id}, {one.item.what}": one.found.figures()
            for one in own
            if one.found is not None and len(one.found.figures()) > 1
        }
        if drawn:
            caption = f"{TITLES[paper]}: the rows of several figures, with their intervals of 95 %"
            page.plot(paper, plots.panels(drawn), caption)
        if missing := [one for one in own if one.verdict == IMPOSSIBLE]:
            page.text("\n".join(f"- {one.item.id}, {one.item.what}: {one.why}" for one in missing))
    page.heading("Commands")
    page.table(("run", "command", "seconds"), [(name, one.command, round(one.seconds)) for name, one in done.items()])
    return page


def _said(found: Found | None) -> str | None:
    """Return a figure with its interval, or several by name."""
    if found is None:
        return None
    return "; ".join(
        f"{name} = {_with_interval(one)}" if name else _with_interval(one) for name, one in found.figures().items()
    )


def _with_interval(figure: Figure) -> str:
    bounds = "" if figure.interval is None else " ({} to {})".format(*map(_number, figure.interval))
    return _number(figure.value) + bounds


def _number(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
