"""The rows of the modality-preference paper, read from reports made by hand and from those that the repository holds."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import chi2_contingency

from probes.harness.bootstrap import wilson
from probes.reproduce.items import Figure, Found, UnreadableRun
from probes.reproduce.mp import ITEMS
from probes.reproduce.readings import mp as read
from probes.reproduce.readings.groups import alike
from probes.reproduce.runs import RUNS

REPORTS = Path(__file__).parents[3] / "demo" / "reports"


def report(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((REPORTS / name / "report.json").read_text())
    return content


def test_every_row_has_its_number_once_and_a_run_that_there_is() -> None:
    numbers = [item.id for item in ITEMS]
    assert numbers == sorted(set(numbers))
    assert {item.paper for item in ITEMS} == {"mp"}
    assert {item.run for item in ITEMS if item.run} <= RUNS.keys()
    assert all(item.effect for item in ITEMS if item.run)


def task(ratio: float, low: float, high: float, n: int = 10) -> dict[str, Any]:
    return {"vision_ratio": ratio, "vision_ratio_95": [low, high], "n": n}


def decided(followed: int, n: int) -> dict[str, Any]:
    return task(followed / n, *wilson(followed, n), n)


PLAIN = {
    "n": 800, "context_only_accuracy": 0.97, "no_conflict_accuracy": 0.98,
    "vision_ratio": 0.3, "vision_ratio_95": [0.2, 0.4],
    "by_task": {"a": decided(20, 100), "b": decided(70, 100), **{f"c{i}": decided(50, 100) for i in range(6)}},
}  # fmt: skip
ABOUT = {"samples": 80, "layers": [1]}


def changed(report: dict[str, Any], value: Any, *path: Any) -> dict[str, Any]:
    """Return a copy with one value changed."""
    copied = copy.deepcopy(report)
    at: Any = copied
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return copied


CONDITIONS = {
    "plain": PLAIN,
    "instruct_text": {
        "s_text": 0.5,
        "s_vision": 0.1,
        "s_text_95": [0.45, 0.55],
        "n": 80,
        "attention_by_layer": [0.4, 0.4, 0.4, 0.5],
        "attention_by_layer_95": [[0.35, 0.45], [0.35, 0.45], [0.35, 0.45], [0.45, 0.55]],
    },
    "text": {
        "s_text": 0.6,
        "s_text_95": [0.55, 0.65],
        "n": 80,
        "attention_by_layer": [0.9, 0.9, 0.3, 0.2],
        "attention_by_layer_95": [[0.85, 0.95], [0.85, 0.95], [0.28, 0.32], [0.15, 0.25]],
    },
    "both_text": {"s_text": 0.7, "s_text_95": [0.65, 0.75]},
    "advantages": {
        side: {"other": "instruct_text", "difference": 0.1, "difference_95": [0.01, 0.2]} for side in ("vision", "text")
    },
}
LENS = {"plain_vision": {"surfaces": 2, "n": 3}, "plain_text": {"surfaces": 1, "n": 4}, "text": {"surfaces": 3, "n": 7}}
SEEN: dict[str, Any] = {
    "about": ABOUT,
    "conditions": CONDITIONS,
    "words": {"a": 30.0, "b": 51.0},
    "attention": {"tasks": {"spearman": 0.6, "n": 8}, "conditions": {"spearman": 1.0, "n": 5}},
    "sizes": {
        "rows": {"5": {"vision_ratio_95": [0.4, 0.6]}, "8": {"vision_ratio_95": [0.45, 0.55]}},
        "settled": 5, "most": 10,
    },
    "tasks": {
        "a": {"text": {"s_text": 0.69, "difference": -0.01, "difference_95": [-0.04, 0.02]}},
        "all tasks": {"text": {"s_text": 0.7, "difference": 0.0, "difference_95": [-0.02, 0.02]}},
    },
    "samples": {
        size: {"text": {"s_text": 0.7, "n": 80, "difference": 0.0, "difference_95": [-0.02, 0.02]}} for size in ("25", "50")
    },
    "strength": {
        "rows": {
            "0.5": {"text": {"s_text": 0.3, "s_text_95": [0.2, 0.4], "n": 80}},
            "1": {"text": {"s_text": 0.6, "s_text_95": [0.5, 0.7], "n": 80}},
            "2": {"text": {"s_text": 0.2, "s_text_95": [0.1, 0.3], "n": 80}},
        }
    },
    "latency": {
        "plain": {"ratio": 1.0},
        "probing": {"ratio": 1.2, "ratio_95": [1.1, 1.3]},
        "steering": {
            "ratio": 1.01, "ratio_95": [1.0, 1.04], "memory_ratio": 1.02, "memory_ratio_95": [1.01, 1.03],
        },
    },
    "auto": {
        "rows": [
            {"severity": None, "degraded": "either", "criterion": "surprise", "gap_closed": 0.9, "gap_closed_95": [0.8, 1]},
            {"severity": None, "degraded": "either", "criterion": "drop", "gap_closed": 0.3, "gap_closed_95": [0.1, 0.5]},
        ]
    },
    "lens": LENS,
}  # fmt: skip


@pytest.mark.parametrize(
    ("reading", "path", "value"),
    [
        (read.tasks_alike, ("conditions", "plain", "by_task", "a", "n"), 9),
        (read.by_task, ("conditions", "plain", "by_task"), {str(i): decided(45 + 5 * (i == 7), 100) for i in range(8)}),
        (read.vision_ratio, ("conditions", "plain", "vision_ratio_95"), [0.2, 0.51]),
        (read.vision_ratio, ("conditions", "plain", "vision_ratio_95"), None),
        (read.alone, ("conditions", "plain", "no_conflict_accuracy"), 0.96),
        (read.advantages, ("conditions", "advantages", "vision", "difference_95"), [-0.01, 0.2]),
        (read.words, ("words", "b"), 51.1),
        (read.evaluation_size, ("sizes", "settled"), None),
        (read.evaluation_size, ("sizes", "settled"), 7),
        (read.one_task, ("tasks", "a", "text", "difference_95"), [-0.06, 0.02]),
        (read.sizes, ("samples", "25", "text", "difference_95"), [-0.02, 0.06]),
        (read.sizes, ("samples", "25", "text", "difference_95"), None),
        (read.strengths, ("strength", "rows", "0.5", "text", "s_text_95"), [0.2, 0.46]),
        (read.strengths, ("strength", "rows", "2", "text", "s_text_95"), [0.1, 0.46]),
        (read.latency, ("latency", "steering", "ratio_95"), [1.0, 1.06]),
        (read.latency, ("latency", "steering", "memory_ratio_95"), [1.0, 1.06]),
        (read.predicted, ("auto", "rows", 1, "gap_closed_95"), [-0.01, 0.5]),
        (read.predicted, ("auto", "rows", 1, "gap_closed"), None),
        (read.attention, ("attention", "tasks", "spearman"), 0.4),
        (read.attention, ("attention", "tasks", "spearman"), None),
        (
            read.attention_by_layer,
            ("conditions", "text", "attention_by_layer_95"),
            [[0, 1], [0, 1], [0.2, 0.4], [0.1, 0.3]],
        ),
        (read.attention_by_layer, ("about", "layers"), [3]),
        (read.case, ("conditions", "both_text", "s_text_95"), [0.54, 0.75]),
        (read.lens, ("lens", "plain_text", "surfaces"), 3),
        (read.lens, ("lens", "plain_text", "surfaces"), None),
    ],
)
def test_an_effect_disappears_if_one_number_changes(reading: Any, path: tuple[Any, ...], value: Any) -> None:
    with_effect, unseen = reading(SEEN), reading(changed(SEEN, value, *path))
    assert (with_effect.appears, unseen.appears) == (True, False)


def test_figures_equal_those_by_hand() -> None:
    assert read.latency(SEEN).ours == {
        "time, steering": 1.01, "time, probing": 1.2, "memory, steering": pytest.approx(1.02),
    }  # fmt: skip
    assert read.latency(changed(SEEN, None, "latency", "steering", "memory_ratio")).appears
    assert read.predicted(SEEN) == Found(0.3, True, [0.1, 0.5], 80)
    assert read.evaluation_size(SEEN).ours == {"5": pytest.approx(0.2), "8": pytest.approx(0.1), "settled": 5}
    with pytest.raises(UnreadableRun, match="too few samples"):
        read.evaluation_size({key: part for key, part in SEEN.items() if key != "sizes"})
    assert read.attention_by_layer(SEEN).ours == pytest.approx(
        {"2, instructed": 0.6, "2, steered": 0.7, "3, instructed": 0.5, "3, steered": 0.8}
    )
    assert read.lens(SEEN).ours == {"preferring vision, surfaces": 2, "preferring text, surfaces": 1, "steered": "1"}
    assert read.lens(SEEN).n == 7
    assert read.case(SEEN).ours == {"instructed": 0.5, "steered": 0.6, "both": 0.7}


def organism(parameters: int, ratio: float) -> dict[str, Any]:
    conflict = task(ratio, ratio - 0.05, ratio + 0.05)
    return {"parameters": parameters, "preference": {"conflict": conflict, "picture_alone": {"s_vision": 0.7}}}


GROWN = {
    "organisms": {
        "size-1": organism(1_000_000, 0.3), "size-4": organism(4_000_000, 0.4), "size-16": organism(16_000_000, 0.5),
        **{f"conflicts-{share}": organism(4_000_000, 0.5 + share / 500) for share in (0, 25, 50, 75, 100)},
    }
}  # fmt: skip


@pytest.mark.parametrize(
    ("reading", "name", "ratio"),
    [(read.by_parameters, "size-16", 0.4), (read.by_share_of_conflicts, "conflicts-100", 0.59)],
)
def test_the_rows_of_organisms(reading: Any, name: str, ratio: float) -> None:
    assert reading(GROWN).appears
    assert not reading(changed(GROWN, organism(4, ratio), "organisms", name)).appears
    lacking = copy.deepcopy(GROWN)
    del lacking["organisms"][name]
    with pytest.raises(KeyError, match=f"helmsight demo train --organism {name}"):
        reading(lacking)


def test_measured_organisms_are_read() -> None:
    reading = read.by_share_of_conflicts(report("organisms"))
    assert reading.appears
    assert reading.ours["100 %"] == pytest.approx(0.724, abs=1e-3)  # its table


def test_the_rows_of_a_probe() -> None:
    probe = report("probe")
    assert read.direction(probe) == Found(probe["info"]["agreement"][3], True, n=250)
    weights = read.weight(probe)
    assert weights.ours["plain states, queries"] == pytest.approx(0.852, abs=1e-3)  # its table of equation 2
    assert weights.ours["instructed states, mean"] == pytest.approx(0.980, abs=1e-3)
    assert weights.appears
    assert not read.weight(changed(probe, "instructed", "info", "recipe", "states")).appears
    by_layer = read.layers(probe)
    assert by_layer.appears
    # Mean / deviation of normal values as large and as many: where the middle 95 % of such samples lie.
    drawn = np.random.default_rng(2).normal(by_layer.ours["3"], 1, (4000, probe["info"]["samples"]))
    expected = np.quantile(drawn.mean(1) / drawn.std(1), (0.025, 0.975))
    assert by_layer.figures()["3"].interval == pytest.approx(tuple(expected), rel=0.02)
    small_probe = changed(probe, 8, "info", "samples")
    assert not read.layers(small_probe).appears
    assert not read.layers(changed(probe, [5.0, 4.0, 7.4, 7.0, 4.0, 4.0, 4.0, 4.0], "info", "score")).appears


SHIFTS: dict[str, Any] = {
    "info": {"samples": 128},
    "projection": {
        "distance": {"instructed toward vision": 9.0, "instructed toward text": 8.0, "text with errors": 2.0},
        "distance_95": {
            "instructed toward vision": [8, 10], "instructed toward text": [7, 9], "text with errors": [1, 3],
        },
        "cosine": -0.5, "cosine_95": [-0.9, -0.1],
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("path", "value"), [(("cosine_95",), [-0.9, 0.1]), (("distance_95", "instructed toward text"), [2.5, 13.5])]
)
def test_the_row_of_states_goes_by_intervals(path: tuple[str, ...], value: list[float]) -> None:
    shifts = read.states(SHIFTS)
    assert shifts.appears
    assert shifts.figures()["toward text"] == (8.0, [7, 9])
    assert not read.states(changed(SHIFTS, value, "projection", *path)).appears


def test_the_extremes_of_alike_tasks_are_no_finding() -> None:
    """Eight tasks of one share: their lowest and highest lie apart, and a test of all of them does not find any."""
    counts = [38, 64, 50, 52, 47, 55, 44, 50]
    groups = [Figure(count / 100, wilson(count, 100)) for count in counts]
    table = np.array([counts, [100 - count for count in counts]])
    assert alike(groups) == pytest.approx(chi2_contingency(table, correction=False).pvalue, rel=1e-6)
    assert alike([Figure(0.0, wilson(0, 20)), Figure(1.0, wilson(20, 20))]) < 1e-8
    assert alike(groups[:1]) == 1
    drawn = np.random.default_rng(0).binomial(100, 0.5, (500, 8))
    wrong = np.mean([alike([Figure(c / 100, wilson(c, 100)) for c in row]) < 0.05 for row in drawn[:200]])
    assert wrong < 0.1


def test_where_others_are_followed_always_steering_has_no_room() -> None:
    assert not read.advantages(SEEN).nothing
    full = changed(SEEN, 1.0, "conditions", "instruct_text", "s_text")
    assert read.advantages(full).nothing == "ceiling: instruct_text is followed in 1.000"
    assert not read.attention_by_layer(SEEN).nothing
    crowded = changed(SEEN, [0.02] * 4, "conditions", "instruct_text", "attention_by_layer")
    assert read.attention_by_layer(crowded).nothing.startswith("ceiling: instructed")
    for reading, path in ((read.sizes, ("samples", "50")), (read.one_task, ("tasks", "all tasks"))):
        assert not reading(SEEN).nothing
        assert reading(changed(SEEN, 0.975, *path, "text", "s_text")).nothing == "ceiling: S_t of the last is 0.975"


def test_a_size_that_learnt_nothing_has_no_preference() -> None:
    guessing = changed(GROWN, 0.225, "organisms", "size-16", "preference", "picture_alone", "s_vision")
    with pytest.raises(UnreadableRun, match=r"size-16 has not learnt to choose options: 0\.225"):
        read.by_parameters(guessing)
