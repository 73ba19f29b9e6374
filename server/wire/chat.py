"""The body of a chat completion: OpenAI's fields that this server knows, and Helmsight's own."""

from __future__ import annotations

import math
import re
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationInfo,
    WithJsonSchema,
    create_model,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from server.wire.diagnostics import Diagnostics, asked, diagnostics_form
from server.wire.fields import Flag, Forced, Integer, Number, Pixels, Strict
from server.wire.guard import Guard, Off, switched
from server.wire.interventions import Given
from server.wire.interventions import fields as intervention_fields
from server.wire.messages import Turn, texts_of
from server.wire.storing.metadata import Metadata
from server.wire.strangers import ELSEWHERE, check_names
from server.wire.structured import ResponseFormat, StructuredOutputs, ToolChoice, ToolList
from steering import Grammar, InterventionSpec, RequestError
from steering.protocol.intervention import REGISTRY
from steering.protocol.request import RANGES

MAX_MESSAGES = 1024
MAX_STOPS = 16
MAX_BIASES = 1024
MAX_VARIABLES = 64

_TOKEN = re.compile("0|[1-9][0-9]{0,9}")

NOTES = ("preset", "skipped", "max_tokens", "pictures")
"""Keys of `applied` besides those of interventions."""


def _token(key: str) -> str:
    """Check that a key is a decimal token number, since Python also accepts "1_0", " 1" and other scripts' digits."""
    if not _TOKEN.fullmatch(key):
        raise PydanticCustomError("token", "must be the number of a token in decimal digits")
    return key


Token = Annotated[int, Field(le=2**31), BeforeValidator(_token)]


