"""Responses: POST /v1/responses, OpenAI's newer protocol for chats, and the stored ones below it."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from flask import Blueprint, Response, request

from server.api.chats.chat import answered
from server.api.query import integer, parameters, word
from server.api.stored import LIMIT, MAX_LIMIT, ORDERS, PAGING, listed, of_caller
from server.context import context
from server.dialects.responses.body import ResponseRequest
from server.dialects.responses.chains import chat_of, items_of
from server.dialects.responses.dialect import ResponsesDialect
from server.dialects.responses.translation import ELSEWHERE, PREVIOUS
from server.dialects.schema import with_chat_fields
from server.encode import json_response
from server.errors import ApiError, BadRequest
from server.journal.pictures import content_of, kept_urls
from server.journal.reading.stored import find, mentioned, remove, shown
from server.openapi.examples import of_responses
from server.openapi.operation import EVENTS, JSON, Parameter, documented
from server.wire.sent.answers import ErrorBody
from server.wire.sent.responses import ResponseBody, ResponseDeletion, ResponseEvent, ResponseItems

blueprint = Blueprint("responses", __name__)

PREFIX = ResponsesDialect.prefix
IMAGES = "message.input_image.image_url"
_IDENTITY = Parameter("identity", "The `id` of a stored response.", place="path")


@blueprint.post("/v1/responses")
@documented(
    "Chat",
    {200: {JSON: ResponseBody, EVENTS: (ResponseEvent, ErrorBody)}},
    errors=(400, 404, 413, 415, 429, 503, 504),
    body={JSON: lambda app: with_chat_fields(ResponseRequest, app.chats, ELSEWHERE)},
    examples=of_responses,
)
def create_response() -> Response:
    """Answer a chat in the form of OpenAI's responses, whole or as a stream of events.

    The schema of a stream is that of the data of each event.
    """
    app = context()
    return answered(ResponsesDialect(_earlier, stores=app.settings.store == "on" and app.journal.enabled))


@blueprint.get("/v1/responses/<identity>")
@documented("Stored answers", ResponseBody, errors=(400, 404, 503), parameters=[_IDENTITY])
def get_response(identity: str) -> Response:
    """Return a stored response."""
    if request.args.get("stream") in ("true", "1"):
        raise BadRequest("'stream' is not supported for stored responses.", "stream", "unsupported_value")
    return json_response(
        of_caller(identity, lambda connection, owner: find(connection, owner, identity), shown, prefix=PREFIX)
    )


@blueprint.get("/v1/responses/<identity>/input_items")
@documented(
    "Stored answers", ResponseItems, errors=(400, 404, 503),
    parameters=[
        _IDENTITY, *PAGING,
        Parameter("include[]", f"`{IMAGES}` returns the images."),
    ],
)  # fmt: skip
def list_input_items(identity: str) -> Response:
    """List the input of a stored response, with that of the responses before it, the newest first."""
    query = parameters(("after", "limit", "order", "include", "include[]"))
    limit, order = integer(query, "limit", MAX_LIMIT) or LIMIT, word(query, "order", ORDERS[::-1])
    app, with_images = context(), IMAGES in request.args.getlist("include[]") + request.args.getlist("include")

    def image(url: str) -> str | None:
        with suppress(BadRequest):  # an image that is no longer kept
            return app.pictures.url_of(url, "id") if with_images else None
        return None

    items = of_caller(
        identity,
        lambda connection, owner: find(connection, owner, identity),
        lambda row: items_of(identity, row["messages"], image),
        prefix=PREFIX,
    )
    if order != "asc":
        items.reverse()
    if (after := query.get("after")) is not None:
        places = [number for number, item in enumerate(items) if item["id"] == after]
        if not places:
            raise BadRequest("'after' must be the id of an input item of this response.", "after")
        items = items[places[0] + 1 :]
    return listed(items[:limit], len(items) > limit)


@blueprint.delete("/v1/responses/<identity>")
@documented("Stored answers", ResponseDeletion, errors=(400, 404, 503), parameters=[_IDENTITY])
def delete_response(identity: str) -> Response:
    """Delete a stored response with its input and its images; its numbers stay in the journal."""
    parameters(())

    def removed(connection: Any, owner: str) -> list[str] | None:
        row = find(connection, owner, identity)
        if row is None:
            return None
        remove(connection, owner, identity)
        return [url for url in kept_urls(row["messages"]) if not mentioned(connection, content_of(url))]

    pictures = context().pictures
    with pictures.lock:
        pictures.discard(of_caller(identity, removed, lambda urls: urls, writes=True, prefix=PREFIX))
    return json_response({"id": identity, "object": "response", "deleted": True})


def _earlier(identity: str) -> list[dict[str, Any]]:
    """Return the messages of the chat that a stored response ends; raises a 404 that names it."""
    app = context()
    if not identity.startswith(PREFIX):
        raise ApiError(
            404,
            f"'{PREVIOUS}' must be the id of a response, which begins with {PREFIX!r}: other answers cannot be continued; "
            f"got {identity[:64]!r}.",
            code="previous_response_not_found",
            param=PREVIOUS,
        )
    reasons = app.runtime.serving().capabilities.takes_reasoning
    try:
        return of_caller(
            identity,
            lambda connection, owner: find(connection, owner, identity),
            lambda row: chat_of(
                row["messages"], row["completion"], lambda url: app.pictures.url_of(url, PREVIOUS), reasons
            ),
            prefix=PREFIX,
        )
    except ApiError as error:
        if error.status != 404:
            raise
        raise ApiError(
            404,
            f"The previous response {identity[:64]!r} is not stored for this key: it was not to be stored "
            '("store": true), was deleted, its days are over, or this server stores none (--store).',
            code="previous_response_not_found",
            param=PREVIOUS,
        ) from None
