"""A shared library that torch compiled ahead of time, called without the interpreter's lock.

torch's own loader holds the lock while a step runs, so that no other thread of the process does anything meanwhile: none
reads a request, none sends a token. This calls the library's C interface (aoti_runtime/interface.h of torch) instead.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

_handles: Any = torch._C._aoti  # type: ignore[attr-defined]
_address = ctypes.pythonapi.PyCapsule_GetPointer
_address.restype, _address.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.restype, _capsule.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
_PREFIX = "AOTInductorModelContainer"
_BIND = f"{_PREFIX}UpdateUserManagedConstantBufferPairs"


class _Constant(ctypes.Structure):
    _fields_ = (("name", ctypes.c_char_p), ("handle", ctypes.c_void_p))


class Library:
    """A compiled function of tensors on the CPU, over constants that stay where they are and that it keeps alive."""

    def __init__(self, path: Path, tensors: Mapping[str, torch.Tensor], threads: int = 1):
        """Load a library. tensors: by name, among them its constants. threads: how many may call it at once.

        Raises OSError for a file that is none, KeyError where it needs a tensor that is not there, and RuntimeError for one
        of a torch that is too old, and where torch refuses.
        """
        self._library = ctypes.CDLL(str(path))
        if not hasattr(self._library, _BIND):
            raise RuntimeError(f"what torch {torch.__version__} compiles cannot be called without its loader")
        self._container = ctypes.c_void_p()
        self._call("CreateWithDevice", ctypes.byref(self._container), ctypes.c_size_t(threads), b"cpu", None)
        count = ctypes.c_size_t()
        self._call("GetNumOutputs", self._container, ctypes.byref(count))
        self._made = ctypes.c_void_p * count.value
        self._call("GetNumConstants", self._container, ctypes.byref(count))
        names = [(self._named("Name", at), self._named("OriginalFQN", at)) for at in range(count.value)]
        self._tensors = [tensors[known.decode()].data for _, known in names]
        self._held = _handles.unsafe_alloc_void_ptrs_from_tensors(self._tensors)
        pairs = [_Constant(own, _address(one, None)) for (own, _), one in zip(names, self._held, strict=True)]
        bound = (_Constant * len(pairs))(*pairs)
        self._call(_BIND.removeprefix(_PREFIX), self._container, bound, ctypes.c_size_t(len(pairs)), False, True)
        self._run = self._library[f"{_PREFIX}Run"]
        weakref.finalize(self, _close, self._library[f"{_PREFIX}Delete"], self._container, self._held)

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The outputs."""
        outputs = self._made()
        given = (ctypes.c_void_p * len(inputs))(
            *[_address(one, None) for one in _handles.unsafe_alloc_void_ptrs_from_tensors(inputs)]
        )
        counts = ctypes.c_size_t(len(inputs)), ctypes.c_size_t(len(outputs))
        self._checked(self._run(self._container, given, counts[0], outputs, counts[1], None, None))
        made: list[torch.Tensor] = _handles.alloc_tensors_by_stealing_from_void_ptrs(
            [_capsule(one, None, None) for one in outputs]
        )
        return made

    def _named(self, kind: str, at: int) -> bytes:
        name = ctypes.c_char_p()
        self._call(f"GetConstant{kind}", self._container, ctypes.c_size_t(at), ctypes.byref(name))
        assert name.value is not None
        return name.value

    def _call(self, function: str, *arguments: Any) -> None:
        self._checked(self._library[_PREFIX + function](*arguments))

    def _checked(self, failed: int) -> None:
        if failed:
            told = self._library.AOTInductorGetLastError
            told.restype = ctypes.c_char_p
            raise RuntimeError((told() or b"torch says no more").decode(errors="replace").splitlines()[0])


def _close(delete: Any, container: ctypes.c_void_p, held: list[Any]) -> None:
    delete(container)
    _handles.alloc_tensors_by_stealing_from_void_ptrs(held)  # and let go of them
