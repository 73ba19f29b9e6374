"""The vLLM servers that answer: which are well, which of them gets an answer, and the stream of one answer."""

from __future__ import annotations

import hashlib
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from http import HTTPStatus
from typing import Any

import urllib3
from urllib3 import BaseHTTPResponse, HTTPConnectionPool, Retry, Timeout
from urllib3.exceptions import HTTPError

from steering.errors import Busy, Fault, RequestError, SteeringError, UnsupportedModel
from steering.vllm import facts
from steering.vllm.facts import ServerFacts

log = logging.getLogger(__name__)

HEALTH = "/health"
EVERY = 1.0
"""Seconds between two looks at each server."""
PATIENCE = 3.0
"""Seconds for a server to answer a look, and to take a connection."""
STRIKES = 2
"""Looks in a row that a server may miss: a busy machine answers late now and then."""
HEARD = 3.0
"""Seconds for which a message of a stream proves that its server is there, however late that answers a look."""
PAROLE = 30.0
"""Seconds before a server whose answers were wrong is looked at again."""
RESTART = 10.0
"""Seconds that no vLLM needs less than to start: a server that was gone for a shorter time is the same one."""
PIECE = 65_536
"""Most bytes that are read from a stream at once."""
RETRIED = frozenset({HTTPStatus.BAD_GATEWAY, HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.GATEWAY_TIMEOUT})
"""Statuses that say nothing of a request: another server may answer it."""
ONCE = Retry(0, redirect=False)
TWICE = Retry(1, connect=0, redirect=False, allowed_methods=None, respect_retry_after_header=False)
"""Bodies are sent once more where the connection breaks: a server may close an idle one while a body is on its way."""


class ServerLost(Fault):
    """A server is gone, not ready, or has broken off an answer."""


class AnswerFailed(Fault):
    """A server could not finish an answer, by its own word, and says nothing against the request."""


class AnswerStream:
    """The messages of one answer, a line of JSON each; any thread may `close` it while another one reads."""

    def __init__(self, response: BaseHTTPResponse):
        self._response = response

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield the messages as they come; raise ServerLost where the connection breaks."""
        unfinished = b""
        try:
            for piece in self._response.stream(PIECE):
                *lines, unfinished = (unfinished + piece).split(b"\n")
                for line in lines:
                    if line:
                        yield json.loads(line)
        except (HTTPError, OSError, ValueError) as error:
            raise ServerLost(f"The stream of the answer broke off: {error}") from error

    def close(self) -> None:
        """End the stream for its reader, and thereby the answer on the server."""
        with suppress(HTTPError, OSError, ValueError, RuntimeError):
            self._response.shutdown()


class Server:
    """One vLLM server.

    `running` counts the rows of the answers that it works on; `well` is True while it answers, `lost_at` the time on the
    monotonic clock when it last ceased to, and `heard_at` that of the last message of one of its streams. `vet` compares
    the answers of a server before it is used, also where it comes back, as it may be another one; it raises
    UnsupportedModel.
    """

    def __init__(self, url: str, key: str | None = None):
        self.url = url.rstrip("/")
        self.facts: ServerFacts | None = None
        self.expected: ServerFacts | None = None
        self.running = 0
        self.well = False
        self.vet: Callable[[Server], None] = lambda server: None
        self._vetted = False
        self.lost_at = self.heard_at = self._refused_until = 0.0
        self._missed = 0
        self._losing = threading.Lock()
        headers = {"Content-Type": "application/json"} | ({} if key is None else {"Authorization": f"Bearer {key}"})
        timeout = Timeout(connect=PATIENCE, read=None)
        # Connections are bounded by the answers that run.
        self._pool: HTTPConnectionPool = urllib3.connection_from_url(
            self.url, maxsize=1024, timeout=timeout, headers=headers, retries=TWICE
        )
        self._base = urllib3.util.parse_url(self.url).path or ""

    def get(self, path: str) -> Any:
        """Return the JSON at a path, None where there is none; raise ServerLost where the server does not answer well."""
        try:
            response = self._pool.request("GET", self._base + path, timeout=Timeout(PATIENCE), retries=ONCE)
        except HTTPError as error:
            raise ServerLost(f"{self.url} cannot be reached: {_reason(error)}") from error
        if response.status == HTTPStatus.NOT_FOUND:
            return None
        if response.status != HTTPStatus.OK:
            raise ServerLost(f"{self.url}{path} answered with the status {response.status}.")
        try:
            return json.loads(response.data) if response.data.strip() else None
        except ValueError as error:
            raise ServerLost(f"{self.url}{path} answered with something else than JSON.") from error

    @contextmanager
    def answer(self, path: str, body: bytes) -> Iterator[AnswerStream]:
        """Send the body of an answer and yield its stream.

        Raises RequestError or Busy where the server refuses it, ServerLost where another server may answer.
        """
        try:
            response = self._pool.request("POST", self._base + path, body=body, preload_content=False)
        except HTTPError as error:
            raise ServerLost(f"{self.url} cannot be reached: {_reason(error)}") from error
        complete = False
        try:
            if response.status != HTTPStatus.OK:
                raise _refusal(self.url, response)
            yield AnswerStream(response)
            complete = response.closed or not response.length_remaining
        finally:
            if complete:
                response.release_conn()
            else:
                response.close()

    def look(self) -> bool:
        """Look whether the server is well; return True where that has changed.

        Raises UnsupportedModel where it answers, but lacks the plugin or serves another model than `expected`.
        """
        before, began = self.well, time.monotonic()
        if began < self._refused_until:
            return False
        try:
            self.get(HEALTH)
            if not before:  # it may be another one than before
                self.facts = ServerFacts.of(self.url, self.get(facts.PATH))
                if self.expected is not None and (other := self.facts.difference(self.expected)) is not None:
                    raise UnsupportedModel(f"{self.url} serves {other}.")
                self._vet()
        except ServerLost as error:
            self._missed = 0 if self.well and self.heard_at > began - HEARD else self._missed + 1
            if self._missed >= STRIKES:
                self.lose(error)
        else:
            self._missed, self.well = 0, True
        return self.well != before

    def _vet(self) -> None:
        """Let `vet` compare its answers; one that was refused is left alone for a while."""
        if self._vetted and time.monotonic() - self.lost_at < RESTART:
            return  # it was busy, or its network was
        self._vetted = False
        try:
            self.vet(self)
            self._vetted = True
        except UnsupportedModel:
            self._refused_until = time.monotonic() + PAROLE
            raise

    @property
    def slots(self) -> int:
        """The rows that it runs at once."""
        return 0 if self.facts is None else self.facts.slots

    def lose(self, error: Exception) -> None:
        """Give it no more answers until it is well again."""
        with self._losing:
            was_well, self.well = self.well, False
        if was_well:
            self.lost_at = time.monotonic()
            log.error("a vLLM server is gone: %s", error)


def _reason(error: Exception) -> str:
    return str(getattr(error, "reason", None) or error)


def error_of(failure: Any) -> SteeringError:
    """Return the error that a server states within a stream: the request's where it names a field, else its own."""
    failure = failure if isinstance(failure, dict) else {"message": failure}
    message = str(failure.get("message"))
    if failure.get("code") == "engine_dead":
        return ServerLost(message)
    if failure.get("param") is None:
        return AnswerFailed(f"vLLM could not answer: {message}")
    return RequestError(message, param=str(failure["param"]), code=str(failure.get("code") or "invalid_value"))


