"""The store of compiled steps, which keeps them from one start to the next.

Its contents run as this user's own code, so nothing is loaded from a folder, or a file, that others may write.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

log = logging.getLogger(__name__)

KEPT = 128
"""Maximum number of entries, two for each step; the least recently used ones are removed."""
STALE = 86_400.0
"""Seconds after which unfinished entries are removed."""
_PACKAGE, _ABOUT, _BUILDING = "step.so", "about.json", ".building-"


class Unsafe(OSError):
    """A folder or a file may have been written by other users."""


class StoredStep(NamedTuple):
    """A compiled step. package: its file. about: its metadata."""

    package: Path
    about: dict[str, Any]


def default_folder() -> Path:
    """Return the user's own folder: $XDG_CACHE_HOME/helmsight/compiled, or the one in ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "helmsight" / "compiled"


class Store:
    """Entries by their keys, which are texts that state everything that a compiled step depends on."""

    def __init__(self, folder: Path):
        """Make the folder, for this user alone; raise Unsafe where others may write it, OSError where it cannot be made."""
        self.folder = folder.expanduser().absolute()
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for place in (self.folder, *self.folder.parents):
            _refuse_shared(place)
        _refuse_foreign(self.folder)

    def find(self, key: str) -> StoredStep | None:
        """Return the entry of a key, None where there is none; remove a broken one."""
        place = self.folder / _digest(key)
        try:
            _refuse_foreign(place)
            for name in (_PACKAGE, _ABOUT):
                _refuse_foreign(place / name)
            about = json.loads((place / _ABOUT).read_text())
            if about["key"] != key or about["digest"] != _digest((place / _PACKAGE).read_bytes()):
                raise ValueError("its content is not what was written")
            os.utime(place)
            if "of" in about:
                with suppress(FileNotFoundError):
                    os.utime(self.folder / _digest(about["of"]))
        except FileNotFoundError:
            if place.exists():
                self._remove(place)
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("a compiled step in %s is unusable and will be compiled again: %s", self.folder, error)
            self._remove(place)
            return None
        return StoredStep(place / _PACKAGE, about)

    @contextmanager
    def turn(self, key: str) -> Iterator[None]:
        """Wait while another process makes the entry of a key."""
        descriptor = os.open(self.folder / f".{_digest(key)[:16]}.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    @contextmanager
    def room(self) -> Iterator[Path]:
        """Yield a temporary folder in which an entry is made."""
        self._tidy()
        place = Path(tempfile.mkdtemp(prefix=_BUILDING, dir=self.folder))
        try:
            yield place
        finally:
            shutil.rmtree(place, ignore_errors=True)

    def keep(self, key: str, package: Path, about: Mapping[str, Any]) -> StoredStep:
        """Store a package, a file in a room of this store, in place of an earlier one."""
        place, building = self.folder / _digest(key), Path(tempfile.mkdtemp(prefix=_BUILDING, dir=self.folder))
        noted = {**about, "key": key, "digest": _digest(package.read_bytes())}
        os.replace(package, building / _PACKAGE)
        (building / _ABOUT).write_text(json.dumps(noted))
        for name in (_PACKAGE, _ABOUT):
            (building / name).chmod(0o600)  # whatever the umask is
        self._remove(place)
        try:
            os.rename(building, place)
        except OSError:  # another process was faster
            shutil.rmtree(building, ignore_errors=True)
        return StoredStep(place / _PACKAGE, noted)

    def share(self, key: str, entry: StoredStep, about: Mapping[str, Any]) -> StoredStep:
        """Store the package of an entry under another key, too, which records the first key as `of`."""
        with self.room() as room:
            try:
                os.link(entry.package, room / _PACKAGE)
            except OSError:  # the file system has no links
                shutil.copy(entry.package, room / _PACKAGE)
            return self.keep(key, room / _PACKAGE, {**about, "of": entry.about["key"]})

    def drop(self, key: str) -> None:
        """Remove an entry that turned out to be wrong."""
        self._remove(self.folder / _digest(key))

    def _remove(self, place: Path) -> None:
        if place.is_symlink() or place.is_file():
            place.unlink(missing_ok=True)
        else:
            shutil.rmtree(place, ignore_errors=True)

    def _tidy(self) -> None:
        entries = sorted(((_age(entry), entry) for entry in self.folder.iterdir()), key=lambda pair: pair[0])
        for age, entry in entries:
            if entry.name.startswith(_BUILDING) and age > STALE:
                self._remove(entry)
        for _, entry in [pair for pair in entries if not pair[1].name.startswith(".")][KEPT - 1 :]:
            self._remove(entry)


def _age(place: Path) -> float:
    try:
        return time.time() - place.lstat().st_mtime
    except OSError:
        return 0.0


def _refuse_shared(place: Path) -> None:
    """Raise Unsafe for a folder in which others may replace files."""
    status = place.stat()
    writable = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not status.st_mode & stat.S_ISVTX
    if writable or status.st_uid not in (0, os.geteuid()):
        raise Unsafe(f"others than this user may write {place}")


def _refuse_foreign(place: Path) -> None:
    """Raise Unsafe for a file that this user did not write, or that others may write."""
    status = place.lstat()
    if status.st_uid != os.geteuid() or stat.S_ISLNK(status.st_mode) or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise Unsafe(f"others than this user may write {place}")


def _digest(content: str | bytes) -> str:
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()
