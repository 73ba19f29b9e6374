"""The sections of the ablations in the report of `helmsight eval mc2`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from probes.conflicts.samples import SIDES
from probes.mc2.ablate import CLOSE
from probes.mc2.report_conditions import Numbers, share
from probes.reporting import plots
from probes.reporting.report import Report
from probes.reporting.tables import Measured


def _toward(row: Numbers, side: str) -> float:
    """Return the share of the samples that follows the side, steered toward it."""
    return float(row[side][f"s_{side}"])


def _ablation(page: Report, first: list[str], rows: Mapping[tuple[Any, ...], Numbers]) -> None:
    head = [*first]
    for side in SIDES:
        head += [f"S_{side[0]} toward {side}", f"Vision Ratio toward {side}", f"S_o toward {side}"]
    page.table(head, [(*names, *(cell for side in SIDES for cell in _cells(row, side))) for names, row in rows.items()])


def _cells(row: Numbers, side: str) -> tuple[object, ...]:
    shares = row[side]
    return share(shares, f"s_{side}"), shares["vision_ratio"], share(shares, "s_others")


def _curves(rows: Mapping[Any, Numbers], xlabel: str, **options: Any) -> Any:
    return plots.curves(
        list(rows),
        {f"S_{side[0]} toward {side}": [_toward(row, side) for row in rows.values()] for side in SIDES}
        | {f"S_o toward {side}": [row[side]["s_others"] for row in rows.values()] for side in SIDES},
        xlabel=xlabel,
        ylabel="share of the samples",
        intervals={
            f"S_{side[0]} toward {side}": [row[side].get(f"s_{side}_95") for row in rows.values()] for side in SIDES
        },
        **options,
    )


def samples(page: Report, results: Numbers) -> None:
    """Add Table 8."""
    rows = {int(size): row for size, row in results.items()}
    page.heading("Probe size (Table 8)")
    least, most = min(rows), max(rows)
    lost = max(abs(_toward(rows[most], side) - _toward(rows[least], side)) for side in SIDES)
    page.text(
        f"{least} samples and {most} samples differ by {100 * lost:.1f} points at most "
        f"({'within' if lost <= CLOSE else 'NOT within'} {100 * CLOSE:.0f})."
    )
    page.plot("probe-size", _curves(rows, "probe samples"), "Effect by number of probe samples")
    _ablation(page, ["samples"], {(size,): row for size, row in rows.items()})


def tasks(page: Report, results: Numbers) -> None:
    """Add Table 9."""
    page.heading("One task only (Table 9)")
    page.text("Vectors from the probe samples of one task, steering all tasks.")
    effects = {name: sum(_toward(row, side) for side in SIDES) / 2 for name, row in results.items()}
    page.plot(
        "probe-task",
        plots.bars(effects, xlabel="share that follows, mean of both sides"),
        "Effect by the task that was probed",
    )
    _ablation(page, ["probe task"], {(task.replace("_", " "),): row for task, row in results.items()})


def strength(page: Report, results: Numbers) -> None:
    """Add Table 10, by strength in published units; the vector's strength 1.0 is `published` of them.

    If that is unknown, strengths are the vector's own.
    """
    rows = {float(strength_text): row for strength_text, row in results["rows"].items()}
    bend, published = results["knee"], results["published"]
    page.heading("Strength (Table 10)")
    units = (
        "The vector does not record its share of the published weight, so strengths are in its own units."
        if published is None
        else f"Strengths are in published units; the vector's own strength 1.0 is {published:g} of them."
    )
    page.text(
        f"{units} Knee {'visible' if bend['visible'] else 'NOT visible'}: at strength {bend['strength']:g} the effect is "
        f"within {100 * CLOSE:.0f} points of its greatest; {_slopes(bend)}."
    )
    if published is None:
        page.plot("strength", _curves(rows, "strength", marks={bend["strength"]: "knee"}), "Effect by strength")
        _ablation(page, ["strength"], {(value,): row for value, row in rows.items()})
        return
    marks = {published: "strength 1.0"}
    marks[bend["strength"]] = "knee" if bend["strength"] != published else "knee, strength 1.0"
    page.plot(
        "strength",
        _curves(rows, "strength (published)", marks=marks, other_x=("strength (calibrated)", 1 / published)),
        "Effect by strength",
    )
    _ablation(
        page, ["published", "calibrated"], {(value, round(value / published, 4)): row for value, row in rows.items()}
    )


def _slopes(bend: Numbers) -> str:
    def grows(slope: float) -> str:
        return f"{'falls' if slope < 0 else 'grows'} by {100 * abs(slope):.0f}"

    before = f"it {grows(bend['slope_before'])} points a unit of strength before"
    if bend["slope_after"] is None:
        return f"{before}; no greater strength was tried"
    broken = (
        "no strength tried breaks the effect" if bend["breaks_at"] is None else f"it breaks at {bend['breaks_at']:g}"
    )
    return f"{before} and {grows(bend['slope_after'])} after; {broken}"


def latency(page: Report, results: Numbers) -> None:
    """Add Table 11."""
    page.heading("Latency of one request (Table 11)")
    page.table(
        ["way", "seconds (median)", "ratio to plain", "peak memory (MB, median)"],
        [
            (name, f"{row['seconds']:.4f}", Measured(row["ratio"], row["ratio_95"]), _megabytes(row.get("megabytes")))
            for name, row in results.items()
        ],
    )
    page.text(
        "Peak memory: that of torch on a GPU, and of the whole process on a CPU, model included; - where the system does "
        "not report it."
    )


def _megabytes(value: float | None) -> str | None:
    return None if value is None else f"{value:.0f}"
