"""Reading a request from a JSON body, and wording its errors in one sentence."""

from __future__ import annotations

import re
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from server.errors import BadRequest
from steering import RequestError
from steering.protocol.request import RANGES, allowed
from steering.protocol.wording import path_of, reason, sentence

MAX_VALUES = 65_536
"""Largest number of values in a body.

Millions of small ones take seconds to read, during which no other request proceeds.
"""

Body = TypeVar("Body", bound=BaseModel)


def parse(body: bytes, model: type[Body], parts: int | None = None) -> Body:
    """Return the request in a JSON body; raises as `read` and `checked` do."""
    return checked(read(body), model, parts)


def read(body: bytes) -> dict[str, Any]:
    """Return the object in a JSON body; raises BadRequest if there is none."""
    if _values(body) > MAX_VALUES:
        raise BadRequest(f"The body may hold at most {MAX_VALUES} values.", code="too_many_values")
    try:
        value = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        message = str(error).replace("unexpected end of hex escape", "half of a surrogate pair, or of an escape,")
        raise BadRequest(f"The body is not valid JSON: {message}.", code="invalid_json") from None
    if not isinstance(value, dict):
        raise BadRequest("The body must be a JSON object.", code="invalid_json")
    return value


def checked(value: dict[str, Any], model: type[Body], parts: int | None = None) -> Body:
    """Return the request with these fields; raises BadRequest naming the first invalid field.

    `parts` limits the number of message parts.
    """
    try:
        return model.model_validate(value, context={"parts": parts})
    except ValidationError as error:
        raise explain(error) from None
    except RequestError as error:  # an intervention's options word their own errors
        raise BadRequest(str(error), error.param, error.code) from None


def _values(body: bytes) -> int:
    """Return the approximate number of values in a JSON text: of commas and opening brackets outside of strings."""
    # Looking for one byte is a hundred times faster than counting two, and images are megabytes.
    strings = body.count(b'"') - (body.count(b'\\"') if b"\\" in body else 0)
    if strings > 4 * MAX_VALUES:
        return strings // 4
    begun = sum(map(body.count, _BEGIN))
    return begun if begun <= MAX_VALUES else sum(map(_STRING.sub(b"", body).count, _BEGIN))


_BEGIN = (b",", b"[", b"{")
"""The bytes before each value but the first."""
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)


_CODES = {
    "missing": "missing_required_parameter",
    "unknown_key": "unknown_parameter",
    "nearly": "unknown_parameter",
    "elsewhere": "unsupported_value",
    "unsupported": "unsupported_value",
    "part_type": "unsupported_value",
    "too_many_parts": "too_many_parts",
}
_SELF_EXPLAINING = {"unsupported", "part_type", "role", "too_many_parts"}
_ELSEWHERE = {"extra_body": "an argument of SDKs for Python; put its fields in the request itself."}
"""What is said of a field that this server lacks, where there is more to say."""
_FIELDS_OF = {
    "add_generation_prompt": "add_generation_prompt",
    "max_tokens": "max_tokens",
    "tool_choice": "tool_choice",
    "min_pixels": "min_pixels",
    "max_pixels": "max_pixels",
}
"""Fields to name for errors that concern several."""


def explain(error: ValidationError) -> BadRequest:
    """Return an error that words the first problem in one sentence: the field, the problem, the allowed values."""
    problem = error.errors(include_url=False)[0]
    param = path_of(problem["loc"])
    kind, context, value = problem["type"], problem.get("ctx", {}), problem.get("input")
    if kind == "unknown_key":
        param = f"{param}.{context['key']}" if param else context["key"]
        message = f"'{param}' is unknown; allowed: {context['known']}."
    elif kind in ("nearly", "elsewhere"):
        param = f"{param}.{context['key']}" if param else context["key"]
        statement = (
            f"unknown; did you mean '{context['meant']}'?"
            if kind == "nearly"
            else _ELSEWHERE.get(context["key"], "not supported by this server.")
        )
        message = f"'{param}' is {statement}"
    elif kind == "missing":
        message = f"'{param}' is required."
    else:
        # pydantic's sentence is kept for a choice of words, since it quotes them.
        statement = problem["msg"].replace("Input should", "must") if kind == "literal_error" else reason(problem)
        if param in RANGES and kind in ("greater_than_equal", "less_than_equal"):
            statement = f"must be {allowed(param, value)}"
        param = param or _FIELDS_OF.get(kind, "")
        if (field := context.get("of_field")) is not None:  # of an object, about one of its fields
            param = f"{param}.{field}" if param else str(field)
        message = sentence(param, statement, value, show=kind not in _SELF_EXPLAINING)
    return BadRequest(message, param or None, _CODES.get(kind, "invalid_value"))
