"""The wire form of steering: vectors by name, which the server looks up."""

from __future__ import annotations

from itertools import combinations
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from server.wire.fields import Flag, Integer, Layers, Number, Strict
from steering import Until
from steering.protocol.intervention_spec import TokenWord, vector_names
from steering.protocol.recorder import gauges
from steering.vectors.option import Vector


class Apply(Strict):
    """The tokens that a vector is added to."""

    tokens: TokenWord = "all"
    """all, prompt, generated, image or text tokens, or `image:2` for those of the second image only."""


ALIASES = ("strength", "coefficient")
"""Alternative names of `scale`."""


def _with_aliases(schema: dict[str, Any]) -> None:
    scale = schema["properties"]["scale"]
    aliases = {name: {**scale, "title": name.title(), "description": "As `scale`."} for name in ALIASES}
    for alias in aliases.values():
        del alias["default"]
    schema["properties"] |= aliases
    schema["not"] = {"anyOf": [{"required": list(pair)} for pair in combinations(("scale", *ALIASES), 2)]}


class NamedVector(Strict):
    """A vector of the long form."""

    model_config = ConfigDict(json_schema_extra=_with_aliases)

    name: Vector
    scale: Number = 1.0
    """The signed coefficient c; positive values push in the measured direction.

    For a modality preference that is toward text.
    """
    layers: Layers | None = None
    """Layers, numbered from 0; the vector's own by default."""
    apply: Apply = Apply()

    @model_validator(mode="before")
    @classmethod
    def _aliases(cls, value: Any) -> Any:
        if isinstance(value, dict):
            present = [key for key in ("scale", *ALIASES) if key in value]
            if len(present) > 1:
                raise PydanticCustomError("aliases", "scale, strength and coefficient are the same; give one of them")
            if present and present[0] != "scale":
                value = {("scale" if key == present[0] else key): item for key, item in value.items()}
        return value


class AutoForm(Strict):
    """The method by which `toward: "auto"` decides the direction."""

    criterion: Literal["drop", "surprise"] = "drop"
    """drop: toward the modality that the answer relies on. surprise: away from a text context that surprises the model."""
    bound: Number | None = Field(None, json_schema_extra={"minimum": 0})
    """The bound of surprise in nats; the model's calibrated one by default."""
    one_degraded: Flag = False
    """With surprise: one of the two modalities is known to be damaged."""


class GateForm(Strict):
    """A condition on the state of the prompt's last token, before anything is changed."""

    vector: Vector
    """A name that `/v1/steering/vectors` lists."""
    layer: Annotated[Integer, Field(ge=0)] | None = None
    """The layer of the state; by default that for which the vector was calibrated as a condition, or its first one."""
    above: Number | None = None
    """The measure must be above this; by default the threshold that was calibrated, at its layer and measure."""
    below: Number | None = None
    """The measure must be below this."""
    measure: Literal["cosine", "projection", "probe", "feature"] | None = None
    """cosine: of the state and the vector. projection: the length of the state along the vector, its activation. probe: the
    probability of a logistic probe, whose weights the vector is. feature: the activation of a sparse dictionary's feature,
    which is the measure of these vectors, above 0, by default.

    By default that of the calibration as a condition, or cosine.
    """

    @model_validator(mode="after")
    def _one_bound(self) -> Self:
        if self.above is not None and self.below is not None:
            raise PydanticCustomError("bounds", "must have one of 'above' and 'below'")
        return self


def _gauged(schema: dict[str, Any]) -> None:
    registered = gauges()
    schema["properties"] = {
        name: {"type": "number", "minimum": gauge.low, "maximum": gauge.high, "description": gauge.about}
        for name, gauge in registered.items()
    }
    schema |= {"additionalProperties": False, "minProperties": 1, "maxProperties": 1}


Target = Annotated[dict[str, Number], Field(min_length=1, max_length=1, json_schema_extra=_gauged)]


class ControlForm(Strict):
    """The controller of a strength that follows a number."""

    gain: Number = Field(1.0, json_schema_extra={"minimum": 0, "maximum": 100})
    """The share of the range by which the strength moves at each token for a number that lies 1 off its target."""
    smoothing: Number = Field(0.25, json_schema_extra={"minimum": 0.01, "maximum": 1})
    """The weight of the latest token in the running mean that is compared with the target; 1 is that token alone."""
    band: Number = Field(0.02, json_schema_extra={"minimum": 0, "maximum": 1})
    """The distance from the target within which the strength stays."""
    range: Annotated[list[Number], Field(min_length=2, max_length=2)] | None = None
    """The least and the greatest strength; by default 0 and the greatest calibrated one of the vector."""


