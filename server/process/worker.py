"""gunicorn's worker for Helmsight: a loop that waits for all clients at once, and threads that only answer.

gunicorn's own threaded worker assigns a thread to each new connection, which then waits for the head, the body, and the
client's receipt of every byte: as many slow clients as there are threads stop the server. Here nothing that waits for a
client holds a thread. One loop reads heads and bodies, within limits of time and size that start with the connection
(`intake`), a thread gets the complete request, and bytes of the answer that the client does not receive at once wait in
memory for the loop to send (`connection`). waitress also reads whole requests before it answers, but has neither gunicorn's
supervision nor access to the client's socket, by which a client that left is noticed while its answer is still queued. The
master process, the parser of heads, the WSGI environment, responses and logs remain gunicorn's.

A stream releases its thread while it waits for the engine (`streaming`); one thread sends the next pieces of all streams.
Requests without a body have threads of their own, so that health and metrics are not queued behind chats.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import logging
import math
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from gunicorn.http.message import Request
from gunicorn.workers.base import Worker as BaseWorker

from server.engine.resources import Pump, RequestThreads, raise_file_limit
from server.http.connection import Connection, PendingBytes
from server.http.intake import FULL, LATE, Intake, Refused, most_bytes
from server.process import early_errors
from server.process.gateway import Delivery

if TYPE_CHECKING:
    from types import FrameType

log = logging.getLogger("helmsight")

DRAIN_MARGIN = 3
"""Seconds of gunicorn's graceful timeout, after which it kills, reserved for sending remaining bytes and the journal."""
LAST = 1.0
"""Seconds of these for the journal."""
STOP, QUIT = 1.0, 1.7  # gunicorn may kill 2 s after SIGQUIT
"""Seconds for the engine to stop, and for the whole worker to end without draining."""
LIGHT = 8
"""Threads for requests without a body."""
ENDS = 16
"""Threads for blocking work after the last token of streams, which is the journal."""
QUEUED = 256
"""Most requests that may wait for a thread; the loop refuses further ones."""
ALL_INPUT = 512 * 2**20
"""Bytes of all incoming requests beyond which the largest of them is refused."""
LINGER = 2.0
LINGER_BYTES = 256 * 2**20
"""Idle seconds, and bytes, for which a closing connection is still read, within the time limit of a request.

Otherwise a client that still sends would see a reset before it has read the answer.
"""
SWEEP = 0.25
"""Seconds between two checks of the deadlines."""
ACCEPTED = 64
"""Most connections accepted, and most closed, in one turn of the loop."""
SPARE_FILES = 256
"""Open files reserved for anything but connections."""


