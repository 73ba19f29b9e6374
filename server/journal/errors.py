"""Errors of a journal, each as a public reason and a detail for the log."""

from __future__ import annotations

from sqlalchemy.exc import DBAPIError, NoSuchModuleError
from sqlalchemy.exc import TimeoutError as PoolTimeout

REASONS = {
    "bad_url": "the setting is neither a path nor a URL of SQLite or PostgreSQL",
    "busy": "too many readers are waiting for the journal",
    "disk_full": "the disk is full",
    "driver_missing": "PostgreSQL needs the package psycopg: pip install 'helmsight[postgres]'",
    "failed": "the database reports an error",
    "locked": "another process holds the database locked",
    "missing": "there is no journal",
    "newer_version": "the journal was written by a newer version of Helmsight",
    "not_a_database": "this is not a journal database",
    "not_writable": "the journal file cannot be opened for writing",
    "starting": "the journal is still being opened",
    "unreachable": "the database cannot be reached",
}
"""Reasons with a clause each that names neither places nor people, since /ready shows it to everybody."""

_SQLITE = (
    ("not a database", "not_a_database"),
    ("malformed", "not_a_database"),
    ("readonly", "not_writable"),
    ("unable to open", "not_writable"),
    ("disk is full", "disk_full"),
    ("locked", "locked"),
)


class JournalError(Exception):
    """An error of the journal with one of REASONS.

    The message adds the place and the database's own message, never a password.
    """

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(f"{REASONS[reason]} ({detail})" if detail else REASONS[reason])
        self.reason = reason
        self.detail = detail


def explain(error: Exception, shown: str, secrets: tuple[str, ...] = ()) -> JournalError:
    """Return the JournalError for any exception of a journal at `shown`, without the `secrets`."""
    if isinstance(error, JournalError):
        return error if error.detail else JournalError(error.reason, shown)
    message = str(error.orig if isinstance(error, DBAPIError) else error).strip().partition("\n")[0][:300]
    for secret in secrets:
        message = message.replace(secret, "***")
    return JournalError(_reason(error, message), f"{shown}: {message or type(error).__name__}")


def _reason(error: Exception, message: str) -> str:
    if isinstance(error, PoolTimeout):
        return "busy"
    if isinstance(error, (NoSuchModuleError, ImportError)):
        return "driver_missing"
    if isinstance(error, OSError):
        return "disk_full" if error.errno == 28 else "not_writable"
    if not isinstance(error, DBAPIError):
        return "failed"
    if hasattr(error.orig, "sqlstate"):  # PostgreSQL
        state: str | None = getattr(error.orig, "sqlstate", None)
        if state == "53100":
            return "disk_full"
        # None: no connection. 08 and 57P: it broke. 28 and 3D: login or database refused. 53: insufficient resources.
        return "unreachable" if state is None or state[:2] in ("08", "28", "3D", "53", "57") else "failed"
    if getattr(error.orig, "sqlite_errorname", None) == "SQLITE_IOERR_SHMSIZE":
        return "disk_full"  # reported as an I/O error, but the index of the write-ahead log has no space
    return next((reason for text, reason in _SQLITE if text in message), "failed")
