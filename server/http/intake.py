"""Parsing an HTTP request from the bytes of its connection as they arrive, without sockets or waiting.

gunicorn's own strict parser reads the head once it is complete. The body is unframed here, by its length or by chunks (RFC
9112, section 7.1), so that the application finds all of it in memory.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

from gunicorn.http import errors as http
from gunicorn.http.body import ChunkedReader
from gunicorn.http.message import Request
from gunicorn.http.unreader import IterUnreader

from server.error_forms import anthropic, is_anthropic
from server.settings import Settings

MAX_HEAD = 65_536
"""Largest size in bytes of a request line with its header fields."""
MAX_LINE = 1024
"""Largest size in bytes of the line that gives a chunk's size."""
MAX_CHUNKS = 65_536
"""Largest number of chunks of a body, since each takes time, however little it holds."""

# A bare LF does not end a line. It counts here, so that the parser refuses it and the client does not wait.
_END_OF_HEAD = re.compile(rb"\n\r?\n")
_HANDSHAKE = b"\x16\x03"
_TARGET = re.compile(rb"[A-Z]+ ([^ \r\n?]*)")
_SIZE = re.compile(rb"([0-9a-fA-F]{1,15})[ \t]*(?:;[\t\x20-\x7e\x80-\xff]*)?")

VECTORS = "/v1/steering/vectors"

State = Literal["head", "body", "whole"]


def most_bytes(settings: Settings, path: str) -> int:
    """Return the largest size in bytes of a request's body.

    Paths are compared by their ends, so that a prefix of the server does not matter.
    """
    uploads = settings.allow_uploads and unquote(path).endswith(VECTORS)
    return settings.max_vector_bytes if uploads else settings.max_body


class Refused(Exception):
    """A request that cannot be read; its connection must be closed after an answer with `status`."""

    def __init__(self, status: int, code: str, message: str, retry_after: int | None = None):
        super().__init__(message)
        self.status = status
        self.code = code
        self.retry_after = retry_after

    def body(self, path: str = "", request_id: str | None = None) -> str:
        """Return the error in OpenAI's form, or in Anthropic's if the path is one of its routes."""
        kind = "timeout_error" if self.status == 408 else "invalid_request_error"
        if self.status >= 500 and self.status != 501:  # RFC 9112 requires 501 for a client's unknown coding
            kind = "server_error"
        error = {"message": str(self), "type": kind, "param": None, "code": self.code}
        body = anthropic(error, self.status, request_id) if is_anthropic(path) else {"error": error}
        return json.dumps(body, separators=(",", ":"))

    def response(self, headers: Mapping[str, str], path: str = "") -> bytes:
        """Return the whole answer to a request for a path, with further headers."""
        body = self.body(path, headers.get("X-Request-Id"))
        lines = [
            f"HTTP/1.1 {self.status} {HTTPStatus(self.status).phrase}",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
            "Connection: close",
            *([] if self.retry_after is None else [f"Retry-After: {self.retry_after}"]),
            *(f"{name}: {value}" for name, value in headers.items()),
        ]
        return "\r\n".join((*lines, "", body)).encode()


FULL = Refused(503, "server_busy", "The server has too many requests at once.", retry_after=1)
LATE = Refused(408, "request_timeout", "The request did not arrive in time.")


