"""Limits on the memory that the C library keeps after it was freed, set before there are threads.

GNU's library gives each thread an arena of its own, up to eight for each core, and assumes that a block freed once will be
needed again: the memory of images that many threads decoded stays with the process for ever, gigabytes of it. Two arenas,
and mapping blocks of an image's size, keep a server at the memory it really uses. This module imports nothing that imports
torch.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping

ARENAS = 2
"""Arenas for all threads; Python's own objects do not use them, and tensors and images are mostly mapped."""

MAPPED = 4 * 2**20
"""Size in bytes from which a block is mapped, and released once it is freed; Pillow's blocks have 16 MiB."""

KEPT = 64 * 2**20
"""Bytes that may be free at the end of an arena before they are released.

With the bound above, GNU's library releases from 128 KiB on, which each step of an engine frees and requests again: that
took 6 % of its time.
"""

_SETTINGS = (
    (-8, ARENAS, ("MALLOC_ARENA_MAX", "MALLOC_ARENA_TEST"), ("arena_max", "arena_test")),
    (-3, MAPPED, ("MALLOC_MMAP_THRESHOLD_",), ("mmap_threshold",)),
    (-1, KEPT, ("MALLOC_TRIM_THRESHOLD_",), ("trim_threshold",)),
)
"""(mallopt's number in malloc.h, value, variables that set it, GLIBC_TUNABLES that do)."""


def parameters(environ: Mapping[str, str] = os.environ) -> dict[int, int]:
    """Return the values to set by mallopt's numbers, without those that the user's environment sets."""
    tuned = environ.get("GLIBC_TUNABLES", "")
    return {
        number: value
        for number, value, variables, tunables in _SETTINGS
        if not any(name in environ for name in variables)
        and not any(f"glibc.malloc.{name}=" in tuned for name in tunables)
    }


def bound_memory(environ: Mapping[str, str] = os.environ) -> None:
    """Set `parameters` for this process and its forks; no effect with another C library."""
    library = ctypes.CDLL(None) if os.name == "posix" else None
    if library is None or not hasattr(library, "gnu_get_libc_version"):
        return
    for number, value in parameters(environ).items():
        library.mallopt(ctypes.c_int(number), ctypes.c_int(value))
