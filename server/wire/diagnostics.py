"""What a request may say of its readouts."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, StringConstraints
from pydantic_core import PydanticCustomError

from server.wire.fields import Flag, Integer, Strict
from steering import Diagnose
from steering.protocol.readout import DRIFT_ROWS, REGISTRY, RESIDUAL_ROWS, SPANS


class LastLayers(Strict):
    """Layers counted from the end."""

    last: Integer
    """How many."""


def _layers(value: Any) -> Any:
    numbers = isinstance(value, list) and all(type(item) is int for item in value)
    last = isinstance(value, dict) and value.keys() == {"last"} and type(value["last"]) is int
    if value != "all" and not numbers and not last:
        raise PydanticCustomError("layers", "must be 'all', a list of layer numbers or {{'last': how many}}")
    return value


def _readouts(schema: dict[str, Any]) -> None:
    schema["anyOf"][0]["items"]["enum"] = list(REGISTRY)


class Diagnostics(Strict):
    """Which readouts stand beside the answer, and how they are made; docs/readouts.md says what each of them is."""

    include: Annotated[list[str], Field(max_length=32)] | None = Field(None, json_schema_extra=_readouts)
    """The readouts; null for the cheap ones."""
    layers: Annotated[Any, PlainValidator(_layers, json_schema_input_type=Literal["all"] | list[int] | LastLayers)] = (
        "all"
    )
    """Those of the patch maps, numbered from 0."""
    heatmaps: Flag = Diagnose.heatmaps
    """Lay the patch maps over the pictures, as PNG."""
    causal: Flag = Diagnose.causal
    """Remove from token activation maps what earlier tokens activate."""
    discount_sinks: Flag = Diagnose.discount_sinks
    """Add patch maps less what places attract whatever they show."""
    target_image: Integer | None = Field(Diagnose.target_image, json_schema_extra={"minimum": 1})
    """The picture that should be looked at, counted from 1: the focus says whether it was."""
    spans: str = Field(Diagnose.spans, json_schema_extra={"enum": list(SPANS)})
    """What counts as system and as user text in the decay: the whole prompt, or the messages' texts alone."""
    residual_rows: str = Field(Diagnose.residual_rows, json_schema_extra={"enum": list(RESIDUAL_ROWS)})
    """Which rows the residual readout is about."""
    drift_rows: str = Field(Diagnose.drift_rows, json_schema_extra={"enum": list(DRIFT_ROWS)})
    """What stands for an answer in the drift: the mean over its rows, or the last one."""
    compare_to: Annotated[str, StringConstraints(max_length=64)] | None = None
    """The id of an earlier answer that included drift, to measure the drift from."""
