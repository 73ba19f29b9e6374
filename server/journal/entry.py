"""The rows of one request: made from what was asked and, choice by choice, from what became of it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from server.encode import dumps
from server.journal.bounded import clean, encoded, reduced
from server.journal.scalars import scalars
from server.journal.writer import Journal
from server.wire.chat import ChatRequest
from server.wire.messages import image_urls
from steering import Choice, Options, Request, Steer, Steering

LABEL = 128
"""Characters kept of a model's name."""


@dataclass
class Entry:
    """Hands a request's rows to the journal; nothing that it does can fail an answer."""

    journal: Journal
    shared: dict[str, Any]
    """The columns that all choices have in common."""
    secret: frozenset[str] = frozenset()
    """Texts of a prompt that interventions report, which the journal is not to keep."""
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
            columns = shared(chat, request, answer_id, model, prompt_tokens, journal.text_limit)
            return cls(journal, columns, secret_texts(chat, journal.text_limit))
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
            "applied": None if choice.applied is None else encoded(without(self.secret, reduced(choice.applied))),
            "answer": self._text(choice.text),
            **scalars(choice.applied, choice.diagnostics),
        }

    def _times(self, first_token: float | None, total: float) -> dict[str, Any]:
        return {"first_token": first_token, "total": total}

    def _text(self, text: str) -> str | None:
        limit = self.journal.text_limit
        return clean(text, limit) if limit else None


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
        "images": sum(1 for _ in image_urls(chat.messages)),
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
    """The interventions and readouts as the client wrote them; None is off."""
    sent = {name: given.sent for name, given in chat.interventions.items()}
    diagnostics = None if chat.diagnostics is None else chat.diagnostics.model_dump(exclude_unset=True) or True
    return {
        **dict.fromkeys(chat.asking),
        **without(secret_texts(chat, text_limit), sent),
        "baseline": bool(chat.baseline),
        "diagnostics": diagnostics,
    }


def secret_texts(chat: ChatRequest, text_limit: int) -> frozenset[str]:
    """Texts that the interventions of a request bring along and the journal does not keep: all but their defaults."""
    if text_limit:
        return frozenset()
    asked = [one for given in chat.interventions.values() for one in given.asked]
    options = [type(one) for one in asked if isinstance(one, Options)]
    defaults = [field.default for one in options for field in one.model_fields.values()]
    return frozenset(text for one in asked for text in one.texts if text not in defaults)


def without(texts: frozenset[str], value: Any) -> Any:
    """A JSON value in which these texts are replaced by their length."""
    if isinstance(value, dict):
        return {key: without(texts, item) for key, item in value.items()}
    if isinstance(value, list):
        return [without(texts, item) for item in value]
    return f"({len(value)} characters)" if isinstance(value, str) and value in texts else value


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
