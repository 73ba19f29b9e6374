"""The fields of a request that request interventions, read from the registry by `steering.protocol.forms`.

Only steering has a form of its own here, because its vectors are names that the server looks up.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, PlainValidator, WrapValidator

from server.wire.fields import Strict, switch
from server.wire.steering import SteeringForm
from steering import InterventionSpec, Options, Steering
from steering.protocol.forms import KIND, Form, forms
from steering.protocol.intervention_spec import LAYERS

OWN_FORMS: dict[tuple[str, ...], type[Strict]] = {Steering.path: SteeringForm}
"""Forms by path of interventions that are not written as their options; `server.requests.resolve` handles them."""


@dataclass(frozen=True)
class Given:
    """The given value of one field of interventions.

    `sent` is the value as written, True for all defaults. `asked` holds the interventions; `form` is one of `OWN_FORMS`
    instead.
    """

    sent: Any
    asked: tuple[Options, ...] = ()
    form: BaseModel | None = None

    @property
    def nothing(self) -> Any:
        """The value of `applied` if nothing was applied: an empty list of vectors, else None."""
        return None if self.form is None else []


def fields() -> dict[str, Any]:
    """Return, for each field that requests interventions, the annotation that reads it into `Given`.

    An intervention that neither has `Options` nor an entry in `OWN_FORMS` is for callers of the library only.
    """
    own = {
        path[0]: Annotated[
            form | None,
            BeforeValidator(switch, json_schema_input_type=bool | form | None),
            WrapValidator(_form_given, json_schema_input_type=bool | form | None),
        ]
        for path, form in OWN_FORMS.items()
    }
    return own | {
        name: Annotated[
            Given | None, PlainValidator(partial(_parsed, form), json_schema_input_type=form.written | None)
        ]
        for name, form in forms().items()
    }


@lru_cache(maxsize=256)
def schema(kind: type[InterventionSpec], layers: int) -> dict[str, Any] | None:
    """Return the JSON schema of an intervention's options for a model with so many layers.

    The result is read-only. None for an intervention that requests have no field for.
    """
    form: type[BaseModel] | None = OWN_FORMS.get(kind.path)
    if form is None and issubclass(kind, Options):
        form = kind
    if form is None:
        return None
    options_schema: dict[str, Any] = bounded(form.model_json_schema(by_alias=True), layers)
    if kind.kind:
        options_schema["properties"] = {KIND: {"const": kind.kind}, **options_schema["properties"]}
        options_schema["required"] = [KIND, *options_schema.get("required", ())]
    return options_schema


def bounded(schema: Any, layers: int | None) -> Any:
    """Return a schema with the model's number of layers as the bound of layers, without that bound if unknown."""
    if isinstance(schema, list):
        return [bounded(item, layers) for item in schema]
    if not isinstance(schema, dict):
        return schema
    copy = {key: bounded(value, layers) for key, value in schema.items() if key != LAYERS}
    return copy | ({"maximum": layers + schema[LAYERS]} if LAYERS in schema and layers is not None else {})


def _parsed(form: Form, value: Any) -> Given | None:
    return None if value is None or value is False else Given(value or True, form.read(value))


def _form_given(value: Any, validate: Any) -> Given | None:
    form = validate(value)
    return None if form is None else Given(value or True, form=form)
