"""Anthropic's messages as a dialect."""

from __future__ import annotations

from typing import Any, ClassVar

from server.dialects.dialect import Begun, Translation
from server.dialects.messages.translation import translated
from server.dialects.messages.writer import MessageWriter


class MessagesDialect:
    """Anthropic's messages."""

    prefix: ClassVar[str] = "msg_"
    keeps_images: ClassVar[bool] = False

    def translated(self, body: dict[str, Any]) -> Translation:
        """Return the chat request that a body means."""
        return translated(body)

    def writer(self, begun: Begun) -> MessageWriter:
        """Return the writer of the message."""
        return MessageWriter(begun)


MESSAGES = MessagesDialect()
