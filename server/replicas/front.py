"""The front, which passes each HTTP request of Ray Serve's proxy to a replica.

It knows no route of the API, except those that report on one process and report on all replicas here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

from server.error_forms import is_anthropic
from server.http.intake import FULL, LATE, Refused
from server.replicas import gathered
from server.replicas.call import AnswerHead, Call, Whole
from server.settings import Settings
from server.telemetry.refusals import RequestCounters

log = logging.getLogger("helmsight")

TRIES = 3
"""Most replicas that are tried for a request if they die one after the other."""
PATIENCE = 10.0
"""Seconds that all replicas together have to report their state."""
MARGIN = 5.0
"""Seconds to wait for an answer after its replica should have given it up."""
HOP = frozenset({"connection", "keep-alive", "transfer-encoding", "te", "upgrade", "x-request-id"})
"""Headers of one connection, here the proxy's (RFC 9110, section 7.6.1), and the one that the proxy sets."""

LOADING = Refused(503, "model_loading", "The model is still loading.", retry_after=2)
LOST = Refused(503, "replica_lost", "The replica that handled this request has ended; send it again.", retry_after=1)
GONE = Refused(499, "client_closed", "The client closed the connection.")
SLOW = Refused(504, "request_timeout", "The answer took too long.")
BROKEN = Refused(500, "internal_error", "The server had an unexpected error; it has been logged.")


class Front:
    """The front's deployment; `replicas` is the handle of `Replica`'s."""

    def __init__(self, replicas: DeploymentHandle, settings: Settings):
        self._replicas = replicas
        self._settings = settings
        self._asked = replicas.options(method_name="answer", stream=True)
        self._counters = RequestCounters(CollectorRegistry())

    async def __call__(self, request: Request) -> Response:
        """Return the answer to a request."""
        call = await self._read(request)
        if isinstance(call, Refused):
            return self._refused(call, request.scope["path"])
        if call.method == "GET" and call.path in gathered.ROUTES:
            report = gathered.ROUTES[call.path](await self._ask_all(call), generate_latest(self._counters.registry))
            return _response(report.head, report.body)
        return await self._answer(call)

    async def drain(self) -> None:
        """Stop accepting requests in all replicas; returns once running ones have ended or timed out."""
        await self._replicas.broadcast("drain").results_async(return_exceptions=True)

    async def _read(self, request: Request) -> Call | Refused:
        """Return the complete request; a body that is too long keeps one byte too many, so that the application notices."""
        most, body = self._settings.max_request_bytes, bytearray()
        try:
            async with asyncio.timeout(self._settings.read_timeout):
                async for piece in request.stream():
                    body += piece[: most + 1 - len(body)]
                    if len(body) > most:
                        break
        except TimeoutError:
            return LATE
        except ClientDisconnect:
            return GONE
        scope = request.scope
        return Call(
            scope["method"], scope["path"], scope["query_string"], tuple((name, value) for name, value in scope["headers"]),
            bytes(body), client=scope.get("client"), server=scope.get("server"), scheme=scope["scheme"],
        )  # fmt: skip

    # -- from one replica --------------------------------------------------------------------------------------------------

    async def _answer(self, call: Call) -> Response:
        """Return a replica's answer; a replica that dies before the answer starts is replaced by another."""
        if not self._replicas.running_replicas_populated() and not await self._ask_all(call):
            return self._refused(LOADING, call.path)
        for _ in range(TRIES if call.repeatable else 1):
            pieces = self._asked.remote(call)
            try:
                async with asyncio.timeout(self._settings.request_timeout + MARGIN):
                    head = await anext(pieces)
            except RayActorError as error:
                log.warning("a replica ended while it answered: %s", type(error).__name__)
            except (BackPressureError, DeploymentUnavailableError):
                return self._refused(FULL, call.path)
            except TimeoutError:
                return self._refused(SLOW, call.path)
            except Exception:
                log.exception("a request could not be answered")
                return self._refused(BROKEN, call.path)
            else:
                return _response(head, _after_head(head, pieces, call.path))
        return self._refused(LOST, call.path)

    def _refused(self, refusal: Refused, path: str) -> Response:
        """Return a refusal of the front's own, which no replica counts, to a request for a path."""
        self._counters.unread(refusal.status, refusal.code)
        retry = {} if refusal.retry_after is None else {"Retry-After": str(refusal.retry_after)}
        return Response(refusal.body(path), refusal.status, retry, "application/json")

    # -- from all of them --------------------------------------------------------------------------------------------------

    async def _ask_all(self, call: Call) -> list[Whole]:
        """Return every replica's answer, without those that fail or take too long."""
        try:
            answers = await self._replicas.broadcast("whole", call).results_async(
                timeout_s=PATIENCE, return_exceptions=True
            )
        except (TimeoutError, DeploymentUnavailableError):
            return []
        return sorted((answer for answer in answers if isinstance(answer, Whole)), key=lambda answer: answer.replica)


def _response(head: AnswerHead, body: Any) -> Response:
    """Return a response with exactly these headers."""
    kind = Response if isinstance(body, bytes) else StreamingResponse
    response = kind(body, head.status)
    response.raw_headers = [
        (name.lower().encode("latin1"), value.encode("latin1"))
        for name, value in head.headers
        if name.lower() not in HOP
    ]
    return response


async def _after_head(head: AnswerHead, pieces: Any, path: str) -> AsyncIterator[bytes]:
    """Yield the bytes after the head.

    If the replica is lost, a stream of events ends with an error event; any other answer breaks off.
    """
    events = any(
        name.lower() == "content-type" and value.startswith("text/event-stream") for name, value in head.headers
    )
    try:
        async for piece in pieces:
            yield piece
    except RayActorError:
        if not events:
            raise
        named = "event: error\n" if is_anthropic(path) else ""
        yield f"{named}data: {LOST.body(path)}\n\n".encode()
