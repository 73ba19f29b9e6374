"""Constraints on an answer and its tool calls: OpenAI's `response_format` and `tools`."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    StringConstraints,
    Tag,
    model_validator,
)
from pydantic_core import PydanticCustomError

from server.wire.fields import Flag, Strict
from server.wire.strangers import check_names
from steering import Grammar, Tools
from steering.tools.tools import MAX_FUNCTIONS, NAME

SCHEMA = "response_format.json_schema.schema"
ASIDE = " With 'response_format.json_schema.strict': false it is left aside."


class Structured(BaseModel):
    """An object of OpenAI's protocol."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _known_names(cls, value: Any) -> Any:
        if isinstance(value, dict):
            check_names(value, [field.alias or name for name, field in cls.model_fields.items()])
        return value


class NamedSchema(Structured):
    """A JSON schema with a name, which the server does not use."""

    name: str | None = None
    description: str | None = None
    definition: dict[str, Any] = Field(alias="schema")
    """The schema of the answer's JSON; keywords that cannot be enforced are refused by name."""
    strict: Flag | None = None
    """false: keywords that cannot be enforced are ignored instead."""


class ResponseFormat(Structured):
    """A constraint on the answer; the model can generate nothing else."""

    type: Literal["text", "json_object", "json_schema"]
    """text: anything. json_object: any JSON object. json_schema: JSON that follows the schema."""
    json_schema: NamedSchema | None = None
    """Only with `"type": "json_schema"`."""

    @model_validator(mode="after")
    def _one_schema(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            context = {"kind": self.type, "needs": "needs" if self.json_schema is None else "goes without"}
            raise PydanticCustomError("schema", "'type': '{kind}' {needs} 'json_schema'", context)
        return self

    @property
    def grammar(self) -> Grammar | None:
        """The grammar of such answers, None for any answer; raises RequestError if the schema is too large."""
        if self.json_schema is not None:
            schema = self.json_schema
            return Grammar.json_schema(schema.definition, strict=schema.strict is not False, param=SCHEMA, aside=ASIDE)
        return Grammar.json_object(param="response_format") if self.type == "json_object" else None


class StructuredOutputs(Strict):
    """A constraint on the answer in vLLM's form: exactly one of these."""

    # Fields named like the aliases would hide methods.
    schema_: dict[str, Any] | None = Field(None, alias="json")
    """A JSON schema, as in `response_format`."""
    regex: str | None = None
    """A regular expression of the whole answer."""
    choice: Annotated[list[str], Field(min_length=1)] | None = None
    """A list of texts, one of which is the answer."""
    json_object: Flag | None = None
    """Any JSON object."""

    @model_validator(mode="after")
    def _single_form(self) -> Self:
        present = [self.schema_ is not None, self.regex is not None, self.choice is not None, bool(self.json_object)]
        if sum(present) != 1:
            raise PydanticCustomError("structured", "must have one of json, regex, choice and json_object")
        return self

    @property
    def grammar(self) -> Grammar:
        """The grammar of such answers; raises RequestError."""
        at = "structured_outputs"
        if self.schema_ is not None:
            return Grammar.json_schema(self.schema_, param=f"{at}.json", aside="")
        if self.regex is not None:
            return Grammar.regex(self.regex, param=f"{at}.regex")
        if self.choice is not None:
            return Grammar.choice(self.choice, param=f"{at}.choice")
        return Grammar.json_object(param=at)


FunctionName = Annotated[str, StringConstraints(pattern=f"^{NAME.pattern}$")]


class FunctionForm(Structured):
    """A function that an answer may call."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """A JSON schema of its arguments, an object; without one it has none."""
    strict: Flag | None = None
    """true: if a call is required, keywords of the parameters that cannot be enforced are refused, not ignored."""


class ToolForm(Structured):
    """A tool; functions are the only kind."""

    type: Literal["function"]
    function: FunctionForm


class FunctionChoice(Structured):
    """The function that must be called."""

    name: str


class NamedTool(Structured):
    """The tool that must be called."""

    type: Literal["function"]
    function: FunctionChoice


class CalledFunction(Structured):
    """A called function with its arguments."""

    name: str
    arguments: str
    """A JSON object."""


class CallForm(Structured):
    """A tool call of an earlier answer."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


def _choice(value: Any) -> Any:
    if value is None or isinstance(value, dict | NamedTool) or value in ("none", "auto", "required"):
        return value
    raise PydanticCustomError("choice", "must be 'none', 'auto', 'required' or a function to call")


ToolList = Annotated[list[ToolForm], Field(max_length=MAX_FUNCTIONS)]
ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<word>")] | Annotated[NamedTool, Tag("<tool>")],
    Discriminator(lambda choice: "<word>" if isinstance(choice, str) else "<tool>"),
    BeforeValidator(_choice),
]


def tools_of(tools: list[ToolForm], choice: str | NamedTool | None, parallel: bool) -> Tools | None:
    """Return the tools that an answer may call, None for none; raises RequestError."""
    if not tools or choice == "none":
        return None
    functions = [tool.model_dump(exclude_unset=True, exclude_none=True) for tool in tools]
    required = choice.function.name if isinstance(choice, NamedTool) else choice == "required"
    return Tools(functions, required, parallel)
