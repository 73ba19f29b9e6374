"""Answers in OpenAI's JSON: whole completions and the events of streamed ones."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from server.encode import dumps
from server.wire.chat import ChatRequest
from server.wire.strangers import MOST_NAMED
from steering import CallPiece, Choice, Chunk, Result, TokenLogprob

DONE = "data: [DONE]\n\n"
LOWEST_LOGPROB = -9999.0
"""The value that represents minus infinity, as in OpenAI's own answers."""


@dataclass(frozen=True)
class Answer:
    """The fields that all objects of one answer share, and the optional fields that the client requested."""

    model: str
    fingerprint: str
    logprobs: bool = False
    nothing: Mapping[str, Any] = field(default_factory=dict)
    """The value of `applied` for each requested field of interventions if nothing was applied."""
    notes: Mapping[str, Any] = field(default_factory=dict)
    """Entries of `applied` besides the effects of interventions."""
    ignored: Sequence[str] = ()
    """The paths of the request's fields that nothing reads."""
    diagnostics: bool = False
    baseline: bool = False
    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def to(cls, chat: ChatRequest, model: str, fingerprint: str, prefix: str) -> Answer:
        """Return the answer to a request; `prefix` begins its id."""
        return cls(
            model,
            f"fp_{fingerprint[:16]}",
            logprobs=bool(chat.logprobs),
            nothing={name: intervention.nothing for name, intervention in chat.interventions.items()},
            diagnostics=chat.diagnostics is not None,
            baseline=bool(chat.baseline),
            id=f"{prefix}{uuid.uuid4().hex}",
        )

    def completion(self, result: Result) -> dict[str, Any]:
        """Return the whole chat.completion object."""
        choices = [
            {
                "index": choice.index,
                **self._finished(choice, self.call_ids(choice.index)),
                **self.extras(choice),
            }
            for choice in result.choices
        ]
        scored = prompt_scores_json(result.choices[0])
        head = self._head("chat.completion")
        return {**head, "choices": choices, "usage": usage(result), **scored, **ignoring(self.ignored)}

    def role_event(self, index: int, usage_asked: bool, text: str | None = "") -> str:
        """Return the first event of a choice; its `text` is None where the choice begins with a call, as OpenAI's."""
        return self._event(index, {"role": "assistant", "content": text}, None, usage_asked)

    def events(self, chunk: Chunk, usage_asked: bool, last: bool = False) -> str:
        """Return the events of a chunk: its text and, for the last chunk of a choice, its end.

        `last` means that only the usage may follow.
        """
        if chunk.choice is None and not chunk.calls and not (self.logprobs and chunk.logprobs):
            return self._piece(chunk.index, chunk.text, usage_asked) if chunk.text or chunk.logprobs else ""
        text = ""
        if chunk.text or chunk.logprobs or chunk.calls:
            delta: dict[str, Any] = {"content": chunk.text} if chunk.text or not chunk.calls else {}
            if chunk.calls:
                delta["tool_calls"] = call_deltas(chunk.calls, self.call_ids(chunk.index))
            text = self._event(chunk.index, delta, chunk.logprobs, usage_asked)
        if chunk.choice is not None:
            end = {"finish_reason": chunk.choice.finish_reason, **self.extras(chunk.choice)}
            ends = last and not usage_asked
            text += self._event(chunk.index, {}, None, usage_asked, end, self.ignored if ends else ())
        return text

    def usage_event(self, result: Result) -> str:
        """Return the event after the last choice, for clients that requested the usage."""
        return event(
            {**self._head("chat.completion.chunk"), "choices": [], "usage": usage(result), **ignoring(self.ignored)}
        )

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }

    def _piece(self, index: int, text: str, usage_asked: bool) -> str:
        """Return the event of a chunk that only has text, as nearly all chunks do; faster than `_event`."""
        choice = f'{{"index":{index},"delta":{{"content":{dumps(text)}}},"logprobs":null,"finish_reason":null}}'
        usage = ',"usage":null' if usage_asked else ""
        return f'data: {self._opened},"choices":[{choice}]{usage}}}\n\n'

    @cached_property
    def _opened(self) -> str:
        """The JSON of an event up to its choices."""
        return dumps(self._head("chat.completion.chunk"))[:-1]

    def _event(
        self,
        index: int,
        delta: dict[str, Any],
        logprobs: Sequence[TokenLogprob] | None,
        usage_asked: bool,
        end: dict[str, Any] | None = None,
        ignored: Sequence[str] = (),
    ) -> str:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **(end or {})}
        if self.logprobs and logprobs:
            choice["logprobs"] = logprobs_json(logprobs)
        head = self._head("chat.completion.chunk")
        uncounted = {"usage": None} if usage_asked else {}
        return event({**head, "choices": [choice], **uncounted, **ignoring(ignored)})

    def call_ids(self, choice: object) -> Callable[[int], str]:
        """Return the id of a choice's call by its number, which is the same whenever it is sent."""
        return lambda number: f"call_{uuid.uuid5(uuid.NAMESPACE_OID, f'{self.id}/{choice}/{number}').hex[:24]}"

    def _finished(self, choice: Choice, call_id: Callable[[int], str]) -> dict[str, Any]:
        logprobs = logprobs_json(choice.logprobs or ()) if self.logprobs else None
        message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
        if choice.tool_calls:
            named = enumerate(choice.tool_calls)
            calls = [call_json(call.name, call.arguments, call_id(number)) for number, call in named]
            message |= {"content": choice.text or None, "tool_calls": calls}
        return {"message": message, "logprobs": logprobs, "finish_reason": choice.finish_reason}

    def extras(self, choice: Choice) -> dict[str, Any]:
        """Return the requested fields beyond OpenAI's."""
        extras: dict[str, Any] = {}
        if self.nothing or self.notes or choice.applied:
            extras["applied"] = {**self.notes, **self.nothing, **(choice.applied or {})}
        if self.diagnostics:
            extras["diagnostics"] = choice.diagnostics
        if choice.guard is not None:
            extras["guard"] = choice.guard
        if self.baseline:
            base = choice.baseline
            ids = self.call_ids(f"{choice.index}/baseline")
            extras["baseline"] = None if base is None else self._finished(base, ids) | self._baseline_diagnostics(base)
        return extras

    def _baseline_diagnostics(self, base: Choice) -> dict[str, Any]:
        return {"diagnostics": base.diagnostics} if self.diagnostics else {}


