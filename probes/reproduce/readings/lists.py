"""Readings of the rows that lists of questions measure."""

from __future__ import annotations

from collections.abc import Callable

from probes.reproduce.items import Figure, Found, Json, figure


def moved(part: str, metric: str, condition: str, sign: int, more: tuple[str, ...] = ()) -> Callable[[Json], Found]:
    """Return a reading of a metric under a condition beside the plain answers, with the metrics of `more` in the figures.

    It appears if the interval of its difference lies above 0 (sign 1) or below (-1).
    """

    def read(report: Json) -> Found:
        now, plain = (report["conditions"][name][part]["all"] for name in (condition, "baseline"))
        ours = {
            f"{name} {way}": figure(result[name])
            for name in (metric, *more)
            for way, result in (("plain", plain), (condition, now))
        }
        return Found.of(ours, min(sign * end for end in now[metric]["difference_95"]) > 0, plain["samples"])

    return read


def texts(report: Json) -> Found:
    """Compare questions beside inaccurate and beside incorrect texts, steered toward the image and plain."""
    read = {mode: moved(f"PhD-{mode}", "accuracy", "toward vision", 1)(report) for mode in ("iac", "icc")}
    ours = {
        f"{mode} {name.removeprefix('accuracy ')}": figure_of_row
        for mode, row in read.items()
        for name, figure_of_row in row.figures().items()
    }
    return Found.of(ours, all(row.appears for row in read.values()), sum(row.n or 0 for row in read.values()))


def mme(report: Json) -> Found:
    """Compare the total of perception, decided by the share of pictures with both questions answered rightly."""
    pairs = moved("MME", "acc_plus", "SAGE", 1)(report)
    totals = {name: Figure(report["totals"][name]["perception"]) for name in ("baseline", "SAGE")}
    more = totals["SAGE"].value > totals["baseline"].value
    return Found.of(pairs.figures() | totals, pairs.appears and more, pairs.n)
