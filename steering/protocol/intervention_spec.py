"""The options of an intervention in a request, validated here once for every caller and every way of writing them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, NamedTuple, TypeVar, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from steering.errors import Inapplicable, RequestError
from steering.model.mllm import MLLM
from steering.prompt.layout import Prompt
from steering.prompt.tokens import PATTERN, TokenChoice
from steering.protocol.signals import Signal
from steering.protocol.wording import counted, refused, shown

Messages = Sequence[Mapping[str, Any]]

LAYERS = "x-layers"
"""The key in a field's `json_schema_extra` whose value, plus the model's number of layers, is the field's maximum."""


class _NamesAVector:
    """A marker in a field's annotations: the field holds a steering vector (`steering.vectors.option.Vector`)."""


NAMES_A_VECTOR = _NamesAVector()


def vector_fields(model: type[BaseModel]) -> list[str]:
    """Return the names of a model's own fields that may hold steering vectors."""

    def holds(field: FieldInfo) -> bool:
        optional = (getattr(kind, "__metadata__", ()) for kind in get_args(field.annotation))
        return any(NAMES_A_VECTOR in metadata for metadata in (field.metadata, *optional))

    return [name for name, field in model.model_fields.items() if holds(field)]


def vector_names(model: BaseModel) -> list[str]:
    """Return the names of the steering vectors in a model's own fields."""
    values = [getattr(model, name) for name in vector_fields(type(model))]
    return [getattr(value, "name", value) for value in values if value is not None]


def _a_choice(value: str) -> str:
    try:
        return TokenChoice(value).word
    except ValueError as error:
        raise PydanticCustomError("tokens", str(error)) from None


Model = TypeVar("Model", bound=BaseModel)


def with_vectors(model: Model, get: Callable[[Any, str], Any]) -> Model:
    """Return a model with steering vectors in its own fields in place of names.

    get: returns the vector for a field's value and the field's name in a request.
    """
    fields = type(model).model_fields
    stated = {name: value for name in vector_fields(type(model)) if (value := getattr(model, name)) is not None}
    vectors = {name: get(value, fields[name].alias or name) for name, value in stated.items()}
    return model.model_copy(update=vectors) if vectors else model


def _says_something(value: str) -> str:
    if not value.strip():
        raise PydanticCustomError("empty", "must not be empty")
    return value


LayerList = Annotated[list[Annotated[int, Field(ge=0, json_schema_extra={LAYERS: -1})]], Field(max_length=1024)]
"""Layer numbers, from 0; `check_layers` compares them with a model."""
TokenWord = Annotated[str, AfterValidator(_a_choice), Field(json_schema_extra={"pattern": PATTERN})]
"""A choice of the tokens that an intervention changes, as `TokenChoice` reads it."""
Words = Annotated[str, Field(max_length=1024), AfterValidator(_says_something)]
"""A text that is inserted into a prompt."""


def check_layers(layers: Sequence[int] | None, known: int | Sequence[int], param: str) -> None:
    """Raise RequestError, naming the field, unless these are distinct layers, at least one, that are `known`.

    known: the numbers of layers, or how many there are.
    """
    if layers is None:
        return
    known = range(known) if isinstance(known, int) else known
    if not layers or len(set(layers)) < len(layers) or not set(layers) <= set(known):
        every = len(known) == known[-1] + 1
        numbers = f"from 0 to {known[-1]}" if every else f"of those with softmax attention, {[*known]}"
        raise RequestError(
            f"'{param}' must be different layer numbers {numbers}; got {shown(list(layers))}.", param=param
        )


def check_choice(choice: TokenChoice, images: int, param: str) -> None:
    """Raise Inapplicable, naming the field, where the tokens are those of an image beyond the prompt's `images`."""
    if choice.image is not None and choice.image > images:
        raise Inapplicable(
            f"'{param}' is {choice.word!r}, but the request holds {counted(images, 'image')}.", param=param
        )


class Rule(NamedTuple):
    """The formula that combines a row's logits with its twin's.

    The result is scale * full + weight * (full - twin); with `relu`, the ReLU of the difference is used instead, which is of
    log-probabilities if `normalised`: a constant added to all logits then changes nothing. Tokens less likely than
    `plausible` times the likeliest one (by `full`) become impossible. With `growth`, the weight of token t, from 0, is
    `weight` + e^(growth * (t + first)) - 1. Where the likeliest token has at least the probability `below`, the weight is 0.
    """

    weight: float
    relu: bool = False
    plausible: float = 0.0
    scale: float = 1.0
    growth: float = 0.0
    first: int = 1
    below: float = math.inf
    normalised: bool = False


