"""The file of named keys: of each its digest, never the key, with what it may do and how much.

A key is 256 random bits, which nobody guesses, so that a fast hash hides it as well as a slow one, which is for passwords,
would, and costs no request a tenth of a second.
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
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal, get_args

from limits import RateLimitItem, parse_many
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

Role = Literal["use", "journal", "vectors"]
ROLES: tuple[Role, ...] = get_args(Role)
NAME = "[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
FORMAT = "helmsight.keys/1"
PREFIX = "hs-"
BYTES = 32
MOST, LONGEST = 10**9, 366 * 86_400
"""Chats of a rate, and seconds that they are in."""


class NamedKey(BaseModel):
    """A key as the file has it. roles: what it is for. rate: chats in a time, such as 60/minute. concurrent: chats at once.
    created: a day."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Annotated[str, Field(pattern=f"^{NAME}$")]
    digest: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    roles: Annotated[tuple[Role, ...], Field(min_length=1)]
    rate: str | None = None
    concurrent: Annotated[int, Field(strict=True, ge=1)] | None = None
    created: str = ""

    @field_validator("rate")
    @classmethod
    def _a_rate(cls, text: str | None) -> str | None:
        if text is not None:
            rate_of(text)
        return text


def rate_of(text: str) -> RateLimitItem:
    """What is written as 60/minute, 1000/day or 5/10 seconds; raises ValueError."""
    try:
        (found,) = parse_many(text)
    except ValueError:  # also of several
        found = None
    wrong = found is None or not 0 < found.amount <= MOST or not 0 < found.get_expiry() <= LONGEST
    if found is None or wrong or re.search(r"(/|per)\s*0", text):  # which the library takes for 1
        raise ValueError(f"a rate is written as 60/minute, 1000/day or 5/10 seconds; got {text[:64]!r}")
    return found


def new_key(
    name: str, roles: Iterable[str] = (), rate: str | None = None, concurrent: int | None = None
) -> tuple[str, NamedKey]:
    """A new key, which is not kept, and what is kept of it; without `roles` it is for use. Raises ValueError."""
    key = PREFIX + secrets.token_urlsafe(BYTES)
    today = datetime.now(UTC).date().isoformat()
    fields = {"rate": rate, "concurrent": concurrent, "created": today}
    asked = tuple(dict.fromkeys(roles)) or ROLES[:1]
    try:
        return key, NamedKey.model_validate({"name": name, "digest": digest_of(key), "roles": asked, **fields})
    except ValidationError as error:
        raise ValueError(_first(error)) from None


def digest_of(key: str) -> str:
    """SHA-256 in hexadecimal digits."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def read(path: Path) -> tuple[NamedKey, ...]:
    """The keys of a file; raises OSError, or ValueError that says what is wrong with it."""
    try:
        content = json.loads(path.read_bytes())
        if (
            not isinstance(content, dict)
            or content.get("format") != FORMAT
            or not isinstance(content.get("keys"), list)
        ):
            raise ValueError(f"it must have 'format': {FORMAT!r} and a list 'keys', as 'helmsight keys add' writes it")
        keys = tuple(NamedKey.model_validate(one) for one in content["keys"])
    except ValidationError as error:
        raise ValueError(_first(error)) from None
    for what in ("name", "digest"):
        found = [getattr(key, what) for key in keys]
        if twice := next((one for one in found if found.count(one) > 1), None):
            raise ValueError(f"two keys have the {what} {twice!r}")
    return keys


def write(path: Path, keys: Iterable[NamedKey]) -> None:
    """Replace the file, at once and whole; one that is new only its owner may read."""
    mode = path.stat().st_mode & 0o777 if path.exists() else 0o600
    content = {"format": FORMAT, "keys": [key.model_dump(exclude_none=True) for key in keys]}
    _replace(path, (json.dumps(content, indent=2) + "\n").encode(), mode)


def _replace(path: Path, data: bytes, mode: int) -> None:
    """As `steering.files.write_atomically`, which brings torch: seconds, in which a command about keys does nothing."""
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
    said = problem["msg"].removeprefix("Value error, ").replace("Input should", "must")
    said = re.sub("^String should match pattern .*", f"must match {NAME}" if field == "name" else "is no digest", said)
    return f"'{field}': {said}"
