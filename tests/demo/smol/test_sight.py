"""Questions about recoloured things, the noise of their pictures, and habits, with hand-worked answers."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
from PIL import Image

from demo.command import HERE
from demo.smol import criteria, sight
from demo.smol.evaluate import report
from demo.smol.things import PIXELS, SHEET, THINGS, mask, render_things, thing_scene
from demo.world.scenes import BACKGROUNDS, COLOURS, POSITIONS, Scene, Thing
from probes.answering.base import Question, Reply
from probes.image_qa.yes_no import YesNo
from tests.probes.conftest import Scripted, text_of


def test_the_stored_report_is_that_of_its_numbers() -> None:
    folder = HERE / "reports" / "smol"
    stored = json.loads((folder / "report.json").read_text())
    assert report(stored["about"], stored["results"]).markdown().strip() == (folder / "report.md").read_text().strip()


def test_every_thing_is_drawn_in_its_cell_and_colour() -> None:
    with Image.open(SHEET) as sheet:
        assert sheet.size == (PIXELS * len(THINGS), PIXELS)
    assert len({mask(kind, 24, 0.8).tobytes() for kind in THINGS}) == len(THINGS)
    for kind in THINGS:
        picture = np.asarray(render_things(Scene("gray", (Thing(4, kind, "blue"),)))).astype(int)
        painted = (picture != BACKGROUNDS["gray"]).any(-1)
        assert painted[28:56, 28:56].sum() == painted.sum() > 100, kind
        assert (np.abs(picture - COLOURS["blue"]).sum(-1) < 40).sum() > 40, kind


def test_things_are_shown_in_every_colour_as_often() -> None:
    rng = random.Random(1)
    things = [thing for _ in range(4000) for thing in thing_scene(rng).shapes]
    usual = [thing.colour == THINGS[thing.kind] for thing in things if THINGS[thing.kind] not in ("white", "black")]
    assert 0.10 < sum(usual) / len(usual) < 0.15  # white and black things are on no background of their colour
    assert {thing.kind for thing in things} == set(THINGS)
    assert {POSITIONS[thing.cell] for thing in things} == set(POSITIONS)


def test_recoloured_things_never_have_their_usual_colour() -> None:
    samples = sight.recoloured(80, 1, ["banana", "frog"])
    assert sum(sample.present for sample in samples) == 40
    for sample in samples:
        kind, colour = sample.question.removeprefix("Is the ").removesuffix("?").split()
        assert kind in ("banana", "frog")
        assert (colour == THINGS[kind]) == (sample.setting == "usual" and not sample.present)


def test_absent_things_are_the_most_and_the_least_expected_ones() -> None:
    expected = {kind: float(place) for place, kind in enumerate(THINGS)}
    samples = sight.absent(40, 1, expected)
    for usual, there, unusual, again in zip(*(samples[place::4] for place in range(4)), strict=True):
        assert usual.image is there.image is unusual.image is again.image
        assert there.question == again.question
        assert (usual.present, there.present, unusual.present) == (False, True, False)
        kinds = [next(kind for kind in THINGS if kind in sample.question) for sample in (usual, unusual)]
        assert expected[kinds[0]] > 15
        assert expected[kinds[1]] < 4


def test_habits_are_read_of_things_whose_colour_the_model_names_and_that_it_expects() -> None:
    """The answerer knows carrots and frogs, and says yes to usual colours and to swans by 1.5, unless See is on."""

    def answer(question: Question) -> Reply:
        words = text_of(question)
        if words.startswith("What color is"):
            kind = words.split()[4]
            return Reply(f"A {kind} is {THINGS[kind] if kind in ('carrot', 'frog') else 'pink'}, I think.")
        *_, kind, colour = words.removesuffix("?").split()
        usual = THINGS.get(kind) == colour or "swan" in words
        return Reply("Yes." if usual else "No.", odds=1.5 * usual if not question.interventions else 0.0)

    result = sight.ranked(Scripted(answer), 16, 1, quiet=True)
    assert sight.rightly_named(result["named"]) == ["frog", "carrot"]
    assert {kind for kind, odds in result["expected"].items() if odds == 1.5} == {"swan"}
    habits, plainly = result["habits"]["baseline"], {"value": 1.5, "value_95": (1.5, 1.5), "n": 4, "habit": True}
    assert habits["recoloured"] == plainly
    assert habits["absent"]["value"] > 1  # all but pictures that show a swan
    for habit in result["habits"]["See from all, alpha 0.1"].values():
        assert habit["value"] == 0
        assert not habit["habit"]


def test_the_noise_is_the_one_with_the_criterions_auroc() -> None:
    right = {0.0: 4, 20.0: 4, 40.0: 3, 60.0: 2, 80.0: 0}  # of four true questions, so many lie above the false ones

    def make(count: int, seed: int, noise: float) -> list[YesNo]:
        image = Image.new("RGB", (84, 84))
        return [YesNo(image, f"{noise} {i}", i < 4, "all") for i in range(8)]

    def answer(question: Question) -> Reply:
        noise, number = text_of(question).split()
        return Reply("Yes.", odds=1.0 if int(number) < right[float(noise)] else 0.0)

    found = sight.chosen_noise(Scripted(answer), make, 16, 1, quiet=True)
    assert found["auroc"] == {f"{noise:g}": pytest.approx(0.5 + above / 8) for noise, above in right.items()}
    assert (found["noise"], criteria.AUROC) == (60, 0.8)
