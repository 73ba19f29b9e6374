"""The rows of one request: made from what was asked and, choice by choice, from what became of it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from server.encode import dumps
from server.journal.bounded import clean, encoded, reduced
from server.journal.scalars import scalars
from server.journal.writer import Journal
from server.wire import Apply, ChatRequest, Icd, Sage, image_urls
from steering import Choice, Request, Steer, Steering

LABEL = 128
"""Characters kept of a model's name."""


@dataclass
class Entry:
    """Hands a request's rows to the journal; nothing that it does can fail an answer."""

    journal: Journal
    shared: dict[str, Any]
    """The columns that all choices have in common."""
    partial: dict[int, str] = field(default_factory=dict)
    recorded: int | None = None
    """The number of the last row of a finished choice."""

    @classmethod
    def of(
        cls, journal: Journal, chat: ChatRequest, request: Request, answer_id: str, model: str, prompt_tokens: int
    ) -> Entry | None:
        """The entry of an accepted request; None where there is no journal."""
        if not journal.enabled:
            return None
        try:
            return cls(journal, shared(chat, request, answer_id, model, prompt_tokens, journal.text_limit))
        except Exception as error:
            journal.refused(error)
            return None

    def heard(self, index: int, text: str) -> None:
        """Remember a piece of an answer that may not come to its end."""
        limit = self.journal.text_limit
        if limit and text and len(known := self.partial.get(index, "")) < limit:
            self.partial[index] = (known + text)[:limit]

    def finished(self, choice: Choice, first_token: float | None, total: float) -> None:
        """Write the row of a finished choice; times in seconds since the request came."""
        try:
            self.recorded = self.journal.record(self.shared | self.of_choice(choice) | self._times(first_token, total))
        except Exception as error:
            self.journal.refused(error)

    def settle(self) -> None:
        """Wait, as long as the journal lets an answer wait, until the rows of the finished choices are on disk."""
        if self.recorded is not None:
            self.journal.settle(self.recorded)
            self.recorded = None

    def given_up(self, index: int, reason: str, tokens: int, first_token: float | None, total: float) -> None:
        """Write the row of a choice that came to no end after so many tokens: `reason` is "cancelled" or "error"."""
        try:
            row = self.shared | scalars(None, None) | self._times(first_token, total)
            row |= {"choice": index, "finish_reason": reason, "completion_tokens": tokens, "applied": None}
            self.journal.record(row | {"answer": self._text(self.partial.get(index, ""))})
        except Exception as error:
            self.journal.refused(error)

    def of_choice(self, choice: Choice) -> dict[str, Any]:
        """The columns of a finished choice."""
        return {
            "choice": choice.index,
            "finish_reason": clean(choice.finish_reason, 16),
            "completion_tokens": len(choice.token_ids),
            "applied": None if choice.applied is None else encoded(self._without_texts(reduced(choice.applied))),
            "answer": self._text(choice.text),
            **scalars(choice.applied, choice.diagnostics),
        }

    def _times(self, first_token: float | None, total: float) -> dict[str, Any]:
        return {"first_token": first_token, "total": total}

    def _text(self, text: str) -> str | None:
        limit = self.journal.text_limit
        return clean(text, limit) if limit else None

    def _without_texts(self, applied: dict[str, Any]) -> dict[str, Any]:
        contrast = applied.get("contrast")
        if isinstance(contrast, dict) and isinstance(said := contrast.get("instruction"), str):
            applied["contrast"] = contrast | {"instruction": instruction(said, self.journal.text_limit)}
        return applied


def shared(
    chat: ChatRequest, request: Request, answer_id: str, model: str, prompt_tokens: int, text_limit: int
) -> dict[str, Any]:
    """The columns that follow from the request alone. `text_limit` 0 keeps its texts out."""
    created = time.time()
    steering = request.asked.get(Steering.name())
    steers = steering.steers if isinstance(steering, Steering) else ()
    toward = steered_toward(steers)
    sampling, metadata = request.sampling, chat.metadata
    stages = {name: f"sage.{name}" in request.asked for name in ("see", "think", "generate")}
    contrast = next((one.kind for one in request.asked.values() if one.path == ("contrast",)), "none")
    parts = ([] if toward == "none" else [f"steer:{toward}"]) + (["sage"] if any(stages.values()) else [])
    parts += [] if contrast == "none" else [f"contrast:{contrast}"]
    right = (metadata or {}).get("answer_correct")
    return {
        "id": answer_id,
        "created": created,
        "hour": int(created // 3600),
        "model": clean(model, LABEL),
        "streamed": bool(chat.stream),
        "intervention": "+".join(parts) or "none",
        "toward": toward,
        **{f"sage_{name}": on for name, on in stages.items()},
        "contrast": contrast,
        "vectors": "".join(f"|{name}" for name in sorted({steer.vector.name for steer in steers})) + "|",
        "prompt_tokens": prompt_tokens,
        "images": sum(1 for _ in image_urls(chat)),
        "answer_correct": {"true": True, "false": False}.get(right or ""),
        "sampling": encoded(
            {
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "max_tokens": sampling.max_tokens,
                "seed": sampling.seed,
                "n": request.n,
            }
        ),
        "asked": encoded(asked(chat, text_limit)),
        "metadata": None if metadata is None else encoded_metadata(metadata),
        "prompt": clean(prompt_text(chat), text_limit, end=True) if text_limit else None,
    }


def steered_toward(steers: tuple[Steer, ...]) -> str:
    """ "vision" or "text" where every vector that does anything is a modality preference that way; "other"; "none"."""
    ways = {steer.way or "other" for steer in steers if steer.scale != 0}
    return "none" if not ways else ways.pop() if len(ways) == 1 else "other"


def asked(chat: ChatRequest, text_limit: int) -> dict[str, Any]:
    """The interventions and readouts as the client wrote them."""
    contrast = as_sent(chat.contrast)
    if isinstance(chat.contrast, Icd) and "instruction" in contrast:
        contrast["instruction"] = instruction(chat.contrast.instruction, text_limit)
    return {
        "steering": as_sent(chat.steering),
        "sage": as_sent(chat.sage),
        "contrast": contrast,
        "baseline": bool(chat.baseline),
        "diagnostics": as_sent(chat.diagnostics),
    }


def as_sent(value: Any) -> Any:
    """A wire object with the fields that were given: {} was true, and inside an object None was false."""
    if isinstance(value, list):
        return [as_sent(item) for item in value]
    if not isinstance(value, BaseModel):
        return value
    given: dict[str, Any] = {}
    for name, info in type(value).model_fields.items():
        if name in value.model_fields_set:
            given[info.alias or name] = as_sent(getattr(value, name))
    if isinstance(value, Sage):
        given = {name: False if stage is None else stage for name, stage in given.items()}
    return given if given or isinstance(value, Apply) else True


def instruction(text: str, text_limit: int) -> str:
    """What a row keeps of a text that is part of a prompt."""
    return text if text_limit or text == Icd.model_fields["instruction"].default else f"({len(text)} characters)"


def prompt_text(chat: ChatRequest) -> str:
    """The texts of all messages, a line "role: text" each; images are left out."""
    lines = []
    for message in chat.messages:
        parts = [message.content] if isinstance(message.content, str) else [p.text for p in message.content if p.text]
        lines.append(f"{message.role}: " + "\n".join(parts))
    return "\n".join(lines)


def encoded_metadata(metadata: dict[str, str]) -> str:
    """The client's own keys and values, whole: the wire bounds them."""
    return dumps({clean(key, 64): clean(value, 512) for key, value in metadata.items()})
