"""The chats that servers are asked, the same for each of them."""

from __future__ import annotations

import base64
import io
import random
from collections.abc import Callable
from functools import cache
from typing import Any

from demo.world.scenes import random_scene, render

Messages = list[dict[str, Any]]

_WORDS = ("red", "green", "blue", "circle", "square", "star", "heart", "left", "top", "picture", "color", "shape")
LONG = 1200
"""The number of words of a long prompt; words are tokens of the embedded model."""


LARGE = (700, 420)
"""The size of a picture of an album: 375 tokens of a model whose tokens are 28 pixels wide."""


@cache
def _picture(seed: int, size: tuple[int, int] = (84, 84)) -> str:
    rng = random.Random(seed)
    buffer = io.BytesIO()
    render(random_scene(rng, 2), size, rng).save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def _text(rng: random.Random, words: int) -> str:
    return " ".join(rng.choice(_WORDS) for _ in range(words))


def _short(seed: int) -> Messages:
    return [{"role": "user", "content": f"What color is the {_text(random.Random(seed), 8)}?"}]


def _long(seed: int) -> Messages:
    return [{"role": "user", "content": f"{_text(random.Random(seed), LONG)}?"}]


def _shared(seed: int) -> Messages:
    system = {"role": "system", "content": _text(random.Random("shared"), LONG // 2)}
    return [system, *_short(seed)]


def _pictured(seed: int) -> Messages:
    parts = [{"type": "image_url", "image_url": {"url": _picture(seed)}}]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": _short(seed)[0]["content"]}]}]


def _ask_again(about: Messages, seed: int) -> Messages:
    """Return another question about the same pictures."""
    pictures = [part for part in about[0]["content"] if part["type"] == "image_url"]
    return [{"role": "user", "content": [*pictures, {"type": "text", "text": _short(seed)[0]["content"]}]}]


def _album(seed: int) -> Messages:
    pictures = [{"type": "image_url", "image_url": {"url": _picture(4 * seed + number, LARGE)}} for number in range(4)]
    return [{"role": "user", "content": [*pictures, {"type": "text", "text": f"{_text(random.Random(seed), 400)}?"}]}]


WORKLOADS: dict[str, Callable[[int], Messages]] = {
    "short": _short,
    "long": _long,
    "shared": _shared,
    "picture": _pictured,
    "same-picture": lambda seed: _ask_again(_pictured(0), seed),
    "album": _album,
    "same-album": lambda seed: _ask_again(_album(0), seed),
}
"""Functions from a seed to its chat.

They are a short text, one of 1,200 words, a short one after a system prompt of 600 words that all share, a picture of its
own or the same one with a short question, four large ones followed by 400 words (2,000 tokens of the models of
`benchmarks.models`), and the same four with a short question.
"""
