"""The body of a response: OpenAI's fields that this server knows. Helmsight's own are those of a chat completion."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from server.wire.messages import Detail, Written


class InputText(Written):
    """A text, of any role."""

    type: Literal["input_text", "output_text", "text", "refusal"]
    text: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    span: Literal["context"] | None = None
    """"context" marks a text that the image may contradict, as in a chat completion."""


class InputImage(Written):
    """An image."""

    type: Literal["input_image"]
    image_url: str
    """A `data:image/...;base64,` URI; an http(s) URL if the server fetches those."""
    detail: Detail | None = None
    """The same as in a chat completion."""


Parts = Annotated[list[InputText | InputImage], Field(min_length=1)]


class InputMessage(Written):
    """A message; `type` may be omitted."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Parts
    id: str | None = None
    status: str | None = None


class InputCall(Written):
    """A call of a function in an earlier answer."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: str | None = None


class InputResult(Written):
    """The result of a call: a text, or texts and images."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | Parts
    id: str | None = None
    status: str | None = None


class InputReasoning(Written):
    """The reasoning of an earlier answer; it is listed in `ignored` if the model's chat template has no place for it."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: list[Any] | None = None
    content: list[Any] | None = None
    """The texts; without them, those of `summary` are read."""
    encrypted_content: str | None = None
    status: str | None = None


Item = InputMessage | InputCall | InputResult | InputReasoning


class TextFormat(Written):
    """A constraint on the answer."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    definition: dict[str, Any] | None = Field(None, alias="schema")
    """With json_schema: the schema of the answer's JSON."""
    strict: bool | None = None


class TextOptions(Written):
    """The form of the answer's text."""

    format: TextFormat | None = None


class FunctionTool(Written):
    """A function that the answer may call; other kinds of tools are refused."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedFunction(Written):
    """The function that must be called."""

    type: Literal["function"]
    name: str


class AllowedTools(Written):
    """The tools of the list that may be called."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[NamedFunction]


class ResponseRequest(Written):
    """A response: OpenAI's fields, and those of a chat completion that OpenAI's chats lack, such as `steering`.

    Sampling fields, `seed`, `stop` and Helmsight's own fields are the same as in a chat completion.
    """

    model_config = ConfigDict(use_attribute_docstrings=True)

    model: str | None = None
    """The model's name, optionally followed by an `@` and a preset."""
    input: str | Annotated[list[Item], Field(min_length=1)]
    """A text, or messages, calls and their results."""
    instructions: str | None = None
    """A system message before the input."""
    previous_response_id: str | None = None
    """A stored response that the input continues."""
    store: bool | None = None
    """Keep the response, its input and its images, so that it can be retrieved and continued."""
    stream: bool | None = None
    """Send events while the answer is generated."""
    max_output_tokens: int | None = None
    """The longest answer in tokens."""
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    """With `include`: the number of likeliest tokens at each position."""
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    """`message.output_text.logprobs` returns the log-probability of every token."""
    text: TextOptions | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | AllowedTools | None = None
    parallel_tool_calls: bool | None = None
    metadata: dict[str, str] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    """auto: the oldest messages are left out as far as the rest does not fit into the context."""
    prompt_cache_key: str | None = None
    """Share cached prompt prefixes only between requests with the same key; `cache_salt` takes precedence."""
