"""The loops as a compiler makes them, called as a compiled step calls them."""

from __future__ import annotations

import ctypes
import os
import platform
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from torch.utils.cpp_extension import library_paths

from steering.compiled.building import LOOPS, build_loops
from steering.compiled.library import _address, _capsule, _handles

COMPILER = shlex.split(os.environ.get("CXX", "g++"))

X86 = platform.machine() in ("x86_64", "AMD64")
PROCESSORS = [
    ("one thread", 1, []),
    ("two threads, without AVX-512", 2, ["-mno-avx512f"] if X86 else []),
    ("one thread, without AVX2", 1, ["-mno-avx2"] if X86 else []),
]
"""For whom the loops are compiled: how many threads they have, and what this processor is to be without."""


class Loops:
    """The library's functions, called as a compiled step calls them."""

    def __init__(self, folder: Path, threads: int):
        path = folder / "loops.so"
        if not path.exists():
            self._build(path, threads)
        self._library = ctypes.CDLL(str(path))

    def _build(self, path: Path, threads: int) -> None:
        folder, linked = path.parent, [f"-L{one}" for one in library_paths()]
        build_loops(threads, folder)
        whole = ["-Wl,--whole-archive", str(folder / f"lib{LOOPS}.a"), "-Wl,--no-whole-archive"]
        openmp = [] if threads == 1 else ["-fopenmp"]
        subprocess.run(
            [*COMPILER, "-shared", "-o", str(path), *whole, *linked, "-ltorch_cpu", "-lc10", *openmp], check=True
        )

    def __call__(self, name: str, *given: Any) -> Any:
        """What a loop makes; RuntimeError where it refuses."""
        schema = getattr(torch.ops.helmsight, name).default._schema
        tensors = [one for value in given for one in (value if isinstance(value, list) else [value])]
        tensors = [one for one in tensors if isinstance(one, torch.Tensor)]
        handles = iter([_address(one, None) for one in _handles.unsafe_alloc_void_ptrs_from_tensors(tensors)])
        passed: list[Any] = []
        for value, declared in zip(given, schema.arguments, strict=True):
            kind = str(declared.type)
            if isinstance(value, list):
                passed += [(ctypes.c_void_p * len(value))(*[next(handles) for _ in value]), ctypes.c_int64(len(value))]
            elif isinstance(value, torch.Tensor):
                own = ctypes.c_void_p(next(handles))
                passed.append(ctypes.byref(own) if kind.startswith("Optional") else own)
            else:
                passed.append({"int": ctypes.c_int64, "float": ctypes.c_double}.get(kind, lambda none: none)(value))
        made = [ctypes.c_void_p() for _ in schema.returns]
        if self._library[f"aoti_torch_cpu_{name}"](*passed, *(map(ctypes.byref, made) if made else [None])):
            raise RuntimeError("it refused")
        out = _handles.alloc_tensors_by_stealing_from_void_ptrs([_capsule(one, None, None) for one in made])
        return out[0] if len(out) == 1 else tuple(out) or None


@pytest.fixture(scope="session", params=range(len(PROCESSORS)), ids=[of for of, *_ in PROCESSORS])
def loops(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loops:
    """Built once, whichever of a run's processes asks first: twelve seconds each."""
    _, threads, flags = PROCESSORS[request.param]
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / f"loops-{request.param}"
    folder.mkdir(exist_ok=True)
    with FileLock(folder / "lock"), pytest.MonkeyPatch.context() as patched:
        # An error where a vector is wider than the processor's: those lie in memory, not in registers.
        patched.setenv("CXX", shlex.join([*COMPILER, "-Werror=psabi", *flags]))
        return Loops(folder, threads)
