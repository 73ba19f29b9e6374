"""A cache of decoded images, since a chat sends its images again with each question."""

from __future__ import annotations

from collections import OrderedDict

from PIL import Image

from steering.lru import ByteBoundedLRU

OBJECTS = 2048
"""Overhead in bytes of an image, however small."""
URLS = 1024
"""The number of URLs that are remembered."""


class DecodedPictures(ByteBoundedLRU[Image.Image]):
    """Upright RGB images by a hash of their files; callers must not modify them."""

    def __init__(self, capacity: int):
        super().__init__(capacity, _bytes)
        self._keys: OrderedDict[int, bytes] = OrderedDict()

    def came_from(self, url: str, key: bytes) -> None:
        """Remember the URL that an image was decoded from, by a hash that may collide."""
        hashed = hash(url)
        with self._lock:
            self._keys[hashed] = key
            if len(self._keys) > URLS:
                self._keys.popitem(last=False)

    def has(self, url: str) -> bool:
        """Return True where the image of a URL most likely need not be decoded, which costs less than reading its base64."""
        hashed = hash(url)
        with self._lock:
            return self._keys.get(hashed) in self._entries


def _bytes(picture: Image.Image) -> int:
    """Return an image's size in Pillow's memory, which takes four bytes for a pixel."""
    return OBJECTS + 4 * picture.width * picture.height
