"""Messages between parent and child: whole, ordered lists of data in the encoding of `steering.messages`."""

from __future__ import annotations

import contextlib
import itertools
import socket
import struct
import threading
import time
from collections.abc import Sequence
from typing import Any

from steering.child.facts import ModelFacts
from steering.front.input_processor import Limits
from steering.messages import serialization
from steering.model.alarm import Alarm
from steering.model.calibration import Calibration
from steering.model.thresholds import Thresholds

KINDS = (Alarm, Calibration, ModelFacts, Limits, Thresholds)
"""Kinds of data that are sent beside those of an engine core's messages."""
_FRAME = struct.Struct("<QBB")
"""The head of a frame: its bytes, the channel of its message (0: the frame is the message), and 1 for the last frame."""
PIECE = 2**18
"""Most bytes of a frame of a large message, between whose frames other messages are sent."""
PAUSE = 0.0002
"""Seconds between two frames of a large message, in which waiting senders get the socket."""
_BUFFER = 4 * 2**20
"""Bytes of unread data that the system should buffer, so that senders do not block at once."""


class Link:
    """An end of a socket; any thread may send, one thread receives.

    An end that `shares` sends a picture or a vector once, and refers to it from then on, so its messages keep their order.
    From an end that does not, short messages overtake large ones.
    """

    def __init__(self, sock: socket.socket, shares: bool = True):
        self._sock = sock
        self._sending = threading.Lock()
        self._shared = serialization.Shared()
        self._shares = shares
        self._channels = itertools.cycle(range(1, 256))
        self._received: dict[int, bytearray] = {}  # frames of large messages, by channel
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, _BUFFER)

    def send(self, message: list[Any]) -> None:
        """Send a message to the other side.

        Raises OSError if that is gone, RequestError for data that cannot be sent.
        """
        if self._shares:
            with self._sending:  # what refers to an earlier message must not overtake it
                parts = serialization.parts(message, KINDS, self._shared)
                self._send_frame(parts, sum(map(len, parts)))
            return
        parts = serialization.parts(message, KINDS)
        size = sum(map(len, parts))
        if size <= PIECE:
            with self._sending:
                self._send_frame(parts, size)
            return
        channel, data = next(self._channels), memoryview(b"".join(parts))
        for start in range(0, size, PIECE):
            piece = data[start : start + PIECE]
            with self._sending:
                self._send_frame([piece], len(piece), channel, start + PIECE >= size)
            time.sleep(PAUSE)

    def receive(self) -> list[Any]:
        """Wait for the next message and return it; raises EOFError if the other side is gone."""
        while True:
            size, channel, last = _FRAME.unpack(self._read(_FRAME.size))
            data = self._read(size)
            if channel:
                buffer = self._received.setdefault(channel, bytearray())
                buffer += data
                if not last:
                    continue
                data = self._received.pop(channel)
            message: list[Any] = serialization.read(data, KINDS, self._shared)
            return message

    def close(self) -> None:
        """Close the socket, which ends sends and receives on both sides."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def _send_frame(self, parts: Sequence[bytes | memoryview], size: int, channel: int = 0, last: bool = True) -> None:
        head, *large = parts
        self._sock.sendall(_FRAME.pack(size, channel, last) + head)
        for part in large:
            self._sock.sendall(part)

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
