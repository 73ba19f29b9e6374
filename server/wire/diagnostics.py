"""What a request may say of its readouts."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, StringConstraints, field_validator
from pydantic_core import PydanticCustomError

from server.wire.fields import Flag, Integer, Strict
from steering import Diagnose


class Diagnostics(Strict):
    """Which readouts; None of `include` means the cheap ones."""

    include: Annotated[list[str], Field(max_length=32)] | None = None
    layers: Any = "all"
    heatmaps: Flag = Diagnose.heatmaps
    causal: Flag = Diagnose.causal
    discount_sinks: Flag = Diagnose.discount_sinks
    target_image: Integer | None = Diagnose.target_image
    spans: str = Diagnose.spans
    residual_rows: str = Diagnose.residual_rows
    drift_rows: str = Diagnose.drift_rows
    compare_to: Annotated[str, StringConstraints(max_length=64)] | None = None

    @field_validator("layers")
    @classmethod
    def _all_or_numbers(cls, value: Any) -> Any:
        numbers = isinstance(value, list) and all(type(item) is int for item in value)
        last = isinstance(value, dict) and value.keys() == {"last"} and type(value["last"]) is int
        if value != "all" and not numbers and not last:
            raise PydanticCustomError("layers", "must be 'all', a list of layer numbers or {{'last': how many}}")
        return value
