"""Signals between an application and the worker by which an answer that waits releases its thread.

An application that yields `AWAITED` is asked for its next piece after it has called the function named `RESUME` in the
request's environ, in any thread. One that yields `BLOCKING` is asked for it at once, in a thread that may block. A server
that does not support this has no `RESUME`, and an application then yields neither.
"""

from __future__ import annotations

RESUME = "helmsight.resume"


class Pause(bytes):
    """A piece without bytes."""


AWAITED, BLOCKING = Pause(), Pause()
