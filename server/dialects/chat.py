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

    def whole(self, result: Result) -> dict[str, Any]:
        """Return the whole answer."""
        return self._answer.completion(result)

    def begin(self) -> str:
        """Return the first event of each choice."""
        return "".join(self._answer.role_event(index, self._with_usage) for index in range(self._n))

    def piece(self, chunk: Chunk, last: bool) -> str:
        """Return the events of a chunk."""
        return self._answer.events(chunk, self._with_usage, last)

    def end(self, result: Callable[[], Result]) -> str:
        """Return the usage, if it was requested, and the end of the stream."""
        return (self._answer.usage_event(result()) if self._with_usage else "") + DONE

    def failed(self, problem: ApiError) -> str:
        """Return an event with the error."""
        return event(problem.body())


CHAT = ChatDialect()
