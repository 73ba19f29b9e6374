"""The protocol of a dialect: how a body means a chat request, and how an answer to that is written.

A dialect translates at the door. Everything between, from presets to the journal, knows chat requests only.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from server.dialects.answer import Answer
from server.errors import ApiError
from server.wire.chat import ChatRequest
from steering import Chunk, Result, Sampling

_QUOTED = re.compile(r"'([a-z_]+(?:[.\[][^']*)?)'")
"""A place in a body, as messages quote it."""


@dataclass
class Translation:
    """The chat request that a body means.

    `chat` is its JSON. `places` holds the body's place for each place in it that has another name, "" for one that bodies
    lack, of which errors do not speak. `ignored` are the body's places that nothing reads, besides those of `chat` that
    nothing reads. With `truncates`, a chat that does not fit may lose its oldest messages.
    """

    chat: dict[str, Any]
    places: dict[str, str] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)
    truncates: bool = False

    def truncated(self) -> bool:
        """Leave out the oldest quarter of the turns, at least one; return False if only the last turn is left.

        A turn begins with a message of the user; system messages stay.
        """
        messages = self.chat["messages"]
        turns = [number for number, message in enumerate(messages) if message.get("role") == "user"]
        if not self.truncates or len(turns) < 2:
            return False
        until = turns[max(1, len(turns) // 4)]
        first = [message for message in messages[:until] if message.get("role") in ("system", "developer")]
        self.chat["messages"] = [*first, *messages[until:]]
        others = {place: name for place, name in self.places.items() if not place.startswith("messages[")}
        self.places = {**others, "messages": "input"}
        return True


@dataclass(frozen=True)
class Begun:
    """A request whose answer begins: its body, the chat request that this means, and what both became.

    `markers` are the tags around the model's reasoning, None if it has none; the prompt ends with `prompt_end`. `stored` is
    True if the answer will be stored. `cached_tokens` returns how many tokens of the prompt came from a cache, as known
    with the first chunk.
    """

    body: Mapping[str, Any]
    chat: ChatRequest
    answer: Answer
    sampling: Sampling
    prompt_tokens: int
    prompt_end: str = ""
    markers: tuple[str, str] | None = None
    stored: bool = False
    cached_tokens: Callable[[], int] = lambda: 0


class Writer(Protocol):
    """Writes one answer."""

    def whole(self, result: Result) -> dict[str, Any]:
        """Return the whole answer."""

    def begin(self) -> str:
        """Return the events before the first token."""

    def piece(self, chunk: Chunk, last: bool) -> str:
        """Return the events of a chunk, "" for none; `last` is True for the last one of all choices."""

    def end(self, result: Callable[[], Result]) -> str:
        """Return the events behind the last chunk."""

    def failed(self, problem: ApiError) -> str:
        """Return the events of an error behind the first event."""


class Dialect(Protocol):
    """A protocol for chats.

    `prefix` begins the ids of its answers. With `keeps_images`, a stored answer can be continued, and its images are kept.
    """

    prefix: ClassVar[str]
    keeps_images: ClassVar[bool]

    def translated(self, body: dict[str, Any]) -> Translation:
        """Return the chat request that a body means; raises BadRequest for a body that means none."""

    def writer(self, begun: Begun) -> Writer:
        """Return the writer of the answer."""


def renamed(problem: ApiError, places: Mapping[str, str]) -> ApiError:
    """Return an error about a chat request as one about the body that it was translated from.

    Its message may name several places; a sentence about one that bodies lack is left out.
    """
    told = problem.message
    for place in [place for place, name in places.items() if not name]:
        told = re.sub(rf" [^.']*'{re.escape(place)}'[^.']*\.", "", told)
    message = _QUOTED.sub(lambda quoted: f"'{place_of(quoted[1], places)}'", told)
    param = None if problem.param is None else place_of(problem.param, places)
    if (message, param) == (problem.message, problem.param):
        return problem
    renamed = ApiError(problem.status, message, code=problem.code, param=param)
    renamed.headers = problem.headers
    return renamed


def place_of(param: str, places: Mapping[str, str]) -> str:
    """Return the body's place for a place in the chat request: that of the longest part of it that has one."""
    for end in range(len(param), 0, -1):
        if (end == len(param) or param[end] in ".[") and param[:end] in places:
            return places[param[:end]] + param[end:]
    return param
