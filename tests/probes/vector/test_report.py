"""The report of a probe: its tables hold the vector's numbers, and it stands alone."""

from __future__ import annotations

import base64
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

import steering
from probes.conflicts.shares import Shares
from probes.reporting.report import Report
from probes.vector.agreement import Agreement
from probes.vector.build import build
from probes.vector.calibrate import calibrate
from probes.vector.projection import Projection, project
from probes.vector.report import report
from probes.vector.verdict import Followed
from steering import SteeringVector
from tests.probes.conftest import make_samples

FOLLOWED = Followed(0.91, 0.23, 0.68, (0.555, 0.777), 48)
PROJECTION = Projection(
    {
        "plain": np.array([[0.0, 0.0], [2.0, 4.0]]), "noisy": np.array([[4.0, 6.0], [4.0, 6.0]]),
        "instructed toward vision": np.array([[0.0, -3.0], [2.0, 1.0]]),
        "instructed toward text": np.array([[0.0, 3.0], [2.0, 7.0]]),
    },
    (0.6, 0.25),
)  # fmt: skip


def _point(strength: float, vision: float, text: float, *damage: float) -> dict[str, Any]:
    """(S_v toward vision, S_t toward text), image, context, cross, kl, repetition."""
    names = ("image_accuracy", "context_accuracy", "cross_fall", "kl", "repetition")
    return {
        "layer": 1, "dose": 0.4 * strength, "strength": strength, **dict(zip(names, damage, strict=True)),
        "vision": Shares(vision, 0.1, 0.9 - vision, vision / (vision + 0.1), 10).to_json(),
        "text": Shares(0.3, text, 0.7 - text, 0.3 / (text + 0.3), 10).to_json(),
    }  # fmt: skip


CURVE = [_point(0.5, 0.6, 0.5, 0.99, 0.98, 0.02, 0.01, 0.001), _point(1.0, 0.8, 0.7, 0.97, 0.94, 0.3, 0.12, 0.034)]
CALIBRATION = {
    "layer": 1, "published_weight": 7.0, "factor": 0.4, "default_strength": 1.0, "range": [0.5, 1.25], "samples": 33,
    "targets_reached": True, "within_budget": False,
    "budget": {"others": 0.03, "accuracy": 0.04, "kl": 0.25, "repetition": 0.05},
    "baseline": {
        "plain": Shares(0.3, 0.6, 0.1, 1 / 3, 10).to_json(), "image_accuracy": 1.0, "context_accuracy": 0.96,
        "repetition": 0.002,
    },
    "chosen": {key: value for key, value in CURVE[1].items() if key != "strength"},
    "curve": CURVE, "others_tried": [],
}  # fmt: skip


def made(**info: Any) -> SteeringVector:
    about = {
        "samples": 25, "tasks": ["color", "shape"], "seed": 4, "score": [2.5, 7.125, 4.0],
        "agreement": [0.2, 0.875, 0.625], "ranking": [1, 2, 0],
        "magnitudes": {
            "states": {"plain": [3.0, 6.0, 5.0], "instructed": [3.3, 7.5, 5.5]},
            "direction": {"queries": [1.5, 2.0, 4.0], "mean": [0.0, 1.5, 2.5]},
        },
        **info,
    }  # fmt: skip
    mean, std = torch.tensor([1.5, 2.25, 3.125]), torch.tensor([0.6, 0.3, 0.75])
    return SteeringVector("mine", torch.ones(3, 4), torch.ones(3), mean, std, (1,), "model", info=about)


DATA = "35 conflicts from mc2.json"