MAX_GATES = 16
"""The most conditions of a gate, those of all groups together."""

Gates = Annotated[list[GateForm], Field(min_length=1, max_length=MAX_GATES)]


class GatesForm(Strict):
    """A group of conditions: all of them, or any."""

    all: Gates | None = None
    any: Gates | None = None

    @model_validator(mode="after")
    def _one_list(self) -> Self:
        if (self.all is None) == (self.any is None):
            raise PydanticCustomError("gates", "must have one of 'all' and 'any'")
        return self

    @property
    def terms(self) -> list[GateForm]:
        """The conditions of the group."""
        return self.all or self.any or []


def _gate_kind(value: Any) -> str:
    grouped = isinstance(value, GatesForm | GroupsForm) or (
        isinstance(value, dict) and bool(value.keys() & {"all", "any"})
    )
    return "<several>" if grouped else "<one>"


Member = Annotated[
    Annotated[GateForm, Tag("<one>")] | Annotated[GatesForm, Tag("<several>")], Discriminator(_gate_kind)
]
Members = Annotated[list[Member], Field(min_length=1, max_length=MAX_GATES)]


class GroupsForm(Strict):
    """Several conditions and groups of conditions: all of them, or any."""

    all: Members | None = None
    any: Members | None = None

    @model_validator(mode="after")
    def _one_list(self) -> Self:
        if (self.all is None) == (self.any is None):
            raise PydanticCustomError("gates", "must have one of 'all' and 'any'")
        if len(self.conditions) > MAX_GATES:
            raise PydanticCustomError("gates", "must have at most {most} conditions in all", {"most": MAX_GATES})
        return self

    @property
    def terms(self) -> list[GateForm | GatesForm]:
        """The conditions and groups."""
        return self.all or self.any or []

    @property
    def conditions(self) -> list[GateForm]:
        """All conditions, those of groups too."""
        return [form for term in self.terms for form in ([term] if isinstance(term, GateForm) else term.terms)]


class SteeringForm(Strict):
    """A push along vectors inside the model: the short form (vector, toward, strength, ...) or the long one (vectors)."""

    vector: Vector = "modality-preference"
    """A name that `/v1/steering/vectors` lists."""
    toward: Literal["vision", "text", "auto"] = "vision"
    """The direction; auto decides it for each request. Without one, as in `"steering": true`, it is vision."""
    auto: AutoForm | None = None
    """Only with `"toward": "auto"`."""
    strength: Number = Field(1.0, json_schema_extra={"minimum": 0})
    """0 is off, 1 the vector's calibrated strength."""
    layers: Layers | None = None
    """Layers, numbered from 0; the vector's own by default."""
    apply: Apply = Apply()
    vectors: Annotated[list[NamedVector], Field(max_length=64)] | None = None
    """The long form, which excludes the other fields but `when`."""
    when: (
        Annotated[
            Annotated[GateForm, Tag("<one>")] | Annotated[GroupsForm, Tag("<several>")], Discriminator(_gate_kind)
        ]
        | None
    ) = None
    """Steer only if this holds for the prompt, which is read once more to find out."""

    until: Target | None = None
    """Let the strength of the answer follow a number, from token to token, until that reaches this target."""
    control: ControlForm | None = None
    """Only with `until`."""

    @property
    def following(self) -> Until | None:
        """The number that the strength follows; raises RequestError for values that are not allowed."""
        if self.until is None:
            return None
        ((number, target),) = self.until.items()
        control = self.control or ControlForm()
        span = None if control.range is None else (control.range[0], control.range[1])
        return Until(number, target, control.gain, control.smoothing, control.band, span)

    @property
    def gates(self) -> list[GateForm]:
        """All conditions."""
        if isinstance(self.when, GateForm):
            return [self.when]
        return [] if self.when is None else self.when.conditions

    @property
    def names(self) -> list[str]:
        """The names of its vectors."""
        forms: list[NamedVector] | list[SteeringForm] = [self] if self.vectors is None else self.vectors
        return [name for form in (*forms, *self.gates) for name in vector_names(form)]

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        mixed = sorted(self.model_fields_set - {"vectors", "when"})
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
        if self.until is not None and self.toward == "auto":
            raise PydanticCustomError("until", "'until' goes with 'toward': vision or text, not with 'auto'")
        if self.control is not None and self.until is None:
            raise PydanticCustomError("control", "'control' goes with 'until'")
        return self
