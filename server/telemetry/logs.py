"""Logs that no client can inject lines into: an event is one line, of text or JSON, and has its request's id.

Paths, header fields and error messages contain what clients sent; a decoded line break in them could start a line that looks
like the server's own. Neither a request's content nor its key is logged.
"""

from __future__ import annotations

import json
import logging
import re
import uuid
import warnings
from collections.abc import Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

from gunicorn.glogging import Logger as GunicornLogger

FORMAT = "[%(asctime)s] [%(process)d] [%(levelname)s] %(message)s"
DATES = "%Y-%m-%d %H:%M:%S %z"
NOTES = "helmsight.notes"
"""Key of a WSGI environment under which the application stores notes for the log, as a dict."""

current: ContextVar[str | None] = ContextVar("helmsight_request_id", default=None)
"""The id of the request that this thread answers."""
current_completion: ContextVar[tuple[str, str] | None] = ContextVar("helmsight_completion_id", default=None)
"""A request's id and that of its completion, once it has one."""
COMPLETION = "helmsight.completion"
"""Key of a WSGI environment under which the application stores the completion's id for the log."""
WELL_FORMED = re.compile(r"[\w.:@/+=-]{1,128}", re.ASCII)
"""Pattern of request ids that are accepted from clients."""
_PARENT = re.compile(r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}(?:-.*)?")


def request_id(sent_id: str | None) -> str:
    """Return the id that a client or a proxy gave if it is well formed, else a new one."""
    return sent_id if sent_id and WELL_FORMED.fullmatch(sent_id) else f"req_{uuid.uuid4().hex}"


def trace_of(parent: str | None) -> dict[str, str]:
    """Return the trace's id of a `traceparent` (W3C Trace Context), nothing if there is none or it is not well formed."""
    match = _PARENT.fullmatch(parent or "")
    return {"trace_id": match[1]} if match and set(match[1]) != {"0"} and set(match[2]) != {"0"} else {}


def _ids() -> tuple[str | None, str | None]:
    """Return the ids of the current request and of its completion; a pair that another request left behind is ignored."""
    request, pair = current.get(), current_completion.get()
    return request, pair[1] if pair is not None and pair[0] == request else None


def printable(text: str) -> str:
    """Return the text with non-printable characters escaped, and backslashes doubled, so that no escape is faked."""
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
        ids = [name for name in _ids() if name and name not in record.message]
        return super().formatMessage(record) + (f" ({' '.join(ids)})" if ids else "")

    def formatException(self, ei: Any) -> str:
        return "\n".join("    " + printable(line) for line in super().formatException(ei).split("\n"))


class OneObject(logging.Formatter):
    """A JSON object per line.

    It has `time` (UTC), `level`, `logger`, `process`, `message`; if known, `request_id`, `completion_id` and `exception`;
    and the record's `fields`.
    """

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": record.process,
            "message": record.getMessage(),
        }
        ids = zip(("request_id", "completion_id"), _ids(), strict=True)
        entry |= {name: value for name, value in ids if value is not None}
        entry |= getattr(record, "fields", {})
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        # Everything but ASCII is escaped, so that no reader finds a line end or a terminal command within it.
        return json.dumps(entry, default=str, separators=(",", ":")).replace("\x7f", "\\u007f")


class Logger(GunicornLogger):
    """gunicorn's logs in this format."""

    def setup(self, cfg: Any) -> None:
        super().setup(cfg)
        self._format(self.error_log, OneLine(FORMAT, DATES))
        self._format(self.access_log, OneLine(self.access_fmt))

    @staticmethod
    def _format(log: logging.Logger, formatter: logging.Formatter) -> None:
        for handler in log.handlers:
            handler.setFormatter(formatter)


class JsonLogger(Logger):
    """gunicorn's logs as JSON; a finished request is an object of fields."""

    def setup(self, cfg: Any) -> None:
        super().setup(cfg)
        self._format(self.error_log, OneObject())
        self._format(self.access_log, OneObject())

    def access(self, resp: Any, req: Any, environ: Mapping[str, Any], request_time: Any) -> None:
        if self.cfg.accesslog:
            fields = finished(resp, environ, request_time.total_seconds())
            self.access_log.info("%s %s", fields["method"], fields["path"], extra={"fields": fields})


def finished(response: Any, environ: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    """Return the log's fields of an answered request, given gunicorn's response.

    The query is left out, since some clients put keys there.
    """
    return {
        "event": "request",
        "client": environ.get("REMOTE_ADDR") or None,
        "method": environ.get("REQUEST_METHOD"),
        "path": environ.get("PATH_INFO"),
        "status": int(str(response.status).split(" ", 1)[0]),
        "bytes": response.sent,
        "seconds": round(seconds, 6),
        **environ.get(NOTES, {}),
    }


def logger_class(form: str) -> str:
    """Return gunicorn's name of the logger that writes a form, "text" or "json"."""
    return f"{__name__}.{'JsonLogger' if form == 'json' else 'Logger'}"


def set_up_logging(level: str, form: str = "text") -> None:
    """Log to standard error in the form of gunicorn's lines; JSON logs include Python's warnings."""
    handler = logging.StreamHandler()
    handler.setFormatter(OneObject() if form == "json" else OneLine(FORMAT, DATES))
    logging.basicConfig(handlers=[handler])
    if form == "json":
        logging.captureWarnings(True)
        warnings.formatwarning = _one_sentence
    for name in ("helmsight", "steering"):
        logging.getLogger(name).setLevel(level.upper())


def _one_sentence(message: Warning | str, category: type[Warning], filename: str, lineno: int, line: Any = None) -> str:
    return f"{category.__name__}: {message} ({filename}:{lineno})"
