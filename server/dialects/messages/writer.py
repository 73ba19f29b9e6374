"""Answers as Anthropic's messages: whole, and as the events from which its SDK puts one together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from flask import g
from pydantic_core import from_json

from server.dialects.answer import ignoring, prompt_scores_json
from server.dialects.dialect import Begun
from server.dialects.reasoning import ReasoningStream
from server.encode import dumps
from server.error_forms import anthropic
from server.errors import ApiError
from steering import CallPiece, Choice, Chunk, Result

BLOCKS = {"text": "text", "reasoning": "thinking"}
"""The type of a block for each kind of text, which is the name of its field, too."""
COMMENT = ":\n\n"
"""A comment of server-sent events, which clients skip."""
REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}


class MessageWriter:
    """Writes one message."""

    def __init__(self, begun: Begun):
        self._begun = begun
        self._request_id = g.get("request_id")  # a stream is written outside of the request's context
        self._parts = ReasoningStream(begun.markers, begun.prompt_end)
        self._blocks = 0
        self._kind = ""
        """The type of the open block, "" for none."""
        self._choice: Choice | None = None
        self._started = False

    def whole(self, result: Result) -> dict[str, Any]:
        """Return the whole message."""
        (choice,) = result.choices
        parts = ReasoningStream(self._begun.markers, self._begun.prompt_end)
        blocks = [_block(BLOCKS[kind], text) for kind, text in parts.feed(choice.text, last=True)]
        for number, call in enumerate(choice.tool_calls):
            blocks.append({**self._tool(number, call.name), "input": _object(call.arguments)})
        blocks = blocks or [_block("text", "")]  # clients read the first one
        return {
            **self._message(),
            "content": blocks,
            **ended(choice),
            "usage": usage(result),
            **self._extras(choice),
        }

    def begin(self) -> str:
        """Return a comment, so that the client gets the response's head.

        The first event has the counts of the prompt's tokens, cached ones included, which are known with the first chunk.
        """
        return COMMENT

    def piece(self, chunk: Chunk, last: bool) -> str:
        """Return the events of a chunk."""
        self._choice = chunk.choice or self._choice
        return self._start() + "".join(self._events(chunk))

    def _start(self) -> str:
        """Return the first event of the stream, once."""
        if self._started:
            return ""
        self._started = True
        counts = _counts(self._begun.prompt_tokens, 0, self._begun.cached_tokens())
        nothing: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": counts}
        return _event("message_start", message={**self._message(), **nothing})

    def end(self, result: Callable[[], Result]) -> str:
        """Return the events with the reason of the end, the usage, and the fields beyond Anthropic's.

        These are in `message_delta`, since its SDK's stream helper makes a `message_stop` of its own.
        """
        assert self._choice is not None
        fields = {"delta": ended(self._choice), "usage": usage(result()), **self._extras(self._choice)}
        return "".join([*self._close(), _event("message_delta", **fields), _event("message_stop")])

    def failed(self, problem: ApiError) -> str:
        """Return the event of an error."""
        return _event("error", **anthropic(problem.body()["error"], problem.status, self._request_id))

    def _message(self) -> dict[str, Any]:
        answer = self._begun.answer
        return {"id": answer.id, "type": "message", "role": "assistant", "model": answer.model}

    def _extras(self, choice: Choice) -> dict[str, Any]:
        answer = self._begun.answer
        return {**answer.extras(choice), **prompt_scores_json(choice), **ignoring(answer.ignored)}

    def _tool(self, number: int, name: str) -> dict[str, Any]:
        identity = "toolu_" + self._begun.answer.call_ids(0)(number).partition("_")[2]
        return {"type": "tool_use", "id": identity, "name": name}

    def _events(self, chunk: Chunk) -> Iterator[str]:
        for kind, text in self._parts.feed(chunk.text, chunk.choice is not None or bool(chunk.calls)):
            block = BLOCKS[kind]
            if self._kind != block:
                yield from self._open(_block(block, ""))
            yield self._delta({"type": f"{block}_delta", block: text})
        for call in chunk.calls:
            yield from self._call(call)
        if chunk.choice is not None and not self._kind:
            yield from self._open(_block("text", ""))

    def _call(self, call: CallPiece) -> Iterator[str]:
        if call.name is not None:
            yield from self._open({**self._tool(call.number, call.name), "input": {}})
        if call.arguments:
            yield self._delta({"type": "input_json_delta", "partial_json": call.arguments})

    def _open(self, block: dict[str, Any]) -> Iterator[str]:
        yield from self._close()
        self._kind = block["type"]
        yield _event("content_block_start", index=self._blocks, content_block=block)

    def _delta(self, delta: dict[str, Any]) -> str:
        return _event("content_block_delta", index=self._blocks, delta=delta)

    def _close(self) -> Iterator[str]:
        if self._kind:
            if self._kind == "thinking":  # clients expect one, although nobody checks it here
                yield self._delta({"type": "signature_delta", "signature": ""})
            yield _event("content_block_stop", index=self._blocks)
            self._blocks += 1
            self._kind = ""


def ended(choice: Choice) -> dict[str, Any]:
    """Return the reason of an answer's end."""
    reason = "stop_sequence" if choice.stop_string is not None else REASONS.get(choice.finish_reason, "end_turn")
    return {"stop_reason": reason, "stop_sequence": choice.stop_string}


def usage(result: Result) -> dict[str, Any]:
    """Return the token counts under Anthropic's names, where cached tokens are no input tokens."""
    return _counts(result.prompt_tokens, result.completion_tokens, result.cached_tokens)


def _counts(prompt: int, answer: int, cached: int) -> dict[str, Any]:
    counts = {"input_tokens": prompt - cached, "output_tokens": answer, "cache_read_input_tokens": cached}
    return {**counts, "cache_creation_input_tokens": 0}


def _block(kind: str, text: str) -> dict[str, Any]:
    return {"type": kind, kind: text, **({"signature": ""} if kind == "thinking" else {})}


def _object(arguments: str) -> Any:
    """Return the object of a call's arguments; of anything else, which a model may write, one that holds it.

    Of a call that was cut, it is the object of what is complete, as Anthropic's SDKs read the pieces of a stream.
    """
    try:
        value = from_json(arguments or "{}", allow_partial=True)
    except ValueError:
        return {"arguments": arguments}
    return value if isinstance(value, dict) else {"arguments": value}


def _event(kind: str, **fields: Any) -> str:
    return f"event: {kind}\ndata: {dumps({**fields, 'type': kind})}\n\n"