class InterventionSpec(ABC):
    """An intervention with the options that a request gave it.

    `path` is its place in a request's body and in the report of what was applied; interventions that share a path differ in
    `kind` and exclude one another. `twin` is True where it contrasts the answer's logits with those of a twin, which repeats
    the answer's tokens on another prompt; a request may have one such intervention. An `only_chat` intervention changes
    nothing but the messages (`chat`), so any server can serve it. Where decode steps are captured, the steps of a
    `rehearsed` intervention with its defaults are captured before the first request. `data` are kinds of data in its options
    that other modules define.
    """

    path: ClassVar[tuple[str, ...]]
    kind: ClassVar[str] = ""
    twin: ClassVar[bool] = False
    needs_image: ClassVar[bool] = False
    only_chat: ClassVar[bool] = False
    rehearsed: ClassVar[bool] = False
    data: ClassVar[tuple[type, ...]] = ()

    @classmethod
    def name(cls) -> str:
        """Return the name in the registry, the metrics and the journal."""
        return ".".join((*cls.path, cls.kind) if cls.kind else cls.path)

    @property
    def signals(self) -> frozenset[Signal]:
        """The signals that it needs captured."""
        return frozenset()

    @property
    def toward(self) -> Iterable[str]:
        """A label for each direction in which it pushes, which names the direction."""
        return [""]

    @property
    def refuses_twin(self) -> str | None:
        """The field because of which an answer may have no twin; None where it may have one."""
        return None

    @property
    def vectors(self) -> Sequence[str]:
        """The names of its steering vectors."""
        return ()

    @property
    def digests(self) -> Mapping[str, str]:
        """The digests of its steering vectors, by name."""
        return {}

    @property
    def texts(self) -> Sequence[str]:
        """Texts of its own that get tokenised."""
        return ()

    def chat(self, messages: Messages) -> Messages:
        """Return the messages as the model reads them."""
        return messages

    def check(self, mllm: MLLM, prompt: Prompt) -> None:  # noqa: B027
        """Raise RequestError where the intervention does not fit a model or a prompt."""

    def settled(self, mllm: MLLM) -> Any:
        """Return what the core needs of the model's calibration, as data; None where it needs nothing.

        The client resolves it once, because a calibration may change while a request waits or runs.
        """
        return None

    # -- of those that have a twin -------------------------------------------------------------------------------------

    @property
    def rule(self) -> Rule:
        """The formula that combines the logits with the twin's."""
        raise NotImplementedError

    def twin_prompt(self, mllm: MLLM, messages: Messages, prompt: Prompt) -> Prompt | None:
        """Return the twin's prompt; None where it depends on the generated tokens, as `Pair.made` records.

        `prompt` is the prompt that the messages were rendered to.
        """
        return None

    def due(self, tokens: int) -> bool:
        """Return True where the twin is remade once `tokens` tokens have been generated."""
        return False

    # -- when the answer has ended -------------------------------------------------------------------------------------

    def report(self, measured: Any) -> Any:
        """Return a JSON report of what was done, from the measurements of `Slots.take`."""
        return {}

    def brief(self, report: Any) -> Any:
        """Return the report without what grows with the answer or the images, for callers that keep many reports."""
        return report


class Part(ABC):
    """A part of an intervention that several parts make together, as vectors that are added."""

    @classmethod
    @abstractmethod
    def together(cls, parts: Sequence[Any]) -> InterventionSpec:
        """Return the intervention that the parts make together."""


class Options(BaseModel, InterventionSpec):
    """Options in the form in which a client writes them.

    Only the class states the fields' defaults and ranges. A wrong value raises RequestError naming it by its place in a
    request.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, populate_by_name=True)

    path: ClassVar[tuple[str, ...]]
    kind: ClassVar[str] = ""
    twin: ClassVar[bool] = False
    needs_image: ClassVar[bool] = False
    only_chat: ClassVar[bool] = False
    rehearsed: ClassVar[bool] = False

    def __init__(self, **options: Any) -> None:
        try:
            super().__init__(**options)
        except ValidationError as error:
            raise refused(error, type(self), self.param) from None

    @property
    def vectors(self) -> Sequence[str]:
        return vector_names(self)

    @property
    def digests(self) -> Mapping[str, str]:
        values = [getattr(self, name) for name in vector_fields(type(self))]
        return {value.name: value.identity for value in values if hasattr(value, "identity")}

    @classmethod
    def param(cls, key: str) -> str:
        """Return the name of a field in a request."""
        field = cls.model_fields.get(key)
        return ".".join([*cls.path, (field.alias if field is not None else None) or key])

    def settings(self) -> dict[str, Any]:
        """Return the options as a client writes them, with steering vectors by name."""
        return ({"kind": self.kind} if self.kind else {}) | self.model_dump(by_alias=True)
