"""Readers of a call's arguments while they are generated: a JSON object, or pairs of tags with plain texts."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Protocol

from pydantic_core import from_json

KEY, VALUE, VALUE_END = ("<arg_key>", "</arg_key>"), "<arg_value>", "</arg_value>"
_PAIR = re.compile(rf"\s*{KEY[0]}(.*?){KEY[1]}\s*{VALUE}", re.DOTALL)


class Reader(Protocol):
    """Reads the arguments of one call."""

    def read(self, text: str) -> tuple[str, str, bool]:
        """Return (JSON that is certain, the rest of the text, whether the arguments are complete)."""


class Braces:
    """A JSON object, up to the brace that closes it."""

    def __init__(self) -> None:
        self._depth, self._quoted, self._escaped = 0, False, False

    def read(self, text: str) -> tuple[str, str, bool]:
        for at, character in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._escaped, self._quoted = character == "\\", character != '"'
            elif character == '"':
                self._quoted = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return text[: at + 1], text[at + 1 :], True
        return text, "", False


class Pairs:
    """Repeated `<arg_key>name</arg_key><arg_value>value</arg_value>`, up to `end`.

    Values of the parameters in `texts` are plain texts; others are JSON, or texts where they are not valid JSON.
    """

    def __init__(self, end: str, texts: Collection[str]):
        self._end = end
        self._texts = texts
        self._before = "{"
        self._within: bool | None = None  # within a value: whether it is a text; else None

    def read(self, text: str) -> tuple[str, str, bool]:
        out = ""
        while True:
            if self._within is None:
                pair, end = _PAIR.match(text), text.find(self._end)
                if pair is None and end >= 0:
                    return out + ("{}" if self._before == "{" else "}"), text[end:], True
                if pair is None:
                    return out, text, False
                name, text = pair[1].strip(), text[pair.end() :]
                self._within = name in self._texts
                out += f"{self._before}{_json(name)}: " + '"' * self._within
                self._before = ", "
            value, ended, behind = text.partition(VALUE_END)
            if self._within:
                held_back = 0 if ended else beginning(text, VALUE_END)
                out += _json(value[: len(value) - held_back])[1:-1] + '"' * bool(ended)
                text = behind if ended else text[len(text) - held_back :]
            elif ended:
                out, text = out + _json_line(value), behind
            if not ended:
                return out, text, False
            self._within = None


def beginning(text: str, mark: str) -> int:
    """Return how many characters at the end of a text may be the beginning of a mark."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)


def _json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _json_line(value: str) -> str:
    """Return a value as JSON on one line."""
    try:
        return json.dumps(from_json(value), ensure_ascii=False, allow_nan=False)
    except ValueError:
        return _json(value)
