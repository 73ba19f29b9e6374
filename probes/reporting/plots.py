"""The figures of the reports, each a function from numbers to a matplotlib `Figure`."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import LogLocator, MaxNLocator
from PIL import Image

BLUE, RED, GREY = "#0072B2", "#D55E00", "#BBBBBB"
COLOURS = (BLUE, RED, "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#F0E442", "#000000")
"""Okabe and Ito's palette, told apart with any colour vision, the strongest contrasts first."""

_MARKERS, _DASHES = "osD^vP*X", ("-", "--", ":", "-.")


def layers(mean_abs: Sequence[float], std: Sequence[float], chosen: Sequence[int]) -> Figure:
    """Return the size of a steering vector in every layer as bars (modality-preference paper, figure 4, right).

    `mean_abs`: (layers,), mean |v| over queries and dimensions, in units of the hidden states; `std`: (layers,), its
    standard deviation over queries, the error bars; `chosen`: the layers to mark.
    """
    figure, axes = _figure()
    at = np.arange(len(mean_abs))
    for label, where, colour in _kinds(np.isin(at, chosen)):
        axes.bar(where, np.asarray(mean_abs)[where], color=colour, label=label)
    axes.errorbar(at, mean_abs, yerr=std, fmt="none", ecolor="black", elinewidth=1, capsize=2, label="± 1 deviation")
    axes.set(xlabel="layer", ylabel="mean |v| (units of the hidden states)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _legend(figure, axes)
    return figure


def ranking(scores: Sequence[float], chosen: Sequence[int]) -> Figure:
    """Draw the layers in order of their score, the best on top.

    `scores`: (layers,), mean |v| / its deviation, without a unit.
    """
    order = np.argsort(-np.asarray(scores), kind="stable")
    figure, axes = _rows(list(map(str, order)), 0.2)
    for label, where, colour in _kinds(np.isin(order, chosen)):
        axes.barh(where, np.asarray(scores)[order[where]], color=colour, label=label)
    axes.set(xlabel="score: mean |v| / deviation (no unit)", ylabel="layer")
    _legend(figure, axes)
    return figure


def states(groups: Mapping[str, np.ndarray], explained: tuple[float, float]) -> Figure:
    """Draw hidden states on their first two principal components, with each group's centre marked large.

    `groups`: (n, 2) by name; `explained`: the shares (0 to 1) of the variance on the two components.
    """
    figure, axes = _figure(height=5)
    for index, (name, points) in enumerate(groups.items()):
        (x, y), (middle_x, middle_y) = points.T, points.mean(axis=0)
        axes.scatter(x, y, s=14, alpha=0.5, linewidths=0, **_look(index))
        axes.scatter(middle_x, middle_y, s=130, zorder=3, ec="black", linewidths=1.5, label=name, **_look(index))
    for ordinal, axis, share in zip(("first", "second"), (axes.xaxis, axes.yaxis), explained, strict=True):
        axis.set_label_text(f"{ordinal} component ({share:.0%} of the variance)".replace("%", " %"))
    _legend(figure, axes)
    return figure


def curves(
    x: Sequence[float],
    series: Mapping[str, Sequence[float | None]],
    *,
    xlabel: str,
    ylabel: str,
    intervals: Mapping[str, Sequence[tuple[float, float] | None]] | None = None,
    marks: Mapping[float, str] | None = None,
    log_x: bool = False,
    other_x: tuple[str, float] | None = None,
) -> Figure:
    """Draw lines over `x`, (n,).

    Each of the `series` is (n,), with None for a gap. `intervals`: by a series' name, (n,) pairs (low, high) that are shaded
    around it. `marks`: labels of vertical lines by their x. `other_x`: (label, factor) of a second axis below, of x times
    the factor. Labels should name their units.
    """
    figure, axes = _figure()
    for index, (name, values) in enumerate(series.items()):
        heights = [math.nan if value is None else value for value in values]
        dashes = _DASHES[index // len(COLOURS) % len(_DASHES)]
        axes.plot(x, heights, linestyle=dashes, markersize=4, label=name, **_look(index))
        if intervals and name in intervals:
            low, high = np.array([(math.nan, math.nan) if pair is None else pair for pair in intervals[name]]).T
            axes.fill_between(x, low, high, color=_look(index)["color"], alpha=0.2, linewidth=1.5)
    if log_x:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter("")
    _mark(axes, marks or {})
    axes.set(xlabel=xlabel, ylabel=ylabel)
    if other_x is not None:
        label, factor = other_x
        below = axes.secondary_xaxis(-0.2, functions=(lambda x: np.multiply(x, factor), lambda x: np.divide(x, factor)))
        below.set_xlabel(label)
    _legend(figure, axes)
    return figure


def shares(rows: Mapping[str, tuple[float, float, float]]) -> Figure:
    """Draw the shares (0 to 1) of the answers that follow the vision, the text, and neither.

    There is one bar per condition, the first on top.
    """
    figure, axes = _rows(list(rows), 0.4)
    parts = np.array(list(rows.values())).reshape(len(rows), 3)
    starts = np.cumsum(parts, axis=1) - parts
    for index, (name, colour, ink) in enumerate((("vision", BLUE, "w"), ("text", RED, "w"), ("others", GREY, "k"))):
        widths = parts[:, index]
        drawn = axes.barh(range(len(rows)), widths, left=starts[:, index], color=colour, label=name)
        # A number wider than its bar would overlap its neighbour.
        numbers = [f"{width:.2f}" if width >= 0.07 else "" for width in widths]
        axes.bar_label(drawn, numbers, label_type="center", color=ink, fontsize=9)
    axes.set(xlabel="share of the answers", xlim=(0, 1))
    _legend(figure, axes)
    return figure


def bars(
    values: Mapping[str, float],
    *,
    xlabel: str,
    intervals: Mapping[str, tuple[float, float]] | None = None,
    baseline: float | None = None,
    label: str | None = None,
    points: tuple[str, Mapping[str, float]] | None = None,
) -> Figure:
    """Draw a horizontal bar per value, the first on top.

    `intervals`: (low, high) by name, drawn as error bars. `baseline`: a dashed line. `xlabel` should name the unit.
    `points`: a name, and values by the bars' names that are drawn beside the bars; the bars are then labelled `label`.
    """
    figure, axes = _rows(list(values), 0.4)
    axes.barh(range(len(values)), list(values.values()), color=BLUE, label=label)
    if points is not None:
        series, beside = points
        rows = [row for row, value in enumerate(values) if value in beside]
        axes.plot([beside[value] for value in values if value in beside], rows, "o--", color=RED, label=series)
        _legend(figure, axes)
    for row, name in enumerate(values):
        if intervals and name in intervals:
            # Around its own middle: an interval need not contain the value, and matplotlib refuses negative lengths.
            low, high = intervals[name]
            axes.errorbar((low + high) / 2, row, xerr=(high - low) / 2, fmt="none", ecolor="black", capsize=3)
    if baseline is not None:
        _mark(axes, {baseline: "baseline"})
    axes.set_xlabel(xlabel)
    return figure


def panels(values: Mapping[str, Mapping[str, tuple[Any, Sequence[float] | None]]]) -> Figure:
    """Draw small plots beside each other, each with an axis of its own.

    `values`: by title and by name, a value and its interval (low, high), the first on top. Entries that are not numbers are
    left out.
    """
    numbers = {
        title: {name: values for name, values in rows.items() if isinstance(values[0], int | float)}
        for title, rows in values.items()
    }
    numbers = {title: rows for title, rows in numbers.items() if rows}
    columns = 2
    lines = [[*numbers.items()][start : start + columns] for start in range(0, len(numbers), columns)]
    heights = [0.8 + 0.22 * max(len(rows) for _, rows in line) for line in lines]
    figure = Figure(figsize=(10, sum(heights)), layout="constrained")
    grid = figure.subplots(len(lines), columns, squeeze=False, gridspec_kw={"height_ratios": heights})
    for axes in grid.flat[len(numbers) :]:
        axes.set_axis_off()
    for axes, (title, rows) in zip(grid.flat, numbers.items(), strict=False):
        for row, (value, interval) in enumerate(rows.values()):
            if interval is not None:
                axes.plot(interval, [row, row], color=GREY, linewidth=4, solid_capstyle="butt")
            axes.plot([value], [row], "o", color=BLUE, markersize=5)
        axes.set_yticks(range(len(rows)), [textwrap.shorten(name, 40) for name in rows], fontsize=7)
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.tick_params(axis="x", labelsize=7)
        axes.set_title(textwrap.fill(title, 48), fontsize=8, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#DDDDDD", linewidth=0.5, axis="x")
        axes.set_axisbelow(True)
    return figure


def heat(rows: Sequence[Sequence[float]], *, xlabel: str, ylabel: str, label: str, marks: Mapping[int, str]) -> Figure:
    """Draw a grid of values, dark where they are large.

    rows: (rows, columns), the first row at the bottom, columns from 1; `marks`: labels above columns, by their number;
    `label`: the meaning of the values.
    """
    figure, axes = _figure(height=max(2.5, 1.5 + 0.16 * len(rows)))
    axes.grid(visible=False)
    values = np.asarray(rows, float)
    columns = values.shape[1]
    extent = (0.5, columns + 0.5, -0.5, len(rows) - 0.5)
    drawn = axes.imshow(values, cmap="Blues", aspect="auto", origin="lower", extent=extent)
    axes.set_xticks(range(1, columns + 1))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    above: dict[str, Any] = {"xycoords": axes.get_xaxis_transform(), "textcoords": "offset points"}
    for column, text in marks.items():
        axes.annotate(text, (column, 1), (0, 3), ha="center", fontsize=9, **above)
    axes.set(xlabel=xlabel, ylabel=ylabel)
    figure.colorbar(drawn, label=label)
    return figure


def isolines(points: Mapping[str, tuple[float, float]], *, xlabel: str, ylabel: str, label: str) -> Figure:
    """Draw points (x, y) by name, both from 0 to 1, with lines of equal x + y (MM-SAP, figure 5).

    `label`: the meaning of the sum.
    """
    figure, axes = _figure(height=6)
    (left, right), (low, high) = (_limits(values) for values in zip(*points.values(), strict=True))
    for total in np.arange(0.1, 2, 0.1):
        x = max(left, total - high)  # where the line enters the plot
        if x < right and total - x > low:
            axes.plot([x, right], [total - x, total - right], "--", color=GREY, linewidth=0.8, zorder=0)
            axes.annotate(f"{total:.1f}", (x, total - x), (2, -8), textcoords="offset points", fontsize=7)
    for index, (name, (x, y)) in enumerate(points.items()):
        axes.plot([x], [y], linestyle="none", markersize=8, label=name, **_look(index))
    axes.set(xlabel=xlabel, ylabel=ylabel, xlim=(left, right), ylim=(low, high))
    axes.set_title(f"dashed: equal {label}", fontsize=9, loc="left")
    _legend(figure, axes)
    return figure


def _limits(values: Iterable[float]) -> tuple[float, float]:
    """Return the limits of an axis of shares, with room around the values."""
    values_list = [*values]
    return max(0.0, min(values_list) - 0.1), min(1.0, max(values_list) + 0.1)


def marked(picture: Image.Image, panels: Mapping[str, np.ndarray]) -> Figure:
    """Draw a picture once per panel, with boxes on it.

    panels: by title, the cells of a grid over the picture that get a box, (rows, columns) of booleans.
    """
    figure = Figure(figsize=(7, 7 / len(panels) * picture.height / picture.width + 0.5), layout="constrained")
    for axes, (title, cells) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        axes.imshow(picture, extent=(0, cells.shape[1], cells.shape[0], 0), aspect="auto")
        for row, column in np.argwhere(cells):
            axes.add_patch(Rectangle((column, row), 1, 1, fill=False, edgecolor=COLOURS[4], linewidth=2))
        axes.set_title(title, fontsize=9)
        axes.set_axis_off()
    return figure


def _figure(height: float = 4) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(7, height), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#DDDDDD", linewidth=0.5)
    axes.set_axisbelow(True)
    return figure, axes


def _kinds(chosen: np.ndarray) -> list[tuple[str, np.ndarray, str]]:
    kinds = (("not chosen", np.flatnonzero(~chosen), BLUE), ("chosen", np.flatnonzero(chosen), RED))
    return [kind for kind in kinds if len(kind[1])]  # a legend cannot show a kind without bars


def _look(index: int) -> dict[str, Any]:
    return {"color": COLOURS[index % len(COLOURS)], "marker": _MARKERS[index % len(_MARKERS)]}


def _mark(axes: Axes, marks: Mapping[float, str]) -> None:
    """Label vertical lines above the axes, where no curve runs.

    Each label has a row and extends toward the side with more room. The outer ones are higher, clear of the inner ones'
    lines.
    """
    for x in marks:
        axes.axvline(x, color="black", linestyle="--", linewidth=1)
    axes.get_xlim()  # updates the transformation below with the lines
    offsets = {x: (axes.transData - axes.transAxes).transform((x, 0))[0] - 0.5 for x in marks}
    # Heights in points: rows in shares of the axes would move whenever the layout makes room for them.
    place: dict[str, Any] = {"xycoords": axes.get_xaxis_transform(), "textcoords": "offset points", "va": "bottom"}
    line = {"arrowstyle": "-", "linestyle": "--", "shrinkA": 0, "shrinkB": 0}
    for row, x in enumerate(sorted(marks, key=lambda x: abs(offsets[x]))):
        axes.annotate("", (x, 1), (0, 12 * row + 12), arrowprops=line, **place)
        side, room = (-3, "right") if offsets[x] > 0 else (3, "left")
        axes.annotate(marks[x], (x, 1), (side, 12 * row + 2), ha=room, fontsize=9, **place)


def _rows(names: Sequence[str], inches: float) -> tuple[Figure, Axes]:
    figure, axes = _figure(height=max(2.5, 1.3 + inches * len(names)))
    axes.set_yticks(range(len(names)), [textwrap.fill(name, 32) for name in names])
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")
    return figure, axes


def _legend(figure: Figure, axes: Axes) -> None:
    """Add a legend below the axes, where it hides nothing, with as many columns as its longest name allows."""
    handles, names = axes.get_legend_handles_labels()
    if len(names) > 1:
        columns = max(1, 88 // (max(map(len, names)) + 8))
        figure.legend(handles, names, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)
