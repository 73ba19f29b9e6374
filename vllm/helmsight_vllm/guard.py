"""A guard of all routes: vLLM's own `--api-key` leaves those outside of /v1 open, some of which generate or stop engines."""

from __future__ import annotations

import hmac
import os
from typing import Any

from starlette.responses import JSONResponse

OPEN = "/health"


class KeyGuard:
    """Refuses requests without the key, but for `/health`; servers with `HELMSIGHT_GUARD` and `VLLM_API_KEY` have it."""

    def __init__(self, app: Any, key: str):
        self._app, self._expected = app, f"Bearer {key}".encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] in ("http", "websocket") and scope["path"] != OPEN:
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self._expected):
                await JSONResponse({"error": "Unauthorized"}, 401)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def guarded_key() -> str | None:
    """Return the key that all routes ask for, None where they are open as in vLLM."""
    return os.environ.get("VLLM_API_KEY") if os.environ.get("HELMSIGHT_GUARD") == "1" else None
