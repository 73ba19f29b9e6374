"""The report of `eval mc2`: every section with numbers made by hand, read back from its tables."""

from __future__ import annotations

import json
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from probes.conflicts.samples import SIDES, Side
from probes.conflicts.shares import Shares
from probes.mc2 import report as mc2_report
from probes.mc2 import report_conditions
from probes.mc2.ablate import Knee, Latency
from probes.mc2.evaluate import Evaluation, Preference
from probes.mc2.run import summary
from probes.reporting.report import Report
from tests.probes.mc2.pages import AUTOMATIC, outcomes, ranged, row, strengths, tables


@pytest.fixture
def page(undrawn: None) -> Report:
    return Report("Modality preference of a model")


def measured(
    kind: str,
    side: Side | None,
    color: tuple[int, int, int],
    shape: tuple[int, int, int],
    *,
    ratio: float | None = None,
    alone: tuple[float, float] | tuple[None, None] = (None, None),
    intervals: bool = True,
) -> Preference:
    all_outcomes = outcomes(*color) + outcomes(*shape)
    return Preference(
        kind=kind,
        side=side,
        shares=Shares.of(all_outcomes, intervals),
        by_task={"color": Shares.of(outcomes(*color)), "shape": Shares.of(outcomes(*shape))},
        followed={side: np.array([outcome == side for outcome in all_outcomes], float) for side in SIDES},
        attention_ratio=ratio,
        unanswered=0.0625,
        image_only=alone[0],
        context_only=alone[1],
    )  # fmt: skip


EVALUATION = Evaluation(
    {
        condition.name: condition
        for condition in (
            measured("plain", None, (2, 1, 1), (0, 2, 2), ratio=0.123, alone=(0.9, 0.8)),
            measured("instruct", "vision", (3, 1, 0), (2, 0, 2)),
            measured("instruct", "text", (0, 4, 0), (0, 0, 4)),
            measured("chain", "vision", (0, 0, 4), (0, 0, 4)),
            measured("chain", "text", (0, 1, 3), (0, 0, 4)),
            measured("shots", "vision", (1, 1, 2), (0, 0, 4)),
            measured("shots", "text", (1, 1, 2), (0, 0, 4)),
            measured("steer", "vision", (4, 0, 0), (3, 1, 0), ratio=0.456, alone=(0.975, 0.625)),
            measured("steer", "text", (0, 2, 2), (0, 1, 3), ratio=0.321, alone=(0.5, 1.0)),
        )
    },
    random=(Shares.of(outcomes(2, 2, 4)), Shares.of(outcomes(6, 0, 2)), Shares.of(outcomes(0, 0, 8))),
)


def test_every_condition_has_its_row(page: Report) -> None:
    report_conditions.conditions(page, EVALUATION.to_json())
    table, checks, *_ = tables(page)
    assert list(table)[:9] == list(checks) == [report_conditions.TITLES[name] for name in EVALUATION.conditions]
    # 2 of 8, 3 of 8, 2 of 5 that follow a side: Wilson's by an independent calculator
    assert table["plain"] == {
        "condition": "plain", "S_v": "0.250 (0.071 to 0.591)", "S_t": "0.375 (0.137 to 0.694)",
        "S_o": "0.375 (0.137 to 0.694)", "Vision Ratio": "0.400 (0.118 to 0.769)",
    }  # fmt: skip
    assert checks["plain"] == {
        "condition": "plain", "unanswered": "0.062", "attention ratio": "0.123", "image only": "0.900",
        "context only": "0.800",
    }  # fmt: skip
    steered = EVALUATION.conditions["vision"].shares
    assert (steered.s_vision, steered.s_text, steered.s_others) == (0.875, 0.125, 0)
    assert list(table["steered toward vision"].values())[1:] == [
        ranged(steered, name) for name in report_conditions.SHARES
    ]
    assert list(checks["steered toward vision"].values())[2:] == ["0.456", "0.975", "0.625"]
    assert table["four-shot toward text"]["S_t"].startswith("0.125 (")


def test_missing_measurements_are_dashes(page: Report) -> None:
    report_conditions.conditions(page, EVALUATION.to_json())
    conditions, checks, by_task, followed = tables(page)
    assert conditions["chain of thought toward vision"]["Vision Ratio"] == "-"
    missing = ("attention ratio", "image only", "context only")
    assert [checks["chain of thought toward vision"][name] for name in missing] == ["-"] * 3
    assert by_task["chain of thought toward vision"]["color"] == "-"
    assert not re.search(r"\bnan\b", page.markdown().lower())
    assert followed["chain of thought toward vision"]["color"] == "0.000"


def test_random_directions_are_summed_up_below(page: Report) -> None:
    report_conditions.conditions(page, EVALUATION.to_json())
    table = tables(page)[0]
    rows = {name: [table[f"3 random directions, {name}"][of] for of in ("S_v", "S_t", "S_o", "Vision Ratio")]
            for name in ("min", "mean", "max")}  # fmt: skip
    assert rows == {
        "min": ["0.000", "0.000", "0.250", "0.500"],
        "mean": ["0.333", "0.083", "0.583", "0.750"],
        "max": ["0.750", "0.250", "1.000", "1.000"],
    }


def test_tasks_have_their_ratio_and_the_share_that_follows(page: Report) -> None:
    report_conditions.conditions(page, EVALUATION.to_json())
    _, _, ratios, followed = tables(page)
    assert ratios["plain"] == {"condition": "plain", "color": "0.667", "shape": "0.000"}
    assert ratios["steered toward vision"] == {"condition": "steered toward vision", "color": "1.000", "shape": "0.750"}
    assert "plain" not in followed
    assert followed["steered toward text"] == {"condition": "steered toward text", "color": "0.500", "shape": "0.250"}
    assert followed["instruction toward text"]["color"] == "1.000"


