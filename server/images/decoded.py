"""A cache of decoded images, since a chat sends its images again with each question."""

from __future__ import annotations

from PIL import Image

from steering.lru import ByteBoundedLRU

OBJECTS = 2048
"""Overhead in bytes of an image, however small."""


class DecodedPictures(ByteBoundedLRU[Image.Image]):
    """Upright RGB images by a hash of their files; callers must not modify them."""

    def __init__(self, capacity: int):
        super().__init__(capacity, _bytes)


def _bytes(picture: Image.Image) -> int:
    """Return an image's size in Pillow's memory, which takes four bytes for a pixel."""
    return OBJECTS + 4 * picture.width * picture.height
