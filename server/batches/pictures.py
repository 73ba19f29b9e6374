"""Pictures of a folder in requests: a `file:` URL of an image becomes a data: URI before a request is sent."""

from __future__ import annotations

import base64
import mimetypes
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

_SCHEME = re.compile(r"(?!file:)[A-Za-z][A-Za-z0-9+.-]*:")
"""The beginning of an address that is not a file's."""


class NoPicture(ValueError):
    """A picture is not in the folder."""


def with_pictures(body: Mapping[str, Any], folder: Path | None) -> Mapping[str, Any]:
    """Return the body with the pictures that it names as files in `folder`, which must be in it; None leaves all as it is.

    A name may be `file:cat.png`, `file:///data/pictures/cat.png` or `cat.png`. Raises NoPicture for a missing one.
    """
    messages = body.get("messages")
    if folder is None or not isinstance(messages, list):
        return body
    return {**body, "messages": [_message(message, folder) for message in messages]}


def _message(message: Any, folder: Path) -> Any:
    if not isinstance(message, dict) or not isinstance(message.get("content"), list):
        return message
    return {**message, "content": [_part(part, folder) for part in message["content"]]}


def _part(part: Any, folder: Path) -> Any:
    image = part.get("image_url") if isinstance(part, dict) else None
    url = image.get("url") if isinstance(image, dict) else image
    if not isinstance(url, str) or _SCHEME.match(url):
        return part
    data = _data(url, folder)
    return {**part, "image_url": {**image, "url": data} if isinstance(image, dict) else data}


def _data(url: str, folder: Path) -> str:
    name = unquote(urlsplit(url).path) if url.startswith("file:") else url
    path = (folder / name).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise NoPicture(f"The picture {name[:256]!r} is not in the folder {folder}.")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise NoPicture(f"The picture {name[:256]!r} cannot be read: {error.strerror}.") from None
    kind = mimetypes.guess_type(path.name)[0] or "image/png"
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"
