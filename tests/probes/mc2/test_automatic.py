"""The automatic direction on degraded copies with a scripted model, and a task's reliability on a tiny real one."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest

from probes.answering.base import Reply
from probes.conflicts.samples import Side
from probes.mc2.automatic import AutomaticReport, Cell, Ways, automatic
from probes.mc2.evaluate import Candidate
from steering import Criterion
from tests.probes.mc2.scripted import AskedQuestion, Scripted, balls, said, simple_vector

# What is answered, by the modality that is reliable, the wording of the text and what is done; four balls, color shape color
# shape.
SCRIPT = {
    ("vision", False): {
        "plain": "vtva", "prior": "vvva", "drop": "vvtn", "surprise": "vvvv", "image_only": "vvva", "context_only": "ttva",
    },
    ("text", False): {
        "plain": "tttv", "prior": "ttta", "drop": "ttvt", "surprise": "tttv", "image_only": "vvvt", "context_only": "tttt",
    },
    ("text", True): {
        "plain": "ttvn", "prior": "tttt", "drop": "ttvn", "surprise": "vvvv", "image_only": "vvvt", "context_only": "tttv",
    },
}  # fmt: skip
# Which way is found: the modality (v, t) in the unswapped and the swapped order, - where the criterion abstains.
FOUND = {
    ("vision", False): {"drop": ["vv", "tt", "v-", "vt"], "surprise": ["vv", "vv", "vv", "v-"]},
    ("text", False): {"drop": ["tt", "vv", "tv", "--"], "surprise": ["--", "--", "--", "-v"]},
    ("text", True): {"drop": ["tt", "tt", "vv", "--"], "surprise": ["vv", "vv", "vv", "vv"]},
}
WAYS: dict[str, Side | None] = {"v": "vision", "t": "text", "-": None}
NAMES = {"drop": Criterion(), "surprise": Criterion("surprise", 3.0)}

VECTOR = simple_vector()
SAMPLES = balls(4)


def cell_of(question: AskedQuestion) -> tuple[str, bool]:
    """Return the modality that is left, picture or context, and whether it is reworded."""
    sample = SAMPLES[question.ball]
    plainly = f"Text context: {sample.context}\n" in question.text
    if question.image is None:
        return ("text", not plainly) if sample.context in question.text else ("vision", False)
    if question.image.tobytes() == sample.picture().tobytes():
        assert sample.context not in question.text
        return "vision", False
    assert question.setting == "image_only" or sample.context in question.text
    return "text", question.setting != "image_only" and not plainly


def rule(question: AskedQuestion) -> Reply:
    cell, auto, setting_asked = cell_of(question), None, question.setting
    if question.push is None:
        setting_asked = "plain" if question.setting == "plain" else question.setting
    elif question.push.toward != "auto":
        assert question.push.toward == cell[0]
        setting_asked = "prior"
    else:
        setting_asked = question.push.criterion.name
        assert question.push.criterion == NAMES[setting_asked]
        auto = {"toward": WAYS[FOUND[cell][setting_asked][question.ball][question.swapped]], "criterion": setting_asked}
    return Reply(said(SCRIPT[cell][setting_asked][question.ball], question.swapped), None, auto)


@pytest.fixture(scope="module")
def scripted() -> Scripted:
    return Scripted(rule)


@pytest.fixture(scope="module")
def report(scripted: Scripted) -> AutomaticReport:
    return automatic(scripted, SAMPLES, Candidate(VECTOR, 1.5, (0, 2)), criteria=NAMES, severities=(1.0,), quiet=True)


def test_right_answers_are_the_reliable_modalitys(report: AutomaticReport) -> None:
    vision, text, unfamiliar = report.cells
    assert [(cell.side, cell.severity, cell.reworded) for cell in report.cells] == [
        ("vision", 1.0, False), ("text", 1.0, False), ("text", 1.0, True),
    ]  # fmt: skip
    assert vision.plain.tolist() == [1, 0, 1, 0.5]
    assert vision.prior.tolist() == [1, 1, 1, 0.5]
    assert vision.ways["drop"].right.tolist() == [1, 1, 0, 0]
    assert vision.ways["surprise"].right.tolist() == [1, 1, 1, 1]
    assert text.ways["drop"].right.tolist() == [1, 1, 0, 1]
    assert unfamiliar.prior.tolist() == [1, 1, 1, 1]
    assert unfamiliar.ways["surprise"].right.tolist() == [0, 0, 0, 0]
    assert vision.followed == (("vision", "vision"), ("text", "text"), ("vision", "vision"), ("vision", "text"))
    assert unfamiliar.followed[3] == (None, None)


def test_a_criterion_on_one_side_by_hand(report: AutomaticReport) -> None:
    groups = report.groups()
    row = report.row(groups["text"], "drop")  # the degraded one: vision is right
    assert (row.plain, row.prior, row.auto) == (2.5 / 4, 3.5 / 4, 2 / 4)
    assert (row.decided, row.toward_vision) == (7 / 8, 4 / 8)
    assert row.right_if_decided == pytest.approx(4 / 7)
    assert row.follows == 1  # vv, tt, v- and vt are the sides of the plain answers
    assert row.tasks == 1 / 2  # color: three votes for vision; shape: one for vision, three for text
    assert report.votes(report.cells[0], "drop") == {
        "color": Counter(vision=3, none=1), "shape": Counter(text=3, vision=1),
    }  # fmt: skip


def test_both_sides_together_by_hand(report: AutomaticReport) -> None:
    groups = report.groups()
    assert [[cell.side for cell in cells] for cells in groups.values()] == [
        ["text", "vision"], ["text"], ["vision"], ["text"], ["text", "vision"],
    ]  # fmt: skip
    row = report.row(groups["either"], "surprise")
    assert (row.plain, row.prior, row.auto) == ((2.5 + 3) / 8, (3.5 + 3.5) / 8, (4 + 3) / 8)
    assert (row.decided, row.right_if_decided) == (8 / 16, 7 / 8)
    assert row.gap_closed is None  # four samples of which two have a gap: it could as well be none
    bad = report.row(groups["image, unfamiliar text"], "surprise")
    assert (bad.auto, bad.decided, bad.toward_vision, bad.right_if_decided) == (0, 1, 1, 0)
    assert bad.follows == 2 / 8


def test_each_modality_alone_checks_the_degradation(report: AutomaticReport) -> None:
    vision, text, unfamiliar = report.cells
    # Image only vvva for the image's answer, context only ttva for the context's.
    assert (vision.reliable_alone, vision.degraded_alone) == (7 / 8, 5 / 8)
    assert (text.reliable_alone, text.degraded_alone) == (1, 6 / 8)
    assert (unfamiliar.reliable_alone, unfamiliar.degraded_alone) == (6 / 8, 6 / 8)


def test_the_report_as_json(report: AutomaticReport) -> None:
    data = report.to_json()
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert (data["severities"], data["criteria"]) == ([1.0], ["drop", "surprise"])
    assert len(data["rows"]) == 2 * 5 * 2
    rows_by_cell = {(row["severity"], row["degraded"], row["criterion"]): row for row in data["rows"]}
    assert rows_by_cell[None, "text", "drop"]["right_if_decided"] == pytest.approx(4 / 7)
    assert rows_by_cell[1.0, "text", "drop"] == rows_by_cell[None, "text", "drop"] | {"severity": 1.0}
    assert data["cells"][0]["votes"]["drop"]["shape"] == {"text": 3, "vision": 1}


def a_cell(side: Side, severity: float, plain: list[float], prior: list[float], auto: list[float]) -> Cell:
    nothing: tuple[tuple[Side | None, ...], ...] = ((None, None),) * len(plain)
    ways = {"drop": Ways(np.array(auto), nothing)}
    return Cell(side, severity, False, np.array(plain), np.array(prior), nothing, ways, 1, 1)


def test_the_gap_that_is_closed_by_hand() -> None:
    # Of forty samples plain is right in 20, prior in 40: auto adds 12 and loses 2 at one severity, nothing at the other.
    plain, prior = [1.0] * 20 + [0.0] * 20, [1.0] * 40
    auto = [1.0] * 18 + [0.0] * 2 + [1.0] * 12 + [0.0] * 8
    cells = [a_cell("vision", 0.3, plain, prior, auto), a_cell("text", 0.7, plain, prior, plain)]
    report = AutomaticReport(cells, ["color"] * 40)
    alone, image_gap, pooled_gap = (
        report.row(group, "drop").gap_closed
        for group in (report.groups(0.3)["text"], report.groups(0.7)["image"], report.groups()["either"])
    )
    assert alone is not None
    assert image_gap is not None
    assert pooled_gap is not None
    assert alone[0] == pytest.approx(0.5)
    low, high = alone[1]
    assert 0.2 < low < 0.4
    assert 0.6 < high < 0.8
    assert image_gap == (0, (0, 0))
    assert pooled_gap[0] == pytest.approx(0.25)
    assert pooled_gap[1] == pytest.approx([end / 2 for end in alone[1]])  # the same samples are drawn together
    row = report.row(report.groups(0.3)["text"], "drop")
    assert (row.decided, row.right_if_decided, row.follows, row.tasks) == (0, None, None, 0)
    assert row.to_json()["gap_closed_95"] == list(alone[1])


def test_there_is_no_gap_if_steering_rightly_is_no_better() -> None:
    for prior in ([1.0] * 10, [0.0] * 10, [0.0] + [1.0] * 9):
        cell = a_cell("vision", 0.3, [1.0] * 10, prior, [0.0] * 10)
        assert AutomaticReport([cell], ["color"] * 10).row([cell], "drop").gap_closed is None


def test_every_way_is_asked_of_every_sample_with_the_same_vector(scripted: Scripted, report: AutomaticReport) -> None:
    assert len(scripted.asked) == 3 * 6 * 4 * 2
    pushes = Counter(
        (question.push.toward, question.push.criterion.name) for question in scripted.asked if question.push
    )
    assert pushes == {
        ("vision", "drop"): 8, ("text", "drop"): 16, ("auto", "drop"): 24, ("auto", "surprise"): 24,
    }  # fmt: skip
    for question in scripted.asked:
        if question.push is not None:
            assert (question.push.vector, question.push.strength, question.push.layers) == (VECTOR, 1.5, (0, 2))


def test_the_unreliable_modality_is_degraded(scripted: Scripted, report: AutomaticReport) -> None:
    third = len(scripted.asked) // 3
    for question in scripted.asked[:third]:  # the image is reliable
        original = SAMPLES[question.ball]
        if question.image is not None:
            assert question.image is original.image
        assert original.context not in question.text
        assert question.setting == "image_only" or question.text.startswith("Text context: ")
        assert original.question in question.text
    for number, question in enumerate(scripted.asked[third:]):
        original = SAMPLES[question.ball]
        if question.image is not None:
            pixels = np.asarray(question.image, float)
            assert pixels.shape == np.asarray(original.picture()).shape
            assert pixels.std() > 50  # noise; the samples' own pictures are of one colour
        assert (original.context in question.text) == (question.setting != "image_only")
        if question.setting != "image_only":
            assert (f"Text context: {original.context}\n" in question.text) == (number < third)


def test_a_degraded_picture_is_the_same_in_every_condition(scripted: Scripted, report: AutomaticReport) -> None:
    noise: dict[int, set[bytes]] = {}
    for question in scripted.asked[len(scripted.asked) // 3 :]:
        if question.image is not None:
            noise.setdefault(question.ball, set()).add(question.image.tobytes())
    assert all(len(pictures) == 1 for pictures in noise.values())
    assert len(set.union(*noise.values())) == 4


def test_without_severity_nothing_is_degraded() -> None:
    answerer = Scripted(lambda question: Reply("A", None, {"toward": "vision"}))
    report = automatic(answerer, SAMPLES, Candidate(VECTOR), severities=(0.0,), quiet=True)
    for question in answerer.asked:
        assert question.image is None or question.image.tobytes() == SAMPLES[question.ball].picture().tobytes()
        assert question.setting == "image_only" or SAMPLES[question.ball].context in question.text
    assert report.criteria == ("drop", "surprise", "surprise, one degraded")
