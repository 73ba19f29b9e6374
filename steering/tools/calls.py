"""Splits an answer, piece by piece, into its text and its calls."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from pydantic_core import from_json

from steering.tools.arguments import Braces, Pairs, Reader, beginning
from steering.tools.formats import Format


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
    """Takes the text of an answer and returns its plain text, and pieces of calls.

    Text that only looks like a call of one of the functions in `names` is plain text. White space around calls is left out,
    and what may have become a call where an answer was cut off.
    texts: by function, the parameters whose values are texts. An answer that must be calls, `required`, has no plain text,
    even where a call was cut off as it began. One that calls or follows a format, `formatted`, is all text unless it begins
    with a call, and then has no plain text. reasoning: tags of the model's own; an answer that begins with the first one, or
    whose prompt ended with it, has no calls before the second.
    """

    def __init__(
        self,
        form: Format,
        names: Collection[str],
        texts: Mapping[str, Collection[str]] | None = None,
        required: bool = False,
        formatted: bool = False,
        reasoning: tuple[str, str] | None = None,
        prompt_end: str = "",
    ):
        self._form = form
        self._names = names
        self._texts = texts or {}
        self._silent = required
        self._begun = ""  # the text of a formatted answer that begins as a call but has none yet
        self._unread = ""
        self._cut_off = False
        self._begins, self._ends = reasoning or ("", "")
        self._part: Callable[[bool], bool] = self._opening if formatted and not required else self._speech
        if reasoning is not None:
            self._part = self._thought if prompt_end.rstrip().endswith(self._begins) else self._beginning
        self._reader: Reader = Braces()
        self._text_parts: list[str] = []
        self._pieces: list[CallPiece] = []
        self.text = ""
        self.calls: list[ToolCall] = []

    def feed(self, text: str, last: bool = False, cut_off: bool = False) -> tuple[str, tuple[CallPiece, ...]]:
        """Return the plain text and pieces that are certain so far; everything at the `last` text.

        cut_off: whether the last text is not where the model ended its answer.
        """
        self._unread += text
        self._cut_off = cut_off
        if self._begun:
            self._begun += text
        while self._part(last):
            pass
        if self._begun and self.calls:
            self._begun, self._silent = "", True
        if self._begun:
            self._text_parts = [self._begun] if last else []
        speech, pieces = "" if self._silent else "".join(self._text_parts), tuple(self._pieces)
        self.text += speech
        self._text_parts, self._pieces = [], []
        return speech, pieces

    @property
    def cut(self) -> bool:
        """True if the arguments of the last call are not complete."""
        return self._part == self._arguments

    # Each part consumes the front of the remaining text; it returns True where another part must go on.

    def _beginning(self, last: bool) -> bool:
        """Decide by its beginning whether an answer reasons."""
        text = self._unread.lstrip()
        if text.startswith(self._begins):
            self._part = self._thought
        elif last or not self._begins.startswith(text):
            self._part = self._speech
        else:
            return False
        return True

    def _thought(self, last: bool) -> bool:
        thought, ended, behind = self._unread.partition(self._ends)
        if ended:
            self._text_parts.append(thought + ended)
            self._unread, self._part = behind, self._speech
            return True
        held_back = 0 if last else beginning(self._unread, self._ends)
        certain = len(self._unread) - held_back
        self._text_parts.append(self._unread[:certain])
        self._unread = self._unread[certain:]
        return False

    def _opening(self, last: bool) -> bool:
        """Decide by its beginning whether a formatted answer calls."""
        start = self._form.start
        if self._unread.startswith(start):
            self._begun, self._part = self._unread, self._speech
        elif last and self._cut_start:
            self._unread = ""
            return False
        elif last or not start.startswith(self._unread):
            self._part = self._plain
        else:
            return False
        return True

    def _plain(self, last: bool) -> bool:
        self._text_parts.append(self._unread)
        self._unread = ""
        return False

    def _speech(self, last: bool) -> bool:
        before, started, behind = self._unread.partition(self._form.start)
        if started:
            self._text_parts.append(before.rstrip())
            self._unread, self._part = behind, self._head
            return True
        held_back = self._cut_start if last else beginning(self._unread, self._form.start)
        certain = self._unread[: len(self._unread) - held_back]
        text = certain if last and not held_back and not self.calls else certain.rstrip()
        self._text_parts.append(text)
        self._unread = self._unread[len(text) :]
        return False

    @property
    def _cut_start(self) -> int:
        """The characters of a start of calls within which the answer was cut off; a single one is as likely text."""
        characters = beginning(self._unread, self._form.start)
        return characters if self._cut_off and characters > 1 else 0

    def _head(self, last: bool) -> bool:
        head = self._form.head.match(self._unread)
        if head is not None and head[1] in self._names:
            self._begin(head[1])
            self._unread, self._part = self._unread[head.end() :], self._arguments
            self._reader = Pairs(self._form.end, self._texts.get(head[1], ())) if self._form.pairs else Braces()
            return True
        is_cut = last and self._cut_off and self._body(False)[0] is None
        body, behind = self._body(last)
        if body is None:
            return False
        self._unread, self._part = behind, self._speech
        calls = self._read_calls(body)
        if calls is None and is_cut and self._may_call(body):
            self._begun = ""
        elif calls is None:
            self._text_parts.append(self._form.start + body)
        for call in calls or ():
            self._begin(call.name)
            self._go_on(call.arguments)
        return True

    def _arguments(self, last: bool) -> bool:
        arguments, self._unread, is_complete = self._reader.read(self._unread)
        self._go_on(arguments)
        if is_complete:
            self._part = self._tail
        return is_complete

    def _tail(self, last: bool) -> bool:
        if self._form.again is not None and (further := self._form.again.match(self._unread)) is not None:
            self._unread, self._part = self._unread[further.end() :], self._head
            return True
        _, ended, behind = self._unread.partition(self._form.end) if self._form.end else ("", "-", self._unread)
        if ended:
            self._unread, self._part = behind, self._speech
        return bool(ended)

    def _body(self, last: bool) -> tuple[str | None, str]:
        """Return the text in place of a call, to its end, and the text after it; None before its end has come."""
        mark = self._form.end or self._form.start
        at = self._unread.find(mark)
        while self._form.again is not None and at >= 0 and self._read_calls(self._unread[: at + len(mark)]) is None:
            at = self._unread.find(mark, at + 1)  # the end mark may occur within the arguments
        if at < 0:
            return (self._unread, "") if last else (None, "")
        at += len(self._form.end)
        return self._unread[:at], self._unread[at:]

    def _begin(self, name: str) -> None:
        self._pieces.append(CallPiece(len(self.calls), name, ""))
        self.calls.append(ToolCall(name, ""))

    def _go_on(self, arguments: str) -> None:
        if arguments:
            self._pieces.append(CallPiece(len(self.calls) - 1, None, arguments))
            self.calls[-1] = ToolCall(self.calls[-1].name, self.calls[-1].arguments + arguments)

    def _read_calls(self, body: str) -> list[ToolCall] | None:
        """Return the calls of a body whose keys are in another order or lack arguments; None where it is no call."""
        try:
            content = from_json(
                body.removesuffix(self._form.end) if self._form.again is None else f"[{body.lstrip(' [')}"
            )
        except ValueError:  # such as half a surrogate pair
            return None
        parsed = [
            self._read_call(entry)
            for entry in (content if isinstance(content, list) and self._form.again else [content])
        ]
        calls = [call for call in parsed if call is not None]
        return calls if calls and len(calls) == len(parsed) else None

    def _read_call(self, content: object) -> ToolCall | None:
        name, arguments = (
            (content.get("name"), content.get("arguments", {})) if isinstance(content, dict) else (None, None)
        )
        if not isinstance(name, str) or name not in self._names or not isinstance(arguments, dict):
            return None
        return ToolCall(name, json.dumps(arguments, ensure_ascii=False))

    def _may_call(self, body: str) -> bool:
        """Return whether a body whose end was cut off may have become a call."""
        name, rest = re.fullmatch(r"\s*([\w.-]*)(.*)", body, re.DOTALL).groups()  # type: ignore[union-attr]
        if not rest:
            return any(each.startswith(name) for each in self._names)
        if name:
            return name in self._names and (rest.isspace() or rest.lstrip().startswith("["))
        several = self._form.again is not None
        text = f"[{body.lstrip(' [')}" if several else body
        try:
            read, begun = from_json(text, allow_partial=True), from_json(text, allow_partial="trailing-strings")
        except ValueError:
            return False
        if not several:
            return self._may_be_call(read, begun)
        return len(read) == len(begun) and all(map(self._may_be_call, read, begun))

    def _may_be_call(self, content: object, begun: object) -> bool:
        """Return whether an object may become a call; `begun` has the string within which it was cut off, too."""
        if not isinstance(content, dict) or not isinstance(begun, dict):
            return False
        name, part = content.get("name"), begun.get("name", "")
        if not isinstance(part, str):
            return False
        known = name in self._names if name is not None else any(each.startswith(part) for each in self._names)
        return known and isinstance(begun.get("arguments", {}), dict)
