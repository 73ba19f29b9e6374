"""Descriptions of routes beside their code, which `documented` registers for `server.openapi.document`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel

from server.wire.sent.answers import ErrorBody

if TYPE_CHECKING:
    from server.context import AppContext

JSON = "application/json"
EVENTS = "text/event-stream"
BYTES: dict[str, Any] = {"type": "string", "format": "binary"}
TEXT: dict[str, Any] = {"type": "string"}

View = TypeVar("View", bound=Callable[..., Any])
Content = type[BaseModel] | Sequence[type[BaseModel]] | Mapping[str, Any]
"""A model, alternatives of several models, or a JSON schema."""


@dataclass(frozen=True)
class Parameter:
    """A parameter of the path or the query, or a header.

    `schema` is called when the document is made, because registries grow.
    """

    name: str
    about: str
    schema: Callable[[], dict[str, Any]] = lambda: dict(TEXT)
    example: Any = None
    place: str = "query"


@dataclass(frozen=True)
class Example:
    """A request that can be sent unchanged to a server with the embedded model, in JSON or as parameters."""

    about: str
    value: Any


@dataclass(frozen=True)
class Operation:
    """The description of a route.

    `answers` holds successful answers by status and media type, `errors` the statuses besides those of every route, `body`
    the models it reads by media type, `examples` named examples of the body, `headers` those of its answers, and `error`
    the model of its errors.
    """

    tag: str
    answers: Mapping[int, Mapping[str, Content]]
    errors: Sequence[int] = ()
    parameters: Sequence[Parameter] = ()
    body: Mapping[str, Callable[[AppContext], Content]] = field(default_factory=dict)
    examples: Callable[[], Mapping[str, Example]] = dict
    headers: Mapping[str, str] = field(default_factory=dict)
    error: type[BaseModel] = ErrorBody


OPERATIONS: dict[Callable[..., Any], Operation] = {}
"""The operations by the function that answers a route."""


def documented(
    tag: str,
    answers: type[BaseModel] | Mapping[int, Mapping[str, Content]],
    errors: Sequence[int] = (),
    **more: Any,
) -> Callable[[View], View]:
    """Describe a route beyond its function's types; the function's docstring is the description.

    A model stands for an answer in JSON with status 200.
    """
    by_status = answers if isinstance(answers, Mapping) else {200: {JSON: answers}}

    def keep(view: View) -> View:
        OPERATIONS[view] = Operation(tag, by_status, errors, **more)
        return view

    return keep
