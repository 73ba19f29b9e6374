"""Messages between the two processes: whole, ordered lists of data in the encoding of `steering.relay.relay`."""

from __future__ import annotations

import builtins
import contextlib
import socket
import threading
from typing import Any

from server.engine.served import Capabilities
from steering import Auto, Result, TextBounds, errors
from steering.errors import Fault, SteeringError
from steering.recorders.residual import Residual
from steering.relay import prompts, relay
from steering.tools.calls import ToolCall

KINDS = (Auto, Capabilities, Residual, Result, TextBounds, ToolCall, *prompts.KINDS)
"""Types that are sent beside the parts of requests and the types of their modules."""
_HEAD = 8
_BUFFER = 4 * 2**20
"""Bytes of unread data that the system should buffer, so that senders do not block at once."""


class Link:
    """An end of a socket; any thread may send, one thread receives."""

    def __init__(self, sock: socket.socket):
        self._sock = sock
        self._lock = threading.Lock()
        self._shared = relay.Shared()
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, _BUFFER)

    def send(self, message: list[Any]) -> None:
        """Send a message to the other side.

        Raises OSError if that is gone, RequestError for data that cannot be sent.
        """
        with self._lock:  # keeps the order of messages
            head, *large = relay.parts(message, KINDS, self._shared)
            size = len(head) + sum(map(len, large))
            self._sock.sendall(size.to_bytes(_HEAD, "big") + head)
            for part in large:
                self._sock.sendall(part)

    def receive(self) -> list[Any]:
        """Wait for the next message and return it; raises EOFError if the other side is gone."""
        size = int.from_bytes(self._read(_HEAD), "big")
        message: list[Any] = relay.read(self._read(size), KINDS, self._shared)
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


def told(error: BaseException) -> list[Any]:
    """Return an error as data: its class name, its message and its fields."""
    fields = {name: value for name, value in vars(error).items() if type(value) in (str, int, float, bool, type(None))}
    return [type(error).__name__, str(error), fields]


def raised(data: list[Any]) -> Exception:
    """Return the error that `told` encoded; a Fault that names it if it is neither `steering`'s nor a builtin."""
    name, text, fields = data
    kind = getattr(errors, name, None) or getattr(builtins, name, None)
    if not (isinstance(kind, type) and issubclass(kind, Exception)):
        return Fault(f"{name}: {text}")
    if not issubclass(kind, SteeringError):
        return kind(text)
    error = kind.__new__(kind)
    Exception.__init__(error, text)
    vars(error).update(fields)
    return error
