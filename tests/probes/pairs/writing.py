"""Files of pairs."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def user(content: object) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def image(source: str) -> dict[str, str]:
    return {"type": "image", "image": source}


def write(folder: Path, rows: Iterable[object]) -> Path:
    """Write the rows to pairs.jsonl."""
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
