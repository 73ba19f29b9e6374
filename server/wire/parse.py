"""From a JSON body to a request, and from what is wrong with it to one sentence."""

from __future__ import annotations

import re
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from server.errors import BadRequest
from steering import RequestError
from steering.protocol.wording import path_of, reason, sentence

MAX_VALUES = 65_536
"""Values in one body: millions of small ones take seconds to read, in which no other request gets on."""

Body = TypeVar("Body", bound=BaseModel)


def parse(body: bytes, model: type[Body], parts: int | None = None) -> Body:
    """The request in a JSON body; raises what `read` and `checked` raise."""
    return checked(read(body), model, parts)


def read(body: bytes) -> dict[str, Any]:
    """The object in a JSON body; raises BadRequest where there is none."""
    if _values(body) > MAX_VALUES:
        raise BadRequest(f"The body may hold at most {MAX_VALUES} values.", code="too_many_values")
    try:
        value = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        said = str(error).replace("unexpected end of hex escape", "half of a surrogate pair, or of an escape,")
        raise BadRequest(f"The body is not valid JSON: {said}.", code="invalid_json") from None
    if not isinstance(value, dict):
        raise BadRequest("The body must be a JSON object.", code="invalid_json")
    return value


def checked(value: dict[str, Any], model: type[Body], parts: int | None = None) -> Body:
    """The request that some fields make, with at most so many `parts` of messages; raises BadRequest with the name of the
    first field that is wrong."""
    try:
        return model.model_validate(value, context={"parts": parts})
    except ValidationError as error:
        raise explain(error) from None
    except RequestError as error:  # of an intervention's options, which word their own
        raise BadRequest(str(error), error.param, error.code) from None


def _values(body: bytes) -> int:
    """About how many values a JSON text holds, without reading it: as many as it has commas outside of strings."""
    strings = body.count(b'"') - body.count(b'\\"')
    if strings > 4 * MAX_VALUES:
        return strings // 4
    return body.count(b",") if body.count(b",") <= MAX_VALUES else _STRING.sub(b"", body).count(b",")


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
_FIELDS_OF = {
    "add_generation_prompt": "add_generation_prompt",
    "max_tokens": "max_tokens",
    "tool_choice": "tool_choice",
    "min_pixels": "min_pixels",
    "max_pixels": "max_pixels",
}
"""Fields to name for problems that lie between several."""


def explain(error: ValidationError) -> BadRequest:
    """The first problem in one sentence: which field, what is wrong, what is allowed."""
    problem = error.errors(include_url=False)[0]
    param = path_of(problem["loc"])
    kind, context, value = problem["type"], problem.get("ctx", {}), problem.get("input")
    if kind == "unknown_key":
        param = f"{param}.{context['key']}" if param else context["key"]
        message = f"'{param}' is unknown; allowed: {context['known']}."
    elif kind in ("nearly", "elsewhere"):
        param = f"{param}.{context['key']}" if param else context["key"]
        said = f"unknown; did you mean '{context['meant']}'?" if kind == "nearly" else "not supported by this server."
        message = f"'{param}' is {said}"
    elif kind == "missing":
        message = f"'{param}' is required."
    else:
        # Of a choice of words pydantic's own sentence is kept, which quotes them.
        said = problem["msg"].replace("Input should", "must") if kind == "literal_error" else reason(problem)
        param = param or _FIELDS_OF.get(kind, "")
        message = sentence(param, said, value, show=kind not in _SELF_EXPLAINING)
    return BadRequest(message, param or None, _CODES.get(kind, "invalid_value"))
