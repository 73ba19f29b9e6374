"""Scores of the journal's rows for tools that read no OpenTelemetry logs: Langfuse's score API, Phoenix's annotation API.

Each score has an identity of its own, so that sending it again replaces it, as when a truth comes later.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

import requests

from server.telemetry.conventions import Score, scores

Tool = Literal["langfuse", "phoenix"]
TIMEOUT = 30
BATCH = 100
TRUTH = "answer_correct"


class ScoreError(ValueError):
    """Raised if a tool refuses scores or cannot be reached."""


def send(rows: Iterable[Mapping[str, Any]], tool: Tool, url: str, environ: Mapping[str, str]) -> tuple[int, int]:
    """Send the scores of rows, as `reading.fields.shown` gives them, and return the numbers of scores and of rows left out.

    Rows without a trace are left out. Keys are those of the tool's own variables in `environ`. Raises ScoreError.
    """
    skipped = 0
    batch: list[dict[str, Any]] = []
    sent = 0
    with requests.Session() as session:
        if tool == "langfuse":
            session.auth = (environ.get("LANGFUSE_PUBLIC_KEY", ""), environ.get("LANGFUSE_SECRET_KEY", ""))
        elif key := environ.get("PHOENIX_API_KEY"):
            session.headers["Authorization"] = f"Bearer {key}"
        for row in rows:
            if row["trace_id"] is None or (tool == "phoenix" and row["span_id"] is None):
                skipped += 1
                continue
            for score in scores_of(row):
                sent += 1
                if tool == "langfuse":
                    _post(session, f"{url.rstrip('/')}/api/public/scores", langfuse(row, score))
                else:
                    batch.append(phoenix(row, score))
            if len(batch) >= BATCH:
                _annotate(session, url, batch)
                batch = []
        if batch:
            _annotate(session, url, batch)
    return sent, skipped


def scores_of(row: Mapping[str, Any]) -> Iterator[Score]:
    """Yield the scores of a shown row: its readouts' numbers and flags, and whether the answer is right."""
    yield from scores(row["diagnostics"])
    yield from scores({TRUTH: row[TRUTH]})


def langfuse(row: Mapping[str, Any], score: Score) -> dict[str, Any]:
    """Return the body of Langfuse's `POST /api/public/scores`."""
    body = {
        "id": identity(row, score), "traceId": row["trace_id"], "name": score.name, "value": score.value,
        "dataType": "NUMERIC" if score.label is None else "BOOLEAN", "comment": score.explanation,
    }  # fmt: skip
    return body if row["span_id"] is None else {**body, "observationId": row["span_id"]}


def phoenix(row: Mapping[str, Any], score: Score) -> dict[str, Any]:
    """Return an annotation of Phoenix's `POST /v1/span_annotations`."""
    result = {"label": score.label, "score": score.value, "explanation": score.explanation}
    return {
        "span_id": row["span_id"], "name": score.name, "annotator_kind": "HUMAN" if score.name == TRUTH else "CODE",
        "result": {name: value for name, value in result.items() if value is not None}, "identifier": identity(row, score),
    }  # fmt: skip


def identity(row: Mapping[str, Any], score: Score) -> str:
    """Return the identity of a score."""
    return f"{row['id']}-{row['choice']}-{score.name}"


def _annotate(session: requests.Session, url: str, annotations: list[dict[str, Any]]) -> None:
    _post(session, f"{url.rstrip('/')}/v1/span_annotations", {"data": annotations})


def _post(session: requests.Session, url: str, body: Any) -> None:
    try:
        answer = session.post(url, json=body, timeout=TIMEOUT)
    except requests.RequestException as error:
        raise ScoreError(f"{url} cannot be reached: {type(error).__name__}") from None
    if not answer.ok:
        raise ScoreError(f"{url} answered {answer.status_code}: {answer.text[:200]}")
