"""Ports for servers that neither take a socket nor choose a port by themselves."""

from __future__ import annotations

import itertools
import os
import socket
from contextlib import suppress

_numbers = itertools.count()


def own_port() -> int:
    """Return a free port which nobody else takes before a server binds it.

    The system gives away higher ones, and other processes that run tests begin elsewhere.
    """
    while True:
        port = 10_000 + (os.getpid() * 61 + next(_numbers)) % 20_000
        with socket.socket() as trial, suppress(OSError):
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind(("127.0.0.1", port))
            return port
