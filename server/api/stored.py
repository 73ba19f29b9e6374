"""Stored completions: GET, POST and DELETE below /v1/chat/completions, as OpenAI's SDKs call them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flask import Blueprint, Response
from sqlalchemy import Connection

from server.access.auth import caller
from server.api.body import read_json
from server.api.query import METADATA, integer, metadata_of, metadata_parameter, parameters, word
from server.api.reading import reading
from server.api.truths import judge
from server.context import context
from server.dialects.chat import CHAT
from server.encode import json_response
from server.errors import ApiError, BadRequest
from server.journal.database import Database
from server.journal.reading.stored import Chosen, change, find, messages, page, remove, shown
from server.openapi.examples import of_change
from server.openapi.operation import JSON, Parameter, documented
from server.wire.parse import parse
from server.wire.storing.stored import StoredChange, StoredCompletion, StoredCompletions, StoredDeletion, StoredMessages

blueprint = Blueprint("stored", __name__)

LIMIT, MAX_LIMIT = 20, 100
ORDERS = ("asc", "desc")
MAX_ID = 64

_IDENTITY = Parameter("identity", 'The `id` of an answer whose request had `"store": true`.', place="path")
PAGING = [
    Parameter("after", "The `last_id` of the previous page."),
    Parameter(
        "limit", "Largest number of entries.",
        lambda: {"type": "integer", "minimum": 1, "maximum": MAX_LIMIT, "default": LIMIT}, 10,
    ),
    Parameter("order", "asc begins with the oldest, desc with the newest.", lambda: {"enum": [*ORDERS]}, "desc"),
]  # fmt: skip


@blueprint.get("/v1/chat/completions")
@documented(
    "Stored answers",
    StoredCompletions,
    errors=(400, 404, 503),
    parameters=[*PAGING, Parameter("model", "The model as the answers name it."), metadata_parameter()],
)
def list_stored() -> Response:
    """List the stored answers of this key, the oldest first."""
    query = parameters(("after", "limit", "order", "model", METADATA))
    chosen = Chosen(caller().owner, CHAT.prefix, query.get("model"), metadata_of(query))
    limit, order = integer(query, "limit", MAX_LIMIT) or LIMIT, word(query, "order", ORDERS)
    with stored() as database, database.engine.connect() as connection:
        try:
            rows, more = page(connection, chosen, limit, query.get("after"), order == "desc")
        except KeyError:
            raise BadRequest("'after' must be the id of a stored answer.", "after") from None
    return listed([shown(row) for row in rows], more)


@blueprint.get("/v1/chat/completions/<identity>")
@documented("Stored answers", StoredCompletion, errors=(400, 404, 503), parameters=[_IDENTITY])
def get_stored(identity: str) -> Response:
    """Return a stored answer with its metadata."""
    parameters(())
    return json_response(of_caller(identity, lambda connection, owner: find(connection, owner, identity), shown))


@blueprint.get("/v1/chat/completions/<identity>/messages")
@documented("Stored answers", StoredMessages, errors=(400, 404, 503), parameters=[_IDENTITY, *PAGING])
def list_messages(identity: str) -> Response:
    """List the messages of a stored answer's request, without images."""
    query = parameters(("after", "limit", "order"))
    limit, order = integer(query, "limit", MAX_LIMIT) or LIMIT, word(query, "order", ORDERS)
    items = of_caller(identity, lambda connection, owner: find(connection, owner, identity), messages)
    if order == "desc":
        items.reverse()
    if (after := query.get("after")) is not None:
        places = [number for number, message in enumerate(items) if message["id"] == after]
        if not places:
            raise BadRequest("'after' must be the id of a message of this answer.", "after")
        items = items[places[0] + 1 :]
    return listed(items[:limit], len(items) > limit)


@blueprint.post("/v1/chat/completions/<identity>")
@documented(
    "Stored answers", StoredCompletion, errors=(400, 404, 413, 415, 503), parameters=[_IDENTITY],
    body={JSON: lambda _: StoredChange}, examples=of_change,
)  # fmt: skip
def change_stored(identity: str) -> Response:
    """Replace the metadata of a stored answer, in the journal's rows, too."""
    parameters(())
    body = parse(read_json(context()), StoredChange)
    changed = of_caller(
        identity, lambda connection, owner: change(connection, owner, identity, body.metadata), shown, writes=True,
        hint=" Metadata of any other answer are taken by POST /v1/diagnostics/{id}.",
    )  # fmt: skip
    judge(identity, body.metadata)
    return json_response(changed)


@blueprint.delete("/v1/chat/completions/<identity>")
@documented("Stored answers", StoredDeletion, errors=(400, 404, 503), parameters=[_IDENTITY])
def delete_stored(identity: str) -> Response:
    """Delete the texts and the metadata of a stored answer; its numbers stay in the journal."""
    parameters(())

    def deleted(_: Any) -> dict[str, Any]:
        return {"id": identity, "object": "chat.completion.deleted", "deleted": True}

    return json_response(
        of_caller(identity, lambda connection, owner: remove(connection, owner, identity) or None, deleted, writes=True)
    )


def stored() -> Any:
    """Return the journal's database, in which every answer that has been sent is committed unless the journal is slow."""
    journal = context().journal
    if not journal.enabled:
        raise ApiError(404, "No answers are stored: the journal is switched off here.", code="unknown_answer")
    journal.settle_all()
    return reading()


def of_caller(
    identity: str,
    find_it: Callable[[Connection, str], Any],
    show: Callable[[Any], Any],
    writes: bool = False,
    prefix: str = CHAT.prefix,
    hint: str = "",
) -> Any:
    """Return what `show` makes of the caller's completion; raises a 404 if `find_it` returns None."""
    completion = None
    if len(identity) <= MAX_ID and identity.isprintable() and identity.startswith(prefix):
        with stored() as database:
            completion = _within(database, find_it, writes)
    if completion is None:
        raise ApiError(
            404, f'No answer is stored under this id for this key; only requests with "store": true are.{hint}',
            code="unknown_answer", param="id",
        )  # fmt: skip
    return show(completion)


def _within(database: Database, find_it: Callable[[Connection, str], Any], writes: bool) -> Any:
    if writes:
        with database.writer.begin() as connection:
            return find_it(connection, caller().owner)
    with database.engine.connect() as connection:
        return find_it(connection, caller().owner)


def listed(entries: list[dict[str, Any]], more: bool) -> Response:
    """Return a page of entries as OpenAI's lists have it."""
    first, last = (entries[0]["id"], entries[-1]["id"]) if entries else (None, None)
    return json_response({"object": "list", "data": entries, "first_id": first, "last_id": last, "has_more": more})
