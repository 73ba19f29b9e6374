"""POST /v1/responses: OpenAI's newer protocol for chats."""

from __future__ import annotations

from flask import Blueprint, Response

from server.api.chat import answered
from server.dialects.responses.body import ResponseRequest
from server.dialects.responses.dialect import RESPONSES
from server.openapi.examples import of_responses
from server.openapi.operation import EVENTS, JSON, documented
from server.wire.answers import ErrorBody
from server.wire.responses import ResponseBody, ResponseEvent

blueprint = Blueprint("responses", __name__)


@blueprint.post("/v1/responses")
@documented(
    "Chat",
    {200: {JSON: ResponseBody, EVENTS: (ResponseEvent, ErrorBody)}},
    errors=(400, 404, 413, 415, 429, 503, 504),
    body={JSON: lambda app: ResponseRequest},
    examples=of_responses,
)
def create_response() -> Response:
    """Answer a chat in the form of OpenAI's responses, whole or as a stream of events.

    The schema of a stream is that of the data of each event.
    """
    return answered(RESPONSES)
