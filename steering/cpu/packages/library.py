"""A shared library that torch compiled ahead of time, called without the interpreter's lock.

torch's own loader holds the lock while a step runs, so that no other thread of the process can read a request or send a
token meanwhile. This calls the library's C interface (aoti_runtime/interface.h of torch) instead.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from steering.cpu.kernels.native import lent, taken

_PREFIX = "AOTInductorModelContainer"
_BIND = f"{_PREFIX}UpdateUserManagedConstantBufferPairs"


class _Constant(ctypes.Structure):
    _fields_ = (("name", ctypes.c_char_p), ("handle", ctypes.c_void_p))


class Library:
    """A compiled function of tensors on the CPU, over constants that stay in place and that it keeps alive."""

    def __init__(self, path: Path, tensors: Mapping[str, torch.Tensor], threads: int = 1):
        """Load a library. tensors: by name, among them its constants. threads: maximum number of concurrent calls.

        Raises OSError for a file that is not a library, KeyError where it needs a missing tensor, and RuntimeError where
        torch is too old or refuses.
        """
        self.native = ctypes.CDLL(str(path))
        if not hasattr(self.native, _BIND):
            raise RuntimeError(f"steps compiled by torch {torch.__version__} cannot be called without torch's loader")
        self._container = ctypes.c_void_p()
        self._call("CreateWithDevice", ctypes.byref(self._container), ctypes.c_size_t(threads), b"cpu", None)
        count = ctypes.c_size_t()
        self._call("GetNumOutputs", self._container, ctypes.byref(count))
        self._output_handles = ctypes.c_void_p * count.value
        self._call("GetNumConstants", self._container, ctypes.byref(count))
        names = [(self._constant_name("Name", at), self._constant_name("OriginalFQN", at)) for at in range(count.value)]
        self._tensors = [tensors[name.decode()].data for _, name in names]
        handles = lent(self._tensors)
        pairs = [_Constant(name, handle) for (name, _), handle in zip(names, handles, strict=True)]
        bound = (_Constant * len(pairs))(*pairs)
        self._call(_BIND.removeprefix(_PREFIX), self._container, bound, ctypes.c_size_t(len(pairs)), False, True)
        self._run = self.native[f"{_PREFIX}Run"]
        weakref.finalize(self, _close, self.native[f"{_PREFIX}Delete"], self._container, handles)

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the outputs."""
        outputs = self._output_handles()
        arguments = (ctypes.c_void_p * len(inputs))(*lent(inputs))
        counts = ctypes.c_size_t(len(inputs)), ctypes.c_size_t(len(outputs))
        self._check(self._run(self._container, arguments, counts[0], outputs, counts[1], None, None))
        return taken(outputs)

    def _constant_name(self, kind: str, at: int) -> bytes:
        name = ctypes.c_char_p()
        self._call(f"GetConstant{kind}", self._container, ctypes.c_size_t(at), ctypes.byref(name))
        assert name.value is not None
        return name.value

    def _call(self, function: str, *arguments: Any) -> None:
        self._check(self.native[_PREFIX + function](*arguments))

    def _check(self, failed: int) -> None:
        if failed:
            message = ctypes.c_char_p()
            self.native.AOTInductorGetLastError(ctypes.byref(message))
            lines = (message.value or b"").decode(errors="replace").splitlines()
            raise RuntimeError(lines[0] if lines else "torch gives no reason")


def _close(delete: Any, container: ctypes.c_void_p, handles: list[int]) -> None:
    delete(container)
    taken(handles)
