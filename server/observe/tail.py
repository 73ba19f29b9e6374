"""The lines of a file that may grow or be replaced, from the place that an earlier run reached."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Event
from typing import IO

from server.batches.file import Line, is_json, lines_of
from steering.files import write_atomically

POLL = 0.5
"""Seconds between looks at a file that has no more lines."""
HEAD = 1024
"""Most bytes at the beginning of a file by which it is recognised."""


@dataclass(frozen=True)
class FilePosition:
    """The place behind a line: its number, the bytes up to there, and a digest of the file's first ones."""

    number: int = 0
    end: int = 0
    head: str = ""

    @classmethod
    def load(cls, state: Path, path: Path) -> FilePosition:
        """Return the place that an earlier run reached; the beginning, if there was none or the file is another one."""
        try:
            position = cls(**json.loads(state.read_bytes()))
        except (OSError, ValueError, TypeError):
            return cls()
        with path.open("rb") as file:
            same = os.fstat(file.fileno()).st_size >= position.end and _digest(file, position.end) == position.head
        return position if same else cls()

    def save(self, state: Path) -> None:
        """Keep the place for a later run."""
        write_atomically(state, json.dumps(asdict(self)).encode())


class Tail:
    """The lines of a file behind a place; with `follow`, also those that are still to be written, until `stop` is set."""

    def __init__(self, path: Path, place: FilePosition, *, follow: bool = False, stop: Event | None = None) -> None:
        self._path, self._follow, self._stop = path, follow, stop or Event()
        self._file = path.open("rb")
        self._file.seek(place.end)
        self._number, self._end = place.number, place.end
        self._head = min(place.end, HEAD), place.head
        """The number of bytes in the last digest, and the digest."""

    @property
    def behind(self) -> int:
        """The number of bytes that were not read yet."""
        return max(0, os.fstat(self._file.fileno()).st_size - self._end)

    def left(self) -> int:
        """Return the number of lines that were not read yet."""
        count = sum(1 for _ in lines_of(self._file))
        self._file.seek(self._end)
        return count

    def lines(self) -> Iterator[tuple[Line, str] | None]:
        """Yield each line with the digest of its file's first bytes; None while there is no more."""
        while not self._stop.is_set():
            text = self._file.readline()
            if text.endswith(b"\n") or (text and not self._follow and is_json(text)):
                self._number += 1
                self._end += len(text)
                if text.strip():
                    yield Line(self._number, self._end, text.strip()), self._digest()
                continue
            self._file.seek(self._end)  # the rest of a line is still being written
            if not self._follow:
                return
            yield None
            if not self._replaced():
                self._stop.wait(POLL)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _replaced(self) -> bool:
        """Go on with the file that has this name now, if it is another one or was cut; returns whether it is."""
        try:
            now = self._path.stat()
        except FileNotFoundError:  # between the two steps of a rotation
            return False
        ours = os.fstat(self._file.fileno())
        if (now.st_dev, now.st_ino) == (ours.st_dev, ours.st_ino) and now.st_size >= self._end:
            return False
        if ours.st_size > self._end and (now.st_ino, now.st_dev) != (ours.st_ino, ours.st_dev) and self._more():
            return True  # the end of the old file first
        self._file.close()
        self._file = self._path.open("rb")
        self._number, self._end, self._head = 0, 0, (0, "")
        return True

    def _digest(self) -> str:
        """Return the digest of the file's first bytes up to here, which stays the same from `HEAD` on."""
        length, head = self._head
        if length < min(self._end, HEAD):
            self._head = length, head = min(self._end, HEAD), _digest(self._file, self._end)
        return head

    def _more(self) -> bool:
        """Return whether the open file has another whole line."""
        more = self._file.readline().endswith(b"\n")
        self._file.seek(self._end)
        return more


def _digest(file: IO[bytes], end: int) -> str:
    """Return a digest of a file's first bytes, of those before `end`; its position stays."""
    at = file.tell()
    file.seek(0)
    digest = hashlib.sha256(file.read(min(end, HEAD))).hexdigest()
    file.seek(at)
    return digest
