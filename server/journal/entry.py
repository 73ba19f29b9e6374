"""The rows of one request, made from the request and, choice by choice, from the outcome."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

from server.encode import dumps
from server.journal.bounded import changed, clean, encoded, encoded_metadata
from server.journal.scalars import scalars
from server.journal.schema import DIAGNOSTICS, STORED
from server.journal.writer import Journal
from server.wire.chat import ChatRequest
from server.wire.guard import Guard
from server.wire.messages import Message, MessagePart, image_urls
from server.wire.storing.metadata import truth
from steering import Choice, InterventionSpec, Options, Request, Sampling, Steer, Steering
from steering.protocol.intervention import REGISTRY
from steering.protocol.readout import Scalar

LABEL = 128
"""Number of characters kept of a model's name."""
STAGES = ("see", "think", "generate")
JOINED = "+"
"""Separator of the interventions in a group's name."""
OMITTED = "omitted"
"""The URL of every image of a stored message."""
SAMPLED = ("temperature", "top_p", "max_tokens", "seed")


@dataclass(frozen=True)
class Storing:
    """The storing of an answer with its texts.

    `owner` may read it. `keep` returns the URL to store for that of an image. The first message is marked if it came from
    `instructions`. `lock` is held until the row is queued, so that no deletion removes the images before.
    """

    owner: str
    keep: Callable[[str], str] = lambda url: OMITTED
    instructions: bool = False
    lock: AbstractContextManager[Any] = field(default_factory=nullcontext)

    def record(self, journal: Journal, chat: ChatRequest, row: Mapping[str, Any]) -> int:
        """Queue a row with the columns that follow from the request, and keep the request's images; return its number."""
        with self.lock:
            return journal.record({**row, **self._columns(chat)}, STORED)

    def _columns(self, chat: ChatRequest) -> dict[str, Any]:
        """Return the columns that follow from the request."""
        messages = messages_of(chat.messages, self.keep)
        if self.instructions:
            messages[0]["instructions"] = True
        return {"owner": self.owner, "messages": dumps(messages)}


@dataclass
class Entry:
    """Passes a request's rows to the journal; none of its errors can fail an answer."""

    journal: Journal
    shared: dict[str, Any]
    """The columns that all choices share."""
    asked: Mapping[str, InterventionSpec] = field(default_factory=dict)
    stored: Callable[[Mapping[str, Any]], int] | None = None
    """Queues the row of a stored completion, and returns its number; None where it is not, or no longer, to be stored."""
    recorded: int | None = None
    """The number of the last row of a finished choice."""

    @classmethod
    def of(
        cls,
        journal: Journal,
        chat: ChatRequest,
        request: Request,
        answer_id: str,
        model: str,
        prompt_tokens: int,
        notes: Mapping[str, Any] | None = None,
        columns: Mapping[str, str | None] | None = None,
        storing: Storing | None = None,
    ) -> Entry | None:
        """Return the entry of an accepted request; None without a journal.

        `notes` are stored beside the request's own options. `columns` are further ones, such as the key's name.
        """
        if not journal.enabled:
            return None
        try:
            row = shared(chat, request, answer_id, model, prompt_tokens, journal.text_limit, notes or {})
            row |= {"key_name": None, **(columns or {})}
            return cls(journal, row, request.asked, None if storing is None else partial(storing.record, journal, chat))
        except Exception as error:
            journal.refused(error)
            return None

    def finished(
        self, choice: Choice, first_token: float | None, total: float, given: tuple[Request, int] | None = None
    ) -> None:
        """Write the row of a finished choice; times in seconds since the request arrived.

        given: the request that it answers and the tokens of its prompt, if that is another one than was accepted.
        """
        try:
            row, asked = self.shared, self.asked
            if given is not None:
                asked, row = given[0].asked, row | of_request(given[0]) | {"prompt_tokens": given[1]}
            row = row | self.of_choice(choice, asked) | self._times(first_token, total)
            self.recorded = self.journal.record(row)
        except Exception as error:
            self.journal.refused(error)

    def store(self, completion: Mapping[str, Any]) -> None:
        """Store the completion as the client gets it; this writes its images to files, so that it may block."""
        if self.stored is None:
            return
        try:
            row = {name: self.shared[name] for name in ("id", "created", "metadata")}
            row |= {"model": completion["model"], "completion": dumps(completion)}
            self.recorded = self.stored(row)
            self.stored = None
        except Exception as error:
            self.journal.refused(error)

    def settle(self) -> None:
        """Wait until the rows of finished choices are on disk, for as long as the journal lets an answer wait."""
        if self.recorded is not None:
            self.journal.settle(self.recorded)
            self.recorded = None

    def given_up(
        self, index: int, reason: str, tokens: int, text: str, first_token: float | None, total: float
    ) -> None:
        """Write the row of an unfinished choice after so many tokens of this text.

        `reason` is one of words.UNFINISHED.
        """
        try:
            row = self.shared | columns_of(scalars(None, None)) | self._times(first_token, total)
            row |= {"choice": index, "finish_reason": reason, "completion_tokens": tokens, "applied": None}
            self.journal.record(row | {"answer": self._text(text)})
        except Exception as error:
            self.journal.refused(error)

    def of_choice(self, choice: Choice, asked: Mapping[str, InterventionSpec]) -> dict[str, Any]:
        """Return the columns of a finished choice, to which these interventions were applied."""
        return {
            "choice": choice.index,
            "finish_reason": clean(choice.finish_reason, 16),
            "completion_tokens": len(choice.token_ids),
            "applied": None if choice.applied is None else encoded(self._brief(choice.applied, asked)),
            "answer": self._text(choice.text),
            "guard": None if choice.guard is None else choice.guard["outcome"],
            **columns_of(scalars(choice.applied, choice.diagnostics)),
        }

    def _brief(self, applied: dict[str, Any], asked: Mapping[str, InterventionSpec]) -> Any:
        """Return the report of what was applied, without long lists and without texts unless they are kept."""
        report: Any = applied
        for spec in asked.values():
            report = changed(report, spec.path, spec.brief)
        return without_texts(report, asked, self.journal.text_limit)

    def _times(self, first_token: float | None, total: float) -> dict[str, Any]:
        return {"first_token": first_token, "total": total}

    def _text(self, text: str) -> str | None:
        limit = self.journal.text_limit
        return clean(text, limit) if limit else None


