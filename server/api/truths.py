"""POST /v1/diagnostics/{id}: metadata of an answer that come after it, whatever its dialect and whether it was stored."""

from __future__ import annotations

from flask import Blueprint, Response

from server.access.auth import caller
from server.api.body import read_json
from server.api.query import parameters
from server.api.reading import reading
from server.context import context
from server.encode import json_response
from server.errors import ApiError, BadRequest
from server.journal.reading.queries import answer
from server.journal.reading.truths import add_metadata
from server.journal.reading.view import scalars
from server.openapi.examples import of_change
from server.openapi.operation import JSON, Parameter, documented
from server.telemetry.conventions import scores
from server.wire.parse import parse
from server.wire.sent.journal import RowsOfAnswer
from server.wire.storing.metadata import MAX_METADATA, truth
from server.wire.storing.stored import RowsChange

blueprint = Blueprint("truths", __name__)

MAX_ID = 64


@blueprint.post("/v1/diagnostics/<identity>")
@documented(
    "Journal",
    RowsOfAnswer,
    errors=(400, 404, 413, 415, 503),
    parameters=[Parameter("identity", "The `id` of the answer.", place="path")],
    body={JSON: lambda _: RowsChange},
    examples=of_change,
)
def change_rows(identity: str) -> Response:
    """Add metadata to an answer of this key, such as whether it was right; a key without a name changes any answer.

    Pairs that are not named stay. A stored answer has them, too.
    """
    parameters(())
    pairs = parse(read_json(context()), RowsChange).metadata or {}
    if (journal := context().journal).enabled:
        journal.settle_all()
    changed = False
    with reading() as database:
        if len(identity) <= MAX_ID and identity.isprintable():
            try:
                with database.writer.begin() as connection:
                    changed = add_metadata(connection, identity, pairs, caller().name)
            except ValueError:
                raise BadRequest(
                    f"'metadata' must have at most {MAX_METADATA} keys, with those that the answer has.", "metadata"
                ) from None
        if not changed:
            raise ApiError(
                404, "The journal holds no answer with this id for this key.", code="unknown_answer", param="id"
            )
        with database.engine.connect() as connection:
            rows = answer(connection, identity, scalars())
    judge(identity, pairs)
    return json_response({"object": "list", "data": rows})


def judge(identity: str, metadata: dict[str, str] | None) -> None:
    """Emit the event of a truth that came after its answer, if traces are sent."""
    traces, right = context().traces, truth(metadata, "answer_correct")
    if traces is None or right is None:
        return
    with reading() as database, database.engine.connect() as connection:
        rows = answer(connection, identity)
    if rows:
        (score,) = scores({"answer_correct": right})
        traces.judged(score, identity, rows[0]["trace_id"], rows[0]["span_id"])
