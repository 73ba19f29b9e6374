"""How long OpenMP's threads spin before they sleep, set before torch loads the library. Imports nothing that imports torch.

A thread that has done its share waits for the others, as often as a step has operations. By default it spins for
milliseconds, which on cores that are shared with anything else takes the time from the very threads that it waits for: an
answer then takes 10 to 100 times as long. Sleeping at once costs a third of the speed on a quiet machine, where the others
are done within microseconds; spinning for about as long as that is as fast as either there. `benchmarks.run spinning` has
the figures.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

SPIN_COUNT = "2000"
"""Rounds of GNU's library (libgomp, in torch's Linux builds): a tenth of a millisecond or less."""

BLOCK_TIME = "0"
"""Milliseconds of Intel's and LLVM's libraries (libiomp5, libomp: torch on Windows, macOS and conda)."""

POLICY = "active"
"""With which GNU's library spins for half as long, and not for a twentieth, where it has more threads than there are
processors. It counts those of every thread that ever shared an operation, however long it has been idle, such as the one
that loaded the model: each decode of a large one would take twice as long."""

_SETTINGS = (
    ("GOMP_SPINCOUNT", SPIN_COUNT, ("OMP_WAIT_POLICY",)),
    ("KMP_BLOCKTIME", BLOCK_TIME, ("OMP_WAIT_POLICY", "KMP_LIBRARY")),
    ("OMP_WAIT_POLICY", POLICY, ("GOMP_SPINCOUNT", "KMP_BLOCKTIME", "KMP_LIBRARY")),
)
"""(variable, value, variables that say the same thing in other words)."""

VARIABLES = ("GOMP_SPINCOUNT", "KMP_BLOCKTIME", "OMP_WAIT_POLICY", "KMP_LIBRARY")
"""All variables that have to do with waiting."""


def set_wait_policy(environ: MutableMapping[str, str] = os.environ) -> None:
    """Set for each of the libraries what is not set already; a user's variable wins.

    Without effect in a process that has loaded torch, whose children still get it.
    """
    given = set(environ)
    for name, value, others in _SETTINGS:
        if given.isdisjoint((name, *others)):
            environ[name] = value
