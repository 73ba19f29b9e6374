"""Tensor functions that a compiled step replaces by our own C++ loops; each defines its loop's result in torch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")

FOLDER = Path(__file__).parent
SHIMS: dict[torch._ops.OpOverload, list[str]] = {}
"""The C declaration of the function that torch calls for an operator in compiled code."""
_C = {
    "Tensor": "AtenTensorHandle",
    "Optional[Tensor]": "AtenTensorHandle*",
    "List[Tensor]": "const AtenTensorHandle*, int64_t",
    "int": "int64_t",
    "float": "double",
}


def operator(
    shaped: Callable[..., object], changes: tuple[str, ...] = ()
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Make a function a single operator where a step is compiled.

    Its result, a tensor, several or none, must be contiguous, and no view of its arguments. shaped: returns tensors of the
    same sizes for tracing; tracing the function itself would specialise some sizes. changes: the arguments that it writes
    to.
    """
    return lambda function: _register_operator(function, shaped, changes)


def _register_operator(
    function: Callable[P, T], shaped: Callable[..., object], changes: tuple[str, ...]
) -> Callable[P, T]:
    op = torch.library.custom_op(f"helmsight::{function.__name__}", function, mutates_args=changes)
    op.register_fake(shaped)
    overload = getattr(torch.ops.helmsight, function.__name__).default
    arguments = [_C[str(argument.type)] for argument in overload._schema.arguments]
    results = ["AtenTensorHandle*"] * (len(overload._schema.returns) or 1)  # a null pointer where there are none
    SHIMS[overload] = [f"AOTITorchError aoti_torch_cpu_{function.__name__}({', '.join([*arguments, *results])})"]

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        return (op if torch.compiler.is_compiling() else function)(*args, **kwargs)

    return call


def sources() -> list[Path]:
    """Return the C++ files of the loops, which can be compiled as one."""
    return sorted(FOLDER.glob("*.cpp"))
