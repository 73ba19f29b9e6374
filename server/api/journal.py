"""GET /v1/diagnostics, /v1/diagnostics/summary and /v1/diagnostics/{id}: the journal over HTTP."""

from __future__ import annotations

import csv
import io
import logging
from collections.abc import Callable, Iterator
from typing import Any

from flask import Blueprint, Response
from sqlalchemy.exc import SQLAlchemyError

from server.access.auth import caller
from server.api.query import METADATA, integer, metadata_of, metadata_parameter, parameters, word
from server.api.reading import reading
from server.context import context
from server.encode import dumps, json_response
from server.errors import ApiError, BadRequest
from server.journal.reading.fields import LISTS, cells, columns
from server.journal.reading.queries import Filters, answer, page, place, stream
from server.journal.reading.times import FORMS, unix_time
from server.journal.reading.view import scalars
from server.journal.schema import ADDED
from server.journal.summary import summarise
from server.journal.summary.periods import DAY, MINUTE
from server.journal.words import WORDED
from server.openapi.operation import JSON, TEXT, Parameter, documented
from server.wire.sent.answers import ErrorBody
from server.wire.sent.journal import ADDED_FIELDS, JournalSummary, PageOfRows, RowOfAnswer, RowsOfAnswer

log = logging.getLogger("helmsight")

blueprint = Blueprint("journal", __name__)

MAX_LIMIT = 1000
MAX_TEXT = 256
FORMATS = ("json", "jsonl", "csv")
CSV = "text/csv"
FILTERS = (*Filters.__dataclass_fields__,)
PAGING = ("limit", "before", "format")
LONGEST = 366 * DAY
"""Longest period in seconds."""

PATIENCE = 5.0
"""Seconds that a reader of many rows waits for a free place."""


_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean"}
ADDED_FIELDS.update(
    (column.name, {"type": [_TYPES[column.type.python_type], "null"], "description": column.doc})
    for added in ADDED.values()
    for column in added
    if column.name not in LISTS
)


def _filters() -> list[Parameter]:
    """Return the filters as parameters of the query."""
    printable = {"type": "string", "minLength": 1, "maxLength": MAX_TEXT}
    time = {"type": "string"}
    return [
        Parameter("since", f"Accepted at this time or later: {FORMS}.", time.copy, "1d"),
        Parameter("until", "Accepted before this time, in the same forms.", time.copy, "2100-01-01"),
        Parameter("model", "The model's name.", printable.copy, "helmsight-demo"),
        Parameter("key_name", "The name of the request's key.", printable.copy, "shop"),
        Parameter("preset", "The preset that the request named.", printable.copy, "sage"),
        Parameter("vector", "The name of a steering vector that was applied.", printable.copy, "modality-preference"),
        *(
            Parameter(name, f"{words.about[0].upper()}{words.about[1:]}.", words.schema, words.allowed()[-1])
            for name, words in WORDED.items()
        ),
        metadata_parameter(),
    ]


@blueprint.get("/v1/diagnostics")
@documented(
    "Journal",
    {200: {JSON: PageOfRows, "application/x-ndjson": (RowOfAnswer, ErrorBody), CSV: TEXT}},
    errors=(400, 503),
    parameters=[
        *_filters(),
        Parameter(
            "limit",
            f"Largest number of rows. A page has 50 by default and {MAX_LIMIT} at most; a stream has all by default.",
            lambda: {"type": "integer", "minimum": 1},
            10,
        ),
        Parameter("before", "The `next` value of an earlier page."),
        Parameter(
            "format",
            "jsonl and csv stream one row per line.",
            lambda: {"enum": list(FORMATS), "default": FORMATS[0]},
            "jsonl",
        ),
    ],
)
def list_rows() -> Response:
    """List rows, newest first: one page, or with `format=jsonl` or `csv` a stream of all (or of `limit`)."""
    query = parameters((*FILTERS, *PAGING))
    filters = filters_of(query)
    before = _cursor(query["before"]) if "before" in query else None
    if (form := word(query, "format", FORMATS)) != FORMATS[0]:
        return _streamed(form, filters, integer(query, "limit", 2**31), before)
    limit = integer(query, "limit", MAX_LIMIT) or 50
    with reading() as database, database.engine.connect() as connection:
        listed = page(connection, filters, limit, before, scalars())
    return json_response(
        {"object": "list", "data": listed.rows, "has_more": listed.next is not None, "next": listed.next}
    )


