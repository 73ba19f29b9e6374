"""Parts of chats."""

from __future__ import annotations

from typing import Any

from tests import families


def text(content: str, **more: str) -> dict[str, Any]:
    return {"type": "text", "text": content, **more}


def image(index: int, *, seed: int = 0) -> dict[str, Any]:
    return {"type": "image", "image": families.example_image(index, seed=seed)}
