"""The body of POST /v1/chat/completions as pydantic models, and one clear message for a body that is wrong.

Unknown fields of OpenAI's protocol are ignored. Unknown keys inside Helmsight's own fields are refused, and fields that
are nearly called as those: an option that is misspelt must not silently do nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    StringConstraints,
    Tag,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError, from_json

import steering
from server.errors import BadRequest

MAX_MESSAGES = 1024
MAX_STOPS = 16
MAX_BIASES = 1024
MAX_METADATA = 16
MAX_METADATA_KEY = 64
MAX_METADATA_VALUE = 512
MAX_VALUES = 65_536
"""Values in one body: millions of small ones take seconds to read, in which no other request gets on."""

OWN = ("steering", "sage", "contrast", "diagnostics", "baseline")
"""The fields that OpenAI's protocol does not have."""
LONGEST_OWN = max(map(len, OWN))
LIKE = 0.7
"""The ratio of difflib from which a name is taken for a misspelt one."""
MAX_LIKENED = 64
"""Unknown fields that are compared with known ones: each takes a moment."""

Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Integer = Annotated[int, Field(strict=True, ge=-(2**63), le=2**63 - 1)]
Flag = Annotated[bool, Field(strict=True)]
Layers = Annotated[list[Integer], Field(max_length=1024)]


class Strict(BaseModel):
    """An object of Helmsight's own: unknown keys are errors that list the known ones."""

    model_config = ConfigDict(frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, value: Any) -> Any:
        if isinstance(value, dict):
            names = [field.alias or name for name, field in cls.model_fields.items()]
            for key in value:
                if key not in names:
                    known = ", ".join(names)
                    raise PydanticCustomError(
                        "unknown_key", "unknown; allowed: {known}", {"key": key[:64], "known": known}
                    )
        return value


def _switch(value: Any) -> Any:
    """true means all defaults, false means off, an object is itself."""
    if value is None or value is False:
        return None
    if value is True:
        return {}
    if not isinstance(value, dict):
        raise PydanticCustomError("switch", "must be true, false or an object")
    return value


class Apply(Strict):
    tokens: str = "all"


class NamedVector(Strict):
    """One vector of the long form; `scale` is the signed coefficient c."""

    name: str
    scale: Number = 1.0
    layers: Layers | None = None
    apply: Apply = Apply()

    @model_validator(mode="before")
    @classmethod
    def _aliases(cls, value: Any) -> Any:
        if isinstance(value, dict):
            given = [key for key in ("scale", "strength", "coefficient") if key in value]
            if len(given) > 1:
                raise PydanticCustomError("aliases", "scale, strength and coefficient are the same; give one of them")
            if given and given[0] != "scale":
                value = {("scale" if key == given[0] else key): item for key, item in value.items()}
        return value


class Auto(Strict):
    """How `toward: "auto"` finds the way."""

    criterion: Literal["drop", "surprise"] = "drop"
    bound: Number | None = None
    one_degraded: Flag = False


class Steering(Strict):
    """Either the short form (vector, toward, strength) or the long one (vectors)."""

    vector: str = "modality-preference"
    toward: Literal["vision", "text", "auto"] = "vision"
    auto: Auto | None = None
    strength: Number = 1.0
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


SteeringField = Annotated[Steering | None, BeforeValidator(_switch)]


class See(Strict):
    alpha: Number = 0.1
    reading: str = "transfer"
    shallow: Integer | None = None
    ceiling: Number = 1.0
    spans: str = "whole"


class Think(Strict):
    gamma: Number = 0.9
    quantile: Number = 0.9
    threshold: Number | None = None


class Generate(Strict):
    weight: Number = Field(default=0.5, alias="lambda")
    top: Number = 0.2
    refresh: Integer = 0


class Sage(Strict):
    """The three stages; one that is false is off, one that is not named has its defaults."""

    see: Annotated[See | None, BeforeValidator(_switch)] = See()
    think: Annotated[Think | None, BeforeValidator(_switch)] = Think()
    generate: Annotated[Generate | None, BeforeValidator(_switch)] = Generate()


class Vcd(Strict):
    kind: Literal["vcd"]
    alpha: Number = 1.0
    beta: Number = 0.1
    step: Integer = 500


