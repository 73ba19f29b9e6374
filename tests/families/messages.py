"""Conversations and pictures to ask the tiny models about."""

from __future__ import annotations

import numpy as np
from PIL import Image

from tests.families.family import Json
from tests.families.registry import ALL


def example_messages(
    family: str,
    images: int = 1,
    *,
    text: str = "What colour is the small ball?",
    system: str | None = None,
    seed: int = 0,
) -> list[Json]:
    """Return an optional system turn, and a user turn with `images` images of different sizes and a question.

    The images are deterministic. Every content is a list of parts: the only form that all chat templates understand.
    """
    limit = ALL[family].max_images
    if limit is not None and images > limit:
        raise ValueError(f"{family} takes at most {limit} images, not {images}")
    parts: list[Json] = [{"type": "image", "image": example_image(i, seed=seed)} for i in range(images)]
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": [{"type": "text", "text": system}]})
    return messages


def example_image(index: int, *, seed: int = 0) -> Image.Image:
    """Noise over a gradient; sizes differ so that families that keep sizes or cut tiles get different layouts."""
    width, height = [(56, 40), (28, 60), (44, 44), (64, 24)][index % 4]
    rng = np.random.default_rng([seed, index])
    ramp = np.linspace(0, 120, width)[None, :, None] + np.linspace(0, 60, height)[:, None, None]
    pixels = ramp * rng.uniform(0.3, 1.0, 3) + rng.uniform(0, 70, (height, width, 3))
    return Image.fromarray(pixels.astype(np.uint8))


def images_of(messages: list[Json]) -> list[Image.Image]:
    """Return the images of a conversation in order."""
    return [part["image"] for message in messages for part in message["content"] if part["type"] == "image"]
