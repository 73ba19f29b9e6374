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


def changed(picture: Image.Image) -> Image.Image:
    """Return the picture with another corner."""
    changed_picture = picture.copy()
    changed_picture.paste((0, 0, 0), (0, 0, 12, 12))
    return changed_picture


def test_two_pictures_are_stacked_the_original_above() -> None:
    first, second = scene(1), changed(scene(1))
    (merged,) = PicturePair("1", (), first, second).pictures(merged=True)
    assert merged.size == (60, 96)
    assert [picture.tobytes() for picture in apart(merged)] == [first.tobytes(), second.tobytes()]


def test_a_merged_picture_is_cut_where_its_halves_are_alike() -> None:
    first, second = scene(2, (48, 60)), changed(scene(2, (48, 60)))
    beside = Image.new("RGB", (96, 60))
    beside.paste(first, (0, 0))
    beside.paste(second, (48, 0))
    for merged in (beside, stacked([first, second])):
        pair = PicturePair("2", (), merged=merged)
        assert [picture.tobytes() for picture in pair.pictures()] == [first.tobytes(), second.tobytes()]
        assert pair.pictures(merged=True) == [merged]


@pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
def test_the_same_blocks_are_hidden_in_both(share: float) -> None:
    first, second = scene(3), changed(scene(3))
    covered = [np.asarray(picture) for picture in PicturePair("3", (), first, second).pictures(hidden=share)]
    gray = [(picture == GRAY).all(-1) for picture in covered]
    assert gray[0].mean() == pytest.approx(round(share * BLOCKS**2) / BLOCKS**2)
    assert (gray[0] == gray[1]).all()
    assert (covered[0][~gray[0]] == np.asarray(first)[~gray[0]]).all()
    (merged,) = PicturePair("3", (), first, second).pictures(merged=True, hidden=share)
    assert merged.tobytes() == stacked([Image.fromarray(half) for half in covered]).tobytes()
