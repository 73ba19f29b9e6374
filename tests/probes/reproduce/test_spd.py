"""The rows of SPD-Faith Bench: read from what its commands write, and the verdicts by hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from PIL import Image

import steering
from probes.harness.comparison import BASELINE
from probes.harness.conditions import Conditions, chosen, default_conditions
from probes.image_pairs.metrics import Claim
from probes.image_qa.yes_no import YesNo
from probes.reproduce.readings.spd import (
    PEAKS,
    ablation,
    agreed,
    alone,
    contradicting,
    drifting,
    harder,
    methods,
    peaks,
    perturbed,
    quantity,
    within,
)
from probes.reproduce.run import ITEMS
from probes.reproduce.runs import RUNS
from probes.sage import evaluate as sage
from probes.sage.samples import Difference
from probes.sage.stages import stages
from probes.spd.asking import OWN, Presentation, manners
from probes.spd.evaluate import answer, evaluated
from probes.spd.inside import inside
from probes.spd.judging.agreement import agreement
from probes.spd.judging.rules import ruled
from probes.spd.samples import Difficulty, PicturePair
from tests.probes.conftest import Scripted

PICTURE = Image.new("RGB", (56, 56), "red")
TRUE = (Claim("color", "star", "blue"), Claim("remove", "ring"))
DIFFICULTIES: tuple[Difficulty, ...] = ("easy", "medium", "hard")


def conditions(run: str, among: Conditions) -> Conditions:
    """Return the conditions that a run asks for."""
    words = list(RUNS[run].words)
    return chosen(among, words[words.index("--conditions") + 1 :] if "--conditions" in words else None, None)


def written(run: str, engine: steering.Engine) -> dict[str, Any]:
    """Return the report of a run on a model that gives one answer to everything."""
    answerer = Scripted(lambda question: "The star turned to blue.")
    if run == "spd-faith":
        pairs = [
            PicturePair(difficulty, TRUE[:1], PICTURE, PICTURE, difficulty=difficulty) for difficulty in DIFFICULTIES
        ]
        manners_asked = manners(conditions(run, default_conditions() | dict.fromkeys(OWN, ())))
        names = Presentation(categories=("star", "ring"))
        answered = answer(
            answerer, manners_asked, [*pairs, PicturePair("m", TRUE, PICTURE, PICTURE)], names,
            lambda statements: [ruled(statement, names.categories) for statement in statements], quiet=True,
        )  # fmt: skip
        contradictions = inside(engine, answered["single"])
        return {"conditions": evaluated(answered), "agreement": agreement(), "inside": contradictions}
    questions = [YesNo(PICTURE, "Is there a star?", True, "random")]
    asked_sage = conditions(run, stages(sweep=run == "sage-sweep"))
    pairs_of_sage = [Difference(PICTURE, PICTURE, TRUE)]
    return {"conditions": sage.evaluate(answerer, asked_sage, questions, pairs_of_sage, ("star", "ring"), quiet=True)}


def test_every_row_reads_what_its_run_writes(tiny: steering.Engine) -> None:
    rows = [item for item in ITEMS if item.run in ("spd-faith", "sage", "sage-sweep")]
    assert {item.id for item in rows} >= {*range(53, 60), 63, 67, 68, *range(69, 74), 77, 80, 81}
    reports = {run: written(run, tiny) for run in ("spd-faith", "sage", "sage-sweep")}
    for item in rows:
        assert item.read is not None
        reading = item.read(reports[str(item.run)])
        assert reading.n or item.id in (77, 80)  # where nothing contradicts, they read nothing
        assert reading.ours is not None
    (cr,) = (item for item in rows if item.id == 58)
    assert cr.read is not None
    assert cr.read(reports["spd-faith"]).ours == {"cr": 1, "cr_all": 1, "cr_clauses": 1}  # beyond the paper's models
    assert not cr.read(reports["spd-faith"]).appears


def share(value: float, low: float, high: float, difference: float = 0.0, above: float = -1.0) -> dict[str, Any]:
    return {"value": value, "value_95": [low, high], "difference": difference, "difference_95": [above, 1.0]}


def made(scores: Mapping[str, Mapping[str, Any]], part: str) -> dict[str, Any]:
    return {
        "conditions": {
            name: {part: {"all": {"samples": 9, **scores_of_condition}}} for name, scores_of_condition in scores.items()
        }
    }


@pytest.mark.parametrize(
    ("hard", "appears"), [((0.4, 0.31, 0.5), True), ((0.4, 0.29, 0.5), False), ((0.1, 0.0, 0.2), False)]
)
def test_harder_pairs_by_hand(hard: tuple[float, float, float], appears: bool) -> None:
    results = made({BASELINE: {}}, "single")
    easy = {"contradictions": share(0.2, 0.1, 0.3)}
    results["conditions"][BASELINE]["single"] |= {
        "easy": easy,
        "medium": easy,
        "hard": {"contradictions": share(*hard)},
    }
    assert harder("contradictions")(results).appears is appears


@pytest.mark.parametrize(("best", "above", "appears"), [(0.03, 0.01, True), (0.06, 0.01, False), (0.03, -0.01, False)])
def test_sage_beside_the_prompt_level_methods_by_hand(best: float, above: float, appears: bool) -> None:
    gains = {"SAGE": 0.05, "SC": 0.01, "SR": -0.1, "API": 0.0, "Zoom-Refine": best}
    scores = {
        name: {metric: share(0, 0, 0, gain, above) for metric in ("cr_all", "drf")} for name, gain in gains.items()
    }
    scores["SR"]["cr_all"] = {"value": None, "value_95": None}  # as where it claims nothing
    assert methods(made(scores, "several")).appears is appears


@pytest.mark.parametrize(("lost", "helped", "appears"), [(-0.05, 0.1, True), (-0.2, 0.1, False), (-0.05, -0.1, False)])
def test_hints_and_hidden_blocks_by_hand(lost: float, helped: float, appears: bool) -> None:
    names = [BASELINE, "wrong hint", "25 % hidden", "50 % hidden", "75 % hidden", "100 % hidden"]
    scores = {name: {"right": share(0.5, 0.4, 0.6, lost)} for name in names}
    scores |= {name: {"right": share(0.7, 0.6, 0.8, 0.2, helped)} for name in ("hint", "implicit hint")}
    assert perturbed(made(scores, "single")).appears is appears


@pytest.mark.parametrize(
    ("steps", "gained", "appears"), [((1, 2, 3, 4), 0.1, True), ((1, 3, 2, 4), 0.1, False), ((1, 2, 3, 4), -0.1, False)]
)
def test_stage_by_stage_by_hand(steps: tuple[int, ...], gained: float, appears: bool) -> None:
    names = (BASELINE, "+ See", "+ Think", "+ Generate")
    scores = {name: {"cr_all": share(step, 0, 9, 1, gained)} for name, step in zip(names, steps, strict=True)}
    assert ablation(made(scores, "differences")).appears is appears


@pytest.mark.parametrize(("strongest", "appears"), [(0.6, True), (0.8, False)])
def test_peaks_by_hand(strongest: float, appears: bool) -> None:
    results: dict[str, Any] = {"conditions": {}}
    for part, metric, names in PEAKS.values():
        for name, value in zip(names, (0.5, 0.7, strongest), strict=True):
            of_name = results["conditions"].setdefault(name, {})
            of_name.setdefault(part, {"all": {"samples": 9}})["all"][metric] = share(value, 0, 1)
    assert peaks(results).appears is appears


def test_what_has_no_room_is_nothing_to_measure() -> None:
    floor = {level: {"contradictions": share(0.02, 0, 0.1)} for level in ("easy", "medium", "hard")}
    single = made({BASELINE: {}}, "single")
    single["conditions"][BASELINE]["single"] |= floor
    assert harder("contradictions")(single).nothing.startswith("floor: 0.020")
    floor["hard"]["contradictions"] = share(0.06, 0, 0.1)
    assert not harder("contradictions")(single).nothing
    for plain, full in ((0.963, True), (0.68, False)):
        report = made(
            {BASELINE: {"accuracy": share(plain, 0, 1)}, "+ See": {"accuracy": share(plain, 0, 1)}}, "existence"
        )
        assert alone("+ See", "existence", "accuracy")(report).nothing.startswith("ceiling") is full
    names = [BASELINE, "hint", "implicit hint", "wrong hint", *(f"{n} % hidden" for n in (25, 50, 75, 100))]
    assert perturbed(made({name: {"right": share(0.98, 0, 1)} for name in names}, "single")).nothing.startswith(
        "ceiling"
    )


@pytest.mark.parametrize(
    ("low", "high", "appears"), [(0.5, 0.796, True), (0.2, 0.6, False), (0.5, 0.9, False), (1.0, 1.0, False)]
)
def test_a_range_of_models_excludes_worse_and_better_ones(low: float, high: float, appears: bool) -> None:
    scores = {"cr": share(0.6, low, high), "cr_pairs": share(0.5, 0, 1), "cr_all": share(0.3, 0, 1)}
    reading = within("cr", 0.31, 0.877, "cr_all")(made({BASELINE: scores}, "several"))
    assert (reading.appears, reading.n) == (appears, 4)  # half of nine pairs


def test_fewer_are_claimed_than_there_are_though_some_are_detected() -> None:
    scores = {name: share(0.0, 0.0, 0.1) for name in ("dqr_exact", "ds_tolerance")}
    for ratio, detected, appears in (((0.3, 0.4), (0.9, 1.0), True), ((0.9, 1.1), (0.9, 1.0), False)):
        shares = {"dqr_ratio": share(0, *ratio), "ds_detect": share(0, *detected)}
        assert quantity(made({BASELINE: scores | shares}, "several")).appears is appears


@pytest.mark.parametrize(("low", "appears"), [(0.588, False), (0.62, True)])
def test_agreement_beyond_chance_is_not_enough(low: float, appears: bool) -> None:
    claims = [{"kappa": 0.756, "kappa_95": [low, 0.915], "n": 30}]
    assert agreed({"agreement": {"claims": claims}}).appears is appears


@pytest.mark.parametrize(("contradict", "drifts"), [((0.80, 0.84), True), ((0.85, 0.87), False)])
def test_contradicting_answers_drift_and_a_clipped_score_says_nothing(
    contradict: tuple[float, float], drifts: bool
) -> None:
    kinds = {"contradicting": contradict, "consistent": (0.865, 0.878)}
    numbers = ("cosine", "last layer", "divergence", "faithfulness")
    report = {
        "inside": {
            kind: {"pairs": 9} | {name: {"value": 0.0, "value_95": list(bounds)} for name in numbers}
            for kind, bounds in kinds.items()
        }
    }
    assert drifting(report).appears is drifts
    assert contradicting(report).nothing.startswith("floor")
    report["inside"]["consistent"]["faithfulness"]["value"] = 0.1
    assert not contradicting(report).nothing