def shared(
    chat: ChatRequest,
    request: Request,
    answer_id: str,
    model: str,
    prompt_tokens: int,
    text_limit: int,
    notes: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the columns that follow from the request alone; `text_limit` 0 excludes its texts."""
    created, metadata = time.time(), chat.metadata
    return {
        "id": answer_id,
        "created": created,
        "hour": int(created // 3600),
        "model": clean(model, LABEL),
        "streamed": bool(chat.stream),
        **of_request(request),
        "prompt_tokens": prompt_tokens,
        "images": sum(1 for _ in image_urls(chat.messages)),
        "answer_correct": truth(metadata, "answer_correct"),
        "preset": notes.get("preset"),
        "asked": encoded({**without_texts(as_asked(chat), chat.options, text_limit), **notes}),
        "metadata": None if metadata is None else encoded_metadata(metadata),
        "prompt": clean(prompt_text(chat), text_limit, end=True) if text_limit else None,
    }


def of_request(request: Request) -> dict[str, Any]:
    """Return the columns that follow from the engine's request."""
    interventions = request.asked
    toward = toward_of(interventions)
    return {
        "sampling": encoded(sampled(request.sampling) | {"n": request.n}),
        "interventions": listed(interventions),
        "intervention": clean(group_of(interventions, toward), 64),
        "toward": toward,
        **{f"sage_{stage}": f"sage.{stage}" in interventions for stage in STAGES},
        "contrast": next(
            (clean(spec.kind, 16) for spec in interventions.values() if spec.path == ("contrast",)), "none"
        ),
        "vectors": listed(sorted({name for spec in interventions.values() for name in spec.vectors})),
        "digests": listed(
            sorted({f"{name}@{digest}" for spec in interventions.values() for name, digest in spec.digests.items()})
        ),
    }


def guard_asked(guard: Guard, again: ChatRequest, text_limit: int) -> dict[str, Any]:
    """Return a guard as the client wrote it; `again` is the request that it gives again, `text_limit` 0 excludes texts."""
    asked = guard.model_dump(exclude_unset=True)
    return {**asked, "then": without_texts(asked["then"], again.options, text_limit)}


def sampled(sampling: Sampling) -> dict[str, Any]:
    """Return the always reported sampling settings, and other numbers that differ from their defaults."""
    others = {
        setting.name: value
        for setting in fields(sampling)
        if isinstance(value := getattr(sampling, setting.name), int | float) and value != setting.default
    }
    return {name: getattr(sampling, name) for name in SAMPLED} | others


def listed(names: Iterable[str]) -> str:
    """Return |name|name|, in which a name can be searched together with its delimiters."""
    return "".join(f"|{name}" for name in names) + "|"


def group_of(interventions: Mapping[str, InterventionSpec], toward: str) -> str:
    """Return the group in which the summary counts an answer, such as steer:vision+sage+contrast:vcd.

    It names the direction of steering and the other interventions, with the members of a group joined.
    """
    others = [interventions[name] for name in REGISTRY if name in interventions and name != Steering.name()]
    heads = dict.fromkeys(f"{spec.path[0]}:{spec.kind}" if spec.kind else spec.path[0] for spec in others)
    return JOINED.join([*([] if toward == "none" else [f"steer:{toward}"]), *heads]) or "none"


def toward_of(interventions: Mapping[str, InterventionSpec]) -> str:
    """Return `steered_toward` of a request's steering, "none" without."""
    steering = interventions.get(Steering.name())
    return steered_toward(steering.steers if isinstance(steering, Steering) else ())


def steered_toward(steers: tuple[Steer, ...]) -> str:
    """Return "vision" or "text" if all active vectors are modality preferences in that direction; else "other" or "none"."""
    ways = {steer.way or "other" for steer in steers if steer.scale != 0}
    return "none" if not ways else ways.pop() if len(ways) == 1 else "other"


def columns_of(numbers: Mapping[str, Scalar]) -> dict[str, Any]:
    """Return the columns of scalars that have their own, and one column with all other known ones."""
    more = {name: value for name, value in numbers.items() if name not in DIAGNOSTICS and value is not None}
    return {name: numbers.get(name) for name in DIAGNOSTICS} | {"readouts": dumps(more) if more else None}


def as_asked(chat: ChatRequest) -> dict[str, Any]:
    """Return the interventions and readouts as the client wrote them; None means off."""
    form = chat.response_format
    return {
        **dict.fromkeys(chat.asking),
        **{name: intervention.sent for name, intervention in chat.interventions.items()},
        "baseline": bool(chat.baseline),
        **({} if chat.force is None else {"force": True}),
        **({"continue_final_message": True} if chat.continue_final_message else {}),
        **({"chat_template_kwargs": chat.chat_template_kwargs} if chat.chat_template_kwargs else {}),
        **({} if form is None or form.type == "text" else {"response_format": form.type}),
        **({} if chat.structured_outputs is None else {"structured_outputs": True}),
        **chat.pixels,
        "diagnostics": None if chat.diagnostics is None else chat.diagnostics.model_dump(exclude_unset=True) or True,
    }


def without_texts(tree: Any, interventions: Mapping[str, InterventionSpec], text_limit: int) -> Any:
    """Return the tree with the texts of interventions replaced by their lengths, unless texts are kept."""
    if text_limit:
        return tree
    if isinstance(tree, dict) and "chat_template_kwargs" in tree:
        tree = {**tree, "chat_template_kwargs": lengths(tree["chat_template_kwargs"])}
    for spec in interventions.values():
        for name, info in type(spec).model_fields.items() if isinstance(spec, Options) else ():
            text = getattr(spec, name)
            if text in spec.texts and text != info.default:
                tree = changed(tree, (*spec.path, info.alias or name), lengths)
    return tree


def lengths(value: Any) -> Any:
    """Return JSON in which each text is replaced by its length."""
    if isinstance(value, dict):
        return {name: lengths(item) for name, item in value.items()}
    if isinstance(value, list):
        return [lengths(item) for item in value]
    return f"({len(value)} characters)" if isinstance(value, str) else value


def prompt_text(chat: ChatRequest) -> str:
    """Return the texts of all messages, a line "role: text" each, without images."""
    lines = []
    for message in chat.messages:
        parts = [message.content] if isinstance(message.content, str) else [p.text for p in message.content if p.text]
        lines.append(f"{message.role}: " + "\n".join(parts))
    return "\n".join(lines)


def messages_of(messages: Iterable[Message], keep: Callable[[str], str]) -> list[dict[str, Any]]:
    """Return a chat as OpenAI's stored messages; `keep` returns the URL in place of that of an image."""
    shown = []
    for message in messages:
        parts = None if isinstance(message.content, str) else [_stored_part(part, keep) for part in message.content]
        texts = (
            message.content if parts is None else "\n".join(part["text"] for part in parts if part["type"] == "text")
        )
        calls = [call.model_dump() for call in message.tool_calls or ()]
        shown.append(
            {
                "role": message.role,
                "content": texts,
                "content_parts": parts,
                **({"tool_calls": calls} if calls else {}),
                **({"tool_call_id": message.tool_call_id} if message.tool_call_id else {}),
                **({"reasoning_content": message.reasoning_content} if message.reasoning_content else {}),
            }
        )
    return shown


def _stored_part(part: MessagePart, keep: Callable[[str], str]) -> dict[str, Any]:
    if part.image is None:
        return {"type": "text", "text": part.text or "", **({"span": part.span} if part.span else {})}
    detail = {} if part.detail is None else {"detail": part.detail}
    return {"type": "image_url", "image_url": {"url": keep(part.image), **detail}}
