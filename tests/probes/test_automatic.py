"""The automatic direction on degraded copies with a scripted model, and a task's reliability on a tiny real one."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

import steering
from probes.answering import Reply
from probes.automatic import AutomaticReport, automatic, task_reliability, vote
from probes.evaluate import Steering
from probes.mc2 import SIDES, Sample, messages
from tests.probes.conftest import make_samples
from tests.probes.test_evaluate import Asked, Scripted, balls, said, simple_vector

# What is answered, by the modality that is reliable and by what is done; four balls, color shape color shape.
SCRIPT = {
    "vision": {
        "plain": "vtva", "prior": "vvva", "auto": "vvtn", "image_only": "vvva", "context_only": "ttva",
    },
    "text": {
        "plain": "tttt", "prior": "ttta", "auto": "ttvt", "image_only": "vvvt", "context_only": "tttt",
    },
}  # fmt: skip
# What auto finds: the modality (v, t) in the unswapped and the swapped order; a capital where it is undecided.
FOUND = {"vision": ["vv", "vt", "TV", "vT"], "text": ["tt", "vv", "tv", "tv"]}

VECTOR = simple_vector()
SAMPLES = balls(4)


def reliable_in(one: Asked) -> str:
    """Of which modality something is left: the picture is the sample's own, or the context is."""
    whole = one.image is None or one.image.tobytes() == SAMPLES[one.ball].picture().tobytes()
    intact = one.setting == "image_only" or f"Text context: {SAMPLES[one.ball].context}\n" in one.text
    if one.image is None:
        return "text" if intact else "vision"
    if one.setting == "image_only":
        return "vision" if whole else "text"
    assert whole != intact
    return "vision" if whole else "text"


def rule(one: Asked) -> Reply:
    side = reliable_in(one)
    done = one.setting if one.setting != "plain" else "prior"
    if one.push is None and one.setting == "plain":
        done = "plain"
    if one.push is not None and one.push.toward == "auto":
        done = "auto"
    elif one.push is not None:
        assert one.push.toward == side
    auto = None
    if done == "auto":
        code = FOUND[side][one.ball][one.swapped]
        auto = {"toward": "vision" if code in "vV" else "text", "undecided": code.isupper(), "drop_vision": 0.5}
    return Reply(said(SCRIPT[side][done][one.ball], one.swapped), None, auto)


@pytest.fixture(scope="module")
def scripted() -> Scripted:
    return Scripted(rule)


@pytest.fixture(scope="module")
def report(scripted: Scripted) -> AutomaticReport:
    return automatic(scripted, SAMPLES, Steering(VECTOR, 1.5, (0, 2)), quiet=True)


def test_right_answers_are_the_reliable_modalitys(report: AutomaticReport) -> None:
    vision, text = (report.sides[side] for side in SIDES)
    assert (vision.side, text.side) == ("vision", "text")
    assert vision.plain.tolist() == [1, 0, 1, 0.5]
    assert vision.prior.tolist() == [1, 1, 1, 0.5]
    assert vision.auto.tolist() == [1, 1, 0, 0]
    assert text.plain.tolist() == [1, 1, 1, 1]
    assert text.prior.tolist() == [1, 1, 1, 0.5]
    assert text.auto.tolist() == [1, 1, 0, 1]


def test_identified_and_decided_by_hand(report: AutomaticReport) -> None:
    vision, text = (report.sides[side] for side in SIDES)
    assert vision.identified.tolist() == [1, 0.5, 0.5, 0.5]  # vv, vt, TV, vT
    assert vision.decided.tolist() == [1, 1, 0, 0.5]
    assert vision.right_if_decided == pytest.approx(4 / 5)
    assert text.identified.tolist() == [1, 0, 0.5, 0.5]  # tt, vv, tv, tv
    assert text.decided.tolist() == [1, 1, 1, 1]
    assert text.right_if_decided == pytest.approx(4 / 8)


def test_votes_by_task_by_hand(report: AutomaticReport) -> None:
    assert report.sides["vision"].votes == {
        "color": Counter(vision=2, none=2), "shape": Counter(vision=2, text=1, none=1),
    }  # fmt: skip
    assert report.sides["text"].votes == {"color": Counter(text=3, vision=1), "shape": Counter(vision=3, text=1)}
    assert report.tasks_identified == 3 / 4  # all but shape, where the text is reliable


