"""Samples for SAGE's evaluation: balanced, held out, and true."""

from __future__ import annotations

import re
from collections import Counter

import numpy as np
import pytest

from demo.faithfulness import difference_samples, existence_samples
from demo.world import SHAPES
from probes.faithfulness import PATTERNS


def test_existence_questions_are_balanced_and_depend_on_the_seed() -> None:
    samples = existence_samples(120, seed=1)
    assert Counter((sample.setting, sample.present) for sample in samples) == {
        (setting, present): 20 for setting in ("random", "popular", "adversarial") for present in (True, False)
    }
    again, other = existence_samples(120, seed=1), existence_samples(120, seed=2)
    assert [s.question for s in samples] == [s.question for s in again]
    assert [s.image.tobytes() for s in samples] == [s.image.tobytes() for s in again]
    assert any(a.question != b.question for a, b in zip(samples, other, strict=True))


def test_popular_objects_are_the_frequent_ones() -> None:
    samples = existence_samples(1200, seed=3)
    asked = Counter(
        next(shape for shape in SHAPES if re.search(rf"\b{shape}\b", sample.question))
        for sample in samples
        if sample.setting == "popular" and not sample.present
    )
    spread = Counter(
        next(shape for shape in SHAPES if re.search(rf"\b{shape}\b", sample.question))
        for sample in samples
        if sample.setting == "random" and not sample.present
    )
    assert asked.most_common(1)[0][1] > 2 * spread.most_common(1)[0][1]


def test_every_difference_has_its_type_and_object() -> None:
    samples = difference_samples(25, seed=1)
    assert Counter(sample.type for sample in samples) == {**dict.fromkeys(PATTERNS, 5), None: 5}
    for sample in samples:
        assert (sample.type is None) == (sample.category is None)
        assert sample.category is None or sample.category in SHAPES


def test_noise_is_of_the_size_asked_for_and_changes_nothing_else() -> None:
    for draw, picture, fact in ((existence_samples, "image", "question"), (difference_samples, "second", "type")):
        clean, noisy, again = (draw(10, seed=1, noise=noise) for noise in (0, 20, 20))
        for pure, one, other in zip(clean, noisy, again, strict=True):
            assert getattr(pure, fact) == getattr(one, fact)
            a, b, c = (np.asarray(getattr(sample, picture), np.float32) for sample in (pure, one, other))
            assert np.array_equal(b, c)
            added = (b - a)[(a > 60) & (a < 195)]  # where nothing is cut off
            assert added.std() == pytest.approx(20, rel=0.1)
