"""The readouts of a request and the options that they declare."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Annotated, Any

from pydantic import Field, StringConstraints, create_model
from pydantic_core import PydanticCustomError

from server.wire.fields import Strict, switch
from steering.protocol.forms import NO_SWITCH
from steering.protocol.readout import REGISTRY, readout_options


def _readouts(schema: dict[str, Any]) -> None:
    schema["anyOf"][0]["items"]["enum"] = list(REGISTRY)


class Diagnostics(Strict):
    """The readouts of an answer and their options; docs/readouts.md describes each of them."""

    # `diagnostics_form` adds the options of readouts and makes the models that validate requests.

    include: Annotated[list[str], Field(max_length=32)] | None = Field(None, json_schema_extra=_readouts)
    """The readouts; null for the cheap ones."""
    compare_to: Annotated[str, StringConstraints(max_length=64)] | None = None
    """The id of an earlier answer that included drift, from which the drift is measured."""


def asked(value: Any) -> Any:
    """Return the fields of `diagnostics`, as `switch` does; a list of readouts is told where it belongs."""
    if isinstance(value, list):
        known = dict.fromkeys(name for name in value if isinstance(name, str) and name in REGISTRY)
        example = json.dumps({"include": list(known) or ["focus"]})
        raise PydanticCustomError("switch", f"{NO_SWITCH}, such as {{example}}", {"example": example})
    return switch(value)


def diagnostics_form() -> type[Diagnostics]:
    """Return the model with a field for each option of the registered readouts.

    It is the same model as long as the registry stays the same.
    """
    form: type[Diagnostics] = _create_form(tuple(REGISTRY.values()))
    return form


@lru_cache(maxsize=16)
def _create_form(_registered: tuple[Any, ...]) -> type[Diagnostics]:
    fields: dict[str, Any] = {
        name: (
            option.kind,
            Field(option.at_rest, description=option.about, json_schema_extra=dict(option.schema) or None),
        )
        for name, option in readout_options().items()
        if option.written
    }
    plain = {"use_attribute_docstrings": False}
    return create_model(
        Diagnostics.__name__, __base__=Diagnostics, __doc__=Diagnostics.__doc__, __cls_kwargs__=plain, **fields
    )
