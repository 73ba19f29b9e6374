"""What a route says of itself beside its code: `documented` keeps it for `server.openapi.document`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel

if TYPE_CHECKING:
    from server.context import AppContext

JSON = "application/json"
EVENTS = "text/event-stream"
BYTES: dict[str, Any] = {"type": "string", "format": "binary"}
TEXT: dict[str, Any] = {"type": "string"}

View = TypeVar("View", bound=Callable[..., Any])
Content = type[BaseModel] | Sequence[type[BaseModel]] | Mapping[str, Any]
"""One model, or one of several; or else a JSON schema."""


@dataclass(frozen=True)
class Parameter:
    """A parameter of the path or the query. `schema` is called when the document is made, because registries grow."""

    name: str
    about: str
    schema: Callable[[], dict[str, Any]] = lambda: dict(TEXT)
    example: Any = None
    place: str = "query"


@dataclass(frozen=True)
class Example:
    """Something that can be sent as it is to a server with the embedded model, in JSON or as parameters."""

    about: str
    value: Any


@dataclass(frozen=True)
class Operation:
    """A route. answers: by status and media type, where nothing went wrong. errors: statuses beside those of every route.
    body: by media type what it reads; examples: of it, by name. headers: of its answers."""

    tag: str
    answers: Mapping[int, Mapping[str, Content]]
    errors: Sequence[int] = ()
    parameters: Sequence[Parameter] = ()
    body: Mapping[str, Callable[[AppContext], Content]] = field(default_factory=dict)
    examples: Callable[[], Mapping[str, Example]] = dict
    headers: Mapping[str, str] = field(default_factory=dict)


OPERATIONS: dict[Callable[..., Any], Operation] = {}
"""By the function that answers a route."""


def documented(
    tag: str,
    answers: type[BaseModel] | Mapping[int, Mapping[str, Content]],
    errors: Sequence[int] = (),
    **more: Any,
) -> Callable[[View], View]:
    """Say of a route what the types of its function do not; its docstring is its description. A model stands for an answer
    in JSON with the status 200."""
    found = answers if isinstance(answers, Mapping) else {200: {JSON: answers}}

    def keep(view: View) -> View:
        OPERATIONS[view] = Operation(tag, found, errors, **more)
        return view

    return keep
