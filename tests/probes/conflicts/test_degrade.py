"""Degraded pictures and texts: untouched at 0, nothing left at 1, and the same again for the same seed."""

from __future__ import annotations

import dataclasses
import string
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from probes.conflicts.degrade import FRAMES, degraded, noisy, reworded, ungrammatical
from probes.conflicts.samples import ConflictSample
from tests.probes.conftest import make_samples

TEXT = "The green object is a heart, and there are 5 shapes (at the top left). A bird has the blue hat."
PLAIN = "Every word keeps its place here and nothing else stood there before"  # nothing to drop or to inflect


def picture(seed: int = 0, size: tuple[int, int] = (64, 48)) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), np.uint8)
    return Image.fromarray(pixels)


def pixels(image: Image.Image) -> np.ndarray:
    return np.asarray(image, np.float64)


def test_severity_0_changes_nothing() -> None:
    assert noisy(picture(), 0, seed=1).tobytes() == picture().tobytes()
    assert ungrammatical(f"  {TEXT}\n", 0, seed=1) == f"  {TEXT}\n"


def test_pure_noise_depends_on_the_seed_alone() -> None:
    black, white = Image.new("RGB", (64, 48)), Image.new("RGB", (64, 48), "white")
    assert noisy(black, 1, seed=1).tobytes() == noisy(white, 1, seed=1).tobytes()
    assert noisy(black, 1, seed=1).tobytes() != noisy(black, 1, seed=2).tobytes()
    noise = pixels(noisy(white, 1, seed=1))
    assert abs(noise.mean() - 127.5) < 2  # of uniform noise over 0..255; the standard error is 0.8
    assert abs(noise.std() - 255 / 12**0.5) < 2
    channels = np.corrcoef(noise.reshape(-1, 3).T)
    assert np.abs(channels - np.eye(3)).max() < 0.08


@pytest.mark.parametrize("severity", [0.25, 0.7])
def test_a_noisy_picture_is_the_blend(severity: float) -> None:
    noise = pixels(noisy(picture(), 1, seed=3))
    expected = (1 - severity) * pixels(picture()) + severity * noise
    assert np.abs(pixels(noisy(picture(), severity, seed=3)) - expected).max() <= 1  # both are rounded


def test_a_grey_picture_becomes_rgb() -> None:
    grey = picture().convert("L")
    assert noisy(grey, 0, seed=1).tobytes() == grey.convert("RGB").tobytes()
    assert noisy(grey, 0.5, seed=1).size == (64, 48)


def test_the_same_seed_gives_the_same_errors() -> None:
    for severity in (0.3, 0.8, 1.0):
        assert ungrammatical(TEXT, severity, seed=4) == ungrammatical(TEXT, severity, seed=4)
        assert ungrammatical(TEXT, severity, seed=4) != ungrammatical(TEXT, severity, seed=5)


def test_every_error_occurs_and_every_word_is_still_there_at_a_half() -> None:
    variants = [ungrammatical("The green objects are here", 0.5, seed).split() for seed in range(300)]
    assert any("The" not in words for words in variants)
    assert any("is" in words for words in variants)
    assert any("geren" in words for words in variants)
    assert any(words[-2] == "here" for words in variants)
    letters = sorted("greenobjectshere")
    for words in variants:
        assert sorted("".join(word for word in words if word not in ("The", "is", "are"))) == letters


@pytest.mark.parametrize(("severity", "low", "high"), [(0.1, 0.05, 0.15), (0.3, 0.24, 0.36), (1.0, 1.0, 1.0)])
def test_articles_are_dropped_as_often_as_the_severity_says(severity: float, low: float, high: float) -> None:
    words = [len(ungrammatical("in the of at to", severity, seed).split()) for seed in range(400)]
    assert low <= np.mean([count == 4 for count in words]) <= high


def test_agreement_keeps_the_capital() -> None:
    assert {ungrammatical("Is", 0.5, seed) for seed in range(20)} == {"Is", "Are"}