def tables(page: Report) -> dict[str, list[dict[str, str]]]:
    """Return the rows of every table, by column, under its heading."""
    found: dict[str, list[dict[str, str]]] = {}
    heading, columns = "", None
    for line in page.markdown().splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ")
        if not line.startswith("|"):
            columns = None
            continue
        cells = [cell.strip().replace("\\", "") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if columns is None:
            columns = cells
        elif any(set(cell) - set("-: ") for cell in cells):
            found.setdefault(heading, []).append(dict(zip(columns, cells, strict=True)))
    return found


def column(rows: list[dict[str, str]], name: str) -> list[str]:
    return [row[name] for row in rows]


def columns(rows: list[dict[str, str]]) -> dict[str, list[str]]:
    return {name: column(rows, name) for name in rows[0]}


@dataclass(frozen=True)
class Written:
    """A page, the same as data, and the folder that both are written into."""

    page: Report
    data: dict[str, Any]
    folder: Path


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """Write the report with all its parts, with plots."""
    folder = tmp_path_factory.mktemp("whole")
    page, data = report(made(calibration=CALIBRATION), "the-model", DATA, FOLLOWED, ["A <b>doubt</b>."], PROJECTION)
    page.write(folder, data)
    return Written(page, data, folder)


@pytest.fixture(autouse=True)
def _only_the_whole_is_drawn(whole: Written, undrawn: None) -> None:
    pass


# -------------------------------------------------------------------------------------------------------------- tables


def test_layers_have_the_vectors_numbers() -> None:
    rows = tables(report(made(), "model", DATA, FOLLOWED, [], None)[0])["Layers"]
    assert column(rows, "layer") == ["0", "1", "2"]
    assert column(rows, "mean |v|") == ["1.500", "2.250", "3.125"]
    assert column(rows, "deviation") == ["0.600", "0.300", "0.750"]
    assert column(rows, "mean / deviation") == ["2.500", "7.125", "4.000"]
    assert column(rows, "agreement") == ["0.200", "0.875", "0.625"]
    assert column(rows, "rank") == ["3", "1", "2"]


def test_layers_that_were_not_tried_have_no_rank() -> None:
    rows = tables(report(made(ranking=[2]), "model", DATA, FOLLOWED, [], None)[0])["Layers"]
    assert column(rows, "rank") == ["-", "-", "1"]


def test_whether_there_is_a_direction_is_told_in_numbers() -> None:
    page, _ = report(made(), "the-model", DATA, FOLLOWED, [], None)
    rows = tables(page)["Is there a direction?"]
    assert column(rows, "value") == ["0.875", "0.910", "0.230", "0.680", "0.555 to 0.777", "48"]
    text = page.markdown()
    assert text.startswith("# Steering vector mine of the-model\n")
    assert "- Data: 35 conflicts from mc2.json\n- Tasks: color, shape\n- Model: the-model\n" in text
    assert "25 pairs of prompts that differ in the instruction only, seed 4." in text
    assert "Yes: nothing speaks against it." in text


def test_every_doubt_is_shown() -> None:
    page, data = report(made(), "model", DATA, FOLLOWED, ["The pairs disagree.", "It moves nothing."], None)
    assert "- The pairs disagree.\n- It moves nothing." in page.markdown()
    assert "Yes" not in page.markdown()
    assert data["doubts"] == ["The pairs disagree.", "It moves nothing."]


def test_settings_are_told_by_their_distance_from_plain() -> None:
    page, data = report(made(), "model", DATA, FOLLOWED, [], PROJECTION)
    assert [list(row.values()) for row in tables(page)["States after layer 1"]] == [
        ["plain", "1.000", "2.000", "0.000"], ["noisy", "4.000", "6.000", "5.000"],
        ["instructed toward vision", "1.000", "-1.000", "3.000"], ["instructed toward text", "1.000", "5.000", "3.000"],
    ]  # fmt: skip
    shown = data["projection"]
    assert (shown["explained"], shown["centres"]["noisy"]) == ([0.6, 0.25], [4.0, 6.0])
    assert shown["distance"] == {"noisy": 5, "instructed toward vision": 3, "instructed toward text": 3}
    assert shown["distance_95"]["instructed toward text"] == [3, 3]
    assert (shown["cosine"], shown["cosine_95"]) == (-1, [-1, -1])


def test_the_curve_stands_beside_the_unsteered_model() -> None:
    rows = tables(report(made(calibration=CALIBRATION), "model", DATA, FOLLOWED, [], None)[0])["Calibration"]
    assert columns(rows) == {
        "strength": ["0.000", "0.500", "1.000"],
        "published": ["0.000", "0.200", "0.400"],
        "Vision Ratio toward vision": ["0.333", f"{6 / 7:.3f}", f"{8 / 9:.3f}"],
        "toward text": ["0.333", "0.375", "0.300"],
        "others' share": ["0.100", "0.300", "0.100"],
        "accuracy, image only": ["1.000", "0.990", "0.970"],
        "accuracy, context only": ["0.960", "0.980", "0.940"],
        "KL (nats)": ["0.000", "0.010", "0.120"],
        "repetition": ["0.002", "0.001", "0.034"],
        # what the context alone has unsteered, less what it loses toward vision
        "context only, steered toward vision": ["0.960", "0.940", "0.660"],
    }


def test_both_units_stand_below_the_curves(whole: Written) -> None:
    for name in ("effect", "damage"):
        drawn = (whole.folder / f"{name}.svg").read_text()
        assert "strength (calibrated)" in drawn
        assert "strength (published)" in drawn


def test_every_reading_of_the_weight_stands_beside_what_it_aligns() -> None:
    vector = made(recipe={"wording": "v2", "position": -2, "size": "mean", "states": "instructed"})
    page = report(vector, "model", DATA, FOLLOWED, [], None)[0]
    rows = tables(page)["Weight (equation 2)"]
    assert columns(rows) == {
        "layer": ["0", "1", "2"],
        "mean |h|, plain": ["3.000", "6.000", "5.000"],
        "mean |h|, instructed": ["3.300", "7.500", "5.500"],
        "mean |v(q)|": ["1.500", "2.000", "4.000"],
        "|mean v|": ["0.000", "1.500", "2.500"],
        "mean |v(q)| and plain: weight": ["2.000", "3.000", "1.250"],
        "mean |v(q)| and instructed: weight": ["2.200", "3.750", "1.375"],
        "|mean v| and plain: weight": ["-", "4.000", "2.000"],
        "|mean v| and instructed: weight": ["-", "5.000", "2.200"],
    }
    text = page.markdown()
    assert "Here: |mean v| and instructed states" in text
    assert "the authors' version 2, word for word" in text
    assert "at the prompt's token -2, counted from its end" in text


def test_other_wordings_and_positions_stand_by_layer() -> None:
    cosines: Any = {("paper", -1): [1.0, 1.0, 1.0], ("v2", -1): [0.5, 0.75, 1.0], ("paper", -2): [0.25, 0.5, -0.125]}
    page, data = report(made(), "model", DATA, FOLLOWED, [], None, Agreement(("paper", -1), cosines, 12))
    rows = tables(page)["Other wordings and positions"]
    assert columns(rows) == {
        "layer": ["0", "1", "2"], "v2, -1": ["0.500", "0.750", "1.000"], "paper, -2": ["0.250", "0.500", "-0.125"],
    }  # fmt: skip
    assert data["agreement"] == {
        "own": "paper, -1", "n": 12, "cosines": {"v2, -1": [0.5, 0.75, 1.0], "paper, -2": [0.25, 0.5, -0.125]},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("reached", "within", "said"),
    [
        (True, True, "Targets reached; within the budget."),
        (False, True, "Targets NOT reached; within the budget."),
        (True, False, "Targets reached; NOT within the budget."),
    ],
)
def test_what_strength_one_means_is_said(reached: bool, within: bool, said: str) -> None:
    found = CALIBRATION | {"targets_reached": reached, "within_budget": within}
    text = report(made(calibration=found), "model", DATA, FOLLOWED, [], None)[0].markdown()
    assert "Strength 1.0 is 0.4 of the published weight at layer 1, so 0.4 in published units" in text
    assert "strengths from 0.5 to 1.25 (0.2 to 0.5 published) stay within the damage budget" in text
    assert "(others 0.03, accuracy 0.04, kl 0.25, repetition 0.05) on 33 samples" in text
    assert said in text
    assert "with the context alone, steered toward vision, is 0.660 at strength 1.0, 0.960 unsteered." in text


def test_what_was_not_measured_is_a_dash() -> None:
    curve = [CURVE[0] | {"cross_fall": None, "vision": Shares(0, 0, 1, None, 10).to_json()}]
    rows = tables(report(made(calibration=CALIBRATION | {"curve": curve}), "model", DATA, FOLLOWED, [], None)[0])
    assert rows["Calibration"][1]["context only, steered toward vision"] == "-"
    assert rows["Calibration"][1]["Vision Ratio toward vision"] == "-"


# ---------------------------------------------------------------------------------------------------------- the whole


@pytest.mark.parametrize("calibrated", [False, True])
@pytest.mark.parametrize("projection", [None, PROJECTION])
def test_each_part_may_be_missing(tmp_path: Path, calibrated: bool, projection: Projection | None) -> None:
    page, data = report(made(**{"calibration": CALIBRATION} if calibrated else {}), "m", DATA, FOLLOWED, [], projection)
    headings = re.findall(r"(?m)^## (.*)$", page.markdown())
    expected = ["Is there a direction?", "Layers", "Weight (equation 2)"]
    expected += ["States after layer 1"] if projection else []
    expected += ["Calibration"] if calibrated else []
    assert headings == expected
    page.write(tmp_path, data)
    plots = (
        {"layers", "ranking"} | ({"states"} if projection else set()) | ({"effect", "damage"} if calibrated else set())
    )
    assert {path.name for path in tmp_path.iterdir()} == {
        "report.md", "report.html", "report.json", *(f"{name}.svg" for name in plots),
    }  # fmt: skip
    assert ("projection" in data) == (projection is not None)


def test_the_same_as_data(whole: Written) -> None:
    vector = made(calibration=CALIBRATION)
    told = json.loads((whole.folder / "report.json").read_text())
    assert told == whole.data
    assert (told["name"], told["model"], told["fingerprint"], told["layers"]) == ("mine", "the-model", "model", [1])
    for name in ("mean_abs", "std", "weight"):
        assert told[name] == getattr(vector, name).tolist()
    assert told["instructed"] == FOLLOWED.to_json()
    assert told["info"] == vector.info


def test_the_page_stands_alone(whole: Written) -> None:
    html = (whole.folder / "report.html").read_text()
    sources = re.findall(r'(?:src|href|srcset|action|data)\s*=\s*"([^"]*)"', html)
    assert len(sources) == 5
    for source in sources:
        kind, _, content = source.partition(",")
        assert kind == "data:image/svg+xml;base64"
        svg = ElementTree.fromstring(base64.b64decode(content))
        references = [value for node in svg.iter() for name, value in node.attrib.items() if name.endswith("href")]
        assert all(value.startswith("#") for value in references)
    assert not re.search(r"<(script|link|iframe|object)|@import|url\(", html)
    assert "<b>" not in html


@pytest.mark.usefixtures("short_answers")
def test_a_vector_as_it_is_built_and_calibrated_is_reported(tmp_path: Path, tiny: steering.Engine) -> None:
    samples = make_samples(4)
    published = build(tiny, samples[:3], quiet=True)
    vector = calibrate(tiny, published, samples[3:], layers=[1], strengths=[0.1, 0.2], quiet=True)
    projection = project(tiny, samples[:3], vector.layers[0], quiet=True)
    page, data = report(vector, tiny.mllm.name, DATA, FOLLOWED, [], projection)
    page.write(tmp_path, data)
    found = tables(page)
    calibration = vector.info["calibration"]
    assert column(found["Layers"], "mean |v|") == [f"{value:.3f}" for value in vector.mean_abs.tolist()]
    assert column(found["Layers"], "agreement") == [f"{value:.3f}" for value in vector.info["agreement"]]
    assert column(found["Calibration"], "KL (nats)")[1:] == [f"{point['kl']:.3f}" for point in calibration["curve"]]
    assert len(found[f"States after layer {vector.layers[0]}"]) == 5
