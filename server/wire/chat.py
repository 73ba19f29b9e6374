"""A chat completion: OpenAI's fields that this server knows, and Helmsight's own."""

from __future__ import annotations

import math
import re
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Self, TypeVar

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

from server.wire.diagnostics import Diagnostics, diagnostics_form
from server.wire.fields import Flag, Integer, Number, Pixels, Strict, switch
from server.wire.interventions import Given
from server.wire.interventions import fields as intervention_fields
from server.wire.messages import Turn, texts_of
from server.wire.strangers import ELSEWHERE, check_names
from server.wire.structured import ResponseFormat, StructuredOutputs, ToolChoice, ToolList
from steering import Asked, Grammar, RequestError, Steering
from steering.protocol.intervention import REGISTRY
from steering.protocol.request import RANGES

MAX_MESSAGES = 1024
MAX_STOPS = 16
MAX_BIASES = 1024
MAX_VARIABLES = 64
MAX_METADATA = 16
MAX_METADATA_KEY = 64
MAX_METADATA_VALUE = 512

_TOKEN = re.compile("0|[1-9][0-9]{0,9}")

NOTES = ("preset", "skipped", "max_tokens", "pictures")
"""Keys of `applied` beside those of interventions."""


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


def _token(key: str) -> str:
    """Python also takes "1_0", " 1" and other scripts' digits for numbers."""
    if not _TOKEN.fullmatch(key):
        raise PydanticCustomError("token", "must be the number of a token in decimal digits")
    return key


Token = Annotated[int, Field(le=2**31), BeforeValidator(_token)]


class StreamOptions(BaseModel):
    """Of an answer that is streamed."""

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
    """What the model's processor is told, of what vLLM tells it."""

    min_pixels: Pixels | None = None
    max_pixels: Pixels | None = None


BOUNDS = tuple(ProcessorOptions.model_fields)
Stop = Annotated[str, StringConstraints(max_length=1024)]
Stops = Annotated[list[Stop], Field(max_length=MAX_STOPS)]
MetadataForm = Annotated[
    dict[
        Annotated[str, StringConstraints(max_length=MAX_METADATA_KEY)],
        Annotated[str, StringConstraints(max_length=MAX_METADATA_VALUE)],
    ],
    Field(max_length=MAX_METADATA),
]
_NOTHING: dict[str, Any] = {"enum": [None, [], {}, "", False, 0]}
_NO_CALL = {"enum": [None, "none", "auto"]}


def within(name: str) -> dict[str, Any]:
    """The range of a sampling value as JSON schema has it; what is outside of it is the engine's to refuse."""
    low, high = RANGES[name]
    return {"minimum": low, "maximum": high}


def _of_tokens(schema: dict[str, Any]) -> None:
    biases = schema["anyOf"][0]
    biases["propertyNames"] = {"pattern": f"^({_TOKEN.pattern})$"}
    biases["additionalProperties"] |= within("logit_bias")


