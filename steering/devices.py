"""Non-blocking copies to a device, and the state and memory of devices.

A blocking copy makes the host wait until the device has finished all earlier work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch

LEAST_FREE = 2**29
"""Bytes of a GPU's free memory that captured graphs leave, because prompts need it."""
REFUSALS = frozenset({1, 2, 9, *range(900, 909)})
"""CUDA's numbers of errors of single calls: invalid values, lack of memory, grids too large, and what no capture takes."""


def to_device(tensor: torch.Tensor, like: torch.Tensor | torch.device) -> torch.Tensor:
    """Return a tensor on a device, or on another tensor's device in its dtype; do not write to it afterwards."""
    device, dtype = (like, tensor.dtype) if isinstance(like, torch.device) else (like.device, like.dtype)
    tensor = tensor.to(dtype)
    if device.type == "cuda" and tensor.device.type == "cpu":  # from pageable memory even a non-blocking copy waits
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def zeros(shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    """Return zeros with the dtype and device of another tensor, which on a CPU take memory once they are written."""
    if like.device.type != "cpu":
        return like.new_zeros(shape)
    raw = np.zeros((*shape[:-1], shape[-1] * like.element_size()), np.uint8)
    return torch.from_numpy(raw).view(like.dtype)


def free_bytes(device: torch.device) -> int | None:
    """Return the memory that can be allocated on a device, including torch's own cache; None where it is unknown."""
    if device.type != "cuda":
        return None
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + cached


def leaves_room(device: torch.device, needed: int) -> bool:
    """Return True where a graph that needs so many bytes leaves enough memory, and where memory is unknown."""
    free = free_bytes(device)
    return free is None or free >= LEAST_FREE + needed


def lost(error: BaseException, devices: Iterable[torch.device]) -> bool:
    """Return True where a device is unusable after an error.

    After an assertion in a kernel, or an illegal access, all later calls fail; the first one reports it, possibly in the
    words of another library, or as if that call alone were refused.
    """
    if isinstance(error, torch.AcceleratorError) and getattr(error, "error_code", None) not in REFUSALS:
        return True
    try:
        for device in devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False


def fill_slot(table: torch.Tensor, slot: int, value: float | torch.Tensor) -> None:
    """Write a number, or a tensor () on its device, to one slot of a table (slots,) by a slice.

    A single element would need a copy from the CPU.
    """
    table[slot : slot + 1] = value


def gpu_memory(devices: Sequence[torch.device]) -> dict[str, float]:
    """Return the allocated, reserved, free and total memory of each GPU, keyed "gpu_memory_KIND_bytes DEVICE".

    Tensors hold the allocated bytes, torch the reserved ones; the free ones are those that no process uses.
    """
    kinds: dict[str, Callable[[torch.device], int]] = {
        "allocated": torch.cuda.memory_allocated,
        "reserved": torch.cuda.memory_reserved,
        "free": lambda device: torch.cuda.mem_get_info(device)[0],
        "total": lambda device: torch.cuda.mem_get_info(device)[1],
    }
    gpus = [device for device in devices if device.type == "cuda"]
    return {f"gpu_memory_{kind}_bytes {device}": size(device) for kind, size in kinds.items() for device in gpus}