def _refusal(url: str, response: BaseHTTPResponse) -> Exception:
    """Return the error that a response other than 200 stands for."""
    try:
        content = json.loads(response.read(2**20) or b"{}")
    except (ValueError, HTTPError):
        content = {}
    error = content.get("error") if isinstance(content, dict) else None
    error = error if isinstance(error, dict) else {}
    message = str(error.get("message") or f"{url} answered with the status {response.status}.")
    if response.status == HTTPStatus.TOO_MANY_REQUESTS:
        return Busy(0, 1.0)
    if response.status in RETRIED:
        return ServerLost(message)
    if HTTPStatus.BAD_REQUEST <= response.status < HTTPStatus.INTERNAL_SERVER_ERROR:
        param, code = error.get("param"), error.get("code")
        if response.status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
            return Fault(f"The vLLM server {url} refuses the key: {message}")
        return RequestError(message, param=param, code=code if isinstance(code, str) else "invalid_value")
    return Fault(message)


class Servers:
    """Several servers of one model. All methods but `looked` are called with the client's lock held."""

    def __init__(self, servers: Sequence[Server]):
        self._servers = list(servers)

    def __iter__(self) -> Iterator[Server]:
        return iter(self._servers)

    @property
    def well(self) -> list[Server]:
        """The servers that answer."""
        return [server for server in self._servers if server.well]

    @property
    def seconds_gone(self) -> float:
        """Seconds since the last server was lost; 0 while one answers."""
        return 0.0 if self.well else time.monotonic() - max(server.lost_at for server in self._servers)

    def facts(self) -> ServerFacts:
        """Return what the servers that are well have in common, and expect it of all others from now on.

        Raises UnsupportedModel where two of them serve different models.
        """
        first, *others = reported = [(server.url, server.facts) for server in self.well if server.facts is not None]
        common = replace(
            first[1],
            can=frozenset.intersection(*(own.can for _, own in reported)),
            context_length=min(own.context_length for _, own in reported),
        )
        for url, own in others:
            if (other := own.difference(common)) is not None:
                raise UnsupportedModel(f"{first[0]} and {url} serve different models: {url} serves {other}.")
        for server in self._servers:
            server.expected = common
        return common

    @property
    def slots(self) -> int:
        """Answers that those which are well run at once."""
        return sum(server.slots for server in self._servers if server.well)

    def take(self, rows: int, home: bytes, avoided: Sequence[Server] = ()) -> Server | None:
        """Return the server for an answer of so many rows, which it counts as running; None where none is well.

        The first choice is the answer's home, by rendezvous hashing of what its cache would know (Thaler and Ravishankar
        1996), as long as that has free slots; else the one with the most free slots. One of those avoided is taken where no
        other one is well.
        """
        able = [server for server in self.well if server not in avoided] or self.well
        if not able:
            return None
        chosen = max(able, key=lambda server: hashlib.blake2b(home + server.url.encode(), digest_size=8).digest())
        if chosen.running + rows > chosen.slots:
            chosen = max(able, key=lambda server: server.slots - server.running)
        chosen.running += rows
        return chosen
