"""OpenAI's batch files: a request or a response in each line of JSON.

A request is `{"custom_id", "method", "url", "body"}`, a response `{"id", "custom_id", "response": {"status_code",
"request_id", "body"}, "error"}`. `vllm run-batch` reads and writes the same.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from server.encode import dumps

URL = "/v1/chat/completions"
"""The one route that a request may name."""
PASSING = frozenset({408, 429, 499, 500, 502, 503, 504})
"""Statuses of failures that may pass, so that a resumed run asks again."""


@dataclass(frozen=True)
class Line:
    """A whole line of a file: its number from 1, the position behind it in bytes, and its text."""

    number: int
    end: int
    text: bytes


def lines_of(file: IO[bytes], number: int = 0) -> Iterator[Line]:
    """Yield the lines from here on, without empty ones; `number` is that of the line before.

    A last line without its end is included only if it is valid JSON, since its writer may have been interrupted.
    """
    for text in iter(file.readline, b""):
        number += 1
        if text.strip() and (text.endswith(b"\n") or is_json(text)):
            yield Line(number, file.tell(), text.strip())


def is_json(text: bytes) -> bool:
    """Return whether a text is JSON as a whole."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


@dataclass(frozen=True)
class Problem:
    """The reason why a request has no HTTP response, in the form of a row's `error`."""

    code: str
    message: str

    def json(self) -> dict[str, str]:
        """Return the row's `error`."""
        return {"code": self.code, "message": self.message}


@dataclass(frozen=True)
class BatchResponse:
    """A response: its status, its JSON and its request's id; or the problem because of which there is none."""

    status: int | None = None
    body: Any = None
    request_id: str | None = None
    problem: Problem | None = None

    @property
    def ok(self) -> bool:
        """True for an answer."""
        return self.status == 200

    @property
    def reason(self) -> str | None:
        """The message of a failure, None for an answer."""
        if self.ok:
            return None
        if self.problem is not None:
            return self.problem.message
        match self.body:
            case {"error": {"message": str() as message}}:
                return message
        return f"status {self.status}"


@dataclass(frozen=True)
class BatchRequest:
    """A line of a file of requests; one with a `problem` cannot be asked."""

    custom_id: str
    body: Mapping[str, Any]
    problem: Problem | None = None


def requests_in(path: Path) -> Iterator[BatchRequest]:
    """Yield the requests of a file in order; what is wrong with a line becomes its problem."""
    ids: set[bytes] = set()
    with path.open("rb") as file:
        for line in lines_of(file):
            request = request_of(line)
            mark = hashlib.blake2b(request.custom_id.encode("utf-8", "surrogatepass"), digest_size=12).digest()
            if mark in ids:
                message = f"Line {line.number} has the 'custom_id' of an earlier line."
                request = BatchRequest(
                    f"{request.custom_id} (line {line.number})", {}, Problem("duplicate_custom_id", message)
                )
            ids.add(mark)
            yield request


def request_of(line: Line) -> BatchRequest:
    """Return the request in a line."""

    def wrong(code: str, message: str) -> BatchRequest:
        return BatchRequest(name, {}, Problem(code, f"Line {line.number} {message}"))

    name = f"line {line.number}"
    try:
        entry = json.loads(line.text)
    except (ValueError, RecursionError):
        return wrong("invalid_json_line", "is not valid JSON.")
    if not isinstance(entry, dict):
        return wrong("invalid_request", "is not a JSON object.")
    if not isinstance(entry.get("custom_id"), str) or not entry["custom_id"]:
        return wrong("missing_required_parameter", "needs a string as 'custom_id'.")
    name = entry["custom_id"]
    if entry.get("method", "POST") != "POST":
        return wrong("invalid_method", "must have the 'method' \"POST\".")
    if entry.get("url", URL) != URL:
        return wrong("invalid_url", f"must have the 'url' {dumps(URL)}; got {dumps(entry['url'])[:128]}.")
    if not isinstance(entry.get("body"), dict):
        return wrong("missing_required_parameter", "needs an object as 'body'.")
    return BatchRequest(name, entry["body"])


