"""The functions that an answer may call, as a request gives them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from steering.errors import RequestError

NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
MAX_FUNCTIONS = 128


@dataclass(frozen=True)
class Tools:
    """The functions that an answer may call.

    Each is `{"type": "function", "function": {"name", "description", "parameters", "strict"}}`, where parameters are a JSON
    schema. By default the model calls any it likes or none; `required` makes it call at least one, or the one of that name.
    Without `parallel` a required call is a single one. Raises RequestError naming the wrong part.
    """

    functions: Sequence[Mapping[str, Any]]
    required: bool | str = False
    parallel: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.functions, Sequence) or not 0 < len(self.functions) <= MAX_FUNCTIONS:
            raise RequestError(f"'tools' must be a list of 1 to {MAX_FUNCTIONS} tools.", param="tools")
        for number, tool in enumerate(self.functions):
            _check(tool, f"tools[{number}]")
        if len(self.names) < len(self.functions):
            raise RequestError("'tools' must have unique function names.", param="tools")
        if isinstance(self.required, str) and self.required not in self.names:
            raise RequestError(
                f"'tool_choice' must name one of the tools ({', '.join(sorted(self.names))[:200]}).",
                param="tool_choice",
            )

    @property
    def names(self) -> frozenset[str]:
        """The names of the functions."""
        return frozenset(tool["function"]["name"] for tool in self.functions)

    @property
    def texts(self) -> dict[str, frozenset[str]]:
        """The parameters, by function, that are texts."""
        functions = (tool["function"] for tool in self.functions)
        properties_of = {
            function["name"]: (function.get("parameters") or {}).get("properties") or {} for function in functions
        }
        return {
            function: frozenset(name for name, schema in properties.items() if is_text(schema))
            for function, properties in properties_of.items()
            if isinstance(properties, Mapping)
        }

    @property
    def told(self) -> list[dict[str, Any]]:
        """The functions as the model is told of them, without keys about the enforcement of calls."""
        return [
            {**tool, "function": {name: value for name, value in tool["function"].items() if name != "strict"}}
            for tool in self.functions
        ]


def is_text(schema: Any) -> bool:
    """Return whether a schema describes texts alone."""
    if not isinstance(schema, Mapping):
        return False
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, Sequence) and values:
        return all(isinstance(value, str) for value in values)
    return bool(schema.get("type") == "string")


def _check(tool: Any, place: str) -> None:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping):
        raise RequestError(f"'{place}' must be {{'type': 'function', 'function': {{'name': ...}}}}.", param=place)
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise RequestError(
            f"'{place}.function.name' must be of 1 to 64 letters, digits, '_', '.' and '-'.",
            param=f"{place}.function.name",
        )
    if not isinstance(parameters, Mapping | None) or (parameters or {}).get("type", "object") != "object":
        at = f"{place}.function.parameters"
        raise RequestError(f"'{at}' must be a JSON schema of an object.", param=at)
    try:
        json.dumps(function, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"'{place}' cannot be written as JSON: {error}.", param=place) from error