class Intake:
    """The next request of a connection: `feed` it until `state` is "whole", `take` it, and continue with an empty `feed`.

    A body larger than `limit` allows for its path is cut one byte beyond the limit. The application sees that it is too
    long, and `complete` is False, since the start of the next request is unknown then.
    """

    def __init__(self, cfg: Any, client: Any, limit: Callable[[str], int]):
        self.request: Request | None = None
        self.body = bytearray()
        self.state: State = "head"
        self.complete = True
        self.expects = False
        """True if the client waits for "100 Continue" before it sends the body."""
        self.number = 0
        """Number of heads that were read on this connection."""
        self._cfg = cfg
        self._client = client
        self._limit = limit
        self._max_body = 0
        self._buffer = bytearray()
        self._searched = 0
        self._length: int | None = None
        self._chunk = -1  # bytes missing of the chunk, its CRLF included; -1 before its size, -2 among the trailers
        self._chunks = self._trailers = 0

    @property
    def held(self) -> int:
        """The number of buffered bytes."""
        return len(self._buffer) + len(self.body)

    @property
    def begun(self) -> bool:
        """True if any byte of the request has arrived."""
        return self.state != "head" or bool(self._buffer)

    def feed(self, data: bytes) -> State:
        """Process further bytes, or buffered ones if `data` is empty; raises Refused."""
        self._buffer += data
        if self.state == "head" and self._buffer:
            self._read_head()
        if self.state == "body":
            self.expects = self.expects and not self._buffer
            self._read_length() if self._length is not None else self._read_chunks()
            if len(self.body) > self._max_body:
                self.complete = False
                self.state = "whole"
        return self.state

    def take(self) -> Request:
        """Return the complete request with its body as a file, and start to read the next one."""
        request = self.request
        assert request is not None
        request.body = io.BytesIO(self.body)
        self.request, self.body, self.state, self.expects = None, bytearray(), "head", False
        self._length, self._chunk = None, -1
        self._searched = self._chunks = self._trailers = 0
        return request

    def field(self, name: str) -> str | None:
        """Return a header field as far as the head has arrived, also of a refused request."""
        if self.request is not None:
            return field(self.request, name)
        end = _END_OF_HEAD.search(self._buffer)
        line = re.compile(rb"\n%b:[ \t]*([!-~]+)[ \t]*\r?\n" % name.encode(), re.IGNORECASE)
        match = line.search(self._buffer, 0, MAX_HEAD if end is None else end.end())
        return None if match is None else match[1].decode()

    @property
    def path(self) -> str:
        """The path of the request as far as the head has arrived, also of a refused request."""
        if self.request is not None:
            return str(self.request.path)
        target = _TARGET.match(self._buffer[:MAX_HEAD])
        return "" if target is None else target[1].decode("latin-1")

    def drop(self) -> None:
        """Discard all buffered bytes, since the connection ends."""
        self._buffer, self.body = bytearray(), bytearray()

    def _read_head(self) -> None:
        if self._buffer.startswith(
            _HANDSHAKE
        ):  # a handshake has no end of head, so that its client would wait for the time-out
            raise Refused(
                400, "invalid_http", "This port serves HTTP without TLS: use an address that begins with http://."
            )
        end = _END_OF_HEAD.search(self._buffer, max(0, self._searched - 2))
        self._searched = len(self._buffer)
        if (self._searched if end is None else end.end()) > MAX_HEAD:
            raise Refused(431, "request_header_too_large", f"The request's header may have at most {MAX_HEAD} bytes.")
        if end is None:
            return
        head = bytes(self._buffer[: end.end()])
        self.number += 1
        try:
            request = Request(self._cfg, IterUnreader([head]), self._client, self.number)
        except (http.ParseException, http.NoMoreData, StopIteration) as error:
            raise refused(error) from None
        del self._buffer[: end.end()]  # a refused head stays, since `field` reads it
        self.request = request
        self._max_body = self._limit(request.path)
        codings = [value.strip().lower() for name, value in request.headers if name == "TRANSFER-ENCODING"]
        if codings and codings != ["chunked"]:  # the parser accepts compressed bodies, which nothing here decompresses
            raise refused(http.UnsupportedTransferCoding(", ".join(codings)))
        _find_host(request)
        expect = field(request, "Expect") or ""
        self.expects = expect.lower() == "100-continue" and request.version >= (1, 1)
        reader = request.body.reader
        if isinstance(reader, ChunkedReader):
            self.state = "body"
            return
        self._length = int(reader.length)
        if self._length > self._max_body:
            self.complete, self.state = False, "whole"  # the application refuses it by its length
        else:
            self.state = "body" if self._length else "whole"

    def _read_length(self) -> None:
        assert self._length is not None
        missing = self._length - len(self.body)
        self.body += self._buffer[:missing]
        del self._buffer[:missing]
        if len(self.body) == self._length:
            self.state = "whole"

    def _read_chunks(self) -> None:
        """Move the contents of chunks into the body, up to its end or the first missing byte."""
        at = 0  # read bytes are cut from the buffer once, however small the chunks are
        try:
            while len(self.body) <= self._max_body:
                if self._chunk > 2:
                    piece = self._buffer[at : at + self._chunk - 2]
                    self.body += piece
                    at += len(piece)
                    self._chunk -= len(piece)
                    if self._chunk > 2:
                        return
                if self._chunk > 0:
                    if len(self._buffer) - at < 2:
                        return
                    if self._buffer[at : at + 2] != b"\r\n":
                        raise _bad_chunk()
                    at, self._chunk = at + 2, -1
                end = self._buffer.find(b"\n", at)
                if (len(self._buffer) if end < 0 else end) - at > MAX_LINE:
                    raise _bad_chunk()
                if end < 0:
                    return
                line, at = bytes(self._buffer[at : end + 1]), end + 1
                if not line.endswith(b"\r\n"):
                    raise _bad_chunk()
                if self._chunk == -2:
                    self._trailers += len(line)
                    if self._trailers > MAX_HEAD:
                        raise _bad_chunk()
                    if line == b"\r\n":
                        self.state = "whole"
                        return
                    continue
                size = _SIZE.fullmatch(line[:-2])
                if size is None:
                    raise _bad_chunk()
                self._chunks += 1
                if self._chunks > MAX_CHUNKS:
                    raise Refused(413, "too_many_chunks", f"The body may come in at most {MAX_CHUNKS} chunks.")
                self._chunk = int(size[1], 16) + 2 if int(size[1], 16) else -2
        finally:
            del self._buffer[:at]