class Icd(Strict):
    kind: Literal["icd"]
    alpha: Number = 1.0
    beta: Number = 0.1
    instruction: Annotated[str, StringConstraints(max_length=1024)] = "You are a confused object detector."


class Pai(Strict):
    kind: Literal["pai"]
    alpha: Number = 0.1
    beta: Number = 0.1
    amplify: Number = 0.2
    first_layer: Integer = 2


def _kind_named(value: Any) -> Any:
    if value is None or (isinstance(value, dict) and value.get("kind") in ("vcd", "icd", "pai")):
        return value
    raise PydanticCustomError("contrast_kind", "must be an object whose 'kind' is vcd, icd or pai")


Contrast = Annotated[
    Annotated[Vcd, Tag("<vcd>")] | Annotated[Icd, Tag("<icd>")] | Annotated[Pai, Tag("<pai>")],
    Discriminator(lambda value: f"<{value['kind'] if isinstance(value, dict) else value.kind}>"),
]
"""A contrastive decoder by its kind."""


class Diagnostics(Strict):
    """Which readouts; None of `include` means the cheap ones."""

    include: Annotated[list[str], Field(max_length=32)] | None = None
    layers: Any = "all"
    heatmaps: Flag = False
    causal: Flag = False
    discount_sinks: Flag = False
    target_image: Integer | None = None
    spans: str = steering.Diagnose.spans
    residual_rows: str = steering.Diagnose.residual_rows
    drift_rows: str = steering.Diagnose.drift_rows
    compare_to: Annotated[str, StringConstraints(max_length=64)] | None = None

    @field_validator("layers")
    @classmethod
    def _all_or_numbers(cls, value: Any) -> Any:
        numbers = isinstance(value, list) and all(type(item) is int for item in value)
        last = isinstance(value, dict) and value.keys() == {"last"} and type(value["last"]) is int
        if value != "all" and not numbers and not last:
            raise PydanticCustomError("layers", "must be 'all', a list of layer numbers or {{'last': how many}}")
        return value


