"""Answers as OpenAI's responses: whole, and as the events from which its SDK puts one together."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from server.dialects.answer import ignoring, logprobs_json, prompt_scores_json
from server.dialects.dialect import Begun
from server.dialects.reasoning import ReasoningStream
from server.encode import dumps
from server.errors import ApiError
from steering import CallPiece, Choice, Chunk, Result, TokenLogprob

Event = tuple[str, dict[str, Any]]
"""The type of an event, and its fields."""


class ResponseWriter:
    """Writes one response."""

    def __init__(self, begun: Begun):
        self._begun = begun
        self._number = 0
        self._items = Items(begun)
        self._choice: Choice | None = None

    def whole(self, result: Result) -> dict[str, Any]:
        """Return the whole response."""
        (choice,) = result.choices
        return self._response(choice, self._items_of(choice), result)

    def begin(self) -> str:
        """Return the events before the first token."""
        response = self._response(None, [], None)
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def piece(self, chunk: Chunk, last: bool) -> str:
        """Return the events of a chunk."""
        self._choice = chunk.choice or self._choice
        return "".join(self._event(kind, **fields) for kind, fields in self._items.piece(chunk))

    def end(self, result: Callable[[], Result]) -> str:
        """Return the event with the whole response."""
        assert self._choice is not None
        kind = "response.incomplete" if self._choice.finish_reason == "length" else "response.completed"
        items = self._items.done
        if self._choice.guard is not None and self._choice.guard["kept"]:  # not the answer that was streamed, perhaps
            items = self._items_of(self._choice)
        return self._event(kind, response=self._response(self._choice, items, result()))

    def failed(self, problem: ApiError) -> str:
        """Return the event of a failed response."""
        response = self._response(None, self._items.done, None)
        code = "rate_limit_exceeded" if problem.status == 429 else "server_error"
        response |= {"status": "failed", "error": {"code": code, "message": problem.message}}
        return self._event("response.failed", response=response)

    def _items_of(self, choice: Choice) -> list[dict[str, Any]]:
        items = Items(self._begun)
        calls = tuple(CallPiece(number, call.name, call.arguments) for number, call in enumerate(choice.tool_calls))
        list(items.piece(Chunk(0, choice.text, choice.logprobs or (), choice, calls)))
        return items.done

    def _event(self, kind: str, **fields: Any) -> str:
        value = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return f"event: {kind}\ndata: {dumps(value)}\n\n"

    def _response(
        self, choice: Choice | None, output: Sequence[Mapping[str, Any]], result: Result | None
    ) -> dict[str, Any]:
        begun, body, answer = self._begun, self._begun.body, self._begun.answer
        cut = choice is not None and choice.finish_reason == "length"
        response: dict[str, Any] = {
            "id": answer.id,
            "object": "response",
            "created_at": answer.created,
            "status": "in_progress" if choice is None else "incomplete" if cut else "completed",
            "background": False,
            "completed_at": None if choice is None or cut else max(answer.created, int(time.time())),
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "instructions": body.get("instructions"),
            "max_output_tokens": body.get("max_output_tokens"),
            "model": answer.model,
            "output": [*output],
            "parallel_tool_calls": begun.chat.parallel_tool_calls is not False,
            "previous_response_id": body.get("previous_response_id"),
            "reasoning": {"effort": None, "summary": None},
            "store": begun.stored,
            "temperature": begun.sampling.temperature,
            "text": {"format": (body.get("text") or {}).get("format") or {"type": "text"}},
            "tool_choice": body.get("tool_choice") or "auto",
            "tools": [_tool(tool) for tool in body.get("tools") or ()],
            "top_logprobs": begun.sampling.logprobs or 0,
            "top_p": begun.sampling.top_p,
            "truncation": body.get("truncation") or "disabled",
            "usage": None if result is None else usage(result),
            "user": body.get("user"),
            "metadata": body.get("metadata") or {},
            "system_fingerprint": answer.fingerprint,
        }
        if choice is not None:
            response |= answer.extras(choice) | prompt_scores_json(choice) | ignoring(answer.ignored)
        return response


class Items:
    """The output of a response: reasoning, messages and calls in order, and the events that add them.

    `done` are the finished items.
    """

    def __init__(self, begun: Begun):
        self._answer = begun.answer
        self._scored = begun.chat.logprobs
        self._parts = ReasoningStream(begun.markers, begun.prompt_end)
        self.done: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        self._text = ""
        self._scores: list[dict[str, Any]] = []

    def piece(self, chunk: Chunk) -> Iterator[Event]:
        """Yield the events of a chunk."""
        scores = self._scores_of(chunk.logprobs)
        last = chunk.choice is not None
        for kind, text in self._parts.feed(chunk.text, last or bool(chunk.calls)):
            yield from self._write("reasoning" if kind == "reasoning" else "message", text, scores)
            scores = []
        if scores:  # the text of these tokens is held back, or is no text
            self._scores += scores
        for call in chunk.calls:
            yield from self._call(call)
        if last:
            if self._open is None and not self.done:
                yield from self._write("message", "", [])
            cut = chunk.choice is not None and chunk.choice.finish_reason == "length"
            yield from self._close("incomplete" if cut else "completed")

    def _scores_of(self, logprobs: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
        return logprobs_json(logprobs)["content"] if self._scored and logprobs else []

    def _write(self, kind: str, text: str, scores: list[dict[str, Any]]) -> Iterator[Event]:
        if self._open is None or self._open["type"] != kind:
            yield from self._close()
            yield from self._begin(kind)
        self._text += text
        place = self._place()
        if kind == "reasoning":
            yield "response.reasoning_text.delta", {**place, "content_index": 0, "delta": text}
            return
        new = [*self._scores, *scores]
        self._scores = []
        assert self._open is not None
        self._open["content"][0]["logprobs"] += new
        if text:
            logprobs = [{name: score[name] for name in ("token", "logprob", "top_logprobs")} for score in new]
            yield "response.output_text.delta", {**place, "content_index": 0, "delta": text, "logprobs": logprobs}

    def _begin(self, kind: str) -> Iterator[Event]:
        number = len(self.done)
        if kind == "reasoning":
            item: dict[str, Any] = {"id": self._id("rs", number), "type": kind, "summary": [], "content": []}
            part: dict[str, Any] = {"type": "reasoning_text", "text": ""}
        else:
            item = {"id": self._id("msg", number), "type": kind, "role": "assistant", "content": []}
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        item["status"] = "in_progress"
        yield "response.output_item.added", {"output_index": number, "item": {**item, "content": []}}
        item["content"] = [part]
        self._open, self._text = item, ""
        yield "response.content_part.added", {**self._place(), "content_index": 0, "part": {**part}}

    def _call(self, call: CallPiece) -> Iterator[Event]:
        if call.name is not None:
            yield from self._close()
            number = len(self.done)
            self._open = {
                "id": self._id("fc", number),
                "type": "function_call",
                "call_id": self._answer.call_ids(0)(call.number),
                "name": call.name,
                "arguments": "",
                "status": "in_progress",
            }
            yield "response.output_item.added", {"output_index": number, "item": {**self._open}}
        if call.arguments and self._open is not None:
            self._open["arguments"] += call.arguments
            yield "response.function_call_arguments.delta", {**self._place(), "delta": call.arguments}

    def _close(self, status: str = "completed") -> Iterator[Event]:
        item = self._open
        if item is None:
            return
        place = self._place()
        if item["type"] == "function_call":
            named = {"name": item["name"], "arguments": item["arguments"]}
            yield "response.function_call_arguments.done", {**place, **named}
        else:
            part = item["content"][0]
            part["text"] = self._text
            if item["type"] == "reasoning":
                yield "response.reasoning_text.done", {**place, "content_index": 0, "text": self._text}
            else:
                scores = part["logprobs"]
                yield "response.output_text.done", {**place, "content_index": 0, "text": self._text, "logprobs": scores}
            yield "response.content_part.done", {**place, "content_index": 0, "part": part}
        item["status"] = status
        yield "response.output_item.done", {"output_index": len(self.done), "item": item}
        self.done.append(item)
        self._open = None

    def _place(self) -> dict[str, Any]:
        assert self._open is not None
        return {"item_id": self._open["id"], "output_index": len(self.done)}

    def _id(self, prefix: str, number: int) -> str:
        return f"{prefix}_{self._answer.id.partition('_')[2]}{number:02d}"


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tool.get(name) for name in ("type", "name", "description", "parameters", "strict")}


def usage(result: Result) -> dict[str, Any]:
    """Return the token counts under the names of responses."""
    return {
        "input_tokens": result.prompt_tokens,
        "input_tokens_details": {"cached_tokens": result.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": result.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": result.reasoning_tokens},
        "total_tokens": result.prompt_tokens + result.completion_tokens,
    }
