"""Pictures that were decoded for an earlier request."""

from __future__ import annotations

import base64
import io

import pytest
from PIL import Image

from server.errors import BadRequest
from server.images.decoded import OBJECTS, DecodedPictures
from server.images.load import ImageLoader
from server.settings import Settings
from tests.server.conftest import data_uri

SQUARE = 10 * 10 * 4 + OBJECTS
"""Bytes of a picture of ten times ten pixels."""


def uri(shade: int, side: int = 10) -> str:
    return data_uri(Image.new("RGB", (side, side), (shade, 0, 0)))


def test_the_same_file_is_decoded_once_for_all_requests() -> None:
    decoded = DecodedPictures(2 * SQUARE)
    first, second = (ImageLoader(Settings(), None, decoded) for _ in range(2))
    one = first.load(uri(1), "a")
    assert second.load(uri(1), "a") is one
    assert second.load(uri(2), "b") is not one
    assert second.load(uri(2), "c").getpixel((0, 0)) == (2, 0, 0)
    assert decoded.bytes == 2 * SQUARE


def test_the_least_recently_used_is_let_go_first_and_what_is_too_large_is_not_kept() -> None:
    decoded = DecodedPictures(2 * SQUARE)
    loader = ImageLoader(Settings(max_images=9), None, decoded)
    one, two = loader.load(uri(1), "a"), loader.load(uri(2), "b")
    assert loader.load(uri(1), "a") is one
    loader.load(uri(3), "c")
    assert loader.load(uri(1), "a") is one
    assert loader.load(uri(2), "b") is not two
    loader.load(uri(4, side=60), "d")
    assert decoded.bytes == 2 * SQUARE


def test_bounds_hold_for_pictures_that_are_known() -> None:
    decoded = DecodedPictures(2**20)
    ImageLoader(Settings(), None, decoded).load(uri(1), "a")
    loader = ImageLoader(Settings(max_request_pixels=150), None, decoded)
    loader.load(uri(1), "a")
    with pytest.raises(BadRequest, match="together"):
        loader.load(uri(1), "b")


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_nothing_but_pixels_is_kept_of_a_file(kind: str) -> None:
    """Profiles of megabytes would count for nothing."""
    buffer = io.BytesIO()
    Image.new("RGB", (40, 40), "red").save(buffer, kind, icc_profile=bytes(2**20), exif=Image.Exif())
    url = "data:image;base64," + base64.b64encode(buffer.getvalue()).decode()
    kept = ImageLoader(Settings(), None, DecodedPictures(2**20)).load(
        url.replace("image;", f"image/{kind.lower()};"), "a"
    )
    assert type(kept) is Image.Image
    assert kept.info == {}
    held = [value for value in vars(kept).values() if isinstance(value, bytes | dict | list)]
    assert sum(len(value) for value in held) == 0


def test_without_room_each_is_decoded() -> None:
    loader = ImageLoader(Settings())
    assert loader.load(uri(1), "a") is not loader.load(uri(1), "a")
    assert loader.decoded.bytes == 0
