"""The wording of validation errors in one sentence: the field, what it must be, and its value. Pydantic checks."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from numbers import Integral, Real
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from steering.errors import RequestError

MAX_SHOWN = 64
"""Maximum length of each quotation of a client's text in a message, in characters."""
_RANGES = {"greater_than", "greater_than_equal", "less_than", "less_than_equal"}


def check_name(name: str, what: str) -> None:
    """Raise ValueError where a name is not valid in requests, metrics and the journal alike."""
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or name == "none":
        raise ValueError(f"{what} must be of a-z, 0-9 and _, and not 'none'; got {name!r}.")


def path_of(location: Sequence[int | str]) -> str:
    """Return messages[0].content[1].text for ("messages", 0, "content", "<parts>", 1, "text")."""
    path = ""
    for item in location:
        if isinstance(item, int):
            path += f"[{item}]"
        elif not item.startswith(("<", "[")):
            path += f".{cut(item)}" if path else cut(item)
    return path


def cut(text: str) -> str:
    """Return a client's text, cut to the length that a message may quote."""
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def shown(value: Any) -> str:
    """Return a client's value, cut to the length that a message may quote."""
    return cut(repr(value))


def limits(field: FieldInfo) -> str | None:
    """Return the range of a number in words; None where it has none."""
    bounds: dict[str, Any] = {}
    for limit in field.metadata:
        bounds |= {
            name: value for name in ("ge", "gt", "le", "lt") if (value := getattr(limit, name, None)) is not None
        }
    if "ge" in bounds and "le" in bounds:
        return f"from {bounds['ge']:g} to {bounds['le']:g}"
    words = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    return " and ".join(f"{words[name]} {value:g}" for name, value in bounds.items()) or None


def reason(problem: Any, field: FieldInfo | None = None) -> str:
    """Return what a value must be: pydantic's message, or the whole range of the field that the value is outside of."""
    message = re.sub(r"a valid dictionary or (instance|object) .*", "an object", str(problem["msg"]))
    message = re.sub(
        r" be a valid (\w+)", lambda kind: f" be {'an' if kind[1][0] in 'aeiou' else 'a'} {kind[1]}", message
    )
    if problem["type"] == "dict_type":
        return "must be an object"
    if problem["type"] == "literal_error":
        return "must be one of " + problem["ctx"]["expected"].replace("'", "").replace(" or ", ", ")
    if problem["type"] == "too_short":
        return f"must have at least {counted(problem['ctx']['min_length'], 'item')}"
    if problem["type"] == "too_long":
        return f"must have at most {counted(problem['ctx']['max_length'], 'item')}"
    if problem["type"] in _RANGES and field is not None and (range_ := limits(field)):
        return f"must be {range_}"
    for thing in ("Input", "List", "Dictionary", "String"):
        message = message.replace(f"{thing} should", "must")
    return message


def counted(count: int, thing: str) -> str:
    """Return a number of things: 1 image, 2 images."""
    return f"{count} {thing}{'' if count == 1 else 's'}"


def sentence(param: str, statement: str, value: Any, show: bool = True) -> str:
    """Return the message about a field, with its value where that is short."""
    text = repr(value) if show and isinstance(value, (bool, int, float, str)) else ""
    got = f"; got {text}" if 0 < len(text) <= MAX_SHOWN else ""
    return (
        f"'{param}' {statement}{got}."
        if statement.startswith(("must", "is ", "cannot "))
        else f"'{param}': {statement}{got}."
    )


def must(param: str, requirement: str, value: Any) -> RequestError:
    """Return the error for a value of the wrong kind; `requirement` names the right one."""
    got = f"{len(value)} bytes" if isinstance(value, bytes) else shown(value)
    return RequestError(f"'{param}' must {requirement}; got {got}.", param=param)


def is_whole(value: Any) -> bool:
    """Return True for an integer, except True and False."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Return True for a real number, except True and False."""
    return isinstance(value, Real) and not isinstance(value, bool)


def whole_numbers(param: str, values: Any) -> tuple[int, ...]:
    """Return a list of integers as a tuple; raise RequestError where it is not one."""
    if not isinstance(values, Sequence) or not all(map(is_whole, values)):
        raise must(param, "be a list of whole numbers", values)
    return tuple(values)


def unknown(param: str, allowed: str) -> RequestError:
    """Return the error for an unknown key."""
    return RequestError(f"'{param}' is unknown; allowed: {allowed}.", param=param, code="unknown_parameter")


def names(model: type[BaseModel]) -> list[str]:
    """Return the keys of an object as a client writes them."""
    return [field.alias or name for name, field in model.model_fields.items()]


def refused(error: ValidationError, model: type[BaseModel], at: Callable[[str], str]) -> RequestError:
    """Return the error for an object's first problem; `at(key)` is the name of a key in messages."""
    problem = error.errors(include_url=False)[0]
    key = path_of(problem["loc"])
    param = at(key)
    if problem["type"] == "extra_forbidden":
        return unknown(param[:256], ", ".join(names(model)))
    if problem["type"] == "missing":
        return RequestError(f"'{param}' is required.", param=param, code="missing_required_parameter")
    by_alias = {field.alias or name: field for name, field in model.model_fields.items()} | model.model_fields
    statement = reason(problem, by_alias.get(key))
    return RequestError(sentence(param, statement, problem.get("input")), param=param)
