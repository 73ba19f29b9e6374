"""What a request asks of an intervention: options that are checked once, here, whoever gives them and however."""

from __future__ import annotations

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
"""In a field's `json_schema_extra`: its maximum, as the model's number of layers plus this."""


class _NamesAVector:
    """Marks, among the annotations of a field, that it holds a steering vector (`steering.vectors.option.Vector`)."""


NAMES_A_VECTOR = _NamesAVector()


def vector_fields(model: type[BaseModel]) -> list[str]:
    """Return the names of a model's own fields that hold steering vectors, or may."""

    def holds(field: FieldInfo) -> bool:
        optional = (getattr(kind, "__metadata__", ()) for kind in get_args(field.annotation))
        return any(NAMES_A_VECTOR in metadata for metadata in (field.metadata, *optional))

    return [name for name, field in model.model_fields.items() if holds(field)]


def vector_names(model: BaseModel) -> list[str]:
    """Return the names of the steering vectors that a model's own fields hold, or name."""
    values = [getattr(model, name) for name in vector_fields(type(model))]
    return [getattr(value, "name", value) for value in values if value is not None]


def _a_choice(value: str) -> str:
    try:
        return TokenChoice(value).word
    except ValueError as error:
        raise PydanticCustomError("tokens", str(error)) from None  # type: ignore[arg-type]


Model = TypeVar("Model", bound=BaseModel)


def with_vectors(model: Model, get: Callable[[Any, str], Any]) -> Model:
    """Return a model with steering vectors in its own fields in the place of names. get: returns the vector for what a field
    holds and for the field's name in a request."""
    fields = type(model).model_fields
    held = {name: value for name in vector_fields(type(model)) if (value := getattr(model, name)) is not None}
    vectors = {name: get(value, fields[name].alias or name) for name, value in held.items()}
    return model.model_copy(update=vectors) if vectors else model


def _says_something(value: str) -> str:
    if not value.strip():
        raise PydanticCustomError("empty", "must not be empty")
    return value


LayerList = Annotated[list[Annotated[int, Field(ge=0, json_schema_extra={LAYERS: -1})]], Field(max_length=1024)]
"""Numbers of layers, from 0; `check_layers` holds them to a model."""
TokenWord = Annotated[str, AfterValidator(_a_choice), Field(json_schema_extra={"pattern": PATTERN})]
"""Which tokens are touched, as `TokenChoice` reads it."""
Words = Annotated[str, Field(max_length=1024), AfterValidator(_says_something)]
"""A text that is put into a prompt."""


def check_layers(layers: Sequence[int] | None, count: int, param: str) -> None:
    """Raise RequestError, naming the field, unless these are different layers of a model with so many, one at least."""
    if layers is None:
        return
    if not layers or len(set(layers)) < len(layers) or not all(0 <= layer < count for layer in layers):
        raise RequestError(
            f"'{param}' must be different layer numbers from 0 to {count - 1}; got {shown(list(layers))}.", param=param
        )


def check_choice(choice: TokenChoice, images: int, param: str) -> None:
    """Raise Inapplicable, naming the field, where the tokens are those of an image that a prompt of so many lacks."""
    if choice.image is not None and choice.image > images:
        raise Inapplicable(
            f"'{param}' is {choice.word!r}, but the request holds {counted(images, 'image')}.", param=param
        )


class Rule(NamedTuple):
    """How a row's logits and its twin's are combined: full + weight * (full - twin), or where `relu`, with the ReLU of the
    difference. Tokens less likely than `plausible` times the likeliest one (by `full`) are impossible."""

    weight: float
    relu: bool = False
    plausible: float = 0.0


class Asked(ABC):
    """One intervention as a request asks for it.

    `path` is where it stands in a request's body and in the report of what was applied; interventions that share a path are
    told apart by their `kind`, and exclude one another. `twin` says whether it contrasts the answer's logits with those of
    a twin, which repeats the answer's tokens on another prompt: of these a request may have one. What one does that is
    `only_chat` can be said to any server: it is what becomes of the messages in `chat`. Decode steps of one that is
    `rehearsed` are captured before the first request, with its defaults, where steps are captured.
    """

    path: ClassVar[tuple[str, ...]]
    kind: ClassVar[str] = ""
    twin: ClassVar[bool] = False
    needs_image: ClassVar[bool] = False
    only_chat: ClassVar[bool] = False
    rehearsed: ClassVar[bool] = False

    @classmethod
    def name(cls) -> str:
        """By which registry, metrics and journal know it."""
        return ".".join((*cls.path, cls.kind) if cls.kind else cls.path)

    @property
    def signals(self) -> frozenset[Signal]:
        """What it needs to be captured."""
        return frozenset()

    @property
    def toward(self) -> Iterable[str]:
        """A label for each thing that it pushes, which says whither."""
        return [""]

    @property
    def vectors(self) -> Sequence[str]:
        """The names of its steering vectors."""
        return ()

    @property
    def texts(self) -> Sequence[str]:
        """Texts of its own that are tokenised."""
        return ()

    def chat(self, messages: Messages) -> Messages:
        """The messages as the model is to read them."""
        return messages

    def check(self, mllm: MLLM, prompt: Prompt) -> None:  # noqa: B027
        """Raise RequestError where it does not fit a model or a prompt."""

    # -- of those that have a twin -------------------------------------------------------------------------------------

    @property
    def rule(self) -> Rule:
        """How the logits are combined with the twin's."""
        raise NotImplementedError

    def twin_prompt(self, mllm: MLLM, messages: Messages, prompt: Prompt) -> Prompt | None:
        """The twin's prompt; None where it depends on what the model says, as `Pair.made` tells. `prompt` is what became of
        the messages."""
        return None

    def due(self, tokens: int) -> bool:
        """Whether the twin is made anew once so many tokens were generated."""
        return False

    # -- when the answer has ended -------------------------------------------------------------------------------------

    def report(self, taken: Any) -> Any:
        """What was done, as JSON, out of what `Slots.take` measured."""
        return {}

    def brief(self, report: Any) -> Any:
        """Its report without what grows with the answer or the images, for whoever keeps many of them."""
        return report


class Part(ABC):
    """One of several things that make one intervention together, as vectors that are added."""

    @classmethod
    @abstractmethod
    def together(cls, parts: Sequence[Any]) -> Asked:
        """The intervention that they make."""


class Options(BaseModel, Asked):
    """Options that a client writes as they are. The fields' defaults and ranges stand in the class and nowhere else; a value
    that is wrong raises RequestError naming it by its place in a request."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, populate_by_name=True)

    path: ClassVar[tuple[str, ...]]
    kind: ClassVar[str] = ""
    twin: ClassVar[bool] = False
    needs_image: ClassVar[bool] = False
    only_chat: ClassVar[bool] = False
    rehearsed: ClassVar[bool] = False

    def __init__(self, **given: Any) -> None:
        try:
            super().__init__(**given)
        except ValidationError as error:
            raise refused(error, type(self), self.param) from None

    @property
    def vectors(self) -> Sequence[str]:
        return vector_names(self)

    @classmethod
    def param(cls, key: str) -> str:
        """What one of its fields is called in a request."""
        field = cls.model_fields.get(key)
        return ".".join([*cls.path, (field.alias if field is not None else None) or key])

    def settings(self) -> dict[str, Any]:
        """The options as a client writes them."""
        return ({"kind": self.kind} if self.kind else {}) | self.model_dump(by_alias=True)
