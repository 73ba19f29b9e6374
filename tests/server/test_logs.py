"""One event is one line, whatever clients send."""

from __future__ import annotations

import logging
import sys

import pytest

from server.logs import OneLine, printable


@pytest.mark.parametrize("text", ["a\r\nFAKE", "a\x1b[31m", "a\x85b", "a\u2028b", "a\x00b", "a\u202eb", "a\x7fb"])
def test_what_is_not_printable_is_escaped(text: str) -> None:
    shown = printable(text)
    assert shown.isprintable()
    assert shown.isascii()
    assert shown.encode().decode("unicode_escape") == text


def test_printable_text_stays_and_no_escape_can_be_faked() -> None:
    assert printable("grün, 日本 \"'") == "grün, 日本 \"'"
    assert printable("\\n") != printable("\n")


def test_a_traceback_that_quotes_a_client_begins_no_line() -> None:
    try:
        raise ValueError("x\n[2026] [INFO] fake")
    except ValueError:
        record = logging.LogRecord("n", logging.ERROR, "f", 1, "failed: %s", ("a\nb",), sys.exc_info())
    first, *others = OneLine("%(message)s").format(record).split("\n")
    assert first == "failed: a\\nb"
    assert all(line.startswith("    ") for line in others)