def test_short_words_ends_and_punctuation_stay_at_a_half() -> None:
    for seed in range(50):
        text = ungrammatical("(colour), 5 red: shapes.", 0.5, seed)
        assert [c for c in text if c in string.punctuation] == list("(),:.")
        words = sorted(text.translate(str.maketrans("", "", "(),:.")).split())
        assert [(word[0], word[-1]) for word in words] == [("5", "5"), ("c", "r"), ("r", "d"), ("s", "s")]


def test_at_1_only_the_number_of_words_and_their_lengths_are_left() -> None:
    lengths = sorted(len(word) for word in PLAIN.split())
    same_letters = total = 0
    for seed in range(100):
        words = ungrammatical(PLAIN, 1, seed).split()
        assert sorted(len(word) for word in words) == lengths
        same_letters += sum(a == b for a, b in zip("".join(words), PLAIN.replace(" ", "").lower(), strict=True))
        total += len("".join(words))
    assert 0.02 < same_letters / total < 0.06  # one in 26 by chance
    assert not any(c.isdigit() or c.isupper() for c in ungrammatical(TEXT, 1, seed=1))


def test_at_1_a_word_may_stand_anywhere() -> None:
    words = " ".join("x" * n for n in range(1, 7))  # told apart by their lengths
    first = [len(ungrammatical(words, 1, seed).split()[0]) for seed in range(600)]
    assert min(np.bincount(first, minlength=7)[1:]) > 60  # 100 each by chance


def test_one_modality_is_degraded_and_nothing_else() -> None:
    sample = make_samples(1)[0]
    image_degraded, read = degraded(sample, "vision", 0.8, seed=1), degraded(sample, "text", 0.8, seed=1)
    assert image_degraded.picture().tobytes() != sample.picture().tobytes()
    assert read.context != sample.context
    assert dataclasses.replace(image_degraded, image=sample.image) == sample
    assert dataclasses.replace(read, context=sample.context) == sample


def test_one_seed_gives_every_sample_its_own_noise() -> None:
    first_sample, second_sample = (dataclasses.replace(sample, context=TEXT) for sample in make_samples(2))
    for modality in ("vision", "text"):
        first, second = (degraded(sample, modality, 1, seed=1) for sample in (first_sample, second_sample))
        again = degraded(first_sample, modality, 1, seed=1)
        assert (first.picture().tobytes(), first.context) == (again.picture().tobytes(), again.context)
        assert (first.picture().tobytes(), first.context) != (second.picture().tobytes(), second.context)
    assert (
        degraded(first_sample, "vision", 1, 1).picture().tobytes()
        != degraded(second_sample, "vision", 1, 1).picture().tobytes()
    )


def test_an_image_in_a_file_is_read(tmp_path: Path) -> None:
    picture().save(tmp_path / "a.png")
    sample = ConflictSample("1", "color", tmp_path / "a.png", "What?", "red", "blue", "It is blue.")
    assert degraded(sample, "vision", 0, seed=1).picture().tobytes() == picture().tobytes()


@pytest.mark.parametrize("severity", [-0.1, 1.5, float("nan")])
@pytest.mark.parametrize("modality", ["vision", "text"])
def test_a_severity_outside_0_to_1_is_refused(modality: str, severity: float) -> None:
    with pytest.raises(ValueError, match=r"severity must be in 0\.\.1, not "):
        degraded(make_samples(1)[0], modality, severity, seed=1)


def test_another_modality_is_refused() -> None:
    with pytest.raises(ValueError, match="modality must be 'vision' or 'text', not 'audio'"):
        degraded(make_samples(1)[0], "audio", 0.5, seed=1)


def test_a_reworded_context_is_whole_in_its_frame() -> None:
    samples = make_samples(60)
    frames = set()
    for sample in samples:
        other_wording = reworded(sample, seed=1)
        assert other_wording == reworded(sample, seed=1)
        assert dataclasses.replace(other_wording, context=sample.context) == sample
        assert sample.context in other_wording.context
        frames.add(other_wording.context.replace(sample.context, "{}"))
    assert frames == set(FRAMES)
    assert any(reworded(sample, 1) != reworded(sample, 2) for sample in samples)
