"""A batch as a table: a row for each answer, with its text, its numbers and its request's metadata in columns."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from server.batches.file import answered_in, lines_of, requests_in
from server.encode import dumps
from server.journal.reading.fields import inert
from server.journal.scalars import scalars

HEAD = (
    "custom_id", "condition", "choice", "status", "error", "finish_reason", "answer", "prompt_tokens", "completion_tokens",
    "logprob",
)  # fmt: skip
FORMATS = (".csv", ".jsonl")
METADATA = "metadata."


def check_table(path: Path) -> None:
    """Raise ValueError unless a table can have this name."""
    if path.suffix.lower() not in FORMATS:
        raise ValueError(f"{path} must end in {' or '.join(FORMATS)}")


def write_table(requests: Path, responses: Path, table: Path) -> int:
    """Write the table of a batch's two files and return the number of its rows.

    Every row of JSON lines has every column. In CSV, a text that a spreadsheet would take for a formula begins with `'`.
    """
    metadata = _metadata(requests)
    columns = [
        *HEAD,
        *scalars(None, None),
        *dict.fromkeys(METADATA + key for pairs in metadata.values() for key in pairs),
    ]
    count = 0
    with table.open("w", encoding="utf-8", errors="backslashreplace", newline="") as file:
        is_csv = table.suffix.lower() == ".csv"
        writer = csv.DictWriter(file, columns) if is_csv else None
        if writer is not None:
            writer.writeheader()
        for row in _rows(responses, metadata):
            count += 1
            full = {name: row.get(name) for name in columns}
            if writer is None:
                file.write(dumps(full) + "\n")
            else:
                writer.writerow({name: inert(value) for name, value in full.items()})
    return count


def flat_rows(row: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the flat rows of a line of a batch's responses: one for each answer, or one for a failure."""
    answered = answered_in(row)
    head = {"custom_id": row.get("custom_id"), "condition": row.get("condition"), "status": answered.status}
    if not answered.ok or not isinstance(answered.body, Mapping):
        yield {**head, "error": answered.reason}
        return
    usage = answered.body.get("usage") or {}
    choices = answered.body.get("choices") or []
    for choice in choices:
        yield {
            **head,
            "choice": choice.get("index"),
            "finish_reason": choice.get("finish_reason"),
            "answer": (choice.get("message") or {}).get("content"),
            "prompt_tokens": usage.get("prompt_tokens"),
            # OpenAI counts the tokens of all answers of a request together.
            "completion_tokens": usage.get("completion_tokens") if len(choices) == 1 else None,
            "logprob": _logprob(choice),
            **scalars(choice.get("applied"), choice.get("diagnostics")),
        }


def _logprob(choice: Mapping[str, Any]) -> float | None:
    """Return the log-probability of an answer in nats: the sum over its tokens, None if it was not asked for."""
    content = (choice.get("logprobs") or {}).get("content")
    return None if content is None else sum(token["logprob"] for token in content)


def _metadata(path: Path) -> dict[str, dict[str, Any]]:
    """Return the metadata of a file's requests by their ids."""
    metadata = {request.custom_id: request.body.get("metadata") for request in requests_in(path)}
    return {name: value for name, value in metadata.items() if isinstance(value, dict)}


def _rows(path: Path, metadata: Mapping[str, Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    with path.open("rb") as file:
        for line in lines_of(file):
            row = json.loads(line.text)
            pairs = {METADATA + key: value for key, value in metadata.get(row["custom_id"], {}).items()}
            for flat in flat_rows(row):
                yield flat | pairs