def ignoring(paths: Sequence[str]) -> dict[str, Any]:
    """Return an answer's entry on fields that nothing reads, `MOST_NAMED` at most; empty if there are none."""
    return {"ignored": [*paths[:MOST_NAMED]]} if paths else {}


def call_json(name: str, arguments: str, identity: str) -> dict[str, Any]:
    """Return a tool call in OpenAI's form."""
    function = {"name": name, "arguments": arguments}
    return {"id": identity, "type": "function", "function": function}


def call_deltas(pieces: Sequence[CallPiece], call_id: Callable[[int], str]) -> list[dict[str, Any]]:
    """Return pieces of tool calls in OpenAI's form, one for each call that continues; `call_id` by their numbers."""
    deltas: dict[int, dict[str, Any]] = {}
    for piece in pieces:
        if piece.name is not None:
            deltas[piece.number] = {
                "index": piece.number,
                **call_json(piece.name, piece.arguments, call_id(piece.number)),
            }
        else:
            delta = deltas.setdefault(piece.number, {"index": piece.number, "function": {"arguments": ""}})
            delta["function"]["arguments"] += piece.arguments
    return list(deltas.values())


def event(value: dict[str, Any]) -> str:
    """Return a server-sent event."""
    return f"data: {dumps(value)}\n\n"


def usage(result: Result) -> dict[str, Any]:
    """Return the token counts under OpenAI's names."""
    return {
        "prompt_tokens": result.prompt_tokens,
        "completion_tokens": result.completion_tokens,
        "total_tokens": result.prompt_tokens + result.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": result.cached_tokens},
    }


def logprobs_json(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    """Return OpenAI's logprobs object."""
    content = [{**_token(token), "top_logprobs": [_token(top) for top in token.top]} for token in tokens]
    return {"content": content, "refusal": None}


def prompt_scores_json(choice: Choice) -> dict[str, Any]:
    """Return vLLM's entry on the prompt's tokens, by their numbers; empty if it was not requested."""
    if choice.prompt_logprobs is None:
        return {}
    tokens: list[dict[str, Any] | None] = [None]  # nothing predicts the first one
    for token in choice.prompt_logprobs:
        likeliest = [(top, rank) for rank, top in enumerate(token.scored.top, 1)]
        tokens.append(
            {
                str(scored.token_id): {
                    "logprob": max(scored.logprob, LOWEST_LOGPROB), "rank": rank, "decoded_token": scored.token,
                }
                for scored, rank in [*likeliest, (token.scored, token.rank)]
            }
        )  # fmt: skip
    return {"prompt_logprobs": tokens}


def _token(token: TokenLogprob) -> dict[str, Any]:
    return {"token": token.token, "logprob": max(token.logprob, LOWEST_LOGPROB), "bytes": list(token.bytes)}
