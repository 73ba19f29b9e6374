"""Answers that another engine served, from its exports: the request, and each answer with all that is known of its tokens.

A line holds a request and its response, or the response to a request in another file, in OpenAI's batch format; or a stored
completion with its `messages`. `FieldPaths` name the places in exports that look otherwise.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from server.batches.file import Line, answered_in, lines_of, request_of

OF_ANSWER = ("answer", "token_ids", "finish_reason", "prompt_tokens", "completion_tokens")
"""The fields that describe an answer, so that no response is needed beside them."""
FIELDS = ("id", "request", "messages", "response", *OF_ANSWER)
"""The fields of a line that a path may name."""
OF_COMPLETION = frozenset(
    {
        "id",
        "object",
        "created",
        "model",
        "choices",
        "usage",
        "system_fingerprint",
        "service_tier",
        "request_id",
        "custom_id",
    }
)
"""Fields of a stored completion that are not its request's."""
_NUMBERED = re.compile(r"token_id:(\d+)")
"""A token as vLLM writes it with `return_tokens_as_token_ids`."""


@dataclass(frozen=True)
class ServedAnswer:
    """An answer that was served; None for what is not known.

    `name` is the request's id and `choice` the answer's number. `tokens` are the bytes of the answer's tokens with their
    log-probabilities, `token_ids` their numbers. `stop` is the text that ended the answer, without being part of it.
    """

    name: str
    choice: int
    request: Mapping[str, Any]
    text: str | None = None
    finish_reason: str | None = None
    stop: str | None = None
    token_ids: tuple[int, ...] | None = None
    tokens: tuple[tuple[bytes, float | None], ...] | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    answer_id: str | None = None
    changed: str | None = None
    """The name of what the server took out of the text: "tool_calls" or "reasoning"."""


@dataclass(frozen=True)
class UnreadAnswer:
    """A line, or an answer in it, that cannot be read; `outcome` is the short name of the reason, which is counted."""

    name: str
    choice: int
    outcome: str
    reason: str


class FieldPaths:
    """The places of fields in a line, given as NAME=PATH with dots, such as `answer=output.0.text`."""

    def __init__(self, assignments: Sequence[str] = ()) -> None:
        self._paths: dict[str, list[str]] = {}
        for text in assignments:
            name, _, path = text.partition("=")
            if name not in FIELDS or not path:
                raise ValueError(f"--map: NAME=PATH is needed, NAME one of {', '.join(FIELDS)}; got {text[:128]!r}")
            self._paths[name] = path.split(".")

    def __bool__(self) -> bool:
        return bool(self._paths)

    def __contains__(self, name: str) -> bool:
        return name in self._paths

    def find(self, name: str, line: Any) -> Any:
        """Return a field of a line, None where there is none; JSON within a text is read."""
        value = line
        for key in self._paths[name]:
            if isinstance(value, str):
                value = _json(value)
            if isinstance(value, list) and key.lstrip("-").isdigit() and -len(value) <= int(key) < len(value):
                value = value[int(key)]
            else:
                value = value.get(key) if isinstance(value, Mapping) else None
        return (
            _json(value)
            if isinstance(value, str) and name in ("request", "response", "messages", "token_ids")
            else value
        )


class RequestFile:
    """A file of requests in OpenAI's batch format, found by their ids; requests that are added later are found, too."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb")
        self._places: dict[str, int] = {}
        self._end = 0

    def find(self, name: str) -> Mapping[str, Any] | None:
        """Return the body of a request, None if there is none of that id."""
        if name not in self._places:
            self._index()
        if (start := self._places.get(name)) is None:
            return None
        self._file.seek(start)
        return request_of(next(lines_of(self._file))).body

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _index(self) -> None:
        self._file.seek(self._end)
        for line in lines_of(self._file):
            request = request_of(line)
            if request.problem is None:
                self._places.setdefault(request.custom_id, self._end)
            self._end = line.end


def answers_in(
    line: Line, paths: FieldPaths, requests: RequestFile | None = None
) -> Iterator[ServedAnswer | UnreadAnswer]:
    """Yield the answers in a line."""
    name = f"line {line.number}"
    try:
        row = json.loads(line.text)
    except (ValueError, RecursionError):
        row = None
    if not isinstance(row, dict):
        yield UnreadAnswer(name, 0, "invalid", "The line is no JSON object.")
        return
    response, reason = _response(row, paths)
    stated = paths.find("id", row) if "id" in paths else row.get("custom_id") or row.get("id")
    if stated is None and isinstance(response, Mapping):
        stated = response.get("id")
    name = str(stated) if isinstance(stated, str | int) else name
    if response is None:
        yield UnreadAnswer(name, 0, "failed", reason or "The line has no response.")
        return
    request = _request(row, paths)
    if request is None and requests is not None:
        request = requests.find(name)
    if request is None or not isinstance(request.get("messages"), list):
        yield UnreadAnswer(name, 0, "no_request", "There is no request with 'messages' for this answer.")
        return
    choices = response.get("choices")
    if not isinstance(choices, list) or not choices:
        yield UnreadAnswer(name, 0, "failed", "The response has no 'choices'.")
        return
    for number, choice in enumerate(choices):
        yield _served(name, number, request, response, choice if isinstance(choice, dict) else {}, len(choices))


def _response(row: Mapping[str, Any], paths: FieldPaths) -> tuple[Mapping[str, Any] | None, str | None]:
    """Return a line's chat completion, or the reason why there is none."""
    if any(name in paths for name in OF_ANSWER):
        answer = {name: paths.find(name, row) if name in paths else None for name in OF_ANSWER}
        choice = {
            "message": {"content": answer["answer"]},
            "finish_reason": answer["finish_reason"],
            "token_ids": answer["token_ids"],
        }
        usage = {name: answer[name] for name in ("prompt_tokens", "completion_tokens")}
        return {"choices": [choice], "usage": usage}, None
    response = paths.find("response", row) if "response" in paths else row.get("response")
    if isinstance(response, Mapping) and "choices" in response:
        return response, None
    if "choices" in row:
        return row, None
    answered = answered_in({"response": response, "error": row.get("error")})
    if not answered.ok or not isinstance(answered.body, Mapping):
        return None, answered.reason or "The response has no body."
    return answered.body, None


