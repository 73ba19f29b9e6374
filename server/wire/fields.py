"""Types of values that several fields have."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from steering.protocol.forms import NO_SWITCH
from steering.protocol.intervention_spec import LAYERS
from steering.protocol.wording import names

Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Bits64 = Annotated[int, Field(strict=True, ge=-(2**63), le=2**63 - 1)]
Integer = Annotated[Bits64, WithJsonSchema({"type": "integer"})]
"""A 64-bit integer, whose bounds are left out of the schema."""
Pixels = Annotated[int, Field(strict=True, ge=1, le=2**31)]
Flag = Annotated[bool, Field(strict=True)]
Layer = Annotated[Bits64, WithJsonSchema({"type": "integer", "minimum": 0, LAYERS: -1})]
Layers = Annotated[list[Layer], Field(max_length=1024)]

MAX_FORCED = 2**17
"""Largest number of forced tokens, whatever the model's context."""


def _forced(value: Any) -> Any:
    """Check an answer's text or token numbers in one place, since a union would name both of its kinds."""
    if value is None or isinstance(value, str):
        return value
    numbers = isinstance(value, list) and 0 < len(value) <= MAX_FORCED
    if not numbers or any(type(token) is not int or not 0 <= token < 2**31 for token in value):
        raise PydanticCustomError("forced", "must be a text, or a list of token numbers")
    return value


_TokenNumber = Annotated[int, Field(ge=0, lt=2**31)]
Forced = Annotated[
    str | Annotated[list[_TokenNumber], Field(min_length=1, max_length=MAX_FORCED)], BeforeValidator(_forced)
]


class Strict(BaseModel):
    """An object of Helmsight's own, whose unknown keys are errors that list the known ones."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, value: Any) -> Any:
        if isinstance(value, dict):
            known_names = names(cls)
            for key in value:
                if key not in known_names:
                    allowed = ", ".join(known_names)
                    raise PydanticCustomError(
                        "unknown_key", "unknown; allowed: {known}", {"key": key[:64], "known": allowed}
                    )
        return value


def switch(value: Any) -> Any:
    """Return an object's fields; true stands for all defaults, false for off."""
    if value is None or value is False:
        return None
    if value is True:
        return {}
    if not isinstance(value, dict):
        raise PydanticCustomError("switch", NO_SWITCH)
    return value
