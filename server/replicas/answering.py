"""A WSGI application whose threads answer calls and whose answers are passed on as they are generated."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import groupby
from typing import Any

from gunicorn.config import Config

from server.engine.resources import RequestThreads
from server.process.worker import LIGHT
from server.replicas.call import AnswerHead, Call
from server.serving import gunicorn_options
from server.settings import Settings

log = logging.getLogger("helmsight")

HELD = 64
"""Most pending pieces of an answer before the thread that generates them blocks."""

Piece = AnswerHead | bytes


@dataclass
class Logged:
    """A response, or a request, in the form that gunicorn's logger expects."""

    status: str
    headers: list[tuple[str, str]]
    sent: int = 0


class Answering:
    """The threads that answer calls; chats and requests without a body have separate ones, as in `server.process.worker`."""

    def __init__(self, app: Any, settings: Settings):
        cfg = Config()
        for name, value in gunicorn_options(settings).items():
            cfg.set(name, value)
        self._app = app
        self._access = cfg.logger_class(cfg)
        self._chats = RequestThreads(max(1, settings.worker_threads - LIGHT), "helmsight-chat")
        self._light = RequestThreads(LIGHT, "helmsight-light")

    async def answer(self, call: Call) -> AsyncIterator[Piece]:
        """Yield the answer's head, then its bytes as they arrive; closing the iterator means that the client left."""
        exchange = Exchange(call, asyncio.get_running_loop())
        threads = self._chats if call.body else self._light
        threads.submit(len(call.body), partial(exchange.run, self._app, self._access))
        try:
            async for piece in exchange.pieces():
                yield piece
        finally:
            exchange.leave()

    async def whole(self, call: Call) -> tuple[AnswerHead, bytes]:
        """Return the whole answer."""
        pieces = [piece async for piece in self.answer(call)]
        head, *body = pieces
        assert isinstance(head, AnswerHead)
        return head, b"".join(piece for piece in body if isinstance(piece, bytes))

    def end(self) -> None:
        """Drop queued calls."""
        for threads in (self._chats, self._light):
            threads.end()


class Exchange:
    """A call and its answer, between the answering thread and the loop that passes it on."""

    def __init__(self, call: Call, loop: asyncio.AbstractEventLoop):
        self._call = call
        self._loop = loop
        self._queue: asyncio.Queue[Piece | BaseException | None] = asyncio.Queue()
        self._room = threading.Semaphore(HELD)
        self._left = threading.Event()
        # A client's connection for `Watcher`, which is closed once nobody listens any more.
        self._connection, self._client = socket.socketpair()

    # -- called by the loop ------------------------------------------------------------------------------------------------

    async def pieces(self) -> AsyncIterator[Piece]:
        """Yield the thread's pieces, with pending bytes joined; raises whatever the thread raised."""
        while True:
            batch = [await self._queue.get()]
            while not self._queue.empty():
                batch.append(self._queue.get_nowait())
            self._room.release(len(batch))
            for kind, group in groupby(batch, type):
                if kind is bytes:
                    yield b"".join(group)  # type: ignore[arg-type]
                    continue
                for piece in group:
                    if piece is None:
                        return
                    if isinstance(piece, BaseException):
                        raise piece
                    yield piece

    def leave(self) -> None:
        """Stop listening; harmless after the end."""
        self._left.set()
        self._room.release()  # the thread may be blocked on it
        self._client.close()

    # -- called by the thread ----------------------------------------------------------------------------------------------

    def run(self, app: Any, access: Any) -> None:
        """Answer by the application, and write the access log."""
        begun = time.monotonic()
        response = Logged("500 Internal Server Error", [])
        environ = self._call.environ(self._connection)
        try:
            self._answer(app, environ, response)
            self._say(None)
        except BrokenPipeError:
            log.debug("an answer was cancelled: its client disconnected")
        except BaseException as error:  # a panic of a native library is no Exception
            log.error("a request could not be answered", exc_info=error)
            with contextlib.suppress(BrokenPipeError):
                self._say(RuntimeError("the request could not be answered"))
        finally:
            self._connection.close()
            request = Logged(
                "", [(name.decode("latin1"), value.decode("latin1")) for name, value in self._call.headers]
            )
            access.access(response, request, environ, timedelta(seconds=time.monotonic() - begun))

    def _answer(self, app: Any, environ: dict[str, Any], response: Logged) -> None:
        def start(status: str, headers: list[tuple[str, str]], exc_info: Any = None) -> None:
            response.status, response.headers = status, headers

        pieces: Iterable[bytes] = app(environ, start)
        try:
            self._say(AnswerHead(int(response.status.split(" ", 1)[0]), tuple(response.headers)))
            for piece in pieces:
                if piece:
                    self._say(piece)
                    response.sent += len(piece)
        finally:
            if hasattr(pieces, "close"):
                pieces.close()

    def _say(self, piece: Piece | BaseException | None) -> None:
        self._room.acquire()
        if self._left.is_set():
            raise BrokenPipeError
        try:  # does not wait for the loop, which has to wait for its turn among many threads
            self._loop.call_soon_threadsafe(self._queue.put_nowait, piece)
        except RuntimeError as error:  # the loop has ended
            raise BrokenPipeError from error
