"""The time that OpenMP's threads spin before they sleep, set before torch loads the library.

A thread that has finished its share waits for the others, as often as a step has operations. By default it spins for
milliseconds, which on shared cores takes the time from the very threads that it waits for: an answer then takes 10 to 100
times as long. Sleeping at once costs a third of the speed on a quiet machine, where the others finish within microseconds;
spinning for about that long is as fast as either there. `benchmarks.run spinning` has the figures. This module imports
nothing that imports torch.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

SPIN_COUNT = "2000"
"""Spin rounds of GNU's library (libgomp, in torch's Linux builds): a tenth of a millisecond or less."""

BLOCK_TIME = "0"
"""Milliseconds of Intel's and LLVM's libraries (libiomp5, libomp: torch on Windows, macOS and conda)."""

POLICY = "active"
"""The policy with which GNU's library spins half as long instead of a twentieth if threads outnumber processors.

The library counts the threads of every thread that ever shared an operation, even of idle ones such as the one that
loaded the model: otherwise each decode of a large one would take twice as long.
"""

_SETTINGS = (
    ("GOMP_SPINCOUNT", SPIN_COUNT, ("OMP_WAIT_POLICY",)),
    ("KMP_BLOCKTIME", BLOCK_TIME, ("OMP_WAIT_POLICY", "KMP_LIBRARY")),
    ("OMP_WAIT_POLICY", POLICY, ("GOMP_SPINCOUNT", "KMP_BLOCKTIME", "KMP_LIBRARY")),
)
"""(variable, value, variables with an equivalent meaning)."""

VARIABLES = ("GOMP_SPINCOUNT", "KMP_BLOCKTIME", "OMP_WAIT_POLICY", "KMP_LIBRARY")
"""All variables that affect waiting."""


def set_wait_policy(environ: MutableMapping[str, str] = os.environ) -> None:
    """Set each library's variable unless the user has set it or an equivalent one.

    No effect on a process that has loaded torch; its children still inherit it.
    """
    variables = set(environ)
    for name, value, others in _SETTINGS:
        if variables.isdisjoint((name, *others)):
            environ[name] = value