def test_each_modality_alone_checks_the_degradation(report: AutomaticReport) -> None:
    vision, text = (report.sides[side] for side in SIDES)
    # Image only vvva for the image's answer, context only ttva for the context's.
    assert (vision.reliable_alone, vision.degraded_alone) == (7 / 8, 5 / 8)
    assert (text.reliable_alone, text.degraded_alone) == (1, 6 / 8)


def test_both_sides_joined_by_hand(report: AutomaticReport) -> None:
    assert report.joined("auto").tolist() == [1, 1, 0, 0, 1, 1, 0, 1]
    data = report.to_json()
    means = {name: data[name]["mean"] for name in ("identified", "decided", "plain", "prior", "auto")}
    assert means == pytest.approx(
        {"identified": 4.5 / 8, "decided": 6.5 / 8, "plain": 6.5 / 8, "prior": 7 / 8, "auto": 5 / 8}
    )
    assert data["auto_minus_prior"]["mean"] == pytest.approx(-2 / 8)
    low, high = data["auto_minus_prior"]["mean_95"]
    assert low < -2 / 8 < high < 0.3
    assert data["tasks_identified"] == 3 / 4
    assert data["sides"]["vision"]["right_if_decided"] == pytest.approx(0.8)
    assert data["sides"]["text"]["auto"]["mean"] == 3 / 4
    assert data["sides"]["vision"]["votes"]["shape"] == {"vision": 2, "text": 1, "none": 1}
    assert json.loads(json.dumps(data, allow_nan=False)) == data


def test_every_way_is_asked_of_every_sample_with_the_same_vector(scripted: Scripted, report: AutomaticReport) -> None:
    assert len(scripted.asked) == 2 * 5 * 4 * 2
    pushes = Counter(one.push for one in scripted.asked)
    assert pushes.pop(None) == 2 * 3 * 4 * 2
    assert {(push.toward, number) for push, number in pushes.items() if push} == {
        ("auto", 16), ("vision", 8), ("text", 8),
    }  # fmt: skip
    for push in pushes:
        assert push is not None
        assert (push.vector, push.strength, push.layers) == (VECTOR, 1.5, (0, 2))


def test_what_is_not_reliable_is_really_degraded(scripted: Scripted, report: AutomaticReport) -> None:
    half = len(scripted.asked) // 2
    for one in scripted.asked[:half]:  # the image is reliable
        original = SAMPLES[one.ball]
        if one.image is not None:
            assert one.image is original.image
        assert original.context not in one.text
        assert one.setting == "image_only" or one.text.startswith("Text context: ")
        assert original.question in one.text
    for one in scripted.asked[half:]:
        original = SAMPLES[one.ball]
        if one.image is not None:
            pixels = np.asarray(one.image, float)
            assert pixels.shape == np.asarray(original.picture()).shape
            assert pixels.std() > 50  # noise; the samples' own pictures are of one colour
        assert (original.context in one.text) == (one.setting != "image_only")


