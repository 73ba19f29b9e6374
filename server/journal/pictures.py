"""The images of stored responses, as files beside the journal, so that a response can be continued after a restart."""

from __future__ import annotations

import base64
import binascii
import hashlib
import logging
import os
import re
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from server.errors import BadRequest
from server.images.base64_forms import plain_base64
from server.journal.database import Place
from server.journal.errors import JournalError
from server.journal.retention import DAY
from steering.files import write_atomically

log = logging.getLogger("helmsight")

SCHEME = "kept:"
"""The scheme of the URL that stands for a kept image."""
CONTENT = re.compile("[0-9a-f]{64}")
"""The pattern of an image's file name."""
_DATA = re.compile(r"data:([a-zA-Z0-9.+/-]{1,64});base64,(.*)", re.DOTALL)
_KEPT = re.compile(r"kept:([a-zA-Z0-9.+/-]{1,64}):([0-9a-f]{64})")


def pictures_folder(journal: str) -> Path:
    """Return the folder of kept images: beside a journal that is a file, else in the user's folder."""
    with suppress(JournalError):
        if (path := Place.of(journal).path) is not None:
            return path.with_name(f"{path.name}.pictures")
    return Path("~/.helmsight/pictures").expanduser()


class KeptPictures:
    """A folder of images by content, of at most `most` bytes and for `days`; the oldest are deleted first.

    A file that is used again counts as new. Only this server's user may read the folder. Whoever records a response with
    kept images, or deletes one, holds `lock` for as long as rows and files may disagree.
    """

    def __init__(self, folder: Path, most: int, days: float):
        self._folder, self._most, self._days = folder, most, days
        self.lock = threading.RLock()

    def keep(self, url: str) -> str:
        """Keep the image of a `data:` URI and return its `kept:` URL; other URLs, and what cannot be kept, stay as they are.

        An image that alone exceeds the bound is not kept either.
        """
        match = _DATA.fullmatch(url)
        if match is None:
            return url
        try:
            data = base64.b64decode(plain_base64(match[2]), validate=True)
        except (binascii.Error, ValueError):
            return url
        digest = hashlib.sha256(data).hexdigest()
        try:
            with self.lock:
                self._write(self._folder / digest, data)
        except OSError as error:
            log.warning("an image of a stored response could not be kept: %s", error)
        return f"{SCHEME}{match[1]}:{digest}"

    def url_of(self, url: str, place: str) -> str:
        """Return the `data:` URI of a `kept:` URL, any other URL as it is; raises BadRequest if the image is gone."""
        match = _KEPT.fullmatch(url)
        if match is None:
            return url
        path = self._folder / match[2]
        try:
            data = path.read_bytes()
            os.utime(path)
        except OSError:
            raise BadRequest(
                f"'{place}' cannot be continued: an image of it is no longer kept.", place, "images_gone"
            ) from None
        return f"data:{match[1]};base64,{base64.b64encode(data).decode()}"

    def discard(self, urls: Iterable[str]) -> None:
        """Delete the images of these `kept:` URLs."""
        for url in urls:
            if (match := _KEPT.fullmatch(url)) is not None:
                (self._folder / match[2]).unlink(missing_ok=True)

    def _write(self, path: Path, data: bytes) -> None:
        if len(data) > self._most:
            return
        if path.exists():
            os.utime(path)
            return
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(path, data, mode=0o600)
        self._delete_surplus()

    def sweep(self) -> None:
        """Delete the images that are too old, and the oldest beyond the bound."""
        try:
            with self.lock:
                self._delete_surplus()
        except FileNotFoundError:
            return  # none was ever kept, or another server deleted one meanwhile
        except OSError as error:
            log.warning("old images of stored responses could not be deleted: %s", error)

    def _delete_surplus(self) -> None:
        before = time.time() - self._days * DAY
        files = sorted((entry.stat().st_mtime, entry.stat().st_size, entry.path) for entry in os.scandir(self._folder))
        total = sum(size for _, size, _ in files)
        for modified, size, name in files:
            if total <= self._most and modified >= before:
                break
            Path(name).unlink(missing_ok=True)
            total -= size


def content_of(url: str) -> str:
    """Return the part of a `kept:` URL that names the image's content, whatever media type it was sent with."""
    return url.rpartition(":")[2]


def kept_urls(messages: str) -> set[str]:
    """Return the `kept:` URLs in stored messages."""
    return {match[0] for match in _KEPT.finditer(messages)}
