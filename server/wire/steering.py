"""The wire form of steering: vectors by name, which the server looks up."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from server.wire.fields import Flag, Layers, Number, Strict


class Apply(Strict):
    tokens: str = "all"


ALIASES = ("scale", "strength", "coefficient")


def _with_aliases(schema: dict[str, Any]) -> None:
    schema["properties"] |= dict.fromkeys(ALIASES, schema["properties"]["scale"])
    schema["additionalProperties"] = False


class NamedVector(Strict):
    """One vector of the long form; `scale` is the signed coefficient c."""

    model_config = ConfigDict(json_schema_extra=_with_aliases)

    name: str
    scale: Number = 1.0
    layers: Layers | None = None
    apply: Apply = Apply()

    @model_validator(mode="before")
    @classmethod
    def _aliases(cls, value: Any) -> Any:
        if isinstance(value, dict):
            given = [key for key in ALIASES if key in value]
            if len(given) > 1:
                raise PydanticCustomError("aliases", "scale, strength and coefficient are the same; give one of them")
            if given and given[0] != "scale":
                value = {("scale" if key == given[0] else key): item for key, item in value.items()}
        return value


class AutoForm(Strict):
    """How `toward: "auto"` finds the way."""

    criterion: Literal["drop", "surprise"] = "drop"
    bound: Number | None = None
    one_degraded: Flag = False


class SteeringForm(Strict):
    """Either the short form (vector, toward, strength) or the long one (vectors)."""

    vector: str = "modality-preference"
    toward: Literal["vision", "text", "auto"] = "vision"
    auto: AutoForm | None = None
    strength: Annotated[Number, Field(json_schema_extra={"minimum": 0})] = 1.0
    layers: Layers | None = None
    apply: Apply = Apply()
    vectors: Annotated[list[NamedVector], Field(max_length=64)] | None = None

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        mixed = sorted(self.model_fields_set - {"vectors"})
        if self.vectors is not None and mixed:
            raise PydanticCustomError(
                "forms",
                "'vectors' cannot be combined with {keys}; set them for each vector",
                {"keys": ", ".join(mixed)},
            )
        if self.auto is not None and self.toward != "auto":
            raise PydanticCustomError(
                "auto", "'auto' goes with 'toward': 'auto', not with '{way}'", {"way": self.toward}
            )
        return self