def identity(*parts: Any) -> str:
    """Return the id of the row that answers a request: it is the same whenever all of `parts` are."""
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    return "batch_req_" + hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def row(row_id: str, custom_id: str, answered: BatchResponse, **more: Any) -> dict[str, Any]:
    """Return a line of a file of responses; `more` are keys of our own."""
    response = None
    if answered.problem is None:
        response = {"status_code": answered.status, "request_id": answered.request_id, "body": answered.body}
    error = None if answered.problem is None else answered.problem.json()
    return {"id": row_id, "custom_id": custom_id, **more, "response": response, "error": error}


def answered_in(row: Mapping[str, Any]) -> BatchResponse:
    """Return the response of a row, whichever engine wrote it; vLLM has errors in `error`, OpenAI in the body."""
    response, error = row.get("response"), row.get("error")
    if not isinstance(response, Mapping):
        return BatchResponse(problem=Problem("no_response", _message(error) or "There is no response."))
    status, body = response.get("status_code", 200), response.get("body")
    if error is not None and not isinstance(body, Mapping):
        body = {"error": {"message": _message(error) or "The request failed."}}
    return BatchResponse(status, body, response.get("request_id"))


def _message(error: Any) -> str | None:
    match error:
        case str():
            return error
        case {"message": str() as message} | {"error": {"message": str() as message}}:
            return message
    return None if error is None else dumps(error)[:300]


class ResponseFile:
    """A file of rows that grows; those of an earlier run are kept, if `row_ids` names their ids (None: all).

    A row that is to be asked `again` is dropped. Raises ValueError for rows of anything else, and for rows that are
    `outdated` for the reason returned, unless they are to be dropped (`replace`).
    """

    def __init__(
        self,
        path: Path,
        row_ids: Collection[str] | None = None,
        *,
        replace: bool = False,
        again: Callable[[Mapping[str, Any]], bool] = lambda row: passing(answered_in(row)),
        outdated: Callable[[Mapping[str, Any]], str | None] = lambda row: None,
    ) -> None:
        self.path = path
        self.kept: set[str] = set()
        self._again, self._outdated = again, outdated
        if path.exists():
            self._keep(row_ids, replace)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab")

    def __enter__(self) -> ResponseFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def write(self, row: Mapping[str, Any]) -> None:
        """Append a row, which is in the file when this returns."""
        self._file.write(dumps(row).encode("utf-8", "surrogatepass") + b"\n")
        self._file.flush()

    def _keep(self, row_ids: Collection[str] | None, replace: bool) -> None:
        """Rewrite the file without rows that are to be asked again, and without a line that was cut."""
        temporary = self.path.with_name(f".{self.path.name}.kept")
        strange = 0
        outdated: list[str] = []
        with self.path.open("rb") as file, temporary.open("wb") as output:
            for line in lines_of(file):
                kept_row = _row(line.text)
                if kept_row is None or (row_ids is not None and kept_row["id"] not in row_ids):
                    # A line of the requests that was no request may have been mended.
                    strange += kept_row is None or answered_in(kept_row).problem is None
                elif kept_row["id"] not in self.kept and not self._again(kept_row):
                    if (reason := self._outdated(kept_row)) is not None:
                        outdated.append(reason)
                        continue
                    self.kept.add(kept_row["id"])
                    output.write(line.text + b"\n")
        if strange and not replace:
            temporary.unlink()
            if row_ids is None:
                raise ValueError(f"{self.path} has {strange} lines of something else; name another file")
            raise ValueError(
                f"{self.path} has {strange} lines that answer other requests, or with another model; name another file, or "
                "drop them with --replace"
            )
        if outdated and not replace:
            temporary.unlink()
            raise ValueError(
                f"{self.path} has {len(outdated)} lines that were answered differently: {outdated[0]}; name another file, "
                "or answer them again with --replace"
            )
        os.replace(temporary, self.path)


def passing(answered: BatchResponse) -> bool:
    """Return whether a failure may pass, so that it pays to ask again."""
    if answered.problem is not None:
        return answered.problem.code in ("no_answer", "no_response")
    return answered.status in PASSING


def _row(text: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and isinstance(row.get("id"), str) else None
