"""Two devices that a machine without any pretends to have: "pretend:0" and "pretend:1", computed on the CPU underneath.

They are a device type of their own (PrivateUse1 as a Python backend), so that torch's checks treat them as they treat GPUs:
an operation whose tensors are on two devices raises, copies apart. Numerics are the CPU's. `watch` tells what the host would
wait for on a GPU: copies to and from the CPU, and operations whose result decides what comes next.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
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
_apart: list[bool] = []
_devices: list[torch.device] = []


class Pretend(torch.Tensor):
    """A tensor of one of the devices; `under` has its values, sizes, strides and offset on the CPU."""

    under: torch.Tensor
    index: int
    """The number of its device."""
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def of(under: torch.Tensor, index: int) -> Pretend:
        layout: Any = {"strides": under.stride(), "storage_offset": under.storage_offset(), "storage_size": 2**60}
        inference = under.is_inference()
        same = inference == torch.is_inference_mode_enabled()
        with nullcontext() if same else torch.inference_mode(inference):
            wrapper: Any = torch.Tensor._make_wrapper_subclass(
                Pretend, under.shape, dtype=under.dtype, device=_devices[index], **layout
            )
        wrapper.under, wrapper.index = under, index
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
    return value.under if isinstance(value, Pretend) else value


def _below(value: Any, found: list[Any]) -> Any:
    """Return what an operation is given on the CPU, and add the tensors and devices that it was given to `found`."""
    kind = type(value)
    if kind is Pretend:
        found.append(value)
        return value.under
    if kind in (list, tuple):
        return kind([_below(entry, found) for entry in value])
    if kind is torch.device:
        found.append(value)
        return torch.device("cpu")
    if isinstance(value, torch.Tensor):
        found.append(value)
    return value


def _above(value: Any, wrappers: dict[int, Pretend], index: int) -> Any:
    """Return the result of an operation on a device."""
    if isinstance(value, torch.Tensor):
        return wrappers[id(value)] if id(value) in wrappers else Pretend.of(value, index)
    if isinstance(value, list | tuple):
        parts = [_above(entry, wrappers, index) for entry in value]
        return type(value)(parts) if type(value) in (list, tuple) else type(value)(*parts)
    return value


def _index_of(name: str, given: list[Any]) -> int:
    """Return the device on which an operation runs; raise RuntimeError if it has tensors of several devices."""
    named, own, devices = None, None, set()
    for one in given:
        if isinstance(one, Pretend):
            own = one.index if own is None else own
            devices.add(f"{NAME}:{one.index}")
        elif isinstance(one, torch.device):
            named = (one.index or 0) if named is None else named
        elif one.ndim:
            devices.add(str(one.device))
    if len(devices) > 1:
        raise RuntimeError(
            f"Expected all tensors on one device, but {name} got some on {' and '.join(sorted(devices))}."
        )
    index = own if named is None else named
    assert index is not None
    return index


def _run(op: Any, name: str, of_tensors: frozenset[int], *args: Any, **kwargs: Any) -> Any:
    """Any operation that is not composed of others: the CPU's, on tensors of one device.

    of_tensors: the numbers of its arguments that are tensors.
    """
    arguments = list(args)
    if name in ("index", "_index_put_impl_", "index_put_"):  # indices of the CPU are moved, as with CUDA
        device_index = next(one.index for one in [arguments[0], *arguments[1]] if isinstance(one, Pretend))
        if name != "index":  # there the composed part has made the copy, and told of it
            _wait(sum(isinstance(i, torch.Tensor) and not isinstance(i, Pretend) for i in arguments[1]))
        arguments[1] = [
            Pretend.of(i, device_index) if isinstance(i, torch.Tensor) and not isinstance(i, Pretend) else i
            for i in arguments[1]
        ]
    for i, value in enumerate(arguments):
        if i in of_tensors and isinstance(value, (int, float)):
            arguments[i] = torch.tensor(value)
    given: list[Any] = []
    plain_args = _below(arguments, given)
    plain_kwargs = {key: _below(value, given) for key, value in kwargs.items()}
    index = _index_of(name, given)
    _wait(_WAITING.get(name, 0))
    if name == "histc":  # of whole numbers, CUDA's alone
        return Pretend.of(op(plain_args[0].float(), *plain_args[1:], **plain_kwargs).to(plain_args[0].dtype), index)
    wrappers = {id(wrapper.under): wrapper for wrapper in given if isinstance(wrapper, Pretend)}
    out = op(*plain_args, **plain_kwargs)
    for wrapper in wrappers.values():
        if wrapper.shape != wrapper.under.shape:  # an output that was resized
            wrapper.as_strided_(wrapper.under.shape, wrapper.under.stride(), wrapper.under.storage_offset())
    return _above(out, wrappers, index)


def _copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    if isinstance(target, Pretend) != isinstance(source, Pretend) and source.numel():
        if _apart:
            raise RuntimeError("A capture copies between the CPU and a device: each replay reads what lies there then.")
        _wait(not non_blocking)
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


@contextmanager
def apart() -> Iterator[None]:
    """Raise for every copy between the CPU and a device, non-blocking ones included."""
    _apart.append(True)
    try:
        yield
    finally:
        _apart.pop()


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
    _devices.extend(torch.device(NAME, index) for index in range(2))
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
            kinds = [isinstance(argument.type, torch.TensorType) for argument in op._schema.arguments]
            of_tensors = frozenset(number for number, is_tensor in enumerate(kinds) if is_tensor)
            aten.impl(full, partial(_run, op, name.partition(".")[0], of_tensors), "PrivateUse1")