def _request(row: Mapping[str, Any], paths: FieldPaths) -> Mapping[str, Any] | None:
    """Return a line's request, None if it is elsewhere."""
    body = paths.find("request", row) if "request" in paths else row.get("request", row.get("body"))
    if isinstance(body, Mapping) and isinstance(body.get("body"), Mapping):
        body = body["body"]
    request = dict(body) if isinstance(body, Mapping) else {}
    if "messages" in paths:
        request["messages"] = paths.find("messages", row)
    elif not request and "messages" in row:
        request = {name: value for name, value in row.items() if name not in OF_COMPLETION}
        if isinstance(request["messages"], list):
            request["messages"] = [_message(message) for message in request["messages"]]
    if isinstance(request.get("messages"), str):
        request["messages"] = [{"role": "user", "content": request["messages"]}]
    return request or None


def _message(stored: Any) -> Any:
    """Return a message of a stored completion as a request has it: the parts in place of their joined texts."""
    if not isinstance(stored, Mapping) or not isinstance(parts := stored.get("content_parts"), list):
        return stored
    return {**{name: value for name, value in stored.items() if name != "content_parts"}, "content": parts}


def _served(
    name: str,
    number: int,
    request: Mapping[str, Any],
    response: Mapping[str, Any],
    choice: Mapping[str, Any],
    count: int,
) -> ServedAnswer | UnreadAnswer:
    message = choice.get("message")
    message = message if isinstance(message, Mapping) else {}
    text, usage = message.get("content"), response.get("usage")
    usage = usage if isinstance(usage, Mapping) else {}
    changed = "tool_calls" if message.get("tool_calls") else None
    if message.get("reasoning_content") or message.get("reasoning"):
        changed = "reasoning"
    tokens, numbers = _tokens(choice.get("logprobs"))
    ids = choice.get("token_ids")
    ids = tuple(ids) if isinstance(ids, list) and ids and all(type(token) is int for token in ids) else numbers
    text = text if isinstance(text, str) else None
    if ids is None and changed is not None:
        state = "has tool calls" if changed == "tool_calls" else "had its reasoning taken out"
        return UnreadAnswer(
            name, number, changed, f"The answer {state}: its text is not known, and it has no 'token_ids'."
        )
    if ids is None and not text:
        return UnreadAnswer(name, number, "empty", "The answer has no text.")
    stop = choice.get("stop_reason")
    return ServedAnswer(
        name,
        number,
        request,
        text=text,
        finish_reason=choice.get("finish_reason"),
        stop=stop if isinstance(stop, str) else None,
        token_ids=ids,
        tokens=tokens,
        prompt_tokens=_integer(usage.get("prompt_tokens")),
        # It counts the tokens of all answers together.
        completion_tokens=_integer(usage.get("completion_tokens")) if count == 1 else None,
        answer_id=response.get("id") if isinstance(response.get("id"), str) else None,
        changed=changed,
    )


def _tokens(logprobs: Any) -> tuple[tuple[tuple[bytes, float | None], ...] | None, tuple[int, ...] | None]:
    """Return the tokens of OpenAI's logprobs with their log-probabilities, or their numbers if vLLM wrote these."""
    content = logprobs.get("content") if isinstance(logprobs, Mapping) else None
    if not isinstance(content, list) or not content:
        return None, None
    texts = [str(token.get("token")) if isinstance(token, Mapping) else "" for token in content]
    numbered = [_NUMBERED.fullmatch(text) for text in texts]
    if all(numbered):
        return None, tuple(int(number[1]) for number in numbered if number is not None)
    return tuple(_token(token, text) for token, text in zip(content, texts, strict=True)), None


def _token(entry: Any, text: str) -> tuple[bytes, float | None]:
    """Return a token's bytes, those of its text where they are not given, and its log-probability."""
    raw, logprob = (entry.get("bytes"), entry.get("logprob")) if isinstance(entry, Mapping) else (None, None)
    valid = isinstance(raw, list) and all(type(byte) is int and 0 <= byte < 256 for byte in raw)
    token = bytes(raw or ()) if valid else text.encode("utf-8", "surrogatepass")
    return token, float(logprob) if isinstance(logprob, int | float) else None


def _integer(value: Any) -> int | None:
    return value if type(value) is int else None


def _json(text: str) -> Any:
    """Return the value that a text holds as JSON, the text itself if it holds none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