def test_a_degraded_picture_is_the_same_in_every_condition(scripted: Scripted, report: AutomaticReport) -> None:
    noise: dict[int, set[bytes]] = {}
    for one in scripted.asked[len(scripted.asked) // 2 :]:
        if one.image is not None:
            noise.setdefault(one.ball, set()).add(one.image.tobytes())
    assert all(len(pictures) == 1 for pictures in noise.values())
    assert len(set.union(*noise.values())) == 4


def test_without_severity_nothing_is_degraded() -> None:
    answerer = Scripted(lambda one: Reply("A", None, {"toward": "vision", "undecided": False}))
    automatic(answerer, SAMPLES, Steering(VECTOR), severity=0.0, quiet=True)
    for one in answerer.asked:
        assert one.image is None or one.image.tobytes() == SAMPLES[one.ball].picture().tobytes()
        assert one.setting == "image_only" or SAMPLES[one.ball].context in one.text


def test_nothing_decided_is_no_share_of_right_ones() -> None:
    answerer = Scripted(lambda one: Reply("A", None, {"toward": "vision", "undecided": True}))
    found = automatic(answerer, SAMPLES, Steering(VECTOR), quiet=True)
    assert found.sides["vision"].right_if_decided == 0
    assert found.sides["vision"].votes["color"] == Counter(none=4)
    assert found.sides["vision"].identified.tolist() == [1, 1, 1, 1]
    json.dumps(found.to_json(), allow_nan=False)


@pytest.mark.parametrize(
    ("votes", "majority"),
    [
        ({"vision": 2, "text": 1}, "vision"), ({"text": 1, "none": 9}, "text"), ({"vision": 2, "text": 2}, "vision"),
        ({"none": 9}, None), ({}, None),
    ],
)  # fmt: skip
def test_the_majority_counts_decided_votes(votes: dict[str, int], majority: str | None) -> None:
    assert vote(votes) == majority


# ------------------------------------------------------------------------------------------------- task reliability


def varied(count: int) -> list[Sample]:
    """Samples of two tasks whose answers the tiny model does not give with the same probabilities."""
    rng = np.random.default_rng(5)
    return [
        replace(
            sample, image=Image.fromarray(rng.integers(0, 255, (56, 56, 3), np.uint8)), context=f"{'So ' * i}it is."
        )
        for i, sample in enumerate(make_samples(count))
    ]


@pytest.mark.parametrize("batch", [2, 64])
def test_a_tasks_reliability_is_that_of_its_chats_one_by_one(tiny: steering.Engine, batch: int) -> None:
    samples = varied(3)
    found = task_reliability(tiny, samples, batch=batch, quiet=True)
    assert list(found) == ["color", "shape", "all"]
    single = {
        sample.id: [steering.measure(tiny, [messages(sample, "plain", swapped)])[0] for swapped in (False, True)]
        for sample in samples
    }
    for task, of in (("color", "02"), ("shape", "1"), ("all", "012")):
        measured = [one for name in of for one in single[name]]
        reports = [one.report() for one in measured]
        votes = Counter("none" if one.undecided else one.toward for one in measured)
        assert found[task].votes == votes
        assert found[task].drop_vision == pytest.approx(
            np.mean([one["drop_vision"] for one in reports]), rel=1e-3, abs=0
        )
        assert found[task].drop_text == pytest.approx(np.mean([one["drop_text"] for one in reports]), rel=1e-3, abs=0)
        assert found[task].reliable == ("vision" if votes["vision"] >= votes["text"] else "text")
    assert found["color"].drop_vision != found["shape"].drop_vision
    assert found["all"].to_json() == {
        "reliable": found["all"].reliable, "votes": dict(found["all"].votes),
        "drop_vision": found["all"].drop_vision, "drop_text": found["all"].drop_text,
    }  # fmt: skip


def test_votes_and_drops_of_a_task_by_hand(monkeypatch: pytest.MonkeyPatch, tiny: steering.Engine) -> None:
    # (answer, without images, without context) of both orders of the samples: color, shape, color
    numbers = [(0.8, 0.2, 0.7), (0.5, 0.1, 0.0), (0.6, 0.0, 0.4), (0.6, 0.58, 0.6), (0.4, 0.3, 0.1), (0.9, 0.2, 0.8)]
    rest = iter(steering.Reliability(*one) for one in numbers)
    monkeypatch.setattr("probes.automatic.measure", lambda engine, chats: [next(rest) for _ in chats])
    found = task_reliability(tiny, make_samples(3), batch=2, quiet=True)
    assert found["color"].votes == Counter(vision=2, text=2)
    assert found["shape"].votes == Counter(vision=1, none=1)
    assert found["all"].votes == Counter(vision=3, text=2, none=1)
    assert found["color"].drop_vision == pytest.approx((0.6 + 0.4 + 0.1 + 0.7) / 4)
    assert found["color"].drop_text == pytest.approx((0.1 + 0.5 + 0.3 + 0.1) / 4)
    assert (found["shape"].drop_vision, found["shape"].drop_text) == pytest.approx((0.62 / 2, 0.2 / 2))
    assert {task: one.reliable for task, one in found.items()} == {
        "color": "vision",
        "shape": "vision",
        "all": "vision",
    }
