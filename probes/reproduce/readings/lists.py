"""Readings of the rows that lists of questions measure."""

from __future__ import annotations

from collections.abc import Callable

from probes.reproduce.items import CEILING, Figure, Found, Json, UnreadableRun, figure

UNREAD = 0.5
"""The share of unreadable answers from which on a benchmark measures the wording of answers."""


def moved(part: str, metric: str, condition: str, sign: int, more: tuple[str, ...] = ()) -> Callable[[Json], Found]:
    """Return a reading of a metric under a condition beside the plain answers, with the metrics of `more` in the figures.

    It appears if the interval of its difference lies above 0 (sign 1) or below (-1).
    """

    def read(report: Json) -> Found:
        now, plain = (report["conditions"][name][part]["all"] for name in (condition, "baseline"))
        unread = plain.get("unread", {}).get("value") or 0.0
        if unread > UNREAD:
            raise UnreadableRun(f"{unread:.0%} of the plain answers cannot be read")
        ours = {
            f"{name} {way}": figure(result[name])
            for name in (metric, *more)
            for way, result in (("plain", plain), (condition, now))
        }
        room = plain[metric]["value"] if sign > 0 else 1 - plain[metric]["value"]
        nothing = f"ceiling: {metric} is {plain[metric]['value']:.3f} plainly" if room >= CEILING else ""
        bounds = now[metric]["difference_95"]
        appears = bounds is not None and min(sign * end for end in bounds) > 0
        return Found.of(ours, appears, plain["samples"], nothing)

    return read


def texts(report: Json) -> Found:
    """Compare questions beside inaccurate and beside incorrect texts, steered toward the image and plain."""
    read = {mode: moved(f"PhD-{mode}", "accuracy", "toward vision", 1)(report) for mode in ("iac", "icc")}
    ours = {
        f"{mode} {name.removeprefix('accuracy ')}": figure_of_row
        for mode, row in read.items()
        for name, figure_of_row in row.figures().items()
    }
    nothing = "; ".join(row.nothing for row in read.values() if row.nothing)
    return Found.of(ours, all(row.appears for row in read.values()), sum(row.n or 0 for row in read.values()), nothing)


def mme(report: Json) -> Found:
    """Compare the total of perception, decided by the share of pictures with both questions answered rightly."""
    pairs = moved("MME", "acc_plus", "SAGE", 1)(report)
    totals = {name: Figure(report["totals"][name]["perception"]) for name in ("baseline", "SAGE")}
    more = totals["SAGE"].value > totals["baseline"].value
    return Found.of(pairs.figures() | totals, pairs.appears and more, pairs.n, pairs.nothing)
