"""Pictures whose files are put together from more parts than an encoder writes are refused before they cost time."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable
from typing import Any

import pytest
from PIL import Image

from server.images.container import MAX_SCANS
from tests.server.images.test_images import as_uri, load, refusal
from tests.waiting import computing_within

MANY = 150_000


def encoded(kind: str, size: tuple[int, int] = (10, 10), **options: Any) -> bytes:
    file = io.BytesIO()
    Image.new("P" if kind == "GIF" else "RGB", size).save(file, kind, **options)
    return file.getvalue()


def chunk(kind: bytes, data: bytes = b"") -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(before: bytes = b"", after: bytes = b"") -> bytes:
    """With chunks before or after those that hold the pixels."""
    data = encoded("PNG")
    pixels, end = data.index(b"IDAT") - 4, data.index(b"IEND") - 4
    return data[:pixels] + before + data[pixels:end] + after + data[end:]


def segment(kind: int, data: bytes = b"") -> bytes:
    return bytes((0xFF, kind)) + struct.pack(">H", len(data) + 2) + data


def jpeg(inserted: bytes) -> bytes:
    data = encoded("JPEG")
    return data[:2] + inserted + data[2:]


def gif(inserted: bytes) -> bytes:
    """With something before the first frame."""
    data = encoded("GIF")
    palette = 3 << (data[10] & 7) + 1 if data[10] & 0x80 else 0
    return data[: 13 + palette] + inserted + data[13 + palette :]


def scans(count: int) -> bytes:
    """Return a progressive JPEG whose last scan is repeated."""
    data = encoded("JPEG", progressive=True)
    last = data[data.rindex(b"\xff\xda") : -2]
    return data[:-2] + last * (count - data.count(b"\xff\xda")) + data[-2:]


def bmp(compression: int) -> bytes:
    """Return a bitmap with one row of a million pixels, of which two bytes set the first."""
    body = b"\1\1\0\0\0\1"
    head = struct.pack("<IiiHHIIiiII", 40, 1_000_000, 1, 1, 8, compression, len(body), 0, 0, 256, 0)
    return b"BM" + struct.pack("<IHHI", 1078 + len(body), 0, 0, 1078) + head + bytes(1024) + body


COSTLY: dict[str, Callable[[], bytes]] = {
    "texts of a PNG": lambda: png(chunk(b"tEXt", b"k\0") * MANY),
    "private chunks of a PNG": lambda: png(chunk(b"prVt") * MANY),
    "private chunks behind the pixels": lambda: png(after=chunk(b"prVt") * MANY),
    "empty pieces of pixels": lambda: png(chunk(b"IDAT") * MANY),
    "comments of a JPEG": lambda: jpeg(segment(0xFE) * MANY),
    "comments behind a JPEG's header": lambda: encoded("JPEG")[:-2] + segment(0xFE) * MANY + b"\xff\xd9",
    "fill between segments": lambda: jpeg(b"\xff" * MANY),
    "bytes between segments": lambda: jpeg(segment(0xFE) + bytes(MANY)),
    "markers without a length": lambda: jpeg(b"\xff\xd0" * MANY),
    "resources of Photoshop": lambda: jpeg(segment(0xED, b"Photoshop 3.0\0" + b"8BIM\4\4\0\0\0\0\0\0" * 5000) * 3),
    "tables in a segment": lambda: jpeg(segment(0xDB, (b"\0" + b"\1" * 64) * 1000) * 11),
    "scans": lambda: scans(MAX_SCANS + 1),
    "comments of a GIF": lambda: gif(b"\x21\xfe\1a\0" * MANY),
    "blocks of a GIF's comment": lambda: gif(b"\x21\xfe" + b"\1a" * MANY + b"\0"),
    "bytes between a GIF's blocks": lambda: gif(b"\1" * MANY),
    "run lengths": lambda: bmp(1),
    "run lengths of four bits": lambda: bmp(2),
}


@pytest.mark.parametrize("what", COSTLY)
def test_too_many_parts_are_refused_in_little_time(what: str) -> None:
    url = as_uri(COSTLY[what]())
    with computing_within(1):  # measured are 0.1 or less
        assert refusal(url) == "image_too_complex"


FINE: dict[str, Callable[[], bytes]] = {
    "a PNG of 20,000 chunks": lambda: png(chunk(b"IDAT") * 20_000),
    "a progressive JPEG": lambda: encoded("JPEG", progressive=True),
    "as many scans as may be": lambda: scans(MAX_SCANS),
    "an ICC profile of megabytes": lambda: encoded("JPEG", icc_profile=bytes(4_000_000)),
    "a JPEG before a film": lambda: encoded("JPEG") + b"\xff\xda" * MANY,
    "a padded JPEG": lambda: jpeg(b"\xff" * 4096),
    "a GIF with XMP": lambda: gif(b"\x21\xff\x0bXMP DataXMP" + b"\1a" * 10_000 + b"\0"),
    "several frames": lambda: encoded(
        "GIF", save_all=True, append_images=[Image.new("P", (10, 10), n) for n in range(99)]
    ),
    "a BMP": lambda: encoded("BMP"),
}


@pytest.mark.parametrize("what", FINE)
def test_what_encoders_write_is_read(what: str) -> None:
    assert load(as_uri(FINE[what]())).size == (10, 10)
