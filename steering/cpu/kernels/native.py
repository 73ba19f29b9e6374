"""Calls of compiled code by its C interface, without the interpreter's lock, which `ctypes` releases."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from typing import Any

import torch

_handles: Any = torch._C._aoti
_address = ctypes.pythonapi.PyCapsule_GetPointer
_address.restype, _address.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.restype, _capsule.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
_NUMBERS = {"int": ctypes.c_int64, "float": ctypes.c_double}


def lent(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return handles of tensors, which keep them alive until `taken`, by us or by the function that gets them."""
    return [_address(tensor, None) for tensor in _handles.unsafe_alloc_void_ptrs_from_tensors(tensors)]


def taken(handles: Iterable[int | None]) -> list[torch.Tensor]:
    """Return the tensors of handles, and free the handles."""
    tensors: list[torch.Tensor] = _handles.alloc_tensors_by_stealing_from_void_ptrs(
        [_capsule(handle, None, None) for handle in handles]
    )
    return tensors


class Loops:
    """Our own loops, called as a compiled step calls them, from any library that steps were linked with.

    threads: the number of threads that share each call.
    """

    def __init__(self, library: ctypes.CDLL, threads: int):
        self._library, self.threads = library, threads

    def __call__(self, name: str, *arguments: Any) -> Any:
        """Return the result of the operator of this name; raise RuntimeError where its loop rejects the arguments."""
        declared = getattr(torch.ops.helmsight, name).default._schema
        tensors = [tensor for value in arguments for tensor in (value if isinstance(value, list) else [value])]
        handles = lent([tensor for tensor in tensors if isinstance(tensor, torch.Tensor)])
        try:
            passed, results = (
                self._c_arguments(declared, arguments, handles),
                [ctypes.c_void_p() for _ in declared.returns],
            )
            failed = self._library[f"aoti_torch_cpu_{name}"](
                *passed, *(map(ctypes.byref, results) if results else [None])
            )
        finally:
            taken(handles)  # a loop only borrows them
        if failed:
            raise RuntimeError(f"the loop of {name} rejected its arguments")
        out = taken([handle.value for handle in results])
        return out[0] if len(out) == 1 else tuple(out) or None

    @staticmethod
    def _c_arguments(declared: Any, values: Sequence[Any], handles: Sequence[int]) -> list[Any]:
        """Return the arguments of the C function, with tensors replaced by these handles in turn."""
        pointers, passed = map(ctypes.c_void_p, handles), list[Any]()
        for value, argument in zip(values, declared.arguments, strict=True):
            kind = str(argument.type)
            if isinstance(value, list):
                passed += [(ctypes.c_void_p * len(value))(*[next(pointers) for _ in value]), ctypes.c_int64(len(value))]
            elif isinstance(value, torch.Tensor):
                passed.append(ctypes.byref(next(pointers)) if kind.startswith("Optional") else next(pointers))
            else:
                passed.append(_NUMBERS.get(kind, lambda none: none)(value))
        return passed
