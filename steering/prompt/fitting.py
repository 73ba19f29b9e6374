"""Sizes of a prompt's pictures: within a request's bounds, and small enough for the context.

A picture of 12 megapixels is 16,384 tokens where a processor makes a token of each 28 x 28 pixels. Pictures share the part
of the context that the text and the answer leave, in proportion to their tokens, and each is scaled down to its share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from PIL import Image

from steering.errors import RequestError
from steering.model.mllm import MLLM

Part = Mapping[str, Any]

ANSWER = 4
"""The divisor of the context reserved for an answer of unstated length; one that may be shortened gets up to twice that."""
STEPS = 16
"""The number of steps to which the pictures' share of the room is rounded down.

Rounding keeps the sizes of pictures equal over several turns of a chat, so that their cached features are used again.
"""
BESIDE = 32
"""The number of tokens by which another prompt of the same request may be longer, besides its given texts."""


@dataclass(frozen=True)
class Shrunk:
    """A picture that was scaled down: its number in the prompt, from 0, and its sizes (width, height) in pixels."""

    number: int
    before: tuple[int, int]
    after: tuple[int, int]

    def report(self) -> dict[str, Any]:
        """Return it as JSON; pictures are counted from 1 there."""
        return {"image": self.number + 1, "from": list(self.before), "to": list(self.after)}


def sized(mllm: MLLM, parts: Sequence[Part]) -> tuple[list[Image.Image], dict[str, int] | None]:
    """Return the pictures of parts as the processor gets them, and its bounds.

    The bounds are None where the processor resizes them by its own.
    """
    images: list[Image.Image] = [part["image"] for part in parts]
    if mllm.image_size is not None:
        images = [image.resize(mllm.image_size, Image.Resampling.BICUBIC) for image in images]
    bounds = [_bounds(part) for part in parts]
    if all(bound == (None, None) for bound in bounds):
        return images, None
    if mllm.pixels is None:
        raise RequestError("This model's processor cannot be told how many pixels pictures may have.", param="messages")
    try:
        images = [mllm.pixels.sized(image, *bound) for image, bound in zip(images, bounds, strict=True)]
    except ValueError as error:
        raise RequestError(f"The model's processor refuses these messages: {error}", param="messages") from error
    return images, mllm.pixels.taking(images)


def shrunk(mllm: MLLM, parts: Sequence[Part], text: str, room: int) -> tuple[Shrunk, ...]:
    """Return the pictures that must shrink for a prompt to have at most `room` tokens, with their new sizes.

    `text` is the rendered chat, with one token in place of each picture. A picture whose `detail` is "high" keeps its size,
    and none shrinks below the least size of the processor or the request. Pictures that do not fit even so are left as they
    are, for the prompt to be refused.
    """
    bounds = mllm.pixels
    if bounds is None or not parts:
        return ()
    try:
        tokens = [bounds.tokens(part["image"], *_bounds(part)) for part in parts]
    except ValueError:  # the processor refuses these pictures
        return ()
    if sum(tokens) + len(text.encode()) <= room:  # no token is shorter than a byte
        return ()
    available = room - len(mllm.tokenizer(text, add_special_tokens=False).input_ids) + len(parts)
    if sum(tokens) <= available:
        return ()
    flexible = [number for number, part in enumerate(parts) if part.get("detail") != "high"]
    available -= sum(tokens) - (needed := sum(tokens[number] for number in flexible))
    available -= available % max(1, room // STEPS)
    shrunk = []
    for number in flexible:
        part, share = parts[number], available * tokens[number] // needed
        if share * bounds.factor**2 < max(bounds.least, part.get("min_pixels") or 0):
            return ()
        after = bounds.size(part["image"], part.get("min_pixels"), share * bounds.factor**2)
        shrunk.append(Shrunk(number, part["image"].size, after))
    return tuple(shrunk)


def resized(parts: Sequence[Part], pictures: Sequence[Shrunk]) -> list[Part]:
    """Return the parts of a prompt's pictures with the shrunk ones scaled down."""
    sizes = {picture.number: picture.after for picture in pictures}
    return [_resized(part, sizes[number]) if number in sizes else part for number, part in enumerate(parts)]


def resized_chat(messages: Sequence[Mapping[str, Any]], pictures: Sequence[Shrunk]) -> Sequence[Mapping[str, Any]]:
    """Return a whole chat with the shrunk pictures scaled down."""
    if not pictures:
        return messages
    chat = [m if isinstance(m["content"], str) else {**m, "content": list(m["content"])} for m in messages]
    places = [
        (message["content"], place)
        for message in chat
        if not isinstance(message["content"], str)
        for place, part in enumerate(message["content"])
        if part["type"] == "image"
    ]
    for picture in pictures:
        content, place = places[picture.number]
        content[place] = _resized(content[place], picture.after)
    return chat


def room_for_prompt(context: int, max_tokens: int | None, clamp: bool) -> int:
    """Return how many tokens of a context a prompt may have besides an answer of up to `max_tokens`.

    Where these may be shortened, or are not stated, the answer is left a part of the context.
    """
    if max_tokens is None:
        return context - max(1, context // ANSWER)
    return context - (min(max_tokens, max(1, 2 * context // ANSWER)) if clamp else max_tokens)


def _resized(part: Part, size: tuple[int, int]) -> Part:
    area = size[0] * size[1]
    picture = part["image"].resize(size, Image.Resampling.BICUBIC)
    return {**part, "image": picture, "min_pixels": min(area, part.get("min_pixels") or area), "max_pixels": area}


def _bounds(part: Part) -> tuple[int | None, int | None]:
    return part.get("min_pixels"), part.get("max_pixels")
