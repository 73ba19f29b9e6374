"""The guard of a request: what its answer is judged by, and what it is given again with."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from server.wire.fields import Integer, Strict
from steering import NumberCondition

MAX_CONDITIONS = 16
MAX_RETRIES = 3
FORM = f"^{NumberCondition.pattern}$"
"""The form of a comparison in a JSON schema."""


def _condition(value: Any) -> Any:
    if isinstance(value, bool | str):
        return value
    raise PydanticCustomError("condition", "must be true, false, or a sign and a number such as '< .5'")


Given = Annotated[
    Any,
    BeforeValidator(_condition),
    WithJsonSchema({"anyOf": [{"type": "boolean"}, {"type": "string", "pattern": FORM}]}),
]


Off = Literal[False]


def switched(value: Any) -> Any:
    """Return a guard as it was given, None for false, which switches it off."""
    return None if value is False else value


class Guard(Strict):
    """The answer is given again with `then` if a condition of `when` holds for it.

    The new answer is kept if no condition holds for it any more, else the first one.
    """

    when: Annotated[dict[str, Given], Field(min_length=1, max_length=MAX_CONDITIONS)]
    """Conditions by the number that they are about, such as `{"alarm": true, "focus_share": "< .5"}`.

    `/v1/models` lists all numbers. A number that an answer does not have meets no condition.
    """
    then: Annotated[dict[str, Any], Field(min_length=1, max_length=64)]
    """Fields of a request: interventions and sampling values, which replace the request's own; null switches one off."""
    match: Literal["any", "all"] = "any"
    """all: the answer is given again only if all conditions hold."""
    retries: Annotated[Integer, Field(ge=1, le=MAX_RETRIES)] = 1
    """Largest number of new answers."""
