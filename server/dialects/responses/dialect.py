"""OpenAI's responses as a dialect."""

from __future__ import annotations

from typing import Any, ClassVar

from server.dialects.dialect import Begun, Translated
from server.dialects.responses.translation import translated
from server.dialects.responses.writer import ResponseWriter


class ResponsesDialect:
    """OpenAI's responses."""

    prefix: ClassVar[str] = "resp_"

    def translated(self, body: dict[str, Any]) -> Translated:
        """Return the chat request that a body means."""
        return translated(body)

    def writer(self, begun: Begun) -> ResponseWriter:
        """Return the writer of the response."""
        return ResponseWriter(begun)


RESPONSES = ResponsesDialect()