def test_steering_is_compared_with_the_best_other_condition(page: Report) -> None:
    report_conditions.conditions(page, EVALUATION.to_json())
    vision = [100 * bound for bound in EVALUATION.advantages()[0].interval]
    assert (
        "Toward vision, steering follows 25.0 points more samples than the best other condition, instruction toward "
        f"vision (95 % interval: {vision[0]:.1f} to {vision[1]:.1f} points more)."
    ) in page.markdown()
    assert (
        "Toward text, steering follows 12.5 points fewer samples than the best other condition, instruction toward text "
    ) in page.markdown()


@pytest.mark.parametrize(
    ("difference", "interval", "expected"),
    [
        (-0.03, [-0.045, -0.01], "3.0 points fewer samples than the best other condition, instruction toward vision (95 % "
         "interval: 1.0 to 4.5 points fewer)"),
        (0.03, [0.01, 0.045], "3.0 points more samples than the best other condition, instruction toward vision (95 % "
         "interval: 1.0 to 4.5 points more)"),
        (-0.0002, [-0.02, 0.015], "as many samples as the best other condition, instruction toward vision (95 % "
         "interval: 2.0 points fewer to 1.5 more)"),
        (0.0, [0.0, 0.0], "as many samples as the best other condition, instruction toward vision (95 % interval: 0 "
         "points)"),
    ],
)  # fmt: skip
def test_no_sign_stands_beside_more_or_fewer(
    page: Report, difference: float, interval: list[float], expected: str
) -> None:
    advantage = {"other": "instruct_vision", "difference": difference, "difference_95": interval}
    report_conditions.conditions(page, EVALUATION.to_json() | {"advantages": {"vision": advantage}})
    assert f"steering follows {expected}." in page.markdown()


def test_a_report_may_have_one_condition(page: Report, tmp_path: Path) -> None:
    only = Evaluation({"plain": measured("plain", None, (0, 0, 2), (0, 0, 2), intervals=False)})
    report_conditions.conditions(page, only.to_json())
    assert tables(page)[0]["plain"]["S_o"] == "1.000"
    assert "steering follows" not in page.markdown()
    page.write(tmp_path, {"conditions": only.to_json()})


# ----------------------------------------------------------------------------------------------------------- whole


class Tags(HTMLParser):
    """Counts the elements and keeps the cells."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.count[tag] += 1

    def handle_data(self, data: str) -> None:
        self.text.append(data)


ABOUT = {
    "model": "a_model", "data": "8 conflicts from *MC2*.json", "samples": 8, "seed": 0, "wording": "v1", "vector": "made",
    "strength": 1.0, "published strength": 0.5, "versions": {"helmsight": "1.2.3"},
}  # fmt: skip


def test_the_whole_report_is_written_from_its_numbers(tmp_path: Path) -> None:
    data = {
        "about": ABOUT,
        "conditions": EVALUATION.to_json(),
        "samples": {"25": row((1, 1, 0), (1, 1, 0)).to_json(), "50": row((0, 0, 2), (0, 0, 2)).to_json()},
        "tasks": {"color": row((1, 1, 0), (1, 1, 0)).to_json()},
        "strength": strengths(
            {0.0: row((1, 1, 0), (1, 1, 0)), 1.0: row((2, 0, 0), (0, 2, 0))}, Knee(1.0, 0.5, 0, None)
        ),
        "latency": {"plain": Latency(0.05, 1, (1, 1)).to_json()},
        "auto": AUTOMATIC.to_json(),
    }
    page = mc2_report.report(data)
    page.write(tmp_path, data)
    tags = Tags()
    tags.feed((tmp_path / "report.html").read_text())
    assert tags.count["table"] == len(tables(page)) == 15
    assert tags.count["img"] == 4
    assert {"Conditions", "Probe size (Table 8)", "One task only (Table 9)", "Strength (Table 10)",
            "Latency of one request (Table 11)",
            "Choosing the direction automatically (Table 12)"} <= set(tags.text)  # fmt: skip
    head = [line for line in "".join(tags.text).splitlines() if line.strip()]
    assert head[head.index("Data: 8 conflicts from *MC2*.json") :][:5] == [
        "Data: 8 conflicts from *MC2*.json", "Model: a_model", "Instructions: the authors' version 1, word for word",
        "Steering: vector made at strength 1 (0.5 in published units)", "Versions: helmsight 1.2.3",
    ]  # fmt: skip
    plots = {"conditions.svg", "probe-size.svg", "probe-task.svg", "strength.svg"}
    assert {path.name for path in tmp_path.iterdir()} == {*plots, "report.md", "report.html", "report.json"}
    files = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for name in files.keys() - {"report.json"}:
        (tmp_path / name).unlink()
    mc2_report.report(json.loads(files["report.json"])).write(tmp_path, data)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == files


def test_the_table_on_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    summary(EVALUATION, "a model: 8 samples, seed 0").show()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].strip() == "a model: 8 samples, seed 0"
    cells = {row[0]: row[1:] for row in ([cell.strip() for cell in line.strip("│").split("│")] for line in lines)}
    assert cells["plain"] == ["0.250", "0.375", "0.375", "0.400", "0.900", "0.800", "0.123"]
    assert cells["chain of thought toward vision"] == ["0.000", "0.000", "1.000", "-", "-", "-", "-"]
    assert cells["3 random, mean"] == ["0.333", "0.083", "0.583", "0.750", "-", "-", "-"]
    assert max(map(len, lines)) <= 120