def field(request: Request, name: str) -> str | None:
    """Return the first value of a request's header field."""
    return next((value for header, value in request.headers if header == name.upper()), None)


def refused(error: Exception) -> Refused:
    """Return the client's error for a head that gunicorn's parser refuses."""
    match error:
        case http.LimitRequestLine():
            return Refused(414, "uri_too_long", "The request line is too long.")
        case http.LimitRequestHeaders():
            return Refused(431, "request_header_too_large", "The request has too many header fields, or too long ones.")
        case http.ExpectationFailed():
            return Refused(417, "expectation_failed", "The only supported expectation is '100-continue'.")
        case http.UnsupportedTransferCoding():
            return Refused(501, "unsupported_transfer_coding", "The only supported transfer coding is 'chunked'.")
    return Refused(400, "invalid_http", "The request is not valid HTTP.")


def _find_host(request: Request) -> None:
    """Replace the Host field by the authority of an absolute URL, and refuse a request without host.

    Checks of either then cover both (RFC 9112, sections 3.2 and 3.2.2).
    """
    named = any(name == "HOST" for name, _ in request.headers)
    if not named and request.version >= (1, 1):
        raise Refused(400, "invalid_http", "The request has no Host header, which HTTP/1.1 requires.")
    if request.method != "CONNECT" and not request.uri.startswith(("/", "*")):
        try:
            authority = urlsplit(request.uri).netloc
        except ValueError:
            authority = ""
        if not authority:
            raise Refused(400, "invalid_http", "The request target is neither a path nor an absolute URL.")
        request.headers = [pair for pair in request.headers if pair[0] != "HOST"] + [("HOST", authority)]


def _bad_chunk() -> Refused:
    return Refused(400, "invalid_body", "The body could not be read: its chunks are not valid HTTP.")
