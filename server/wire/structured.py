"""What an answer must be: OpenAI's `response_format`."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from server.wire.fields import Flag
from server.wire.strangers import check_names
from steering import Grammar

SCHEMA = "response_format.json_schema.schema"


class Structured(BaseModel):
    """An object of OpenAI's."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _known_names(cls, value: Any) -> Any:
        if isinstance(value, dict):
            check_names(value, [field.alias or name for name, field in cls.model_fields.items()])
        return value


class NamedSchema(Structured):
    """A JSON schema with a name, which is the client's own business."""

    name: str | None = None
    description: str | None = None
    definition: dict[str, Any] = Field(alias="schema")
    """What the answer's JSON must be. What of it cannot be enforced is refused by its name."""
    strict: Flag | None = None
    """false: what cannot be enforced is left aside instead."""


class ResponseFormat(Structured):
    """What an answer must be; the model can say nothing else."""

    type: Literal["text", "json_object", "json_schema"]
    """text: anything. json_object: any JSON object. json_schema: what the schema describes."""
    json_schema: NamedSchema | None = None
    """Goes with `"type": "json_schema"`."""

    @model_validator(mode="after")
    def _one_schema(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            said = {"kind": self.type, "needs": "needs" if self.json_schema is None else "goes without"}
            raise PydanticCustomError("schema", "'type': '{kind}' {needs} 'json_schema'", said)
        return self

    @property
    def grammar(self) -> Grammar | None:
        """The grammar of such answers, None of any; raises RequestError where the schema is too large."""
        if self.json_schema is not None:
            schema = self.json_schema
            return Grammar.json_schema(schema.definition, strict=schema.strict is not False, param=SCHEMA)
        return Grammar.json_object(param="response_format") if self.type == "json_object" else None
