"""JSON in files and answers written by others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def parsed(text: str) -> Any:
    """Parse JSON.

    Raises ValueError for invalid JSON, for nesting deeper than Python reads, and for text that cannot be encoded.
    """
    try:
        parsed_value = json.loads(text)
        if "\\u" in text:  # "\\ud800", say, is half a character: no file or plot can hold it
            json.dumps(parsed_value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except UnicodeEncodeError as error:
        raise ValueError(f"it holds {error.object[error.start : error.end]!r}, half of a surrogate pair") from None
    return parsed_value


def text_of(file: Path) -> str:
    """Return the text of a file, without a byte order mark; raise ValueError that names the file if it holds no text."""
    if file.is_dir():
        raise ValueError(f"{file} is a folder; a file is needed")
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 text: {error}") from error
