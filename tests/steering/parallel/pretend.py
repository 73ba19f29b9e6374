"""Two devices that a machine without any pretends to have: "pretend:0" and "pretend:1", computed on the CPU underneath.

They are a device type of their own (PrivateUse1 as a Python backend), so that torch's checks treat them as they treat GPUs:
an operation whose tensors are on two devices raises, copies apart. Numerics are the CPU's. `watch` tells what the host would
wait for on a GPU: copies to and from the CPU, and operations whose result decides what comes next.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "pretend"
_WHOLE = {
    *("alias", "detach", "lift", "lift_fresh", "_unsafe_view", "view.dtype"),  # composed, they lose what is underneath
    *("convolution", "scaled_dot_product_attention"),  # composed, they ask which of torch's own devices it is
}
_WAITING = {"_local_scalar_dense": 1, "nonzero": 1, "masked_select": 1, "equal": 1, "_unique2": 1, "bincount": 2}
"""The number of host waits in operations that are not copies."""
_PYTHON = torch._C.DispatchKeySet(torch._C.DispatchKey.Python)
_libraries: list[torch.library.Library] = []
_watched: list[list[str]] = []


class Pretend(torch.Tensor):
    """A tensor of one of the devices; `under` has its values, sizes, strides and offset on the CPU."""

    under: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def of(under: torch.Tensor, index: int) -> Pretend:
        layout: Any = {"strides": under.stride(), "storage_offset": under.storage_offset(), "storage_size": 2**60}
        with torch.inference_mode(under.is_inference()):
            wrapper: Any = torch.Tensor._make_wrapper_subclass(
                Pretend, under.shape, dtype=under.dtype, device=torch.device(NAME, index), **layout
            )
        wrapper.under = under
        return wrapper

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_PYTHON):
            return func(*args, **(kwargs or {}))

    def __setitem__(self, index: Any, value: Any) -> None:
        # A number is a scalar of the CPU first, as with CUDA: for single or chosen elements that is a copy, else a fill.
        number = isinstance(value, bool | int | float)
        super().__setitem__(index, torch.tensor(value, dtype=self.dtype) if number else value)

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def data_ptr(self) -> int:
        return self.under.data_ptr()

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"{self.device}({self.cpu()})"


def _plain(value: Any) -> Any:
    if isinstance(value, Pretend):
        return value.under
    return torch.device("cpu") if isinstance(value, torch.device) else value


def _mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """Change every part of the inputs and outputs of operations; torch's own way to do so takes half of all time here."""
    if isinstance(value, list | tuple):
        parts = [_mapped(change, entry) for entry in value]
        return type(value)(parts) if type(value) in (list, tuple) else type(value)(*parts)
    if isinstance(value, dict):
        return {name: _mapped(change, entry) for name, entry in value.items()}
    return change(value)


def _parts(value: Any) -> list[Any]:
    parts: list[Any] = []
    _mapped(parts.append, value)
    return parts


def _index_of(name: str, flat: list[Any]) -> int:
    """Return the device on which an operation runs; raise RuntimeError if it has tensors of several devices."""
    indices = [device.index or 0 for device in flat if isinstance(device, torch.device)]
    tensors = [tensor for tensor in flat if isinstance(tensor, torch.Tensor)]
    devices = {str(tensor.device) for tensor in tensors if isinstance(tensor, Pretend) or tensor.ndim}
    if len(devices) > 1:
        raise RuntimeError(
            f"Expected all tensors on one device, but {name} got some on {' and '.join(sorted(devices))}."
        )
    own_indices = [tensor.device.index for tensor in tensors if isinstance(tensor, Pretend)]
    return (indices or own_indices)[0]


def _run(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Any operation that is not composed of others: the CPU's, on tensors of one device."""
    name, arguments = op._schema.name.removeprefix("aten::"), list(args)
    flat = _parts([arguments, kwargs])
    if name in ("index", "_index_put_impl_", "index_put_"):  # indices of the CPU are moved, as with CUDA
        device_index = next(tensor.device.index for tensor in flat if isinstance(tensor, Pretend))
        if name != "index":  # there the composed part has made the copy, and told of it
            _wait(sum(isinstance(i, torch.Tensor) and not isinstance(i, Pretend) for i in arguments[1]))
        arguments[1] = [
            Pretend.of(i, device_index) if isinstance(i, torch.Tensor) and not isinstance(i, Pretend) else i
            for i in arguments[1]
        ]
    for i, (argument, value) in enumerate(zip(op._schema.arguments, arguments, strict=False)):
        if isinstance(value, (int, float)) and isinstance(argument.type, torch.TensorType):
            arguments[i] = torch.tensor(value)
    flat = _parts([arguments, kwargs])
    index = _index_of(name, flat)
    _wait(_WAITING.get(name, 0))
    plain_args, plain_kwargs = _mapped(_plain, [arguments, kwargs])
    if name == "histc":  # of whole numbers, CUDA's alone
        return Pretend.of(op(plain_args[0].float(), *plain_args[1:], **plain_kwargs).to(plain_args[0].dtype), index)
    wrappers = {id(wrapper.under): wrapper for wrapper in flat if isinstance(wrapper, Pretend)}
    out = op(*plain_args, **plain_kwargs)
    for wrapper in wrappers.values():
        if wrapper.shape != wrapper.under.shape:  # an output that was resized
            wrapper.as_strided_(wrapper.under.shape, wrapper.under.stride(), wrapper.under.storage_offset())

    def pretended(result: Any) -> Any:
        if not isinstance(result, torch.Tensor):
            return result
        return wrappers[id(result)] if id(result) in wrappers else Pretend.of(result, index)

    return _mapped(pretended, out)


def _copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    if isinstance(target, Pretend) != isinstance(source, Pretend) and source.numel() and not non_blocking:
        _wait(1)
    _plain(target).copy_(_plain(source))
    return target


def _copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    return _copy(target, source, non_blocking)


@contextmanager
def watch() -> Iterator[list[str]]:
    """Yield the lines of our code, file:number, that made the host wait, as often as each did."""
    _watched.append(lines := [])
    try:
        yield lines
    finally:
        _watched.remove(lines)


def _wait(times: int) -> None:
    for watching in _watched if times else ():
        frame: Any = sys._getframe(1)
        while frame is not None and ("/steering/" not in (file := frame.f_code.co_filename) or "/tests/" in file):
            frame = frame.f_back
        line = "?" if frame is None else f"{frame.f_code.co_filename.split('/steering/')[-1]}:{frame.f_lineno}"
        watching.extend([line] * times)


def install() -> None:
    """Make the devices known to torch; they stay until the process ends."""
    if _libraries:
        return
    _setup_privateuseone_for_python_backend(NAME)
    _libraries.append(aten := torch.library.Library("aten", "IMPL"))
    ours = {"copy_": _copy, "_copy_from": _copy_from}
    computed = torch._C._dispatch_has_computed_kernel_for_dispatch_key
    for full in torch._C._dispatch_get_all_op_names():
        name = full.removeprefix("aten::")
        if name in ours:
            aten.impl(full, ours[name], "PrivateUse1")
        elif full != name and (name in _WHOLE or (computed(full, "CPU") and not computed(full, "PrivateUse1"))):
            packet, _, overload = name.partition(".")
            op = getattr(getattr(torch.ops.aten, packet), overload or "default")
            aten.impl(full, partial(_run, op), "PrivateUse1")
