"""The bodies of dialects in the API's document: their own fields, and those of a chat completion that they share."""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache
from typing import Any, TypeVar

from pydantic import BaseModel, create_model

from server.wire.chat import ChatRequest, Stop, Stops

Form = TypeVar("Form", bound=BaseModel)

_OPENAI = frozenset({"messages", "stream_options", "modalities", "audio", "max_tokens", "max_completion_tokens"})
"""Fields of a chat completion that are OpenAI's alone, besides those that a dialect names otherwise."""


def with_chat_fields(form: type[Form], chats: type[ChatRequest], elsewhere: Collection[str]) -> type[Form]:
    """Return the model of a body with the fields of a chat completion, except those that a dialect names `elsewhere`."""
    extended: type[Form] = _with_chat_fields(form, chats, frozenset(elsewhere))  # the cache loses the type
    return extended


@lru_cache(maxsize=16)
def _with_chat_fields(form: type[Form], chats: type[ChatRequest], elsewhere: frozenset[str]) -> type[Form]:
    without = {*form.model_fields, *elsewhere, *_OPENAI}
    fields: dict[str, Any] = {
        name: (info.annotation, info) for name, info in chats.model_fields.items() if name not in without
    }
    if "stop" in fields:
        fields["stop"] = (Stop | Stops | None, fields["stop"][1])
    plain = {"use_attribute_docstrings": False}
    return create_model(form.__name__, __base__=form, __doc__=form.__doc__, __cls_kwargs__=plain, **fields)
