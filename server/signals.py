"""Signals that ask servers for what this one must not do."""

from __future__ import annotations

import signal

IGNORED = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTTIN, signal.SIGTTOU)
"""For gunicorn: load anew beside what runs, open log files anew, start another server, have a worker more, have one fewer.
Most would put a second model into memory; all else that is not said in a process gets its default, which ends it."""


def ignore_signals() -> None:
    """Have this process and what it starts ignore them; main thread only."""
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