class ChatRequest(BaseModel):
    """A chat completion: OpenAI's fields that this server knows, and Helmsight's own, among them one for each intervention.
    Others are ignored, which the answer says, but for those that are nearly called as one of these, or change the answers of
    other servers."""

    # Those for interventions are added by `with_interventions`, which makes the models that bodies are read with; the ranges
    # of sampling values are the engine's to check.

    asking: ClassVar[tuple[str, ...]] = ()
    """The fields that ask for interventions."""
    required: ClassVar[frozenset[str]] = frozenset()
    """Those of them that must be there."""

    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=(), use_attribute_docstrings=True)

    model: str | None = None
    """The model's name, as `/v1/models` lists it, alone or with a preset behind an `@`; may be left out."""
    messages: Annotated[list[Turn], Field(min_length=1, max_length=MAX_MESSAGES)]
    """The chat up to what is to be answered."""
    n: Integer | None = Field(None, json_schema_extra={"minimum": 1})
    """How many answers; `/v1/models` says how many are allowed."""
    stream: Flag | None = None
    """Send the answer as server-sent events while it is generated."""
    stream_options: StreamOptions | None = None
    max_tokens: Integer | None = Field(None, json_schema_extra=within("max_tokens"))
    """The longest answer, in tokens; more than fit are cut to what fits, and `applied.max_tokens` says so."""
    max_completion_tokens: Integer | None = Field(None, json_schema_extra=within("max_tokens"))
    """The same under OpenAI's newer name."""
    temperature: Number | None = Field(None, json_schema_extra=within("temperature"))
    """0 takes the likeliest token. Absent sampling fields have the checkpoint's defaults, else OpenAI's."""
    top_p: Number | None = Field(None, json_schema_extra=within("top_p"))
    """Sample from the likeliest tokens that have this share of the probability."""
    top_k: Integer | None = Field(None, json_schema_extra=within("top_k") | {"minimum": -1})
    """Sample from so many of the likeliest tokens; 0 and -1 for all."""
    min_p: Number | None = Field(None, json_schema_extra=within("min_p"))
    """Leave out tokens less likely than this share of the likeliest one."""
    repetition_penalty: Number | None = Field(None, json_schema_extra=within("repetition_penalty"))
    """Above 1 makes tokens of prompt and answer less likely."""
    frequency_penalty: Number | None = Field(None, json_schema_extra=within("frequency_penalty"))
    presence_penalty: Number | None = Field(None, json_schema_extra=within("presence_penalty"))
    logit_bias: Annotated[dict[Token, Number], Field(max_length=MAX_BIASES)] | None = Field(
        None, json_schema_extra=_of_tokens
    )
    """What is added to the logits of tokens, by their numbers."""
    min_tokens: Integer | None = Field(None, json_schema_extra=within("min_tokens"))
    """No answer ends by itself before it has so many tokens."""
    ignore_eos: Flag | None = None
    """Let answers go on to `max_tokens`, or to `stop`."""
    seed: Integer | None = Field(None, json_schema_extra=within("seed"))
    """The same request with the same seed is answered alike."""
    stop: Stops | None = None
    """The answer ends before these."""
    logprobs: Flag | None = None
    """Give the log-probability of every token, before temperature and penalties."""
    top_logprobs: Integer | None = Field(None, json_schema_extra=within("top_logprobs"))
    """With `logprobs`: so many of the likeliest tokens beside each."""
    response_format: ResponseFormat | None = None
    """Have the answer be JSON, or what a JSON schema describes."""
    structured_outputs: StructuredOutputs | None = None
    """The same as vLLM has it, and more: what a regular expression matches, one of several texts."""
    tools: ToolList | None = None
    """What the answer may call, where the model's chat template knows tools."""
    tool_choice: ToolChoice | None = None
    """none: the model is told of no tools. required: it calls one at least; a tool by its name: that one."""
    parallel_tool_calls: Flag | None = None
    """false: a required call is a single one."""
    functions: Annotated[Any, WithJsonSchema(_NOTHING)] = None
    """Of old; `tools` is what to use."""
    function_call: Annotated[Any, WithJsonSchema(_NO_CALL)] = None
    metadata: Annotated[
        dict[str, str] | None, BeforeValidator(_metadata, json_schema_input_type=MetadataForm | None)
    ] = None
    """Kept with the answer's rows in the journal; `answer_correct` "true" or "false" says whether it was right."""
    modalities: Annotated[Any, WithJsonSchema({"enum": [None, [], ["text"]]})] = None
    audio: Annotated[Any, WithJsonSchema(_NOTHING)] = None

    min_pixels: Pixels | None = None
    """Make smaller pictures so large, where the model's processor bounds pixels (Qwen-VL)."""
    max_pixels: Pixels | None = None
    """Make larger pictures so small; `/v1/models` has the processor's own bounds."""
    mm_processor_kwargs: ProcessorOptions | None = None
    """The same as vLLM has it."""

    diagnostics: Diagnostics | None = None
    """Say where the model looked, and more: true for the cheap readouts."""
    baseline: Flag | None = None
    """Add the answer without interventions, from the same batch."""
    force: str | None = None
    """An answer that is given: the model generates it whatever it would say, so that `logprobs` and `diagnostics` are those
    of this answer."""

    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """What is kept of the prompt serves only requests with the same one, as vLLM has it."""
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=MAX_VARIABLES)] | None = None
    """What the model's chat template is told beside the chat, as vLLM and SGLang have it: `{"enable_thinking": false}`;
    `/v1/models` lists what it reads."""
    continue_final_message: Flag | None = None
    """The answer goes on from the last message, a text of the assistant's, as vLLM has it."""
    add_generation_prompt: Flag | None = None
    """false goes with `continue_final_message`, true without."""

    strict: Flag | None = None
    """Whether what does not apply is refused, which is the default; false skips it and says so in `applied.skipped`. true
    also refuses fields that are unknown, which `ignored` names otherwise."""

    @model_validator(mode="before")
    @classmethod
    def _known_names(cls, value: Any) -> Any:
        check_names(value, cls.model_fields, ELSEWHERE)
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
        """A client that insists on a call would wait for one in vain."""
        if value not in (None, "none", "auto"):
            raise PydanticCustomError("unsupported", "must be 'none' or 'auto'; what to use is 'tool_choice'")
        return value

    @property
    def grammar(self) -> Grammar | None:
        """What the answer must be, None for anything; raises RequestError."""
        asked = [one.grammar for one in (self.response_format, self.structured_outputs) if one is not None]
        found = [one for one in asked if one is not None]
        if len(found) > 1:
            raise RequestError(
                "'response_format' and 'structured_outputs' exclude one another.", param="structured_outputs"
            )
        return found[0] if found else None

    @model_validator(mode="after")
    def _tools_to_choose(self) -> Self:
        if self.tool_choice not in (None, "none", "auto") and not self.tools:
            raise PydanticCustomError("tool_choice", "cannot require a call without 'tools'")
        return self

    @model_validator(mode="after")
    def _going_on(self) -> Self:
        continues, begins = bool(self.continue_final_message), self.add_generation_prompt
        if begins is not None and begins == continues:
            said = "exclude" if continues else "need"
            raise PydanticCustomError(
                "add_generation_prompt",
                "{value} and 'continue_final_message': true {said} one another",
                {"value": str(begins).lower(), "said": said},
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
            one, other = getattr(self, name), getattr(others, name)
            if None not in (one, other) and one != other:
                raise PydanticCustomError(name, "is given twice, here and in mm_processor_kwargs, and not alike")
        pixels = self.pixels
        if pixels.get("min_pixels", 1) > pixels.get("max_pixels", math.inf):
            raise PydanticCustomError("min_pixels", "must be at most max_pixels")
        return self

    @property
    def pixels(self) -> dict[str, int]:
        """The bounds of pictures that are given, by their names."""
        given = ((name, getattr(one, name, None)) for one in (self.mm_processor_kwargs, self) for name in BOUNDS)
        return {name: value for name, value in given if value is not None}

    @property
    def longest(self) -> int | None:
        """The tokens that an answer may have, by either name."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def interventions(self) -> dict[str, Given]:
        """What is given for each of the fields that ask for interventions, those that are off left out."""
        given = ((name, getattr(self, name)) for name in self.asking)
        return {name: one for name, one in given if one is not None}

    @property
    def options(self) -> dict[str, Asked]:
        """The interventions by name, but for those that have a form of their own."""
        return {one.name(): one for given in self.interventions.values() for one in given.asked}

    @property
    def texts(self) -> list[str]:
        """Every text that the model reads, but for what the chat template is told, which is bounded by itself."""
        forced = [] if self.force is None else [self.force]
        forced += [tool.model_dump_json() for tool in self.tools or ()]
        return texts_of(self.messages) + [text for one in self.options.values() for text in one.texts] + forced


class DryRun(ChatRequest):
    """A chat completion whose steering is to be told. Its messages may be missing; where they are there, the numbers of
    pictures are checked, too."""

    required: ClassVar[frozenset[str]] = frozenset(Steering.path)

    messages: Annotated[list[Turn], Field(default_factory=list, max_length=MAX_MESSAGES)]


Chat = TypeVar("Chat", bound=ChatRequest)


def with_interventions(chat: type[Chat]) -> type[Chat]:
    """A model with a field for each intervention, or group of them, that is registered by now, and with the options of the
    readouts that are: the same one as long as these are the same. Raises ValueError where something else is called so."""
    made: type[Chat] = _with_interventions(
        chat, diagnostics_form(), tuple(REGISTRY.values())
    )  # the cache tells no types
    return made


@lru_cache(maxsize=16)
def _with_interventions(chat: type[Chat], diagnostics: Any, _registered: tuple[Any, ...]) -> type[Chat]:
    found = intervention_fields()
    if taken := [name for name in found if name in chat.model_fields or name in NOTES or hasattr(chat, name)]:
        raise ValueError(f"No intervention can be called {taken[0]!r}, which is part of a request already.")
    fields: dict[str, Any] = {name: (kind, ... if name in chat.required else None) for name, kind in found.items()}
    read = Annotated[diagnostics | None, BeforeValidator(switch, json_schema_input_type=bool | diagnostics | None)]
    fields["diagnostics"] = (read, Field(None, description=chat.model_fields["diagnostics"].description))
    # Without a source of its own: pydantic would look for docstrings of its fields in the files of all callers.
    plain = {"use_attribute_docstrings": False}
    made = create_model(chat.__name__, __base__=chat, __doc__=chat.__doc__, __cls_kwargs__=plain, **fields)
    made.asking = tuple(found)
    return made
