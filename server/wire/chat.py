"""A chat completion: OpenAI's fields that this server knows, and Helmsight's own."""

from __future__ import annotations

import re
from difflib import get_close_matches
from typing import Annotated, Any, ClassVar, Self, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationInfo,
    create_model,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from server.wire.diagnostics import Diagnostics
from server.wire.fields import Flag, Integer, Number, switch
from server.wire.interventions import Given
from server.wire.interventions import fields as intervention_fields
from server.wire.messages import Message, texts_of
from steering import Steering

MAX_MESSAGES = 1024
MAX_STOPS = 16
MAX_BIASES = 1024
MAX_METADATA = 16
MAX_METADATA_KEY = 64
MAX_METADATA_VALUE = 512

_TOKEN = re.compile("0|[1-9][0-9]{0,9}")

LIKE = 0.7
"""The ratio of difflib from which a name is taken for a misspelt one."""
MAX_LIKENED = 64
"""Unknown fields that are compared with known ones: each takes a moment."""


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
    include_usage: Flag | None = None


class ChatRequest(BaseModel):
    """The fields of a chat completion that this server knows; ranges of sampling values are the engine's. Those that ask for
    interventions are added by `with_interventions`, which makes the models that bodies are read with."""

    asking: ClassVar[tuple[str, ...]] = ()
    """The fields that ask for interventions."""
    required: ClassVar[frozenset[str]] = frozenset()
    """Those of them that must be there."""

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
    logit_bias: Annotated[dict[Token, Number], Field(max_length=MAX_BIASES)] | None = None
    seed: Integer | None = None
    stop: Annotated[list[Annotated[str, StringConstraints(max_length=1024)]], Field(max_length=MAX_STOPS)] | None = None
    logprobs: Flag | None = None
    top_logprobs: Integer | None = None
    response_format: Any = None
    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    metadata: Annotated[dict[str, str] | None, BeforeValidator(_metadata)] = None
    modalities: Any = None
    audio: Any = None

    diagnostics: Annotated[Diagnostics | None, BeforeValidator(switch)] = None
    baseline: Flag | None = None

    @model_validator(mode="before")
    @classmethod
    def _nearly_own(cls, value: Any) -> Any:
        """Refuse a field that is unknown, and more like one of Helmsight's own than like any other known one."""
        own = {*cls.asking, "diagnostics", "baseline"}
        longest = 2 * max(map(len, own))
        unknown = [key for key in value if key not in cls.model_fields and len(key) <= longest]
        for key in unknown[:MAX_LIKENED]:
            meant = get_close_matches(key.lower(), cls.model_fields, n=1, cutoff=LIKE)
            if value[key] is not None and meant and meant[0] in own:
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

    @field_validator("tool_choice", "function_call")
    @classmethod
    def _no_call(cls, value: Any) -> Any:
        """A client that insists on a call would wait for one in vain."""
        if value not in (None, "none", "auto"):
            raise PydanticCustomError("unsupported", "must be 'none' or 'auto'; this server calls no tools")
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

    @property
    def interventions(self) -> dict[str, Given]:
        """What is given for each of the fields that ask for interventions, those that are off left out."""
        given = ((name, getattr(self, name)) for name in self.asking)
        return {name: one for name, one in given if one is not None}

    @property
    def texts(self) -> list[str]:
        """Every text that the model reads."""
        asked = [one for given in self.interventions.values() for one in given.asked]
        return texts_of(self.messages) + [text for one in asked for text in one.texts]


class DryRun(ChatRequest):
    """A chat request whose messages may be missing, for what its steering would do; where they are there, the numbers of
    images are checked too."""

    required: ClassVar[frozenset[str]] = frozenset(Steering.path)

    messages: Annotated[list[Message], Field(default_factory=list, max_length=MAX_MESSAGES)]


Chat = TypeVar("Chat", bound=ChatRequest)


def with_interventions(chat: type[Chat]) -> type[Chat]:
    """A model with a field for each intervention, or group of them, that is registered by now. Raises ValueError where
    something else is called so already."""
    found = intervention_fields()
    if taken := [name for name in found if name in chat.model_fields or hasattr(chat, name)]:
        raise ValueError(f"No intervention can be called {taken[0]!r}, which is part of a request already.")
    fields: dict[str, Any] = {name: (kind, ... if name in chat.required else None) for name, kind in found.items()}
    made = create_model(chat.__name__, __base__=chat, **fields)
    made.asking = tuple(found)
    return made
