"""How an answer that waits for its next piece gives its thread back: words between an application and the worker.

An application that yields `AWAITED` is asked for its next piece after it has called what `RESUME` names in the request's
environ, in any thread; one that yields `BLOCKING` is asked for it at once, in a thread that may wait. A server that
knows none of this has no `RESUME`, and an application then yields neither.
"""

from __future__ import annotations

RESUME = "helmsight.resume"


class Pause(bytes):
    """A piece without bytes."""


AWAITED, BLOCKING = Pause(), Pause()
