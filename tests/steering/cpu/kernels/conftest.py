"""The loops as a compiler makes them, called as a compiled step calls them."""

from __future__ import annotations

import ctypes
import os
import platform
import shlex
import subprocess
from pathlib import Path

import pytest
from filelock import FileLock
from torch.utils.cpp_extension import library_paths

from steering.cpu.building import LOOPS, build_loops
from steering.cpu.kernels import native

COMPILER = shlex.split(os.environ.get("CXX", "g++"))

X86 = platform.machine() in ("x86_64", "AMD64")
PROCESSORS = [
    ("one thread", 1, []),
    ("two threads, without AVX-512", 2, ["-mno-avx512f"] if X86 else []),
    ("one thread, without AVX2", 1, ["-mno-avx2"] if X86 else []),
]
"""For whom the loops are compiled: how many threads they have, and what this processor is to be without."""


class Loops(native.Loops):
    """A library of them alone."""

    def __init__(self, folder: Path, threads: int):
        path = folder / "loops.so"
        if not path.exists():
            self._build(path, threads)
        super().__init__(ctypes.CDLL(str(path)), threads)

    def _build(self, path: Path, threads: int) -> None:
        folder, linked = path.parent, [f"-L{folder_of_libraries}" for folder_of_libraries in library_paths()]
        build_loops(threads, folder)
        archive = ["-Wl,--whole-archive", str(folder / f"lib{LOOPS}.a"), "-Wl,--no-whole-archive"]
        openmp = [] if threads == 1 else ["-fopenmp"]
        subprocess.run(
            [*COMPILER, "-shared", "-o", str(path), *archive, *linked, "-ltorch_cpu", "-lc10", *openmp], check=True
        )


BUILT = [pytest.param(0), pytest.param(1), pytest.param(2, marks=pytest.mark.long)]
"""The two that differ in everything are built for each change: each takes many seconds."""


@pytest.fixture(scope="session", params=BUILT, ids=[of for of, *_ in PROCESSORS])
def loops(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loops:
    """Built once, whichever of a run's processes asks first: twelve seconds each."""
    _, threads, flags = PROCESSORS[request.param]
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / f"loops-{request.param}"
    folder.mkdir(exist_ok=True)
    with FileLock(folder / "lock"), pytest.MonkeyPatch.context() as patched:
        # An error where a vector is wider than the processor's: those lie in memory, not in registers.
        patched.setenv("CXX", shlex.join([*COMPILER, "-Werror=psabi", *flags]))
        return Loops(folder, threads)
