"""Holders of keys: those of the settings, which may do everything, and the named ones of a file that may change."""

from __future__ import annotations

import hmac
import logging
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from limits import RateLimitItem

from server.access.named import ROLES, NamedKey, digest_of, rate_of, read
from server.settings import SettingsError

log = logging.getLogger("helmsight")


@dataclass(frozen=True)
class Holder:
    """The holder of a key.

    `name` is the key's, None for one of the settings. `group` is the queue of its requests. `owner` marks what the key has
    stored, and stays the same as long as the key does. `rate` and `concurrent` limit chats per time and at once; None is
    unlimited. The key is accepted until `expires`, None for always.
    """

    name: str | None = None
    group: str = ""
    owner: str = ""
    roles: frozenset[str] = frozenset(ROLES)
    rate: RateLimitItem | None = None
    concurrent: int | None = None
    expires: datetime | None = None

    @classmethod
    def of(cls, key: NamedKey) -> Holder:
        """Return the holder of a named key."""
        rate = None if key.rate is None else rate_of(key.rate)
        group = owner = f"name:{key.name}"
        return cls(key.name, group, owner, frozenset(key.roles), rate, key.concurrent, key.expires)

    @property
    def expired(self) -> bool:
        """True if the key is no longer accepted."""
        return self.expires is not None and self.expires <= datetime.now(UTC)


OWNER = 16
"""Number of a digest's characters by which a key of the settings owns what it stores: too few to recover a random key."""

ANYONE = Holder()
"""The holder of every request if no key is required."""


class KeyRing:
    """The accepted keys as digests.

    The file of named keys is checked at each request, so that added and revoked keys take effect with the next one. If the
    file cannot be read, that is logged and the known keys stay valid.
    """

    def __init__(self, plain: Iterable[str] = (), named: str | None = None):
        digests = [digest_of(key) for key in plain]
        several = len(digests) > 1 or named is not None
        self._plain = tuple(
            (digest, Holder(group=f"digest:{digest}" if several else "", owner=f"digest:{digest[:OWNER]}"))
            for digest in digests
        )
        self._path = None if named is None else Path(named).expanduser()
        self._named: tuple[tuple[str, Holder], ...] = ()
        self._seen: tuple[int, ...] = ()
        self._lock = threading.Lock()
        if self._path is not None:
            self._seen = _state(self._path)
            self._named = checked(self._path)

    def __bool__(self) -> bool:
        """Return whether a key is required, which includes a file without keys."""
        return bool(self._plain) or self._path is not None

    def holder(self, key: str) -> Holder | None:
        """Return the holder of this key, which may have expired; it is compared with every known one in constant time."""
        digest = digest_of(key)
        matches = [holder for other, holder in (*self._plain, *self._current()) if hmac.compare_digest(digest, other)]
        return matches[0] if matches else None

    def expiries(self) -> Mapping[str, datetime]:
        """Return when named keys expire, by name; keys that never do and rotated ones are left out."""
        newest: dict[str, datetime | None] = {}
        for _, holder in self._current():
            newest.setdefault(str(holder.name), holder.expires)
        return {name: expires for name, expires in newest.items() if expires is not None}

    def _current(self) -> tuple[tuple[str, Holder], ...]:
        """Return the named keys as of now."""
        if self._path is None:
            return ()
        with self._lock:
            if (state := _state(self._path)) != self._seen:
                self._seen = state
                try:
                    self._named = checked(self._path)
                    log.info("%s: %d keys", self._path, count(self._named))
                except SettingsError as error:
                    log.error("%s; the %d keys read before stay valid", error, count(self._named))
            return self._named


def checked(path: Path) -> tuple[tuple[str, Holder], ...]:
    """Return (digest, holder) of each key of a file, rotated ones behind their successor; raises SettingsError."""
    try:
        return tuple(
            (digest, replace(Holder.of(key), expires=expires)) for key in read(path) for digest, expires in key.digests
        )
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise SettingsError(f"--named-key-file {path}: {reason}") from None


def count(keys: Iterable[tuple[str, Holder]]) -> int:
    """Return the number of named keys, rotated ones not counted."""
    return len({holder.name for _, holder in keys})


def _state(path: Path) -> tuple[int, ...]:
    """Return a state that changes with the file; empty if it does not exist."""
    try:
        status = path.stat()
    except OSError:
        return ()
    return status.st_mtime_ns, status.st_ino, status.st_size
