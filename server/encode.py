"""JSON as the server writes it: compact, UTF-8, and never NaN or Infinity, which JSON does not have."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flask import Response


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return an HTTP response with a value in JSON."""
    # Imported here, since the journal's command writes JSON without a web framework.
    from flask import Response  # noqa: PLC0415

    return Response(dumps(value), status, headers, mimetype="application/json")


def dumps(value: Any) -> str:
    """Return compact JSON; non-finite floats become null."""
    try:
        return _encode(value)
    except ValueError:
        return _encode(_finite(value))


_encode = json.JSONEncoder(allow_nan=False, ensure_ascii=False, separators=(",", ":")).encode


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
