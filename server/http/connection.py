"""One client's connection: what it still has to send us, and what it still has to take from us.

A thread that answers never waits for its client's network: it leaves its bytes here, and the worker's loop sends them as
the client takes them. Only where a client lags by many bytes does the thread wait.
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
"""Bytes that one read or one write moves at most, so that no connection holds up the loop. A client that does not take as
many within the time limit, nor all there is, is given up."""
LAG = 32 * 2**20
"""Bytes by which a client may lag behind its answer before the answer waits for it; more than any chat's answer has."""
LAG_WHEN_FULL = 64 * 1024
ALL_OUTPUT = 256 * 2**20
"""Bytes of all answers that wait to be taken, beyond which `LAG_WHEN_FULL` holds for each."""

State = Literal["reading", "answering", "flushing", "lingering", "closed"]


class Output:
    """The bytes of all connections that wait to be taken by their clients."""

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
    """`sock` is not blocking. The loop owns all but `sendall`, which the thread that answers calls.

    `patience` is how many seconds a client has to take a piece; `wake` tells the loop that there is something to send.
    """

    def __init__(
        self, sock: socket.socket, client: Any, server: Any, intake: Intake, output: Output, patience: float,
        wake: Callable[[Connection], object],
    ):  # fmt: skip
        self.sock = sock
        self.client = client
        self.server = server
        self.intake = intake
        self.state: State = "reading"
        self.deadline = 0.0
        """When the present state has lasted too long; of states that send, `late` knows."""
        self.keep = False
        """Whether another request may follow the answer on its way."""
        self.watched = 0
        """The events that the loop is told of."""
        self.drained = 0
        self.ends = 0.0
        """Bytes that were read of one that is about to be closed, and when it will be, whatever still comes."""
        self._output = output
        self._patience = patience
        self._wake = wake
        self._unsent = bytearray()
        self._taken = 0
        self._take_by = 0.0
        self._broken = False
        self._room = threading.Condition()

    # -- for the thread that answers, with the names that gunicorn's Response calls ---------------------------------------

    def sendall(self, data: bytes) -> None:
        """Send what the client takes at once and leave the rest to the loop; raises OSError once the client is gone."""
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
        """Whether the client lags so far that sending more would wait for it."""
        return len(self._unsent) > (LAG_WHEN_FULL if self._output.full else LAG)

    def send(self, data: bytes) -> int:
        """Nothing: gunicorn sends only "100 Continue" this way, and the loop has done that before the body came."""
        return len(data)

    def _raise_if_broken(self) -> None:
        if self._broken:
            raise BrokenPipeError("The client is gone, or took too long to take its answer.")

    # -- for the loop ------------------------------------------------------------------------------------------------------

    def receive(self) -> bytes | None:
        """What has come, b"" at the end, None if nothing has; OSError where the connection broke."""
        try:
            return self.sock.recv(PIECE)
        except (BlockingIOError, InterruptedError):
            return None

    @property
    def sending(self) -> bool:
        """Whether bytes wait for the client to take them."""
        return bool(self._unsent)

    def flush(self) -> None:
        """Send a piece of what waits."""
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
        """Whether the client has taken too long over what it is to do now."""
        if self.state in ("answering", "flushing"):
            return bool(self._unsent) and now >= self._take_by
        return now >= self.deadline

    def give_up(self) -> None:
        """Send no more; who watches the connection sees it end."""
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
        """Whether nothing can be sent any more."""
        return self._broken

    def close(self) -> None:
        """End it; no thread may be answering."""
        self.give_up()
        self.state = "closed"
        self.sock.close()
