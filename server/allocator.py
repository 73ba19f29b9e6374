"""How much memory the C library keeps of what was freed, set before there are threads. Imports nothing that imports torch.

GNU's library gives each thread an arena of its own, up to eight for each core, and takes a block that was freed once for
one that will be wanted again: what pictures took while many threads decoded them stays with the process for ever, gigabytes
of it. Two arenas, and blocks of a picture's size from the system and back to it, keep a server at what it really uses.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping

ARENAS = 2
"""Arenas for all threads: Python's own objects do not come from them, tensors and pictures mostly from beyond them."""

MAPPED = 4 * 2**20
"""Bytes from which a block is mapped, and given back as soon as it is freed; Pillow's blocks have 16 MiB."""

KEPT = 64 * 2**20
"""Bytes that may be free at the end of an arena before they are given back. Where the bound above is set, GNU's library
gives back from 128 KiB on, which each step of an engine frees and asks for again: it took 6 % of its time."""

_SETTINGS = (
    (-8, ARENAS, ("MALLOC_ARENA_MAX", "MALLOC_ARENA_TEST"), ("arena_max", "arena_test")),
    (-3, MAPPED, ("MALLOC_MMAP_THRESHOLD_",), ("mmap_threshold",)),
    (-1, KEPT, ("MALLOC_TRIM_THRESHOLD_",), ("trim_threshold",)),
)
"""(mallopt's number of it as in malloc.h, value, variables that set it, GLIBC_TUNABLES that do)."""


def parameters(environ: Mapping[str, str] = os.environ) -> dict[int, int]:
    """What is set, by mallopt's numbers: that of which the user's environment says nothing."""
    tuned = environ.get("GLIBC_TUNABLES", "")
    return {
        number: value
        for number, value, variables, tunables in _SETTINGS
        if not any(name in environ for name in variables)
        and not any(f"glibc.malloc.{name}=" in tuned for name in tunables)
    }


def bound_memory(environ: Mapping[str, str] = os.environ) -> None:
    """Set `parameters` for this process and those that it forks; without effect where the C library is another one."""
    library = ctypes.CDLL(None) if os.name == "posix" else None
    if library is None or not hasattr(library, "gnu_get_libc_version"):
        return
    for number, value in parameters(environ).items():
        library.mallopt(ctypes.c_int(number), ctypes.c_int(value))
