"""Pictures that were decoded lately: a chat sends its own again with each question."""

from __future__ import annotations

from PIL import Image

from steering.kept import Kept

OBJECTS = 2048
"""Bytes, of a picture however small."""


class DecodedPictures(Kept[Image.Image]):
    """Upright RGB pictures by a hash of their files. Whoever gets one changes nothing in it."""

    def __init__(self, capacity: int):
        super().__init__(capacity, _bytes)


def _bytes(picture: Image.Image) -> int:
    """As Pillow has it, which takes four bytes for a pixel."""
    return OBJECTS + 4 * picture.width * picture.height
