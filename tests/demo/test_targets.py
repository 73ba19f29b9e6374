"""Samples for the benchmark of attention accuracy: one of the pictures holds the answer, and no other."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from demo.world.several import in_picture
from demo.world.targets import MAKERS, target_samples
from demo.world.wordings import ASK
from probes.stme.samples import ANCHOR, CAPTION, NEEDLE


def test_samples_are_of_all_tasks_and_numbers_of_pictures_and_depend_on_the_seed() -> None:
    samples = target_samples(36, seed=1)
    assert Counter(sample.task for sample in samples) == dict.fromkeys(MAKERS, 6)
    for task in MAKERS:
        counts = [len(sample.images) for sample in samples if sample.task == task]
        assert counts == ([3, 3, 4] if task == ANCHOR else [2, 3, 4]) * 2
    assert len({sample.target for sample in samples}) > 2
    again, different = target_samples(36, seed=1), target_samples(36, seed=2)
    assert samples[0].picture(1).tobytes() == again[0].picture(1).tobytes()
    assert [sample.texts for sample in samples] == [sample.texts for sample in again]
    assert [sample.texts for sample in samples] != [sample.texts for sample in different]


def test_noise_changes_the_pictures_alone() -> None:
    plain, noised = target_samples(6, seed=1), target_samples(6, seed=1, noise=40)
    assert [sample.texts for sample in plain] == [sample.texts for sample in noised]
    clean, noisy = (np.asarray(sample[0].picture(1), float) for sample in (plain, noised))
    assert 20 < (clean - noisy).std() < 45  # less than 40, because values end at 0 and 255


@pytest.mark.parametrize("task", MAKERS)
def test_the_target_alone_holds_the_answer(task: str) -> None:
    rng = random.Random(task)
    questions = [made_question for _ in range(120) if (made_question := MAKERS[task](rng, 3)) is not None]
    assert len(questions) > 10
    for scenes, target, question, response, choices, cell in questions:
        target_scene = scenes[target]
        other_scenes = [scene for index, scene in enumerate(scenes) if index != target]
        if task == NEEDLE:
            assert target_scene.glyph is not None
            assert (target_scene.glyph.kind, target_scene.glyph.cell) == (response, cell)
            assert not any(scene.glyph for scene in other_scenes)
        elif task == "found":
            (thing,) = (candidate for candidate in target_scene.shapes if f" {candidate.kind}" in question)
            assert thing.cell == cell
            assert not any(candidate.kind == thing.kind for scene in other_scenes for candidate in scene.shapes)
        elif task == ANCHOR:
            assert scenes[-1] == target_scene
            assert [*scenes[:-1]].count(target_scene) == 1
            assert question.endswith(f"picture {len(scenes)}?")
        elif task == CAPTION:
            assert response == str(target + 1)
        else:
            assert f"picture {target + 1}" in question
        assert response in choices or not choices
        assert all(scene.held_out for scene in scenes)


def test_every_wording_of_a_question_can_name_its_picture() -> None:
    rng = random.Random(0)
    wordings = [in_picture(rng, wording, "picture 2") for wording in ASK["color"]]
    assert all("picture 2" in wording for wording in wordings)
