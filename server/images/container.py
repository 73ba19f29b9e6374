"""Bounds on the structure of an image file.

Pillow parses files in Python, and libjpeg traverses all pixels for each scan, so that millions of parts of a few bytes would
cost seconds, and in a progressive JPEG hours. Each part that Pillow's Python code parses is read from the file, so that
counting reads bounds its work in every format and without a parser of our own. Parts that are not read one by one are
counted before anything is decoded. A PNG's pixels are counted because Pillow does not notice missing ones.
"""

from __future__ import annotations

import io
import re
import struct
import zlib

from PIL import Image

MAX_READS = 100_000
"""Most reads from one file.

A PNG's chunk takes three or four, a GIF's block two, a JPEG's segment four, a byte between segments one. A PNG of 16 MB has
8,000, with the 8 KiB that libpng puts into a chunk.
"""
MAX_SEGMENTS = 10_000
"""Most segments of a JPEG, including scans and the parts within segments that Pillow loops over."""
MAX_SCANS = 100
"""Most scans of a JPEG; progressive ones have about ten."""

_MARKER = re.compile(rb"\xff([\x01-\xcf\xd8-\xfe])")
_EOI, _SOS, _PHOTOSHOP = 0xD9, 0xDA, 0xED
_BARE = frozenset((0x01, 0xC8, 0xD8, *range(0xF0, 0xFE)))
"""Markers without a length, and those that libjpeg refuses and Pillow treats as such."""
_RLE = (1, 2)
"""Values of a BMP's "compression" for run lengths."""
_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
"""Channels of a PNG's colour types."""
_PASSES = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))
"""First column and row, and their distances, of the passes of an interlaced PNG."""
_INFLATED = 2**18
"""Bytes of pixels that are inflated at a time to be counted."""


class TooComplex(Exception):
    """Raised for an image file that no encoder would write; the message ends a sentence about it."""


class Reads(io.BytesIO):
    """A file in memory that raises TooComplex if it is read from too often."""

    def __init__(self, data: bytes, most: int = MAX_READS):
        super().__init__(data)
        self._left = most

    def read(self, size: int | None = -1, /) -> bytes:
        self._left -= 1
        if self._left < 0:
            raise TooComplex("consists of too many parts")
        return super().read(size)


def check(data: bytes) -> None:
    """Raise TooComplex for a file that is costly in ways that its number of reads does not show."""
    if data.startswith(b"\xff\xd8\xff"):
        _check_jpeg(data)
    # Pillow adds the pixels of every line that a run-length encoded BMP omits one by one.
    if data.startswith(b"BM") and len(data) >= 34 and struct.unpack_from("<I", data, 30)[0] in _RLE:
        raise TooComplex("is a run-length encoded BMP, which is not supported")


def _check_jpeg(data: bytes) -> None:
    at, segments, scans = 2, 0, 0
    while match := _MARKER.search(data, at):
        at, kind = match.end(), match[1][0]
        if kind == _EOI and scans:
            return
        segments += 1
        scans += kind == _SOS
        if kind not in _BARE and kind != _EOI:
            size = int.from_bytes(data[at : at + 2], "big")
            segments += _pieces(kind, data, at, size)
            at += size
        if segments > MAX_SEGMENTS or scans > MAX_SCANS:
            raise TooComplex(f"has more than {MAX_SCANS} scans or {MAX_SEGMENTS} segments")


def _pieces(kind: int, data: bytes, at: int, size: int) -> int:
    """Return how many parts of a segment Pillow loops over, if more than an encoder puts there.

    These are tables and components.
    """
    if kind == _PHOTOSHOP:
        return data.count(b"8BIM", at, at + size)
    return 0 if kind >= 0xE0 else size // 64


def ends_early(data: bytes, image: Image.Image) -> bool:
    """Return whether the pixels of a loaded image end before its last row without an error of Pillow.

    Pillow accepts a PNG's stream that ends after any row and leaves the other rows at zero.
    """
    if image.format != "PNG":
        return False
    last = image.crop((0, image.height - 1, image.width, image.height))
    interlaced = bool(image.info.get("interlace"))
    if not interlaced and any(last.tobytes()):
        return False
    at, missing, inflate = 8, 1, zlib.decompressobj()
    while at + 8 <= len(data) and missing > 0 and not inflate.eof:  # what follows the pixels may be gigabytes
        size, kind = int.from_bytes(data[at : at + 4], "big"), data[at + 4 : at + 8]
        body = data[at + 8 : at + 8 + size]
        if kind == b"IHDR":
            missing = _pixel_bytes(*image.size, bits=body[8] * _CHANNELS[body[9]], interlaced=interlaced)
        while kind == b"IDAT" and body and missing > 0 and not inflate.eof:
            missing -= len(inflate.decompress(body, _INFLATED))
            body = inflate.unconsumed_tail
        at += size + 12
    return missing > 0


def _pixel_bytes(width: int, height: int, bits: int, interlaced: bool) -> int:
    """Return the size in bytes of a PNG's pixels before compression; each row begins with its filter's byte."""
    total = 0
    for left, top, across, down in _PASSES if interlaced else ((0, 0, 1, 1),):
        columns, rows = -(-(width - left) // across), -(-(height - top) // down)
        if columns > 0:
            total += rows * (1 + (columns * bits + 7) // 8)
    return total
