"""The fields of a request that ask for interventions: those of the registry, as `steering.protocol.forms` reads them. Only
steering has a form of its own here, because its vectors are names that the server looks up."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, PlainValidator, WrapValidator

from server.wire.fields import Strict, switch
from server.wire.steering import SteeringForm
from steering import Asked, Options, Steering
from steering.protocol.asked import LAYERS
from steering.protocol.forms import KIND, Form, forms

OWN_FORMS: dict[tuple[str, ...], type[Strict]] = {Steering.path: SteeringForm}
"""By path, the forms of interventions that are not written as their options; `server.requests.resolve` knows what becomes of
them."""


@dataclass(frozen=True)
class Given:
    """What a request gives for one of these fields. sent: as it was written, True for all defaults. asked: the
    interventions; instead of them form: one of `OWN_FORMS`."""

    sent: Any
    asked: tuple[Options, ...] = ()
    form: BaseModel | None = None

    @property
    def nothing(self) -> Any:
        """What is reported as applied where nothing was: an empty list of vectors, else None."""
        return None if self.form is None else []


def fields() -> dict[str, Any]:
    """By the name of each field that asks for interventions, the annotation that reads it, into `Given`.

    One that neither has `Options` nor stands in `OWN_FORMS` is for callers of the library alone.
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
        name: Annotated[Given | None, PlainValidator(partial(_given, form), json_schema_input_type=form.written | None)]
        for name, form in forms().items()
    }


@lru_cache(maxsize=256)
def schema(kind: type[Asked], layers: int) -> dict[str, Any] | None:
    """The JSON schema of what may be asked of an intervention of a model with so many layers, to be read only; None for one
    that requests have no field for."""
    form: type[BaseModel] | None = OWN_FORMS.get(kind.path)
    if form is None and issubclass(kind, Options):
        form = kind
    if form is None:
        return None
    found: dict[str, Any] = bounded(form.model_json_schema(by_alias=True), layers)
    if kind.kind:
        found["properties"] = {KIND: {"const": kind.kind}, **found["properties"]}
        found["required"] = [KIND, *found.get("required", ())]
    return found


def bounded(schema: Any, layers: int | None) -> Any:
    """A schema in which a bound that follows from the model's number of layers is that number, or none where it is not
    known."""
    if isinstance(schema, list):
        return [bounded(one, layers) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: bounded(value, layers) for key, value in schema.items() if key != LAYERS}
    return found | ({"maximum": layers + schema[LAYERS]} if LAYERS in schema and layers is not None else {})


def _given(form: Form, value: Any) -> Given | None:
    return None if value is None or value is False else Given(value or True, form.read(value))


def _form_given(value: Any, validate: Any) -> Given | None:
    form = validate(value)
    return None if form is None else Given(value or True, form=form)
