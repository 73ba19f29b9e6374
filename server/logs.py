"""Logs that no client can write into: what is not printable stands escaped, so that one event is one line.

Paths, header fields and messages of errors hold what clients sent; a decoded line break among them would begin a line that
looks like the server's own.
"""

from __future__ import annotations

import logging
from typing import Any

from gunicorn.glogging import Logger as GunicornLogger

FORMAT = "[%(asctime)s] [%(process)d] [%(levelname)s] %(message)s"
DATES = "%Y-%m-%d %H:%M:%S %z"


def printable(text: str) -> str:
    """The text with every character that is not printable as its escape, and backslashes doubled, so that none is faked."""
    if text.isprintable() and "\\" not in text:
        return text
    return "".join(
        char if char.isprintable() and char != "\\" else char.encode("unicode_escape", "surrogatepass").decode()
        for char in text
    )


class OneLine(logging.Formatter):
    """Escapes the message; the lines of a traceback, which may quote a client too, are escaped and indented."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = printable(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:
        return "\n".join("    " + printable(line) for line in super().formatException(ei).split("\n"))


class Logger(GunicornLogger):
    """gunicorn's logs in this format."""

    def setup(self, cfg: Any) -> None:
        super().setup(cfg)
        for handler in self.error_log.handlers:
            handler.setFormatter(OneLine(FORMAT, DATES))
        for handler in self.access_log.handlers:
            handler.setFormatter(OneLine(self.access_fmt))


def set_up_logging(level: str) -> None:
    """Log to standard error, in gunicorn's format."""
    handler = logging.StreamHandler()
    handler.setFormatter(OneLine(FORMAT, DATES))
    logging.basicConfig(handlers=[handler])
    for name in ("helmsight", "steering"):
        logging.getLogger(name).setLevel(level.upper())
