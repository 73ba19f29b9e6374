"""Encoders that read the sizes of pictures to split and unpad features, for which a GPU's host does not wait."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from steering.devices import to_device


@contextmanager
def on_the_host(device: torch.device) -> Iterator[None]:
    """Keep an encoder on a device from copying sizes there with a wait within the block, if they are on the CPU.

    Numbers are copied without one; tensors that are only moved there stay on the CPU, as they are read next.
    """
    if device.type == "cpu":
        yield
        return
    with _Copies():
        yield


class _Copies(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.tensor and kwargs.get("device") is not None:
            return to_device(func(*args, **(kwargs | {"device": "cpu"})), torch.device(kwargs["device"]))
        if func is torch.as_tensor and isinstance(args[0], torch.Tensor) and args[0].device.type == "cpu":
            kwargs = kwargs | {"device": "cpu"}
        return func(*args, **kwargs)
