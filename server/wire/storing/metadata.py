"""Metadata of a completion: OpenAI's bounds, and the keys among them whose values mean something here."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, StringConstraints
from pydantic_core import PydanticCustomError

MAX_METADATA = 16
MAX_METADATA_KEY = 64
MAX_METADATA_VALUE = 512

TRUTHS = frozenset({"answer_correct"})
"""Keys of metadata that say what is true of an answer, so that their values are checked."""


def check_metadata(value: Any) -> Any:
    """Check metadata against OpenAI's bounds; error messages omit keys, which the client chose and may be long."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise PydanticCustomError("metadata", "must be an object of strings")
    if len(value) > MAX_METADATA:
        raise PydanticCustomError(
            "metadata", "must have at most {most} keys; got {count}", {"most": MAX_METADATA, "count": len(value)}
        )
    for key, item in value.items():
        if len(key) > MAX_METADATA_KEY:
            raise PydanticCustomError(
                "metadata", "must have keys of at most {most} characters", {"most": MAX_METADATA_KEY}
            )
        if not isinstance(item, str) or len(item) > MAX_METADATA_VALUE:
            raise PydanticCustomError(
                "metadata",
                "must have strings of at most {most} characters as values; '{key}' has another",
                {"most": MAX_METADATA_VALUE, "key": key},
            )
    for key in TRUTHS & value.keys():
        if value[key] not in ("true", "false"):
            raise PydanticCustomError(
                "metadata", "must have 'true' or 'false' as the value of '{key}', in lower case", {"key": key}
            )
    return value


MetadataForm = Annotated[
    dict[
        Annotated[str, StringConstraints(max_length=MAX_METADATA_KEY)],
        Annotated[str, StringConstraints(max_length=MAX_METADATA_VALUE)],
    ],
    Field(max_length=MAX_METADATA),
]

Metadata = Annotated[dict[str, str] | None, BeforeValidator(check_metadata, json_schema_input_type=MetadataForm | None)]


def truth(metadata: dict[str, str] | None, key: str) -> bool | None:
    """Return the value of one of `TRUTHS` in checked metadata, None where it is missing."""
    return {"true": True, "false": False}.get((metadata or {}).get(key, ""))
