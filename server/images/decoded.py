"""Pictures that were decoded lately: a chat sends its own again with each question."""

from __future__ import annotations

import threading
from collections import OrderedDict

from PIL import Image

OBJECTS = 2048
"""Bytes, of a picture however small."""


class DecodedPictures:
    """Upright RGB pictures by a hash of their files, the least recently used let go first, of so many bytes at most. Whoever
    gets one changes nothing in it. Any thread may ask."""

    def __init__(self, capacity: int):
        self.bytes = 0
        self._capacity = capacity
        self._pictures: OrderedDict[bytes, Image.Image] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: bytes) -> Image.Image | None:
        """The picture, if it is kept."""
        with self._lock:
            found = self._pictures.get(key)
            if found is not None:
                self._pictures.move_to_end(key)
            return found

    def keep(self, key: bytes, picture: Image.Image) -> None:
        """Keep one, unless it is larger than all may be."""
        with self._lock:
            if _bytes(picture) > self._capacity or key in self._pictures:
                return
            self._pictures[key] = picture
            self.bytes += _bytes(picture)
            while self.bytes > self._capacity:
                self.bytes -= _bytes(self._pictures.popitem(last=False)[1])


def _bytes(picture: Image.Image) -> int:
    """As Pillow has it, which takes four bytes for a pixel."""
    return OBJECTS + 4 * picture.width * picture.height
