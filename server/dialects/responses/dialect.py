"""OpenAI's responses as a dialect."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from server.dialects.dialect import Begun, Translation
from server.dialects.responses.translation import translated
from server.dialects.responses.writer import ResponseWriter


class ResponsesDialect:
    """OpenAI's responses.

    `earlier` returns the messages of the chat that a stored response ends, by its id. With `stores`, responses are stored
    unless a request says otherwise.
    """

    prefix: ClassVar[str] = "resp_"
    keeps_images: ClassVar[bool] = True

    def __init__(self, earlier: Callable[[str], list[dict[str, Any]]], stores: bool):
        self._earlier = earlier
        self._stores = stores

    def translated(self, body: dict[str, Any]) -> Translation:
        """Return the chat request that a body means."""
        meant = translated(body, self._earlier)
        if self._stores and meant.chat.get("store") is None:
            meant.chat["store"] = True
        return meant

    def writer(self, begun: Begun) -> ResponseWriter:
        """Return the writer of the response."""
        return ResponseWriter(begun)