@blueprint.get("/v1/diagnostics/summary")
@documented(
    "Journal",
    JournalSummary,
    errors=(400, 503),
    parameters=[
        *_filters(),
        Parameter(
            "bucket",
            "The length of a period of `by_time` in seconds, a multiple of 60; by default it suits the time span.",
            lambda: {"type": "integer", "minimum": MINUTE, "maximum": LONGEST, "multipleOf": MINUTE},
            300,
        ),
    ],
)
def summary() -> Response:
    """Summarise the matching rows in counts, means, quantiles and rates.

    `first_token` and `total` are seconds. `refusals` counts the refused requests of the time span, except those to the
    journal's own routes; no other filter applies to them.
    """
    query = parameters((*FILTERS, "bucket"))
    filters, bucket = filters_of(query), integer(query, "bucket", LONGEST)
    if bucket is not None and bucket % MINUTE:
        raise BadRequest(f"'bucket' must be a multiple of {MINUTE} seconds; got {bucket}.", "bucket")
    release = _begin_heavy()
    try:
        with reading() as database, database.engine.connect() as connection:
            return json_response(summarise(connection, filters, bucket))
    finally:
        release()


@blueprint.get("/v1/diagnostics/<identity>")
@documented(
    "Journal",
    RowsOfAnswer,
    errors=(400, 404, 503),
    parameters=[Parameter("identity", "The `id` of the answer.", place="path")],
)
def get_rows(identity: str) -> Response:
    """Return the rows of all choices of one answer; a key without the role `journal` sees those of its own answers."""
    parameters(())
    rows: list[dict[str, Any]] = []
    if (journal := context().journal).enabled:
        journal.settle_all()
    with reading() as database, database.engine.connect() as connection:
        if len(identity) <= MAX_TEXT and identity.isprintable():
            rows = answer(connection, identity, scalars())
    if "journal" not in (holder := caller()).roles:
        rows = [row for row in rows if row["key_name"] == holder.name]
    if not rows:
        raise ApiError(404, "The journal holds no answer with this id.", code="unknown_answer", param="id")
    return json_response({"object": "list", "data": rows})


def filters_of(query: dict[str, str]) -> Filters:
    """Return the filters among the parameters; raises a 400 naming a wrong one."""
    filters: dict[str, Any] = {name: query[name] for name in FILTERS if name in query and name != METADATA}
    for name, words in WORDED.items():
        if name in filters:
            try:
                words.check(name, filters[name])
            except ValueError as error:
                raise BadRequest(str(error), name) from None
    for name in ("model", "preset", "vector"):
        if name in filters and not (0 < len(filters[name]) <= MAX_TEXT and filters[name].isprintable()):
            raise BadRequest(f"'{name}' must have 1 to {MAX_TEXT} printable characters.", name)
    for name in ("since", "until"):
        if name in filters:
            filters[name] = _time(filters[name], name)
    return Filters(**filters, metadata=metadata_of(query))


def _time(text: str, name: str) -> float:
    try:
        return unix_time(text)
    except ValueError as error:
        raise BadRequest(f"'{name}' {error}.", name) from None


def _cursor(text: str) -> int:
    try:
        return place(text)
    except ValueError:
        raise BadRequest("'before' must be the 'next' of an earlier page.", "before") from None


def _begin_heavy() -> Callable[[], None]:
    """Take a place among the readers of many rows; return a function that releases it once."""
    heavy = context().journal.heavy
    if not heavy.acquire(timeout=PATIENCE):
        raise ApiError(
            503,
            "Too many requests are reading the journal; try again.",
            code="journal_busy",
            retry_after=max(PATIENCE, 1.0),
        )
    unreleased = [heavy]

    def release() -> None:
        if unreleased:
            unreleased.pop().release()

    return release


def _streamed(form: str, filters: Filters, limit: int | None, before: int | None) -> Response:
    names, release = scalars(), _begin_heavy()
    try:
        with reading() as database:
            chunks = stream(database, filters, limit, before, names)
            first = next(chunks, [])  # an error of the database can still change the status here
    except BaseException:
        release()
        raise

    table = form == "csv"
    head = columns(names)

    def encode(rows: list[dict[str, Any]]) -> str:
        return _table(rows, head) if table else "".join(dumps(row) + "\n" for row in rows)

    def lines() -> Iterator[str]:
        try:
            yield (",".join(head) + "\r\n" if table else "") + encode(first)
            for rows in chunks:
                yield encode(rows)
        except SQLAlchemyError as error:
            # A stream that ends early must not look like one that is complete.
            log.error("journal: a stream ended early: %s", database.explain(error))
            if table:
                raise  # a table cannot hold an error, so that the connection is cut
            broken = ApiError(503, "The journal could not be read to its end.", code="journal_unavailable")
            yield dumps(broken.body()) + "\n"
        finally:
            release()

    response = Response(lines(), mimetype=CSV if table else "application/x-ndjson")
    response.call_on_close(release)
    return response


def _table(rows: list[dict[str, Any]], names: tuple[str, ...]) -> str:
    text = io.StringIO()
    csv.DictWriter(text, names).writerows(cells(row, names) for row in rows)
    return text.getvalue()
