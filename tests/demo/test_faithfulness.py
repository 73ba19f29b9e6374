"""Samples for SAGE's evaluation: balanced, held out, and true."""

from __future__ import annotations

import random
import re
from collections import Counter

import numpy as np
import pytest

from demo.world.faithfulness import DENSITIES, SEVERAL, _pair, difference_samples, existence_samples, picture_pairs
from demo.world.scenes import POSITIONS, SHAPES
from probes.image_pairs.metrics import TYPES


def test_existence_questions_are_balanced_and_depend_on_the_seed() -> None:
    samples = existence_samples(120, seed=1)
    assert Counter((sample.setting, sample.present) for sample in samples) == {
        (setting, present): 20 for setting in ("random", "popular", "adversarial") for present in (True, False)
    }
    again, different = existence_samples(120, seed=1), existence_samples(120, seed=2)
    assert [s.question for s in samples] == [s.question for s in again]
    assert [s.image.tobytes() for s in samples] == [s.image.tobytes() for s in again]
    assert any(a.question != b.question for a, b in zip(samples, different, strict=True))


def test_popular_objects_are_the_frequent_ones() -> None:
    samples = existence_samples(1200, seed=3)
    asked_about = Counter(
        next(shape for shape in SHAPES if re.search(rf"\b{shape}\b", sample.question))
        for sample in samples
        if sample.setting == "popular" and not sample.present
    )
    spread = Counter(
        next(shape for shape in SHAPES if re.search(rf"\b{shape}\b", sample.question))
        for sample in samples
        if sample.setting == "random" and not sample.present
    )
    assert asked_about.most_common(1)[0][1] > 2 * spread.most_common(1)[0][1]


def test_pairs_differ_by_what_is_said_and_by_nothing_else() -> None:
    rng = random.Random(5)
    drawn = [
        _pair(rng, types) for types in (["color"], ["remove", "position"], ["position", "color", "remove"], []) * 20
    ]
    for first, second, true in drawn:
        assert first.held_out
        assert second.held_out
        for claim in true:
            (old,) = (thing for thing in first.shapes if thing.kind == claim.category)
            now = [thing for thing in second.shapes if thing.kind == claim.category]
            if claim.type == "remove":
                assert now == []
                assert claim.attribute == POSITIONS[old.cell]
            elif claim.type == "color":
                assert now == [old._replace(colour=str(claim.attribute))] != [old]
            else:
                assert now == [old._replace(cell=POSITIONS.index(str(claim.attribute)))] != [old]
        changed = {claim.category for claim in true}
        assert len(changed) == len(true)
        first_rest, second_rest = ([t for t in scene.things if t.kind not in changed] for scene in (first, second))
        assert first_rest == second_rest
        assert first.background == second.background
        assert second.shapes


def test_pairs_have_from_no_to_three_differences_of_the_papers_types() -> None:
    samples = difference_samples(36, seed=1)
    assert Counter(len(sample.true) for sample in samples) == {0: 6, 1: 18, 2: 6, 3: 6}
    assert Counter(claim.type for sample in samples for claim in sample.true) == dict.fromkeys(TYPES, 16)
    for sample in samples:
        same = np.array_equal(np.asarray(sample.first), np.asarray(sample.second))
        assert not same  # also equal scenes are drawn anew


def test_noise_is_of_the_size_asked_for_and_changes_nothing_else() -> None:
    for draw, picture, fact in ((existence_samples, "image", "question"), (difference_samples, "second", "true")):
        clean, noisy, again = (draw(10, seed=1, noise=noise) for noise in (0, 20, 20))
        for pure, noised_sample, repeated in zip(clean, noisy, again, strict=True):
            assert getattr(pure, fact) == getattr(noised_sample, fact)
            a, b, c = (np.asarray(getattr(sample, picture), np.float32) for sample in (pure, noised_sample, repeated))
            assert np.array_equal(b, c)
            added = (b - a)[(a > 60) & (a < 195)]  # where nothing is cut off
            assert added.std() == pytest.approx(20, rel=0.1)


def test_pairs_of_one_difference_are_harder_the_more_is_in_them_and_others_have_up_to_five() -> None:
    pairs = picture_pairs(12, 12, seed=1)
    assert Counter(pair.setting for pair in pairs) == {**dict.fromkeys(DENSITIES, 4), **{str(n): 3 for n in SEVERAL}}
    assert [len(pair.true) for pair in pairs[:12]] == [1] * 12
    assert {pair.difficulty for pair in pairs[12:]} == {None}
    kinds = Counter(claim.type for pair in pairs for claim in pair.true)
    assert max(kinds.values()) - min(kinds.values()) <= 2
    assert [(pair.id, pair.true) for pair in picture_pairs(0, 12, seed=1)] == [
        (pair.id, pair.true) for pair in pairs[12:]
    ]
    assert len({pair.id for pair in pairs}) == 24
    for shapes in DENSITIES.values():
        first, second, _ = _pair(random.Random(1), ["remove"], shapes)
        assert (len(first.shapes), len(second.shapes)) == (shapes, shapes - 1)