class Part(BaseModel):
    """One part of a message's content; `image` holds the URL of an image part."""

    type: str
    text: str | None = None
    span: Literal["context"] | None = None
    image: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _normalise(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            raise PydanticCustomError("part", "must be an object with a 'type'")
        kind = value.get("type")
        if kind in ("text", "input_text"):
            if not isinstance(value.get("text"), str):
                raise PydanticCustomError("part_text", "a text part needs a string in 'text'")
            return {"type": "text", "text": value["text"], "span": value.get("span")}
        if kind in ("image_url", "input_image"):
            url = value.get("image_url")
            if isinstance(url, dict):
                url = url.get("url")
            if not isinstance(url, str):
                raise PydanticCustomError("part_image", "an image part needs a URL in 'image_url.url'")
            return {"type": "image", "image": url}
        raise PydanticCustomError(
            "part_type", "unsupported content type '{kind}'; allowed: text, image_url", {"kind": str(kind)[:64]}
        )


class Message(BaseModel):
    """One turn of the chat; "developer" is read as "system"."""

    role: Literal["system", "user", "assistant"]
    content: Annotated[
        Annotated[str, Tag("<text>")] | Annotated[list[Part], Tag("<parts>")],
        Discriminator(lambda content: "<text>" if isinstance(content, str) else "<parts>"),
    ]

    @model_validator(mode="before")
    @classmethod
    def _normalise(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            raise PydanticCustomError("message", "must be an object with 'role' and 'content'")
        role, content = value.get("role"), value.get("content")
        if role in ("tool", "function") or value.get("tool_calls") or value.get("function_call"):
            raise PydanticCustomError("unsupported", "tool calls and tool messages are not supported")
        if role == "developer":
            role = "system"
        if role not in ("system", "user", "assistant"):
            raise PydanticCustomError(
                "role", "unknown role '{role}'; allowed: system, developer, user, assistant", {"role": str(role)[:64]}
            )
        if content is None and role == "assistant":
            content = ""
        if not isinstance(content, (str, list)):
            raise PydanticCustomError("content", "'content' must be a string or a list of parts")
        if content == []:
            raise PydanticCustomError("content", "'content' must not be an empty list")
        return {"role": role, "content": content}

    @model_validator(mode="after")
    def _images_of_users_only(self) -> Self:
        if self.role != "user" and isinstance(self.content, list) and any(p.type == "image" for p in self.content):
            raise PydanticCustomError("image_role", "images are allowed in user messages only")
        return self


def _metadata(value: Any) -> Any:
    """OpenAI's bounds. Keys are not named in messages: they are the client's, and may be long."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise PydanticCustomError("metadata", "must be an object of strings")
    if len(value) > MAX_METADATA:
        raise PydanticCustomError(
            "metadata", "must have at most {most} keys; got {count}", {"most": MAX_METADATA, "count": len(value)}
        )
    for key, item in value.items():
        if len(key) > MAX_METADATA_KEY:
            raise PydanticCustomError(
                "metadata", "must have keys of at most {most} characters", {"most": MAX_METADATA_KEY}
            )
        if not isinstance(item, str) or len(item) > MAX_METADATA_VALUE:
            raise PydanticCustomError(
                "metadata",
                "must have strings of at most {most} characters as values; that of '{key}' is not",
                {"most": MAX_METADATA_VALUE, "key": key},
            )
    return value


class StreamOptions(BaseModel):
    include_usage: Flag | None = None


class ChatRequest(BaseModel):
    """The fields of a chat completion that this server knows; ranges of sampling values are the engine's."""

    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=())

    model: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    n: Integer | None = None
    stream: Flag | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Integer | None = None
    max_completion_tokens: Integer | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: Integer | None = None
    min_p: Number | None = None
    repetition_penalty: Number | None = None
    frequency_penalty: Number | None = None
    presence_penalty: Number | None = None
    logit_bias: Annotated[dict[Annotated[int, Field(ge=0, le=2**31)], Number], Field(max_length=MAX_BIASES)] | None = (
        None
    )
    seed: Integer | None = None
    stop: Annotated[list[Annotated[str, StringConstraints(max_length=1024)]], Field(max_length=MAX_STOPS)] | None = None
    logprobs: Flag | None = None
    top_logprobs: Integer | None = None
    response_format: Any = None
    tools: Any = None
    functions: Any = None
    metadata: Annotated[dict[str, str] | None, BeforeValidator(_metadata)] = None
    modalities: Any = None
    audio: Any = None

    steering: SteeringField = None
    sage: Annotated[Sage | None, BeforeValidator(_switch)] = None
    contrast: Annotated[Contrast | None, BeforeValidator(_kind_named)] = None
    diagnostics: Annotated[Diagnostics | None, BeforeValidator(_switch)] = None
    baseline: Flag | None = None

    @model_validator(mode="before")
    @classmethod
    def _nearly_own(cls, value: Any) -> Any:
        """Refuse a field that is unknown, and more like one of Helmsight's own than like any other known one."""
        unknown = [key for key in value if key not in cls.model_fields and len(key) <= 2 * LONGEST_OWN]
        for key in unknown[:MAX_LIKENED]:
            meant = get_close_matches(key.lower(), cls.model_fields, n=1, cutoff=LIKE)
            if value[key] is not None and meant and meant[0] in OWN:
                raise PydanticCustomError("nearly_own", "unknown", {"key": key, "meant": meant[0]})
        return value

    @field_validator("messages", mode="before")
    @classmethod
    def _few_parts(cls, value: Any, info: ValidationInfo) -> Any:
        """Counted before each of them is looked at."""
        most = (info.context or {}).get("parts")
        if most is not None and isinstance(value, list):
            contents = [message.get("content") for message in value if isinstance(message, dict)]
            count = sum(len(content) for content in contents if isinstance(content, list))
            if count > most:
                raise PydanticCustomError(
                    "too_many_parts", "must hold at most {most} parts; got {count}", {"most": most, "count": count}
                )
        return value

    @field_validator("stop", mode="before")
    @classmethod
    def _stop_list(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @field_validator("tools", "functions", "audio")
    @classmethod
    def _no_tools(cls, value: Any) -> Any:
        if value:
            raise PydanticCustomError("unsupported", "is not supported by this server")
        return value

    @field_validator("modalities")
    @classmethod
    def _text_only(cls, value: Any) -> Any:
        if value not in (None, [], ["text"]):
            raise PydanticCustomError("unsupported", "must be ['text']; nothing else is supported")
        return value

    @field_validator("response_format")
    @classmethod
    def _plain_text(cls, value: Any) -> Any:
        if value is not None and not (isinstance(value, dict) and value.get("type") == "text"):
            raise PydanticCustomError("unsupported", "must be {'type': 'text'}; nothing else is supported")
        return value

    @model_validator(mode="after")
    def _token_limits(self) -> Self:
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise PydanticCustomError("max_tokens", "give either max_tokens or max_completion_tokens, not both")
        return self


Asked = TypeVar("Asked", bound=BaseModel)


def parse(body: bytes, model: type[Asked], parts: int | None = None) -> Asked:
    """The request in a JSON body, with at most so many `parts` of messages; raises BadRequest with the name of the first
    field that is wrong."""
    if _values(body) > MAX_VALUES:
        raise BadRequest(f"The body may hold at most {MAX_VALUES} values.", code="too_many_values")
    try:
        value = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise BadRequest(f"The body is not valid JSON: {error}.", code="invalid_json") from None
    if not isinstance(value, dict):
        raise BadRequest("The body must be a JSON object.", code="invalid_json")
    try:
        return model.model_validate(value, context={"parts": parts})
    except ValidationError as error:
        raise explain(error) from None


def _values(body: bytes) -> int:
    """About how many values a JSON text holds, without reading it: as many as it has commas outside of strings."""
    strings = body.count(b'"') - body.count(b'\\"')
    if strings > 4 * MAX_VALUES:
        return strings // 4
    return body.count(b",") if body.count(b",") <= MAX_VALUES else _STRING.sub(b"", body).count(b",")


_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)


def texts(chat: ChatRequest) -> list[str]:
    """Every text that the model reads."""
    contents = [message.content for message in chat.messages]
    found = [
        text
        for content in contents
        for text in ([content] if isinstance(content, str) else [part.text for part in content])
        if text is not None
    ]
    return [*found, chat.contrast.instruction] if isinstance(chat.contrast, Icd) else found


def image_urls(chat: ChatRequest) -> Iterator[tuple[str, str]]:
    """(URL, path of its field) of every image, in order."""
    for i, message in enumerate(chat.messages):
        for j, part in enumerate(message.content if isinstance(message.content, list) else ()):
            if part.image is not None:
                yield part.image, f"messages[{i}].content[{j}].image_url"


_CODES = {
    "missing": "missing_required_parameter",
    "unknown_key": "unknown_parameter",
    "nearly_own": "unknown_parameter",
    "unsupported": "unsupported_value",
    "part_type": "unsupported_value",
    "too_many_parts": "too_many_parts",
}
_SELF_EXPLAINING = {"unsupported", "part_type", "role", "too_many_parts"}
_FIELDS_OF = {"max_tokens": "max_tokens"}
"""Fields to name for problems that lie between several."""


def explain(error: ValidationError) -> BadRequest:
    """The first problem in one sentence: which field, what is wrong, what is allowed."""
    problem = error.errors(include_url=False)[0]
    param = path_of(problem["loc"])
    kind, context, value = problem["type"], problem.get("ctx", {}), problem.get("input")
    if kind == "unknown_key":
        param = f"{param}.{context['key']}" if param else context["key"]
        message = f"'{param}' is unknown; allowed: {context['known']}."
    elif kind == "nearly_own":
        param = context["key"]
        message = f"'{param}' is unknown; did you mean '{context['meant']}'?"
    elif kind == "missing":
        message = f"'{param}' is required."
    else:
        said = (
            problem["msg"]
            .replace("Input should", "must")
            .replace("List should", "must")
            .replace("Dictionary should", "must")
        )
        shown = repr(value) if isinstance(value, (bool, int, float, str)) else ""
        got = f"; got {shown}" if 0 < len(shown) <= 64 and kind not in _SELF_EXPLAINING else ""
        param = param or _FIELDS_OF.get(kind, "")
        message = f"'{param}' {said}{got}." if said.startswith(("must", "is ")) else f"'{param}': {said}{got}."
    return BadRequest(message, param or None, _CODES.get(kind, "invalid_value"))


def path_of(location: Sequence[int | str]) -> str:
    """messages[0].content[1].text for ("messages", 0, "content", "<parts>", 1, "text")."""
    path = ""
    for item in location:
        if isinstance(item, int):
            path += f"[{item}]"
        elif not item.startswith(("<", "[")):
            path += f".{item}" if path else item
    return path
