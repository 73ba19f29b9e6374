"""The connection of a client: the bytes that it still has to send and those that it still has to receive.

A thread that answers never waits for its client's network: it leaves its bytes here, and the worker's loop sends them as the
client receives them. The thread only waits if a client lags behind by many bytes.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, Literal

from server.http.intake import Intake

PIECE = 256 * 1024
"""Most bytes of one read or write, so that no connection blocks the loop.

A client that receives neither as many within the time limit nor all pending bytes is given up.
"""
LAG = 32 * 2**20
"""Bytes by which a client may lag before its answer waits; more than any chat's answer has."""
LAG_WHEN_FULL = 64 * 1024
ALL_OUTPUT = 256 * 2**20
"""Pending bytes of all answers beyond which `LAG_WHEN_FULL` applies to each."""

State = Literal["reading", "answering", "flushing", "lingering", "closed"]


class PendingBytes:
    """The number of pending bytes of all connections."""

    def __init__(self) -> None:
        self._bytes = 0
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        with self._lock:
            self._bytes += count

    @property
    def full(self) -> bool:
        return self._bytes > ALL_OUTPUT


class Connection:
    """A non-blocking connection; the loop owns all of it except `sendall`, which the answering thread calls.

    `patience` is how many seconds a client has to receive a piece; `wake` notifies the loop of bytes to send.
    """

    def __init__(
        self, sock: socket.socket, client: Any, server: Any, intake: Intake, output: PendingBytes, patience: float,
        wake: Callable[[Connection], object],
    ):  # fmt: skip
        self.sock = sock
        self.client = client
        self.server = server
        self.intake = intake
        self.state: State = "reading"
        self.deadline = 0.0
        """End of the current state's time limit; `late` knows that of sending states."""
        self.keep = False
        """True if another request may follow the current answer."""
        self.watched = 0
        """The events that the loop watches for."""
        self.drained = 0
        self.ends = 0.0
        """Bytes read from a connection that is about to be closed, and the time at which it is closed in any case."""
        self._output = output
        self._patience = patience
        self._wake = wake
        self._unsent = bytearray()
        self._taken = 0
        self._take_by = 0.0
        self._broken = False
        self._room = threading.Condition()

    # -- called by the answering thread, under the names that gunicorn's Response uses -------------------------------------

    def sendall(self, data: bytes) -> None:
        """Send the bytes that fit at once and leave the rest to the loop; raises OSError once the client is gone."""
        with self._room:
            self._raise_if_broken()
            if not self._unsent:
                try:
                    data = data[self.sock.send(data) :]
                except BlockingIOError:
                    pass
                except OSError:
                    self._broken = True
                    raise
                if not data:
                    return
                self._taken, self._take_by = 0, time.monotonic() + self._patience
                self._wake(self)
            self._unsent += data
            self._output.add(len(data))
            while self.lags:
                self._room.wait(1.0)
                self._raise_if_broken()

    @property
    def lags(self) -> bool:
        """True if the client lags so far that sending more would wait for it."""
        return len(self._unsent) > (LAG_WHEN_FULL if self._output.full else LAG)

    def send(self, data: bytes) -> int:
        """Send nothing.

        gunicorn only sends "100 Continue" this way, which the loop has sent before the body.
        """
        return len(data)

    def _raise_if_broken(self) -> None:
        if self._broken:
            raise BrokenPipeError("The client disconnected, or read its answer too slowly.")

    # -- called by the loop ------------------------------------------------------------------------------------------------

    def receive(self) -> bytes | None:
        """Return received bytes, b"" at the end, None if nothing has arrived; raises OSError if the connection broke."""
        try:
            return self.sock.recv(PIECE)
        except (BlockingIOError, InterruptedError):
            return None

    @property
    def sending(self) -> bool:
        """True if bytes wait to be sent."""
        return bool(self._unsent)

    def flush(self) -> None:
        """Send a piece of the pending bytes."""
        with self._room:
            try:
                sent = self.sock.send(memoryview(self._unsent)[:PIECE].tobytes())
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                self._break()
                return
            del self._unsent[:sent]
            self._output.add(-sent)
            self._taken += sent
            if self._taken >= PIECE or not self._unsent:
                self._taken, self._take_by = 0, time.monotonic() + self._patience
            self._room.notify_all()

    def late(self, now: float) -> bool:
        """Return whether the client has exceeded the time limit of the current state."""
        if self.state in ("answering", "flushing"):
            return bool(self._unsent) and now >= self._take_by
        return now >= self.deadline

    def give_up(self) -> None:
        """Send no more; threads that watch the connection see it end."""
        with self._room:
            self._break()
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def _break(self) -> None:
        self._output.add(-len(self._unsent))
        self._unsent.clear()
        self._broken = True
        self._room.notify_all()

    @property
    def broken(self) -> bool:
        """True if nothing can be sent any more."""
        return self._broken

    def close(self) -> None:
        """Close the connection; no thread may be answering."""
        self.give_up()
        self.state = "closed"
        self.sock.close()
