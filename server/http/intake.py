"""One HTTP request from the bytes of its connection, as they come: no socket and no waiting in here.

The head is read by gunicorn's own strict parser once it is whole. The body is unframed here, by its length or by chunks
(RFC 9112, section 7.1), so that whoever answers the request finds all of it in memory.
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

from server.settings import Settings

MAX_HEAD = 65_536
"""Bytes of a request line with its header fields."""
MAX_LINE = 1024
"""Bytes of the line that gives a chunk's size."""
MAX_CHUNKS = 65_536
"""Chunks of one body: each takes a moment, however little it holds."""

# A bare LF ends no line, but waiting for more would not tell the client so; the parser refuses it.
_END_OF_HEAD = re.compile(rb"\n\r?\n")
_HANDSHAKE = b"\x16\x03"
_SIZE = re.compile(rb"([0-9a-fA-F]{1,15})[ \t]*(?:;[\t\x20-\x7e\x80-\xff]*)?")

VECTORS = "/v1/steering/vectors"

State = Literal["head", "body", "whole"]


def most_bytes(settings: Settings, path: str) -> int:
    """Bytes that the body of a request to a path may have, which ends as its route does, whatever the server lies below."""
    uploads = settings.allow_uploads and unquote(path).endswith(VECTORS)
    return settings.max_vector_bytes if uploads else settings.max_body


class Refused(Exception):
    """The request cannot be read; its connection has to be closed after an answer with `status`."""

    def __init__(self, status: int, code: str, message: str, retry_after: int | None = None):
        super().__init__(message)
        self.status = status
        self.code = code
        self.retry_after = retry_after

    def body(self) -> str:
        """The error in OpenAI's format."""
        kind = "timeout_error" if self.status == 408 else "invalid_request_error"
        if self.status >= 500 and self.status != 501:  # what RFC 9112 asks for where a client's coding is not known
            kind = "server_error"
        error = {"message": str(self), "type": kind, "param": None, "code": self.code}
        return json.dumps({"error": error}, separators=(",", ":"))

    def response(self, headers: Mapping[str, str]) -> bytes:
        """The whole answer, with further headers."""
        body = self.body()
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
    """The next request of a connection. `feed` it until `state` is "whole"; `take` it; go on with what was `left`.

    A body of more bytes than `limit` has for its path is cut one byte beyond: the application sees that it is too long, and
    `complete` is False, because where the next request begins is not known then.
    """

    def __init__(self, cfg: Any, client: Any, limit: Callable[[str], int]):
        self.request: Request | None = None
        self.body = bytearray()
        self.state: State = "head"
        self.complete = True
        self.expects = False
        """Whether the client waits for "100 Continue" before it sends the body."""
        self.number = 0
        """Requests whose head was read on this connection."""
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
        """Bytes that are kept."""
        return len(self._buffer) + len(self.body)

    @property
    def begun(self) -> bool:
        """Whether a byte of the request has come."""
        return self.state != "head" or bool(self._buffer)

    def feed(self, data: bytes) -> State:
        """Take the next bytes, none to go on with those that are left; raises Refused."""
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
        """The whole request with its body as a file; afterwards the next one is read."""
        request = self.request
        assert request is not None
        request.body = io.BytesIO(self.body)
        self.request, self.body, self.state, self.expects = None, bytearray(), "head", False
        self._length, self._chunk = None, -1
        self._searched = self._chunks = self._trailers = 0
        return request

    def field(self, name: str) -> str | None:
        """A field of the head as far as it has come, also of one that is refused."""
        if self.request is not None:
            return field(self.request, name)
        end = _END_OF_HEAD.search(self._buffer)
        line = re.compile(rb"\n%b:[ \t]*([!-~]+)[ \t]*\r?\n" % name.encode(), re.IGNORECASE)
        found = line.search(self._buffer, 0, MAX_HEAD if end is None else end.end())
        return None if found is None else found[1].decode()

    def drop(self) -> None:
        """Forget what was read: the connection ends."""
        self._buffer, self.body = bytearray(), bytearray()

    def _read_head(self) -> None:
        if self._buffer.startswith(
            _HANDSHAKE
        ):  # which has no end of a head: its client would wait for its time to be over
            raise Refused(400, "invalid_http", "This port speaks HTTP without TLS: its address begins with http://.")
        end = _END_OF_HEAD.search(self._buffer, max(0, self._searched - 2))
        self._searched = len(self._buffer)
        if (self._searched if end is None else end.end()) > MAX_HEAD:
            raise Refused(431, "request_header_too_large", f"The request's head may have at most {MAX_HEAD} bytes.")
        if end is None:
            return
        head = bytes(self._buffer[: end.end()])
        self.number += 1
        try:
            request = Request(self._cfg, IterUnreader([head]), self._client, self.number)
        except (http.ParseException, http.NoMoreData, StopIteration) as error:
            raise refused(error) from None
        del self._buffer[: end.end()]  # not of a head that is refused: `field` looks there
        self.request = request
        self._max_body = self._limit(request.path)
        codings = [value.strip().lower() for name, value in request.headers if name == "TRANSFER-ENCODING"]
        if codings and codings != ["chunked"]:  # the parser lets compressed bodies pass, which nobody here undoes
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
        """Move the contents of chunks into the body; stops at the end, or where bytes are missing."""
        at = 0  # what was read of the buffer is cut off once, however small the chunks are
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
    """The first value of a request's header field."""
    return next((value for found, value in request.headers if found == name.upper()), None)


def refused(error: Exception) -> Refused:
    """What a client is told of a head that gunicorn's parser does not take."""
    match error:
        case http.LimitRequestLine():
            return Refused(414, "uri_too_long", "The request's line is too long.")
        case http.LimitRequestHeaders():
            return Refused(431, "request_header_too_large", "The request has too many header fields, or too long ones.")
        case http.ExpectationFailed():
            return Refused(417, "expectation_failed", "Only '100-continue' can be expected.")
        case http.UnsupportedTransferCoding():
            return Refused(501, "unsupported_transfer_coding", "Bodies may be 'chunked'; no other coding is supported.")
    return Refused(400, "invalid_http", "The request is not valid HTTP.")


def _find_host(request: Request) -> None:
    """Let the authority of a whole URL stand for Host, so that whoever checks the one checks the other, and refuse a request
    that names no host (RFC 9112, sections 3.2 and 3.2.2)."""
    named = any(name == "HOST" for name, _ in request.headers)
    if not named and request.version >= (1, 1):
        raise Refused(400, "invalid_http", "The request has no Host, which HTTP/1.1 asks for.")
    if request.method != "CONNECT" and not request.uri.startswith(("/", "*")):
        try:
            authority = urlsplit(request.uri).netloc
        except ValueError:
            authority = ""
        if not authority:
            raise Refused(400, "invalid_http", "The request's target is neither a path nor a whole URL.")
        request.headers = [pair for pair in request.headers if pair[0] != "HOST"] + [("HOST", authority)]


def _bad_chunk() -> Refused:
    return Refused(400, "invalid_body", "The body could not be read: its chunks are not framed as HTTP asks.")
