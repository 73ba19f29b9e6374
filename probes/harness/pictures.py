"""The pictures of samples, opened or made only when they are asked about, so that thousands need no memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image

if TYPE_CHECKING:
    from probes.answering.base import Chat  # imports torch, which drawing scenes does not need

Source = Image.Image | Path | Callable[[], Image.Image]
"""A picture, its file, or a function that makes it."""


def picture(source: Source, name: str) -> Image.Image:
    """Return the picture, in RGB if it comes from a file.

    Raises ValueError, naming the sample (`name`), if its file does not decode.
    """
    if isinstance(source, Image.Image):
        return source
    if not isinstance(source, Path):
        return source()
    try:
        return _decode(source)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise ValueError(f"The image of {name} does not decode: {source}: {error}") from error


def chat(images: Sequence[Source], text: str) -> Chat:
    """Return a user's single message: images, then a text; raise ValueError if an image's file does not decode."""
    parts: list[dict[str, Any]] = [
        {"type": "image", "image": picture(image, f"the question {text!r}")} for image in images
    ]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


@lru_cache(maxsize=16)
def _decode(path: Path) -> Image.Image:
    """Decode a file; it is cached briefly, because a sample's questions follow one another."""
    with Image.open(path) as file:
        return file.convert("RGB")
