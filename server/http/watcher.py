"""Detects clients that left and requests that took too long, also while nothing is written to them.

One thread polls all sockets a few times a second. A request's own thread could not: while the request is queued there is no
token to write, and so no broken pipe.
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

log = logging.getLogger("helmsight")

# Linux reports a peer that closed its sending side, which HTTP clients only do to leave. Other systems' poll() only reports
# hang-ups.
_HUNG_UP = getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR | select.POLLNVAL


def client_socket(environ: Mapping[str, Any]) -> socket.socket | None:
    """Return the client's connection if the WSGI server exposes it, as gunicorn and werkzeug do."""
    connection = environ.get("gunicorn.socket") or environ.get("werkzeug.socket")
    return connection if isinstance(connection, socket.socket) else None


@dataclass
class Watch:
    """A watched request; `outcome` is the reason for giving it up, None if it was not.

    `late` is called in place of `give_up` at the deadline, if given.
    """

    connection: socket.socket | None
    deadline: float
    give_up: Callable[[], object]
    late: Callable[[], object] | None = None
    outcome: Literal["gone", "late"] | None = None


class Watcher:
    """Calls `give_up` of a watch once its client leaves or its deadline passes."""

    def __init__(self, interval: float = 0.25):
        self.interval = interval
        self._by_id: dict[int, Watch] = {}
        self._lock = threading.Lock()
        self._some = threading.Event()
        self._thread: threading.Thread | None = None

    def add(
        self,
        connection: socket.socket | None,
        deadline: float,
        give_up: Callable[[], object],
        late: Callable[[], object] | None = None,
    ) -> Watch:
        """Watch a request from now until `deadline`, on the monotonic clock."""
        watch = Watch(connection, deadline, give_up, late)
        with self._lock:
            self._by_id[id(watch)] = watch
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="helmsight-watcher", daemon=True)
                self._thread.start()
            self._some.set()
        return watch

    def remove(self, watch: Watch) -> None:
        """Stop watching; must happen before the connection is closed. Harmless if repeated."""
        with self._lock:
            self._by_id.pop(id(watch), None)

    @contextlib.contextmanager
    def watching(
        self, connection: socket.socket | None, deadline: float, give_up: Callable[[], object]
    ) -> Iterator[Watch]:
        """Watch a request within a block."""
        watch = self.add(connection, deadline, give_up)
        try:
            yield watch
        finally:
            self.remove(watch)

    def _run(self) -> None:
        while True:
            self._some.wait()
            time.sleep(self.interval)
            with self._lock:
                # The lock prevents that a watched connection is closed and its number reused meanwhile.
                given_up = self._look(time.monotonic())
                for watch in given_up:
                    del self._by_id[id(watch)]
                if not self._by_id:
                    self._some.clear()
            for watch in given_up:
                try:
                    (watch.late if watch.late and watch.outcome == "late" else watch.give_up)()
                except Exception:  # an error of one request must not stop the watcher
                    log.exception("a request could not be cancelled")

    def _look(self, now: float) -> list[Watch]:
        poller = select.poll()
        by_number: dict[int, Watch] = {}
        for watch in self._by_id.values():
            if now >= watch.deadline:
                watch.outcome = "late"
            elif watch.connection is not None:
                number = watch.connection.fileno()
                if number < 0:
                    watch.outcome = "gone"
                else:
                    by_number[number] = watch
                    poller.register(number, _HUNG_UP)
        for number, _ in poller.poll(0):
            by_number[number].outcome = "gone"
        return [watch for watch in self._by_id.values() if watch.outcome]
