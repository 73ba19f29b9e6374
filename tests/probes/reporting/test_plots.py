"""Plots: what was given is what is drawn, read back from the axes; everything is labelled and nothing is cut off."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.container import BarContainer, ErrorbarContainer
from matplotlib.figure import Figure
from numpy.testing import assert_allclose
from PIL import Image

from probes.reporting import plots
from probes.reporting.plots import BLUE, COLOURS, RED

X = [0.25, 0.5, 1.0, 2.0]


def every() -> dict[str, Callable[[], Figure]]:
    """Return one figure of each kind, with names and marks that need room."""
    long = "a condition with a name that does not fit beside its bar on one line"
    groups = {name: np.array([[at, 0.0], [at + 1, 2.0]]) for at, name in enumerate(["plain", "toward vision", long])}
    names = [f"series {index} with a longer name" for index in range(10)]
    curves = {name: [index, None, index, 1.0] for index, name in enumerate(names)}
    marks = {0.25: "the first dose that was tried", 0.27: "and the next", 2.0: "the last dose that was tried"}
    return {
        "layers": lambda: plots.layers([1.0, 2.0, 3.0], [0.1, 0.2, 3.5], [2]),
        "ranking": lambda: plots.ranking(list(range(48)), [40, 41]),
        "states": lambda: plots.states(groups, (0.6, 0.1)),
        "curves": lambda: plots.curves(X, curves, xlabel="dose (no unit)", ylabel="share", marks=marks, log_x=True),
        "shares": lambda: plots.shares({"plain": (0.5, 0.3, 0.2), long: (0.98, 0.01, 0.01)}),
        "bars": lambda: plots.bars({"plain": 0.5, long: 0.9}, xlabel="share", baseline=0.9),
    }


def legend(figure: Figure) -> list[str]:
    return [text.get_text() for drawn in figure.legends for text in drawn.get_texts()]


def labels(figure: Figure) -> tuple[str, str]:
    return figure.axes[0].get_xlabel(), figure.axes[0].get_ylabel()


def names(figure: Figure) -> list[str]:
    """Return the names of the rows, from the top."""
    axis = figure.axes[0].yaxis
    rows = sorted((axis.axes.transData.transform((0, at))[1], label.get_text()) for at, label in ticks(axis))
    return [name for _, name in reversed(rows)]


def ticks(axis: Any) -> list[tuple[float, Any]]:
    return list(zip(axis.get_ticklocs(), axis.get_ticklabels(), strict=True))


def colours(bars: BarContainer) -> list[str]:
    return [to_hex(bar.get_facecolor()).upper() for bar in bars]


def spans(figure: Figure, kind: type = ErrorbarContainer) -> list[np.ndarray]:
    """Return both ends, (2, 2), of every error bar."""
    drawn = [container for container in figure.axes[0].containers if isinstance(container, kind)]
    return [segment for container in drawn for segment in container.lines[2][0].get_segments()]


def bar_containers(figure: Figure) -> list[BarContainer]:
    return [container for container in figure.axes[0].containers if isinstance(container, BarContainer)]


def test_layers_are_bars_with_deviations_and_the_chosen_stand_out() -> None:
    figure = plots.layers([1.0, 4.0, 2.0, 3.0], [0.1, 0.4, 0.2, 0.3], [1, 3])
    heights = {
        round(bar.get_x() + bar.get_width() / 2): (bar.get_height(), colour)
        for bars in bar_containers(figure)
        for bar, colour in zip(bars, colours(bars), strict=True)
    }
    assert heights == {0: (1.0, BLUE), 1: (4.0, RED), 2: (2.0, BLUE), 3: (3.0, RED)}
    ends = [[[0, 0.9], [0, 1.1]], [[1, 3.6], [1, 4.4]], [[2, 1.8], [2, 2.2]], [[3, 2.7], [3, 3.3]]]
    assert_allclose(spans(figure), ends)
    assert sorted(legend(figure)) == ["chosen", "not chosen", "± 1 deviation"]
    assert labels(figure) == ("layer", "mean |v| (units of the hidden states)")


def test_the_best_layer_is_on_top() -> None:
    figure = plots.ranking([2.0, 5.0, 3.0, 5.0], [2])
    assert names(figure) == ["1", "3", "2", "0"]
    widths = {
        names(figure)[round(bar.get_y() + bar.get_height() / 2)]: (bar.get_width(), colour)
        for bars in bar_containers(figure)
        for bar, colour in zip(bars, colours(bars), strict=True)
    }
    assert widths == {"1": (5.0, BLUE), "3": (5.0, BLUE), "2": (3.0, RED), "0": (2.0, BLUE)}
    assert legend(figure) == ["not chosen", "chosen"]


@pytest.mark.parametrize("chosen", [[], [0, 1]])
def test_one_kind_of_layer_needs_no_legend(chosen: Sequence[int]) -> None:
    figure = plots.ranking([1.0, 2.0], chosen)
    assert legend(figure) == []
    assert {colour for bars in bar_containers(figure) for colour in colours(bars)} == {RED if chosen else BLUE}


def test_states_are_points_with_a_large_centre_a_group() -> None:
    groups = {"vision": np.array([[0.0, 0.0], [2.0, 4.0]]), "text": np.array([[-1.0, 1.0], [-3.0, 1.0], [-2.0, 4.0]])}
    figure = plots.states(groups, (0.611, 0.0449))
    drawn = figure.axes[0].collections
    assert_allclose(drawn[0].get_offsets(), groups["vision"])
    assert_allclose(drawn[1].get_offsets(), [[1.0, 2.0]])
    assert_allclose(drawn[2].get_offsets(), groups["text"])
    assert_allclose(drawn[3].get_offsets(), [[-2.0, 2.0]])
    assert drawn[1].get_sizes()[0] > 4 * drawn[0].get_sizes()[0]
    assert drawn[1].get_zorder() > drawn[2].get_zorder(), "later points do not hide an earlier centre"
    assert [to_hex(part.get_facecolor()[0]).upper() for part in drawn] == [BLUE, BLUE, RED, RED]
    assert legend(figure) == ["vision", "text"]
    assert labels(figure) == ("first component (61 % of the variance)", "second component (4 % of the variance)")


def test_curves_have_gaps_where_there_is_no_value() -> None:
    series = {"toward vision": [0.5, None, 0.9, 0.8], "toward text": [0.5, 0.4, 0.3, 0.2]}
    figure = plots.curves(X, series, xlabel="dose (no unit)", ylabel="share")
    first, second = figure.axes[0].lines
    assert_allclose(first.get_xdata(), X)
    assert_allclose(first.get_ydata(), [0.5, math.nan, 0.9, 0.8])
    assert_allclose(second.get_ydata(), [0.5, 0.4, 0.3, 0.2])
    assert first.get_color() != second.get_color()
    assert first.get_marker() not in ("", "None"), "a value between two gaps has no line to show it"
    assert legend(figure) == ["toward vision", "toward text"]
    assert labels(figure) == ("dose (no unit)", "share")
    assert figure.axes[0].get_xscale() == "linear"
    assert legend(plots.curves(X, {"one": X}, xlabel="x", ylabel="y")) == []


def test_intervals_are_shaded_around_their_own_series() -> None:
    series = {"plain": [0.1, 0.1, 0.1, 0.1], "steered": [0.5, 0.6, None, 0.8]}
    intervals = {"steered": [(0.4, 0.6), (0.5, 0.7), None, (0.7, 0.9)]}
    figure = plots.curves(X, series, xlabel="x", ylabel="y", intervals=intervals)
    (shade,) = figure.axes[0].collections
    corners = {(x, y) for path in shade.get_paths() for x, y in path.vertices.tolist()}
    assert corners == {(0.25, 0.4), (0.25, 0.6), (0.5, 0.5), (0.5, 0.7), (2.0, 0.7), (2.0, 0.9)}
    assert len(shade.get_paths()) == 2, "nothing is shaded across the gap"
    assert to_hex(shade.get_facecolor()[0]) == to_hex(figure.axes[0].lines[1].get_color())
    assert shade.get_linewidth()[0] > 0, "an interval between two gaps is an edge and nothing else"


def test_marks_are_labelled_lines_whose_labels_keep_apart() -> None:
    marks = {0.5: "chosen dose", 0.55: "published weight", 2.0: "the end of the doses"}
    figure = plots.curves(X, {"one": X}, xlabel="x", ylabel="y", marks=marks)
    axes = figure.axes[0]
    assert [(line.get_xdata()[0], line.get_xdata()[1]) for line in axes.lines[1:]] == [(x, x) for x in marks]
    written = [text for text in axes.texts if text.get_text()]
    assert {text.xy[0]: text.get_text() for text in written} == marks
    figure.draw_without_rendering()
    boxes = [text.get_window_extent() for text in written]
    assert not any(box.overlaps(earlier) for at, box in enumerate(boxes) for earlier in boxes[:at])
    assert all(box.y0 >= axes.get_window_extent().y1 for box in boxes), "no curve runs through a label"
    lines = {text.xy[0]: text.get_window_extent().y1 for text in axes.texts if not text.get_text()}
    at = {x: axes.transData.transform((x, 0))[0] for x in marks}
    crossed = [x for x, top in lines.items() for box in boxes if box.x0 < at[x] < box.x1 and top > box.y0]
    assert crossed == [], "no line runs through another's label"
    assert all(box.x1 <= axes.get_window_extent().x1 for box in boxes), "a label at the right end takes no room from it"


def test_another_unit_of_x_stands_below_the_first() -> None:
    figure = plots.curves([0.0, 1.0, 3.0], {"a": [0, 1, 2]}, xlabel="own", ylabel="y", other_x=("published", 0.4))
    figure.draw_without_rendering()
    (axes,) = figure.axes
    (below,) = axes.child_axes
    assert (axes.get_xlabel(), below.get_xlabel()) == ("own", "published")
    assert below.get_xlim() == pytest.approx([0.4 * limit for limit in axes.get_xlim()])
    # no word of the one runs into the other, or into what is below both
    assert below.xaxis.get_tightbbox().y1 < axes.xaxis.label.get_window_extent().y0
    assert below.get_tightbbox().y0 >= figure.bbox.y0


def test_a_mark_beyond_the_data_is_in_view_and_the_others_have_room() -> None:
    figure = plots.curves(X, {"one": X}, xlabel="x", ylabel="y", marks={2.0: "the end of the doses", 20.0: "far"})
    figure.draw_without_rendering()
    inside = figure.axes[0].get_window_extent()
    boxes = [text.get_window_extent() for text in figure.axes[0].texts if text.get_text()]
    assert all(inside.x0 <= box.x0 and box.x1 <= inside.x1 for box in boxes)


def test_a_logarithmic_axis_has_plain_numbers_for_ticks() -> None:
    axes = plots.curves(X, {"one": X}, xlabel="x", ylabel="y", log_x=True).axes[0]
    assert axes.get_xscale() == "log"
    low, high = axes.get_xlim()
    labels = {label.get_text() for at, label in ticks(axes.xaxis) if low <= at <= high}
    assert labels == {"0.5", "1", "2"}
    assert {label.get_text() for label in axes.xaxis.get_ticklabels(minor=True)} <= {""}


def test_shares_are_stacked_from_the_first_condition_down() -> None:
    figure = plots.shares({"plain": (0.48, 0.46, 0.06), "toward vision": (0.9, 0.02, 0.08)})
    assert names(figure) == ["plain", "toward vision"]
    stacked = [[(bar.get_x(), bar.get_width()) for bar in bars] for bars in bar_containers(figure)]
    expected = [[(0, 0.48), (0, 0.9)], [(0.48, 0.46), (0.9, 0.02)], [(0.94, 0.06), (0.92, 0.08)]]
    assert_allclose(stacked, expected)
    assert [round(bar.get_y() + bar.get_height() / 2) for bar in bar_containers(figure)[0]] == [0, 1]
    assert len({colour for bars in bar_containers(figure) for colour in colours(bars)}) == 3
    assert legend(figure) == ["vision", "text", "others"]
    assert [text.get_text() for text in figure.axes[0].texts] == ["0.48", "0.90", "0.46", "", "", "0.08"]
    assert figure.axes[0].get_xlim() == (0, 1)


def test_bars_have_their_intervals_and_a_baseline() -> None:
    values = {"plain": 0.5, "steered": 0.9, "random": 0.4}
    intervals = {"plain": (0.45, 0.6), "random": (0.41, 0.43)}  # the last one does not contain its value
    figure = plots.bars(values, xlabel="Vision Ratio (0 to 1)", intervals=intervals, baseline=0.25)
    assert names(figure) == list(values)
    (drawn,) = bar_containers(figure)
    assert [bar.get_width() for bar in drawn] == [0.5, 0.9, 0.4]
    assert_allclose(spans(figure), [[[0.45, 0], [0.6, 0]], [[0.41, 2], [0.43, 2]]])
    (baseline,) = [line for line in figure.axes[0].lines if line.get_linestyle() == "--"]
    assert list(baseline.get_xdata()) == [0.25, 0.25]
    assert [text.get_text() for text in figure.axes[0].texts if text.get_text()] == ["baseline"]
    assert figure.axes[0].get_xlabel() == "Vision Ratio (0 to 1)"


def test_bars_without_a_baseline_have_no_line() -> None:
    figure = plots.bars({"plain": 0.5}, xlabel="share")
    assert list(figure.axes[0].lines) == []
    assert list(figure.axes[0].texts) == []


def test_a_baseline_of_zero_is_drawn() -> None:
    figure = plots.bars({"plain": -0.5, "steered": 0.5}, xlabel="difference", baseline=0)
    assert [list(line.get_xdata()) for line in figure.axes[0].lines] == [[0, 0]]


def test_eight_colours_and_then_other_dashes_tell_series_apart() -> None:
    figure = plots.curves(X, {str(index): X for index in range(20)}, xlabel="x", ylabel="y")
    looks = {(line.get_color(), line.get_linestyle()) for line in figure.axes[0].lines}
    assert len(looks) == 20
    assert len(set(COLOURS)) == 8


@pytest.mark.parametrize("name", list(every()))
def test_nothing_is_cut_off_or_drawn_over(name: str) -> None:
    figure = every()[name]()
    FigureCanvasAgg(figure).draw()
    axes, canvas = figure.axes[0], figure.bbox
    inside = axes.get_window_extent()
    for drawn in (axes.get_tightbbox(), *(legend.get_window_extent() for legend in figure.legends)):
        assert canvas.x0 <= drawn.x0
        assert drawn.x1 <= canvas.x1
        assert canvas.y0 <= drawn.y0
        assert drawn.y1 <= canvas.y1
    assert all(not legend.get_window_extent().overlaps(axes.get_tightbbox()) for legend in figure.legends)
    assert inside.width > canvas.width / 2, "the labels leave room for the plot"
    assert inside.height > canvas.height / 3
    assert axes.get_xlabel()
    rows = [label.get_window_extent() for label in axes.get_yticklabels()]
    assert all(below.y1 <= above.y0 or above.y1 <= below.y0 for below, above in itertools.pairwise(rows))
    assert figure.get_figwidth() == 7


def test_plots_leave_no_global_state() -> None:
    code = "import sys, probes.reporting.plots; assert 'matplotlib.pyplot' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_isolines_label_their_sums_where_they_come_into_sight() -> None:
    figure = plots.isolines({"one": (0.33, 0.25), "other": (0.53, 0.45)}, xlabel="x", ylabel="y", label="sum")
    (axes,) = figure.axes
    assert (axes.get_xlim(), axes.get_ylim()) == (pytest.approx((0.23, 0.63)), pytest.approx((0.15, 0.55)))
    labels = {text.get_text(): text.xy for text in axes.texts}  # type: ignore[attr-defined]
    assert [*labels] == ["0.4", "0.5", "0.6", "0.7", "0.8", "0.9", "1.0", "1.1"]
    assert all(x + y == pytest.approx(float(name)) for name, (x, y) in labels.items())
    dashed = [line for line in axes.lines if line.get_linestyle() == "--"]
    assert all(np.ptp(np.add(*line.get_data())) < 1e-9 for line in dashed)
    points = {line.get_label(): (line.get_xdata()[0], line.get_ydata()[0]) for line in axes.lines if line not in dashed}
    assert points == {"one": (0.33, 0.25), "other": (0.53, 0.45)}


def test_a_grid_has_its_first_row_at_the_bottom_and_marks_above_columns() -> None:
    figure = plots.heat([[0.1, 0.9], [0.8, 0.2]], xlabel="picture", ylabel="layer", label="part", marks={2: "target"})
    axes, bar = figure.axes
    (image,) = axes.images
    assert image.get_array().tolist() == [[0.1, 0.9], [0.8, 0.2]]
    assert (image.origin, image.get_extent()) == ("lower", [0.5, 2.5, -0.5, 1.5])
    (mark,) = axes.texts
    assert (mark.get_text(), mark.xy[0], bar.get_ylabel()) == ("target", 2, "part")


def test_marked_cells_have_a_box_in_every_panel() -> None:
    cells = np.zeros((2, 3), bool)
    cells[1, 0] = True
    figure = plots.marked(Image.new("RGB", (60, 40)), {"layer 0": cells, "layer 1": ~cells})
    boxes = [[(box.get_x(), box.get_y()) for box in axes.patches] for axes in figure.axes]
    assert boxes[0] == [(0, 1)]  # the second row, the first column; y grows downward
    assert len(boxes[1]) == 5
    assert [axes.get_title() for axes in figure.axes] == ["layer 0", "layer 1"]
    assert figure.axes[0].images[0].get_extent() == [0, 3, 2, 0]


def test_panels_have_an_axis_each_and_leave_out_what_is_no_number() -> None:
    values = {
        "one": {"a": (0.5, (0.4, 0.6)), "b": (2, None)},
        "two": {"c": (None, None), "d": (1.0, None)},
        "three": {"e": ("3", None)},
    }
    used = [axes for axes in plots.panels(values).axes if axes.axison]
    assert [axes.get_title(loc="left") for axes in used] == ["one", "two"]
    assert [[label.get_text() for label in axes.get_yticklabels()] for axes in used] == [["a", "b"], ["d"]]
    interval, first, second = used[0].lines
    assert (list(interval.get_xdata()), list(interval.get_ydata())) == ([0.4, 0.6], [0, 0])
    assert [list(point.get_xdata()) for point in (first, second)] == [[0.5], [2]]