class StreamOptions(BaseModel):
    """The options of a streamed answer."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    include_usage: Flag | None = None
    """Send the token counts in an event of their own, at the end."""

    @model_validator(mode="before")
    @classmethod
    def _known_names(cls, value: Any) -> Any:
        if isinstance(value, dict):
            check_names(value, cls.model_fields)
        return value


class ProcessorOptions(Strict):
    """The options of the model's processor, a subset of vLLM's."""

    min_pixels: Pixels | None = None
    max_pixels: Pixels | None = None


BOUNDS = tuple(ProcessorOptions.model_fields)
Stop = Annotated[str, StringConstraints(max_length=1024)]
Stops = Annotated[list[Stop], Field(max_length=MAX_STOPS)]
_NOTHING: dict[str, Any] = {"enum": [None, [], {}, "", False, 0]}
_NO_CALL = {"enum": [None, "none", "auto"]}


def within(name: str) -> dict[str, Any]:
    """Return the range of a sampling value for JSON schema; the engine refuses values outside of it."""
    low, high = RANGES[name]
    return {"minimum": low, "maximum": high}


def _of_tokens(schema: dict[str, Any]) -> None:
    biases = schema["anyOf"][0]
    biases["propertyNames"] = {"pattern": f"^({_TOKEN.pattern})$"}
    biases["additionalProperties"] |= within("logit_bias")


class ChatRequest(BaseModel):
    """A chat completion: OpenAI's fields that this server knows, and Helmsight's own, including one for each intervention.

    Other fields are ignored and listed in the answer, except names similar to a known one and fields that change the answers
    of other servers, which are refused.
    """

    # `with_interventions` adds the fields of interventions and makes the models that validate bodies. The engine checks the
    # ranges of sampling values.

    asking: ClassVar[tuple[str, ...]] = ()
    """The fields that request interventions."""

    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=(), use_attribute_docstrings=True)

    model: str | None = None
    """The model's name, as `/v1/models` lists it, optionally followed by an `@` and a preset; may be omitted."""
    messages: Annotated[list[Turn], Field(min_length=1, max_length=MAX_MESSAGES)]
    """The chat up to the turn to be answered."""
    n: Integer | None = Field(None, json_schema_extra={"minimum": 1})
    """Number of answers; `/v1/models` has the limit."""
    stream: Flag | None = None
    """Send the answer as server-sent events while it is generated."""
    stream_options: StreamOptions | None = None
    max_tokens: Integer | None = Field(None, json_schema_extra=within("max_tokens"))
    """The longest answer in tokens; if fewer fit, the limit is reduced and reported in `applied.max_tokens`."""
    max_completion_tokens: Integer | None = Field(None, json_schema_extra=within("max_tokens"))
    """The same as `max_tokens`, under OpenAI's newer name."""
    temperature: Number | None = Field(None, json_schema_extra=within("temperature"))
    """0 selects the likeliest token. Absent sampling fields have the checkpoint's defaults, else OpenAI's."""
    top_p: Number | None = Field(None, json_schema_extra=within("top_p"))
    """Sample from the likeliest tokens that together have this share of the probability."""
    top_k: Integer | None = Field(None, json_schema_extra=within("top_k"))
    """Sample from this many of the likeliest tokens; 0 and -1 mean all."""
    min_p: Number | None = Field(None, json_schema_extra=within("min_p"))
    """Exclude tokens less likely than this share of the likeliest one's probability."""
    repetition_penalty: Number | None = Field(None, json_schema_extra=within("repetition_penalty"))
    """Values above 1 make tokens of prompt and answer less likely."""
    frequency_penalty: Number | None = Field(None, json_schema_extra=within("frequency_penalty"))
    presence_penalty: Number | None = Field(None, json_schema_extra=within("presence_penalty"))
    logit_bias: Annotated[dict[Token, Number], Field(max_length=MAX_BIASES)] | None = Field(
        None, json_schema_extra=_of_tokens
    )
    """Values added to the logits of tokens, keyed by token number."""
    min_tokens: Integer | None = Field(None, json_schema_extra=within("min_tokens"))
    """Smallest number of tokens before an answer may end by itself."""
    ignore_eos: Flag | None = None
    """Continue answers to `max_tokens`, or to `stop`."""
    seed: Integer | None = Field(None, json_schema_extra=within("seed"))
    """The seed of sampling; the same request with the same seed gets the same answer."""
    stop: Stops | None = None
    """Texts that end the answer, which excludes them."""
    logprobs: Flag | None = None
    """Return the log-probability of every token, before temperature and penalties."""
    top_logprobs: Integer | None = Field(None, json_schema_extra=within("top_logprobs"))
    """With `logprobs`: the number of likeliest tokens to return at each position."""
    prompt_logprobs: Integer | None = Field(None, json_schema_extra=within("prompt_logprobs"))
    """The number of likeliest tokens to return at each position of the prompt, as in vLLM; 0 for its own tokens alone."""
    response_format: ResponseFormat | None = None
    """Require the answer to be JSON, or JSON that follows a schema."""
    structured_outputs: StructuredOutputs | None = None
    """The same in vLLM's form, which also allows a regular expression or one of several texts."""
    tools: ToolList | None = None
    """The tools that the answer may call, if the model's chat template supports tools."""
    tool_choice: ToolChoice | None = None
    """none: the prompt mentions no tools. required: the answer calls at least one; a tool's name: it calls that one."""
    parallel_tool_calls: Flag | None = None
    """false: a required call is a single one."""
    functions: Annotated[Any, WithJsonSchema(_NOTHING)] = None
    """Deprecated; use `tools`."""
    function_call: Annotated[Any, WithJsonSchema(_NO_CALL)] = None
    metadata: Metadata = None
    """Kept with the answer's rows in the journal; `answer_correct` "true" or "false" marks whether it was right."""
    store: Flag | None = None
    """Keep the texts of prompt and answer, so that `GET /v1/chat/completions/{id}` returns them to the same key."""
    modalities: Annotated[Any, WithJsonSchema({"enum": [None, [], ["text"]]})] = None
    audio: Annotated[Any, WithJsonSchema(_NOTHING)] = None

    min_pixels: Pixels | None = None
    """Enlarge smaller images to this many pixels, if the model's processor bounds pixels (Qwen-VL)."""
    max_pixels: Pixels | None = None
    """Shrink larger images to this many pixels; `/v1/models` has the processor's own bounds."""
    mm_processor_kwargs: ProcessorOptions | None = None
    """The same in vLLM's form."""

    diagnostics: Diagnostics | None = None
    """The readouts that tell where the model looked, and more; true for the cheap ones."""
    baseline: Flag | None = None
    """Add the answer without interventions, from the same batch."""
    guard: Annotated[Guard | None, BeforeValidator(switched, json_schema_input_type=Guard | Off | None)] = None
    """Give the answer again, with other interventions, if it meets a condition.

    false and null switch a preset's guard off.
    """
    guard_stream: Literal["hold", "first"] | None = None
    """hold, the default: a guarded answer is streamed once it is decided. first: the first one is streamed at once, and the
    last event says if another one replaces it.
    """
    force: Forced | None = None
    """A given answer, a text or token numbers, that is forced, so that `logprobs` and `diagnostics` describe it."""

    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """Share cached prompt prefixes only between requests with the same salt, as in vLLM."""
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=MAX_VARIABLES)] | None = None
    """Variables of the chat template, as in vLLM: `{"enable_thinking": false}`; `/v1/models` lists those that it reads."""
    continue_final_message: Flag | None = None
    """Continue the last message, which must be a text of the assistant's, as in vLLM."""
    add_generation_prompt: Flag | None = None
    """false is allowed only with `continue_final_message`, true only without it."""

    strict: Flag | None = None
    """true, the default, refuses parts that do not apply; false skips them and lists them in `applied.skipped`.

    An explicit true also refuses unknown fields, which `ignored` lists otherwise.
    """

    @model_validator(mode="before")
    @classmethod
    def _known_names(cls, value: Any) -> Any:
        check_names(value, cls.model_fields, ELSEWHERE)
        return value

    @field_validator("messages", mode="before")
    @classmethod
    def _few_parts(cls, value: Any, info: ValidationInfo) -> Any:
        """Limit the number of parts before each of them is validated."""
        most = (info.context or {}).get("parts")
        if most is not None and isinstance(value, list):
            contents = [message.get("content") for message in value if isinstance(message, dict)]
            count = sum(len(content) for content in contents if isinstance(content, list))
            if count > most:
                raise PydanticCustomError(
                    "too_many_parts", "must hold at most {most} parts; got {count}", {"most": most, "count": count}
                )
        return value

    @field_validator("stop", mode="before", json_schema_input_type=Stop | Stops | None)
    @classmethod
    def _stop_list(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @field_validator("functions", "audio")
    @classmethod
    def _nothing(cls, value: Any) -> Any:
        if value:
            raise PydanticCustomError("unsupported", "is not supported by this server")
        return value

    @field_validator("function_call")
    @classmethod
    def _no_call(cls, value: Any) -> Any:
        """Refuse a required function call, since its client would wait for one in vain."""
        if value not in (None, "none", "auto"):
            raise PydanticCustomError("unsupported", "must be 'none' or 'auto'; use 'tool_choice' instead")
        return value

    @property
    def grammar(self) -> Grammar | None:
        """The grammar that the answer must follow, None for any answer; raises RequestError."""
        grammars = [form.grammar for form in (self.response_format, self.structured_outputs) if form is not None]
        stated = [grammar for grammar in grammars if grammar is not None]
        if len(stated) > 1:
            raise RequestError(
                "'response_format' and 'structured_outputs' are mutually exclusive.", param="structured_outputs"
            )
        return stated[0] if stated else None

    @model_validator(mode="after")
    def _tools_to_choose(self) -> Self:
        if self.tool_choice not in (None, "none", "auto") and not self.tools:
            raise PydanticCustomError("tool_choice", "cannot require a call without 'tools'")
        return self

    @model_validator(mode="after")
    def _going_on(self) -> Self:
        continues, begins = bool(self.continue_final_message), self.add_generation_prompt
        if begins is not None and begins == continues:
            relation = "are mutually exclusive" if continues else "need each other"
            raise PydanticCustomError(
                "add_generation_prompt",
                "{value} and 'continue_final_message': true {said}",
                {"value": str(begins).lower(), "said": relation},
            )
        return self

    @field_validator("modalities")
    @classmethod
    def _text_only(cls, value: Any) -> Any:
        if value not in (None, [], ["text"]):
            raise PydanticCustomError("unsupported", "must be ['text']; nothing else is supported")
        return value

    @model_validator(mode="after")
    def _token_limits(self) -> Self:
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise PydanticCustomError("max_tokens", "give either max_tokens or max_completion_tokens, not both")
        return self

    @model_validator(mode="after")
    def _pixel_bounds(self) -> Self:
        others = self.mm_processor_kwargs or ProcessorOptions()
        for name in BOUNDS:
            own, other = getattr(self, name), getattr(others, name)
            if None not in (own, other) and own != other:
                raise PydanticCustomError(name, "differs from the value in mm_processor_kwargs; give it once")
        pixels = self.pixels
        if pixels.get("min_pixels", 1) > pixels.get("max_pixels", math.inf):
            raise PydanticCustomError("min_pixels", "must be at most max_pixels")
        return self

    @property
    def pixels(self) -> dict[str, int]:
        """The requested bounds of images by name."""
        bounds = ((name, getattr(source, name, None)) for source in (self.mm_processor_kwargs, self) for name in BOUNDS)
        return {name: value for name, value in bounds if value is not None}

    @property
    def longest(self) -> int | None:
        """The largest number of tokens of the answer, from either field."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def interventions(self) -> dict[str, Given]:
        """The given value of each field that requests interventions, without those that are off."""
        fields = ((name, getattr(self, name)) for name in self.asking)
        return {name: value for name, value in fields if value is not None}

    @property
    def options(self) -> dict[str, InterventionSpec]:
        """The interventions by name, without those that have a form of their own."""
        return {spec.name(): spec for field in self.interventions.values() for spec in field.asked}

    @property
    def texts(self) -> dict[str, list[str]]:
        """Every text that the model reads, by field, except the template's variables, which have their own bound."""
        return {
            "messages": texts_of(self.messages),
            **{".".join(spec.path): [*spec.texts] for spec in self.options.values()},
            "force": [self.force] if isinstance(self.force, str) else [],
            "tools": [tool.model_dump_json() for tool in self.tools or ()],
        }


class DryRun(ChatRequest):
    """A chat completion that is to be checked and reported, not answered; without messages only its options are."""

    messages: Annotated[list[Turn], Field(default_factory=list, max_length=MAX_MESSAGES)]


Chat = TypeVar("Chat", bound=ChatRequest)


def with_interventions(chat: type[Chat]) -> type[Chat]:
    """Return a model with fields for the registered interventions and the options of the registered readouts.

    The model is cached while the registries stay the same. Raises ValueError for a name that is already in use.
    """
    # The cache loses the type.
    extended: type[Chat] = _with_interventions(chat, diagnostics_form(), tuple(REGISTRY.values()))
    return extended


@lru_cache(maxsize=16)
def _with_interventions(chat: type[Chat], diagnostics: Any, _registered: tuple[Any, ...]) -> type[Chat]:
    kinds = intervention_fields()
    if reserved := [name for name in kinds if name in chat.model_fields or name in NOTES or hasattr(chat, name)]:
        raise ValueError(f"No intervention can be called {reserved[0]!r}, which is part of a request already.")
    fields: dict[str, Any] = {name: (kind, None) for name, kind in kinds.items()}
    read = Annotated[diagnostics | None, BeforeValidator(asked, json_schema_input_type=bool | diagnostics | None)]
    fields["diagnostics"] = (read, Field(None, description=chat.model_fields["diagnostics"].description))
    # The class has no source, so that pydantic would search all callers' files for docstrings of its fields.
    plain = {"use_attribute_docstrings": False}
    extended = create_model(chat.__name__, __base__=chat, __doc__=chat.__doc__, __cls_kwargs__=plain, **fields)
    extended.asking = tuple(kinds)
    return extended
