"""Connections to a worker."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tests.waiting import PATIENCE


@pytest.fixture
def connect() -> Iterator[Callable[[int], socket.socket]]:
    with ExitStack() as stack:
        yield lambda port: stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=PATIENCE))
