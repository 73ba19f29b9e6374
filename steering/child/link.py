"""Messages between parent and child: whole, ordered lists of data in the encoding of `steering.messages`."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import Any

from steering.child.facts import ModelFacts
from steering.front.input_processor import Limits
from steering.messages import serialization
from steering.model.alarm import Alarm
from steering.model.calibration import Calibration
from steering.model.thresholds import Thresholds

KINDS = (Alarm, Calibration, ModelFacts, Limits, Thresholds)
"""Kinds of data that are sent beside those of an engine core's messages."""
_HEAD = 8
_BUFFER = 4 * 2**20
"""Bytes of unread data that the system should buffer, so that senders do not block at once."""


class Link:
    """An end of a socket; any thread may send, one thread receives.

    An end that `shares` sends a picture or a vector once, and refers to it from then on.
    """

    def __init__(self, sock: socket.socket, shares: bool = True):
        self._sock = sock
        self._sending = threading.Lock()
        self._shared = serialization.Shared()
        self._shares = shares
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, _BUFFER)

    def send(self, message: list[Any]) -> None:
        """Send a message to the other side.

        Raises OSError if that is gone, RequestError for data that cannot be sent.
        """
        if not self._shares:  # a message that takes long to encode keeps no other one waiting
            parts = serialization.parts(message, KINDS)
        with self._sending:
            if self._shares:  # what refers to an earlier message must not overtake it
                parts = serialization.parts(message, KINDS, self._shared)
            head, *large = parts
            size = len(head) + sum(map(len, large))
            self._sock.sendall(size.to_bytes(_HEAD, "big") + head)
            for part in large:
                self._sock.sendall(part)

    def receive(self) -> list[Any]:
        """Wait for the next message and return it; raises EOFError if the other side is gone."""
        size = int.from_bytes(self._read(_HEAD), "big")
        message: list[Any] = serialization.read(self._read(size), KINDS, self._shared)
        return message

    def close(self) -> None:
        """Close the socket, which ends sends and receives on both sides."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def _read(self, size: int) -> bytearray:
        data = bytearray(size)
        view, have = memoryview(data), 0
        while have < size:
            try:
                got = self._sock.recv_into(view[have:], 0, socket.MSG_WAITALL)
            except OSError as error:
                raise EOFError("The other process is gone.") from error
            if not got:
                raise EOFError("The other process is gone.")
            have += got
        return data
