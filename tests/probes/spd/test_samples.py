"""The presentation of pairs: apart, as one picture, and partly hidden."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from probes.spd.samples import BLOCKS, GRAY, PicturePair, apart, stacked


def scene(seed: int, size: tuple[int, int] = (60, 48)) -> Image.Image:
    """Noise, so that no two pictures are alike."""
    width, height = size
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def changed(one: Image.Image) -> Image.Image:
    """Return the picture with another corner."""
    other = one.copy()
    other.paste((0, 0, 0), (0, 0, 12, 12))
    return other


def test_two_pictures_are_stacked_the_original_above() -> None:
    first, second = scene(1), changed(scene(1))
    (whole,) = PicturePair("1", (), first, second).pictures(merged=True)
    assert whole.size == (60, 96)
    assert [one.tobytes() for one in apart(whole)] == [first.tobytes(), second.tobytes()]


def test_a_merged_picture_is_cut_where_its_halves_are_alike() -> None:
    first, second = scene(2, (48, 60)), changed(scene(2, (48, 60)))
    beside = Image.new("RGB", (96, 60))
    beside.paste(first, (0, 0))
    beside.paste(second, (48, 0))
    for whole in (beside, stacked([first, second])):
        pair = PicturePair("2", (), merged=whole)
        assert [one.tobytes() for one in pair.pictures()] == [first.tobytes(), second.tobytes()]
        assert pair.pictures(merged=True) == [whole]


@pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
def test_the_same_blocks_are_hidden_in_both(share: float) -> None:
    first, second = scene(3), changed(scene(3))
    both = [np.asarray(one) for one in PicturePair("3", (), first, second).pictures(hidden=share)]
    gray = [(one == GRAY).all(-1) for one in both]
    assert gray[0].mean() == pytest.approx(round(share * BLOCKS**2) / BLOCKS**2)
    assert (gray[0] == gray[1]).all()
    assert (both[0][~gray[0]] == np.asarray(first)[~gray[0]]).all()
    (one,) = PicturePair("3", (), first, second).pictures(merged=True, hidden=share)
    assert one.tobytes() == stacked([Image.fromarray(half) for half in both]).tobytes()
