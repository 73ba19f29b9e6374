"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's protocol for chats."""

from __future__ import annotations

from flask import Blueprint, Response

from server.api.body import read_json
from server.api.chats.chat import answered
from server.api.chats.waiting import pictures_turn
from server.context import context
from server.dialects.answer import ignoring
from server.dialects.dialect import place_of, renamed
from server.dialects.messages.body import CountRequest, MessageRequest
from server.dialects.messages.dialect import MESSAGES
from server.dialects.messages.translation import ELSEWHERE, translated
from server.dialects.schema import with_chat_fields
from server.encode import json_response
from server.errors import ApiError, to_api_error
from server.openapi.examples import of_count, of_messages
from server.openapi.operation import EVENTS, JSON, documented
from server.requests.resolve import ignored_reasoning, resolve
from server.wire.messages import image_urls
from server.wire.parse import read
from server.wire.sent.answer_messages import MessageBody, MessageCount, MessageError, MessageEvent
from steering import RequestError

blueprint = Blueprint("messages", __name__)


@blueprint.post("/v1/messages")
@documented(
    "Chat",
    {200: {JSON: MessageBody, EVENTS: (MessageEvent, MessageError)}},
    errors=(400, 404, 413, 415, 429, 503, 504),
    body={JSON: lambda app: with_chat_fields(MessageRequest, app.chats, ELSEWHERE)},
    examples=of_messages,
    error=MessageError,
)
def create_message() -> Response:
    """Answer a chat in the form of Anthropic's messages, whole or as a stream of events.

    The schema of a stream is that of the data of each event. Errors have Anthropic's form. The key may come as `x-api-key`.
    """
    return answered(MESSAGES)


@blueprint.post("/v1/messages/count_tokens")
@documented(
    "Chat",
    {200: {JSON: MessageCount}},
    errors=(400, 404, 413, 415, 429, 503),
    body={JSON: lambda app: CountRequest},
    examples=of_count,
    error=MessageError,
)
def count_tokens() -> Response:
    """Count the tokens of a chat's prompt, images and tools included, without answering it."""
    app = context()
    serving = app.runtime.serving()
    bounds = serving.text_bounds(app.settings)
    meant = translated(read(read_json(app)), counted=True)
    try:
        chat, skipping = app.presets.read(
            meant.chat, app.chats, serving, bounds.parts + app.settings.max_images, meant.ignored
        )
        bounds.check(chat.texts)
        unplaced = ignored_reasoning(chat, serving.capabilities)
        images = app.image_loader()
        images.fetch_remote(image_urls(chat.messages))
        with pictures_turn(app, serving, chat, images) as images.check:
            resolved = resolve(chat, serving, app.settings, images, skipping=skipping)
            _, inspected = skipping.until_it_applies(resolved, serving.engine.inspect)
        ignored = [*skipping.ignored, *(place_of(path, meant.places) for path in unplaced)]
        return json_response({"input_tokens": inspected.prompt_tokens, **ignoring(ignored)})
    except (ApiError, RequestError) as error:
        raise renamed(to_api_error(error), meant.places) from error
