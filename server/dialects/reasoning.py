"""The parts of an answer that are reasoning, between tags of the model's own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

Kind = Literal["reasoning", "text"]


class ReasoningStream:
    """Divides the text of an answer, as it comes, into reasoning and the rest.

    An answer reasons if its text begins with the first tag, or if the prompt ended with it. Without markers, all is text.
    """

    def __init__(self, markers: tuple[str, str] | None, prompt_end: str = ""):
        self._begin, self._end = markers or ("", "")
        inside = markers is not None and prompt_end.rstrip().endswith(self._begin)
        self._state = "inside" if inside else "before" if markers else "after"
        self._held = ""

    def feed(self, piece: str, last: bool = False) -> Iterator[tuple[Kind, str]]:
        """Yield the new parts of the answer; what may become a tag is held back until that is clear, or until the `last`."""
        text, self._held = self._held + piece, ""
        if self._state == "before":
            start = text.lstrip()
            if start.startswith(self._begin):
                text, self._state = start[len(self._begin) :], "inside"
            elif self._begin.startswith(start) and not last:
                self._held = text
                return
            else:
                self._state = "after"
        if self._state == "inside":
            reasoning, end_tag, answer = text.partition(self._end)
            if not end_tag and not last:
                overlap = next((n for n in range(len(self._end) - 1, 0, -1) if text.endswith(self._end[:n])), 0)
                reasoning, self._held = text[: len(text) - overlap], text[len(text) - overlap :]
            if reasoning:
                yield "reasoning", reasoning
            if not end_tag:
                return
            text, self._state = answer, "trailing"
        if self._state == "trailing":  # templates put empty lines between reasoning and answer
            text = text.lstrip("\n")
            if not text:
                return
            self._state = "after"
        if text:
            yield "text", text
