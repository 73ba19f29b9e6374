"""The file of named keys: the digest of each, never the key, with its roles and limits.

A key is 256 random bits, which cannot be guessed. A fast hash therefore hides it as well as a slow password hash would, and
does not cost each request a tenth of a second.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import tempfile
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Literal, get_args

from limits import RateLimitItem, parse_many
from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError, field_validator

Role = Literal["use", "journal", "vectors"]
ROLES: tuple[Role, ...] = get_args(Role)
NAME = "[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
FORMAT = "helmsight.keys/1"
PREFIX = "hs-"
BYTES = 32
MOST, LONGEST = 10**9, 366 * 86_400
"""Most chats of a rate, and the longest period in seconds."""


Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class RotatedKey(BaseModel):
    """A key that was replaced by rotation, and is still accepted until `expires`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    digest: Digest
    expires: AwareDatetime


class NamedKey(BaseModel):
    """A key as the file stores it.

    `roles` are its permissions, `rate` its chats per time, such as 60/minute, `concurrent` its chats at once, `created` a
    date. It is accepted until `expires`, None for always; `rotated` are the keys before it that are still accepted.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Annotated[str, Field(pattern=f"^{NAME}$")]
    digest: Digest
    roles: Annotated[tuple[Role, ...], Field(min_length=1)]
    rate: str | None = None
    concurrent: Annotated[int, Field(strict=True, ge=1)] | None = None
    created: str = ""
    expires: AwareDatetime | None = None
    rotated: tuple[RotatedKey, ...] = ()

    @property
    def digests(self) -> tuple[tuple[str, datetime | None], ...]:
        """Each accepted digest with the time until which it is accepted."""
        return (self.digest, self.expires), *((old.digest, old.expires) for old in self.rotated)

    @field_validator("rate")
    @classmethod
    def _a_rate(cls, text: str | None) -> str | None:
        if text is not None:
            rate_of(text)
        return text


def rate_of(text: str) -> RateLimitItem:
    """Parse a rate such as 60/minute, 1000/day or 5/10 seconds; raises ValueError."""
    try:
        (limit,) = parse_many(text)
    except ValueError:  # raised for several rates, too
        limit = None
    wrong = limit is None or not 0 < limit.amount <= MOST or not 0 < limit.get_expiry() <= LONGEST
    if limit is None or wrong or re.search(r"(/|per)\s*0", text):  # the library reads 0 as 1
        raise ValueError(f"a rate is written as 60/minute, 1000/day or 5/10 seconds; got {text[:64]!r}")
    return limit


def new_key(
    name: str,
    roles: Iterable[str] = (),
    rate: str | None = None,
    concurrent: int | None = None,
    expires: datetime | None = None,
) -> tuple[str, NamedKey]:
    """Return a new key, which is not stored, and its stored form; `roles` defaults to "use". Raises ValueError."""
    key = PREFIX + secrets.token_urlsafe(BYTES)
    today = datetime.now(UTC).date().isoformat()
    fields = {"rate": rate, "concurrent": concurrent, "created": today, "expires": expires}
    given_roles = tuple(dict.fromkeys(roles)) or ROLES[:1]
    try:
        return key, NamedKey.model_validate({"name": name, "digest": digest_of(key), "roles": given_roles, **fields})
    except ValidationError as error:
        raise ValueError(_first(error)) from None


def rotate(key: NamedKey, overlap: timedelta, expires: datetime | None) -> tuple[str, NamedKey]:
    """Return a new key with the name, roles and limits of an old one, and its stored form.

    The old key is accepted for `overlap` more, but never beyond its own expiry; keys that expired meanwhile are dropped.
    """
    now = datetime.now(UTC).replace(microsecond=0)
    secret, stored = new_key(key.name, key.roles, key.rate, key.concurrent, expires)
    ends = ((digest, now + overlap if end is None else min(end, now + overlap)) for digest, end in key.digests)
    rotated = tuple(RotatedKey(digest=digest, expires=end) for digest, end in ends if end > now)
    return secret, stored.model_copy(update={"rotated": rotated})


def digest_of(key: str) -> str:
    """Return the SHA-256 of a key in hexadecimal digits."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def read(path: Path) -> tuple[NamedKey, ...]:
    """Return the keys of a file; raises OSError, or ValueError that names the defect."""
    try:
        content = json.loads(path.read_bytes())
        if (
            not isinstance(content, dict)
            or content.get("format") != FORMAT
            or not isinstance(content.get("keys"), list)
        ):
            raise ValueError(f"it must have 'format': {FORMAT!r} and a list 'keys', as 'helmsight keys add' writes it")
        keys = tuple(NamedKey.model_validate(key) for key in content["keys"])
    except ValidationError as error:
        raise ValueError(_first(error)) from None
    digests = [digest for key in keys for digest, _ in key.digests]
    for what, values in (("name", [key.name for key in keys]), ("digest", digests)):
        if twice := next((value for value in values if values.count(value) > 1), None):
            raise ValueError(f"two keys have the {what} {twice!r}")
    return keys


def write(path: Path, keys: Iterable[NamedKey]) -> None:
    """Replace the file atomically; only its owner may read a new one."""
    mode = path.stat().st_mode & 0o777 if path.exists() else 0o600
    content = {"format": FORMAT, "keys": [_stored(key) for key in keys]}
    _replace(path, (json.dumps(content, indent=2) + "\n").encode(), mode)


def _stored(key: NamedKey) -> dict[str, object]:
    """Return a key as JSON without the fields that are at their defaults, which older versions do not know."""
    return key.model_dump(mode="json", exclude_none=True, exclude=None if key.rotated else {"rotated"})


def _replace(path: Path, data: bytes, mode: int) -> None:
    """Replace a file as `steering.files.write_atomically` does, without importing torch, which takes seconds."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, mode)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def _first(error: ValidationError) -> str:
    problem = error.errors(include_url=False)[0]
    field = next((str(part) for part in problem["loc"]), "a key")
    reason = problem["msg"].removeprefix("Value error, ").replace("Input should", "must")
    reason = re.sub(
        "^String should match pattern .*", f"must match {NAME}" if field == "name" else "is no digest", reason
    )
    return f"'{field}': {reason}"
