"""The sizes of a request's images: its own bounds in pixels, and the `detail` of single images."""

from __future__ import annotations

from collections.abc import Callable

from server.engine.runtime import Serving
from server.errors import BadRequest
from server.requests.skipping import Skipping
from server.settings import Settings
from server.wire.chat import ChatRequest
from server.wire.messages import MessagePart, image_urls
from steering import Inapplicable

LOW = 512 * 512
"""Most pixels of an image with low `detail`, as in OpenAI's API."""

Bounds = dict[str, int | str]
"""`min_pixels`, `max_pixels` and `detail`, as message parts hold them."""


def bounds_of(
    chat: ChatRequest, serving: Serving, settings: Settings, skipping: Skipping
) -> Callable[[MessagePart], Bounds]:
    """Return a function that gives the bounds of each image of a request.

    Raises Inapplicable if the request's bounds cannot apply to this model's images; `detail` is only a hint and never
    refused.
    """
    stated = chat.pixels
    for name, pixels in stated.items():
        with skipping.of(name):
            if serving.capabilities.pixels is None:
                raise Inapplicable(f"'{name}': {_why(serving)}", param=name, code="unsupported_value")
            _affordable(name, pixels, len(list(image_urls(chat.messages))), settings)
    bounds = {name: pixels for name, pixels in stated.items() if not skipping.skips(name)}

    def of_part(part: MessagePart) -> Bounds:
        if part.detail == "high":
            return {**bounds, "detail": part.detail}
        if part.detail != "low" or serving.capabilities.pixels is None:
            return {**bounds}
        most = min(LOW, bounds.get("max_pixels", LOW))
        return {**bounds, "max_pixels": max(most, bounds.get("min_pixels", most))}

    return of_part


def _why(serving: Serving) -> str:
    size = serving.capabilities.image_size
    return (
        f"this model sees every image at {size[0]} x {size[1]} pixels."
        if size
        else "the processor of this model does not limit the pixels of an image."
    )


def _affordable(name: str, pixels: int, pictures: int, settings: Settings) -> None:
    """Raise a 400 if `min_pixels` would enlarge small images beyond the limit for large ones."""
    together = min(settings.max_image_pixels, settings.max_request_pixels // max(1, pictures))
    if name == "min_pixels" and pixels > together:
        raise BadRequest(
            f"'{name}' may be at most {together} for {pictures} images; got {pixels}.", name, "image_too_large"
        )
