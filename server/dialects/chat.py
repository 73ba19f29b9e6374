"""OpenAI's chat completions, the dialect that all others are translated to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from server.dialects.answer import DONE, event
from server.dialects.dialect import Begun, Translation
from server.errors import ApiError
from steering import Chunk, Result


class ChatDialect:
    """Chat completions as they are."""

    prefix: ClassVar[str] = "chatcmpl-"
    keeps_images: ClassVar[bool] = False

    def translated(self, body: dict[str, Any]) -> Translation:
        """Return the body."""
        return Translation(body)

    def writer(self, begun: Begun) -> ChatWriter:
        """Return the writer of the answer."""
        return ChatWriter(begun)


class ChatWriter:
    """Writes chat.completion objects, and chunks that end with `[DONE]`."""

    def __init__(self, begun: Begun):
        self._answer, options = begun.answer, begun.chat.stream_options
        self._n = 1 if begun.chat.n is None else begun.chat.n
        self._with_usage = bool(options and options.include_usage)
        may_call = begun.chat.tools and begun.chat.tool_choice != "none"
        self._unknown = set(range(self._n)) if may_call else set[int]()
        """The choices of which it is not known yet whether they begin with a call."""

    def whole(self, result: Result) -> dict[str, Any]:
        """Return the whole answer."""
        return self._answer.completion(result)

    def begin(self) -> str:
        """Return the first event of each choice that cannot begin with a call."""
        known = [index for index in range(self._n) if index not in self._unknown]
        return "".join(self._answer.role_event(index, self._with_usage) for index in known)

    def piece(self, chunk: Chunk, last: bool) -> str:
        """Return the events of a chunk."""
        events = self._answer.events(chunk, self._with_usage, last)
        if not events or chunk.index not in self._unknown:
            return events
        self._unknown.remove(chunk.index)
        silent = not chunk.text and (chunk.choice is None or bool(chunk.choice.tool_calls))
        return self._answer.role_event(chunk.index, self._with_usage, None if silent else "") + events

    def end(self, result: Callable[[], Result]) -> str:
        """Return the usage, if it was requested, and the end of the stream."""
        return (self._answer.usage_event(result()) if self._with_usage else "") + DONE

    def failed(self, problem: ApiError) -> str:
        """Return an event with the error."""
        return event(problem.body())


CHAT = ChatDialect()
