"""The request that a guard gives again: made and checked before the first answer begins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import steering
from server.api.chats.waiting import pictures_turn
from server.context import AppContext
from server.engine.runtime import Serving
from server.errors import ApiError, BadRequest
from server.images.load import ImageLoader
from server.requests.guarding import PLACE, skipped_of_then, within_then
from server.requests.inspecting import check_auto, inspected
from server.requests.resolve import resolve
from server.wire.chat import ChatRequest
from server.wire.guard import Guard
from server.wire.messages import image_urls

Complete = Callable[[steering.Request], steering.Request]


@dataclass(frozen=True)
class Again:
    """A request to give again, as it was read and for the engine; `skipped` maps places below `guard.then` to reasons."""

    chat: ChatRequest
    request: steering.Request
    skipped: dict[str, str]


@dataclass(frozen=True)
class Checking:
    """A way to read and check the request in a body.

    `kind` reads it; `images` loads its images; `earlier` is the answer that drift is measured from; `parts` limits the
    number of message parts; `complete` adds the readouts that run beside those of the request.
    """

    app: AppContext
    serving: Serving
    kind: type[ChatRequest]
    images: ImageLoader
    earlier: steering.Earlier | None = None
    parts: int | None = None
    complete: Complete = lambda request: request

    def again(self, body: dict[str, Any], guard: Guard) -> Again:
        """Return the request that a guard gives again in place of the body's; nothing is generated.

        Raises a 400 under the place in `guard.then` that is wrong by itself or with the request's other fields. Without
        messages only what does not depend on a prompt is checked.
        """
        try:
            return self._again(body, guard)
        except steering.ContextOverflow:
            raise
        except (ApiError, steering.RequestError) as error:
            placed = within_then(error, guard)
            if placed is error and self._is_due_to_then(error, body):
                raise BadRequest(f"'{PLACE}': with it, the request is refused: {error}", PLACE) from error
            raise placed from error

    def _is_due_to_then(self, error: ApiError | steering.RequestError, body: dict[str, Any]) -> bool:
        """Return whether the request without its guard is valid; raises its error if not."""
        if isinstance(error, ApiError) and error.status != 400:
            return False
        param = error.param or ""
        if not param or param.startswith((PLACE, "messages")):
            return False
        self._again(body, Guard.model_construct(when={}, then={}))
        return True

    def _again(self, body: dict[str, Any], guard: Guard) -> Again:
        app, serving = self.app, self.serving
        chat, skipping = app.presets.read_again(body, guard, self.kind, serving, self.parts)
        if not chat.messages:
            chat = chat.model_copy(update={"continue_final_message": None})
            request = resolve(chat, serving, app.settings, self.images, self.earlier, skipping)
            check_auto(request, serving, skipping, None)
            return Again(chat, request, skipped_of_then(skipping, guard))
        with pictures_turn(app, serving, chat, self.images) as self.images.check:
            request = resolve(chat, serving, app.settings, self.images, self.earlier, skipping)
            pictures = len(list(image_urls(chat.messages)))
            request, _ = inspected(request, serving, skipping, pictures, self.complete)
        return Again(chat, self.complete(request), skipped_of_then(skipping, guard))
