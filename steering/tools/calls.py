"""An answer taken apart, piece by piece: what it says, and what it calls."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

from steering.tools.formats import Format

_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\]+)"\s*,\s*"arguments"\s*:\s*(?=\{)')


@dataclass(frozen=True)
class ToolCall:
    """A call of a function; arguments: JSON, as the model wrote it."""

    name: str
    arguments: str


@dataclass(frozen=True)
class CallPiece:
    """A piece of the call of that number, counted from 0; `name` comes with its first piece."""

    number: int
    name: str | None
    arguments: str


class CallStream:
    """Feed the text of an answer; take what is said, and pieces of calls. What only looks like a call of one of the
    functions of these `names` is said. White space around calls is left out."""

    def __init__(self, form: Format, names: frozenset[str]):
        self._form = form
        self._names = names
        self._left = ""
        self._part: Callable[[bool], bool] = self._speech
        self._said: list[str] = []
        self._pieces: list[CallPiece] = []
        self.text = ""
        self.calls: list[ToolCall] = []

    def feed(self, text: str, last: bool = False) -> tuple[str, tuple[CallPiece, ...]]:
        """What is certain by now of the text so far; all of it at the `last`."""
        self._left += text
        while self._part(last):
            pass
        said, pieces = "".join(self._said), tuple(self._pieces)
        self.text += said
        self._said, self._pieces = [], []
        return said, pieces

    # Each part takes what it can from the front of what is left; True where another one has to go on.

    def _speech(self, last: bool) -> bool:
        before, found, behind = self._left.partition(self._form.start)
        if found:
            self._said.append(before.rstrip())
            self._left, self._part = behind, self._head
            return True
        held = 0 if last else _beginning(self._left, self._form.start)
        certain = self._left[: len(self._left) - held]
        kept = certain if last and not self.calls else certain.rstrip()
        self._said.append(kept)
        self._left = self._left[len(kept) :]
        return False

    def _head(self, last: bool) -> bool:
        head = _HEAD.match(self._left)
        if head is not None and head[1] in self._names:
            self._begin(head[1])
            self._left, self._part = self._left[head.end() :], self._arguments
            self._depth, self._quoted, self._escaped = 0, False, False
            return True
        body, found, behind = self._left.partition(self._form.end)
        if not found and not last:
            return False
        self._left, self._part = behind, self._speech
        if found and (call := self._whole(body)) is not None:
            self._begin(call.name)
            self._go_on(call.arguments)
        else:
            self._said.append(self._form.start + body + found)
        return True

    def _arguments(self, last: bool) -> bool:
        """Up to the brace that closes the first one."""
        for at, character in enumerate(self._left):
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
                    self._go_on(self._left[: at + 1])
                    self._left, self._part = self._left[at + 1 :], self._tail
                    return True
        self._go_on(self._left)
        self._left = ""
        return False

    def _tail(self, last: bool) -> bool:
        _, found, behind = self._left.partition(self._form.end)
        if found:
            self._left, self._part = behind, self._speech
        return bool(found)

    def _begin(self, name: str) -> None:
        self._pieces.append(CallPiece(len(self.calls), name, ""))
        self.calls.append(ToolCall(name, ""))

    def _go_on(self, arguments: str) -> None:
        if arguments:
            self._pieces.append(CallPiece(len(self.calls) - 1, None, arguments))
            self.calls[-1] = ToolCall(self.calls[-1].name, self.calls[-1].arguments + arguments)

    def _whole(self, body: str) -> ToolCall | None:
        """A call whose object is written in another order or without arguments."""
        try:
            said = json.loads(body)
        except (ValueError, RecursionError):
            return None
        name, arguments = (said.get("name"), said.get("arguments", {})) if isinstance(said, dict) else (None, None)
        if not isinstance(name, str) or name not in self._names or not isinstance(arguments, dict):
            return None
        return ToolCall(name, json.dumps(arguments, ensure_ascii=False))


def _beginning(text: str, mark: str) -> int:
    """How many characters at the end of a text may be the beginning of a mark."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)
