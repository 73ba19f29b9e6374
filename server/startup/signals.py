"""Signals of server managers that this server must ignore."""

from __future__ import annotations

import signal

IGNORED = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTTIN, signal.SIGTTOU)
"""gunicorn's signals to reload, to reopen log files, to start another server, and to add or remove a worker.

Most would load a second model into memory. Processes without handlers would end by the default action.
"""


def ignore_signals() -> None:
    """Ignore the signals in `IGNORED`, in this process and its children; main thread only."""
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
