"""Pictures that were decoded for an earlier request."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from urllib.parse import quote

import pytest
from PIL import Image

from server.errors import BadRequest
from server.images import load
from server.images.decoded import OBJECTS, DecodedPictures
from server.images.load import ImageLoader
from server.settings import Settings
from tests.server.conftest import data_uri
from tests.waiting import computing_within

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


def test_images_are_large_by_their_files_beginnings_unless_they_are_decoded_already(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(load, "LARGE", 10_000)
    decoded = DecodedPictures(2**20)
    noise = Image.effect_noise((101, 101), 80).convert("RGB")
    plain = data_uri(noise)
    escaped = f"data:image/png;base64,{quote(plain.partition(',')[2], safe='')}"
    beginnings = {"plain": plain[: len(plain) // 2], "escaped": escaped[: len(escaped) // 2], "none": plain[:60]}
    for name, url in {"plain": plain, "escaped": escaped, **beginnings}.items():
        assert ImageLoader(Settings(), None, decoded).are_large([(url, "a")]), name
    small = [(uri(shade, 70), "a") for shade in range(3)]
    loader = ImageLoader(Settings(), None, decoded)
    assert [loader.are_large(small[:count]) for count in range(4)] == [False, False, False, True]
    loader.load(plain, "a")
    assert not loader.are_large([(plain, "a"), *small[:2]]), "it need not be decoded"
    decoded.capacity = 0
    decoded.keep(b"another", noise)
    assert loader.are_large([(plain, "a")]), "it was let go"


def test_a_file_of_many_parts_takes_no_time_before_its_turn() -> None:
    part = struct.pack(">I4sI", 0, b"teSt", zlib.crc32(b"teSt"))
    header = struct.pack(">IIBBBBB", 10, 10, 8, 2, 0, 0, 0)
    head = struct.pack(">I", len(header)) + b"IHDR" + header + struct.pack(">I", zlib.crc32(b"IHDR" + header))
    url = "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n" + head + part * 20_000).decode()
    with computing_within(0.1):
        assert ImageLoader(Settings()).are_large([(url, "a")])