class Worker(BaseWorker):
    """A worker that also drains on SIGTERM: until running requests are done it answers new ones with a clean 503."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._draining = self._quitting = False
        self._ends = math.inf
        self._connections: dict[Connection, None] = {}
        self._reading: dict[Connection, None] = {}  # those that wait for bytes of their clients, oldest first
        self._due: collections.deque[Callable[[], object]] = collections.deque()
        self._accepting = False
        self._next_sweep = 0.0
        self._output = PendingBytes()

    @classmethod
    def check_config(cls, cfg: Any, log: Any) -> None:
        if cfg.is_ssl:
            raise SystemExit("helmsight: the server does not support TLS; put a proxy in front of it")

    def init_process(self) -> None:
        self.prepare()
        super().init_process()

    def prepare(self) -> None:
        """Create the loop's resources in the process that will run it."""
        self._selector = selectors.DefaultSelector()
        self._wakes, self._wake_end = socket.socketpair()
        self._wakes.setblocking(False)
        self._wake_end.setblocking(False)
        self._chats = RequestThreads(max(1, self.cfg.threads - LIGHT), "helmsight-chat")
        self._light = RequestThreads(LIGHT, "helmsight-light")
        self._settling = RequestThreads(ENDS, "helmsight-end")
        self._pump = Pump("helmsight-streams")
        self._most = max(16, min(self.cfg.worker_connections, raise_file_limit() - SPARE_FILES))

    # -- signals -----------------------------------------------------------------------------------------------------------

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if not self._draining:
            self._end_after(self.cfg.graceful_timeout - DRAIN_MARGIN, self.cfg.graceful_timeout - LAST)

    def handle_quit(self, sig: int, frame: FrameType | None) -> None:
        if not hasattr(self, "wsgi"):
            super().handle_quit(sig, frame)
        if not self._quitting:  # a terminal and the arbiter both send one
            self._quitting = True
            self._end_after(0.0, QUIT)

    def _end_after(self, drain: float, most: float) -> None:
        """Let running answers finish for `drain` seconds and end the process after at most `most` seconds."""
        self._draining, self._ends = True, time.monotonic() + most
        threading.Thread(target=self._drain, args=(drain,), name="helmsight-drain", daemon=True).start()

    def _drain(self, seconds: float) -> None:
        log.info("draining: new requests are refused, running ones get up to %d s", seconds)
        (stopper := threading.Thread(target=self._stop_engine, args=(seconds,), daemon=True)).start()
        stopper.join(seconds + STOP)  # a hanging engine may never stop
        self.alive = False

    def _stop_engine(self, seconds: float) -> None:
        app = getattr(self, "wsgi", None)  # a signal may arrive before the application exists
        if app is not None:
            app.extensions["helmsight"].runtime.drain(seconds)

    def _end_threads(self) -> None:
        for threads in (self._chats, self._light, self._settling):
            threads.end()

    # -- the loop ----------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until a signal ends it, then let running answers finish."""
        self._settings = self.wsgi.extensions["helmsight"].settings
        self._selector.register(self._wakes, selectors.EVENT_READ, self._woken)
        while self.alive and self.ppid == os.getppid():
            self._accept_if(self._has_place())
            self._turn()
        self._accept_if(False)
        for listener in self.sockets:
            listener.close()
        for connection in list(self._reading):
            self._close(connection)
        while self._connections and time.monotonic() < self._ends and self.ppid == os.getppid():
            self._turn()
        for connection in list(self._connections):
            self._close(connection)
        self._end_threads()
        for end in (self._selector, self._wakes, self._wake_end):
            end.close()

    def _turn(self) -> None:
        """Wait for events and handle them; check deadlines and notify the arbiter from time to time."""
        for key, _ in self._selector.select(SWEEP):
            key.data()
        while self._due:
            self._due.popleft()()
        now = time.monotonic()
        if now >= self._next_sweep:
            self._next_sweep = now + SWEEP
            self.notify()
            late = [connection for connection in self._connections if connection.late(now)]
            for connection in late[:ACCEPTED]:
                self._too_late(connection)
            if len(late) > ACCEPTED:  # the others follow in the next turn, so that the loop is not blocked
                self.later(partial(setattr, self, "_next_sweep", now))
            self._bound_input()

    def later(self, act: Callable[[], object]) -> None:
        """Run `act` in the loop soon; any thread may call this."""
        self._due.append(act)
        with contextlib.suppress(OSError):  # a full buffer wakes as well
            self._wake_end.send(b"\0")

    def _woken(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wakes.recv(65_536)

    # -- connections that come and go --------------------------------------------------------------------------------------

    def _has_place(self) -> bool:
        """Return whether another connection can be served, possibly in place of one that waits for its client."""
        return len(self._connections) < self._most or bool(self._reading)

    def _accept_if(self, accepting: bool) -> None:
        if accepting != self._accepting:
            for listener in self.sockets:
                if accepting:
                    listener.setblocking(False)
                    self._selector.register(listener, selectors.EVENT_READ, partial(self._accept, listener))
                else:
                    self._selector.unregister(listener)
            self._accepting = accepting

    def _accept(self, listener: Any) -> None:
        for _ in range(ACCEPTED):
            if not self._has_place():
                return
            if len(self._connections) >= self._most:
                self._close(next(iter(self._reading)))  # closes the one that has been waited for longest
            try:
                sock, client = listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS) and self._reading:
                    self._close(next(iter(self._reading)))
                return
            sock.setblocking(False)
            settings = self._settings
            intake = Intake(self.cfg, client, partial(most_bytes, settings))
            connection = Connection(
                sock, client, listener.getsockname(), intake, self._output, settings.read_timeout, self._to_send
            )
            connection.deadline = time.monotonic() + settings.read_timeout
            self._connections[connection] = self._reading[connection] = None
            self._watch(connection, selectors.EVENT_READ)
            self._read(connection)  # most clients have already sent their request

    def _watch(self, connection: Connection, events: int) -> None:
        """Watch for these events of a connection, 0 for none."""
        if events == connection.watched:
            return
        if not connection.watched:
            self._selector.register(connection.sock, events, partial(self._ready, connection))
        elif not events:
            self._selector.unregister(connection.sock)
        else:
            self._selector.modify(connection.sock, events, partial(self._ready, connection))
        connection.watched = events

    def _ready(self, connection: Connection) -> None:
        try:
            if connection.state == "reading":
                self._read(connection)
            elif connection.state == "lingering":
                self._read_off(connection)
            elif connection.state in ("answering", "flushing"):
                self._send(connection)
        except Exception:  # an error of one connection must not end the loop
            log.exception("a connection could not be served")
            self._close(connection)

    def _close(self, connection: Connection) -> None:
        if connection.state == "answering":  # its thread will notice that it is broken
            self._watch(connection, 0)
            connection.give_up()
        elif connection.state != "closed":
            self._watch(connection, 0)
            self._reading.pop(connection, None)
            del self._connections[connection]
            connection.close()

    def _too_late(self, connection: Connection) -> None:
        if connection.state == "reading" and connection.intake.begun:
            self._refuse(connection, LATE)
        else:
            self._close(connection)

    # -- reading -----------------------------------------------------------------------------------------------------------

    def _read(self, connection: Connection) -> None:
        try:
            data = connection.receive()
        except OSError:
            data = b""
        if data == b"":
            self._close(connection)
        elif data is not None:
            if not connection.intake.begun and connection.intake.number:  # a further request begins
                self._reading[connection] = self._reading.pop(connection)
                connection.deadline = time.monotonic() + self._settings.read_timeout
            self._feed(connection, data)

    def _feed(self, connection: Connection, data: bytes) -> None:
        """Feed received bytes to a connection's intake, and pass a complete request to a thread."""
        intake = connection.intake
        try:
            state = intake.feed(data)
        except Refused as refusal:
            self._refuse(connection, refusal)
            return
        if state == "whole":
            self._dispatch(connection)
        elif intake.expects:
            intake.expects = False
            connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _bound_input(self) -> None:
        """Refuse the largest incoming requests while all of them together are too large."""
        buffered = sum(connection.intake.held for connection in self._reading)
        for connection in sorted(self._reading, key=lambda other: other.intake.held, reverse=True):
            if buffered <= ALL_INPUT:
                break
            buffered -= connection.intake.held
            self._refuse(connection, FULL)

    def _refuse(self, connection: Connection, refusal: Refused) -> None:
        """Answer a request without passing it to a thread, and close its connection."""
        intake = connection.intake
        response = early_errors.refused(refusal, self.wsgi, connection.client, intake.path, intake.field)
        self._reading.pop(connection, None)
        intake.drop()
        connection.state = "answering"
        with contextlib.suppress(OSError):
            connection.sendall(response)
        self._answered(connection, keep=False)

    # -- answering ---------------------------------------------------------------------------------------------------------

    def _dispatch(self, connection: Connection) -> None:
        keep, size = connection.intake.complete, len(connection.intake.body)
        threads = self._chats if size else self._light
        if threads.queued >= QUEUED or threads.queued_bytes + size > ALL_INPUT:
            self._refuse(connection, FULL)
            return
        del self._reading[connection]
        request = connection.intake.take()
        connection.state = "answering"
        self._watch(connection, selectors.EVENT_WRITE if connection.sending else 0)
        threads.submit(size, partial(self._answer, connection, request, keep))

    def _answer(self, connection: Connection, request: Request, keep: bool) -> None:
        """Answer a request in this thread; other threads send what the connection does not take yet."""
        keep = keep and not self._draining and bool(self.cfg.keepalive)
        delivery = Delivery(
            self.wsgi, connection, request, keep, self.cfg, self.log,
            pump=self._pump, blocking=partial(self._settling.submit, 0),
            done=lambda keep: self.later(partial(self._answered, connection, keep)),
        )  # fmt: skip
        delivery.go_on()

    def _answered(self, connection: Connection, keep: bool) -> None:
        """Handle a complete answer, whose last bytes may still wait to be sent."""
        connection.state, connection.keep = "flushing", keep
        if connection.broken:
            self._close(connection)
        elif connection.sending:
            self._watch(connection, selectors.EVENT_WRITE)
        else:
            self._continue_or_close(connection)

    def _to_send(self, connection: Connection) -> None:
        """Watch for a writable client, since there are bytes to send; any thread may call this."""

        def watch() -> None:
            if connection.state in ("answering", "flushing") and connection.sending:
                self._watch(connection, selectors.EVENT_WRITE)

        self.later(watch)

    def _send(self, connection: Connection) -> None:
        connection.flush()
        if connection.broken:
            self._close(connection)
        elif not connection.sending:
            if connection.state == "flushing":
                self._continue_or_close(connection)
            else:
                self._watch(connection, 0)

    def _continue_or_close(self, connection: Connection) -> None:
        """Continue with the next request, or close, now that the client has its answer."""
        if connection.keep and self.alive and not self._draining:
            connection.state = "reading"
            begun = connection.intake.begun
            connection.deadline = time.monotonic() + (self._settings.read_timeout if begun else self.cfg.keepalive)
            self._reading[connection] = None
            self._watch(connection, selectors.EVENT_READ)
            self._feed(connection, b"")
        else:
            connection.state, connection.ends = "lingering", time.monotonic() + self._settings.read_timeout
            connection.intake.drop()
            self._reading[connection] = None  # it may be closed to make room, too
            with contextlib.suppress(OSError):
                connection.sock.shutdown(socket.SHUT_WR)
            self._watch(connection, selectors.EVENT_READ)
            self._read_off(connection)

    def _read_off(self, connection: Connection) -> None:
        """Read and discard bytes of a connection that is about to be closed."""
        try:
            data = connection.receive()
        except OSError:
            data = b""
        connection.drained += len(data or b"")
        connection.deadline = min(time.monotonic() + LINGER, connection.ends)
        if data == b"" or connection.drained > LINGER_BYTES:
            self._close(connection)
