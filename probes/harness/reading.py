"""Files and answers that hold JSON, which others wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def parsed(text: str) -> Any:
    """What JSON says; raises ValueError for anything else, also where it is nested deeper than Python reads, or a text in it
    could not be written."""
    try:
        found = json.loads(text)
        if "\\u" in text:  # as "\\ud800", half a character: no file and no plot can hold it
            json.dumps(found, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except UnicodeEncodeError as error:
        raise ValueError(f"it holds {error.object[error.start : error.end]!r}, which is half a character") from None
    return found


def text_of(file: Path) -> str:
    """What a file holds, without the mark that Windows begins files with; raises ValueError that names it where it holds no
    text."""
    if file.is_dir():
        raise ValueError(f"{file} is a folder; a file is needed")
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is no text in UTF-8: {error}") from error
