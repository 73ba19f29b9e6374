"""The refusal prompt tells the model that it may say that it does not know (MM-SAP, section 4.5)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from steering.protocol.intervention_spec import Messages, Options, Words

BY_LETTER = "Answer with the option's letter from the given choices directly."
REFUSAL = "Sorry, I can't help with it"
REFUSAL_PROMPT = f"{BY_LETTER} If you don't know the answer, please reply with '{REFUSAL}'."
"""The prompt as in the paper, which asks questions with options."""


class RefusalPrompt(Options):
    """Tell the model that it may refuse.

    `text` is added on a line at the end of the last user message, or of the system message (`place`), which is created where
    there is none; it defaults to the published text. Where that message already ends with the published text's first
    sentence, only the rest is added. Raises RequestError for values out of range.
    """

    path = ("refusal_prompt",)
    only_chat = True

    text: Words = REFUSAL_PROMPT
    place: Literal["user", "system"] = "user"

    @property
    def texts(self) -> tuple[str, ...]:
        return (self.text,)

    def chat(self, messages: Messages) -> Messages:
        out: list[Mapping[str, Any]] = list(messages)
        indices = [number for number, message in enumerate(out) if message["role"] == self.place]
        if not indices and self.place == "system":
            return [{"role": "system", "content": self.text}, *out]
        if indices:
            message = out[indices[-1]]
            out[indices[-1]] = {**message, "content": self._append_text(message["content"])}
        return out

    def report(self, measured: Any) -> dict[str, Any]:
        return self.settings()

    def _append_text(self, content: Any) -> Any:
        """Return a message's content with the text at its end: after its last text that is no text context, or as a part."""
        if isinstance(content, str):
            return self._append_line(content)
        parts = list(content)
        texts = [i for i, part in enumerate(parts) if part["type"] == "text" and part.get("span") != "context"]
        if not texts or texts[-1] != len(parts) - 1:
            return [*parts, {"type": "text", "text": self.text}]
        return [*parts[:-1], {**parts[-1], "text": self._append_line(parts[-1]["text"])}]

    def _append_line(self, before: str) -> str:
        before = before.rstrip()
        if before.endswith(self.text):
            return before
        if before.endswith(BY_LETTER) and self.text.startswith(BY_LETTER):
            return before + self.text.removeprefix(BY_LETTER)
        return f"{before}\n{self.text}"
