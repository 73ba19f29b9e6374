"""The body of a message: Anthropic's fields that this server knows. Helmsight's own are those of a chat completion."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class MessageBlockBase(BaseModel):
    """An object as a client writes it; `translation` reads it and words its errors."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    cache_control: Any = None
    """Unused: prefixes are cached by themselves."""


class MessageText(MessageBlockBase):
    """A text."""

    type: Literal["text"]
    text: str
    citations: Any = None
    span: Literal["context"] | None = None
    """"context" marks a text that the image may contradict, as in a chat completion."""


class MessageImageSource(BaseModel):
    """An image in base64, or its URL if the server fetches those."""

    type: Literal["base64", "url"]
    media_type: str | None = None
    data: str | None = None
    url: str | None = None


class MessageImage(MessageBlockBase):
    """An image."""

    type: Literal["image"]
    source: MessageImageSource


class MessageToolUse(MessageBlockBase):
    """A call of a tool in an earlier answer."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class MessageToolResult(MessageBlockBase):
    """The result of a call: a text, or texts and images."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[MessageText | MessageImage] | None = None
    is_error: bool | None = None


class MessageThinking(MessageBlockBase):
    """The reasoning of an earlier answer; it is listed in `ignored` if the model's chat template has no place for it."""

    type: Literal["thinking", "redacted_thinking"]
    thinking: str | None = None
    signature: str | None = None
    data: str | None = None


MessageBlock = MessageText | MessageImage | MessageToolUse | MessageToolResult | MessageThinking


class MessageTurn(BaseModel):
    """A turn of the chat."""

    role: Literal["user", "assistant"]
    content: str | Annotated[list[MessageBlock], Field(min_length=1)]


class MessageTool(MessageBlockBase):
    """A function that the answer may call; other kinds of tools are refused."""

    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None


class MessageToolChoice(BaseModel):
    """The calls that the answer may have."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class MessageFormat(BaseModel):
    """A constraint on the answer."""

    type: Literal["json_schema"]
    definition: dict[str, Any] = Field(alias="schema")


class MessageOutput(BaseModel):
    """The form of the answer."""

    format: MessageFormat | None = None


class CountRequest(BaseModel):
    """A chat whose tokens are to be counted."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    model: str | None = None
    """The model's name, optionally followed by an `@` and a preset."""
    messages: Annotated[list[MessageTurn], Field(min_length=1)]
    system: str | list[MessageText] | None = None
    tools: list[MessageTool] | None = None
    tool_choice: MessageToolChoice | None = None


class MessageRequest(CountRequest):
    """A message: Anthropic's fields, and those of a chat completion that Anthropic lacks, such as `steering`.

    Sampling fields, `seed` and Helmsight's own fields are the same as in a chat completion.
    """

    max_tokens: int
    """The longest answer in tokens."""
    stop_sequences: list[str] | None = None
    """Texts that end the answer, which excludes them."""
    stream: bool | None = None
    """Send events while the answer is generated."""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: dict[str, str | None] | None = None
    """Kept with the answer's row in the journal: Anthropic's `user_id`, and pairs of your own as in a chat completion."""
    output_config: MessageOutput | None = None
    """With `format`: JSON that follows a schema."""
