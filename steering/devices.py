"""Copies to a device that nobody waits for: others have the host wait until the device has done all it was told before. And
what state a device is in."""

from __future__ import annotations

from collections.abc import Iterable

import torch

NO_MEMORY = 2
"""CUDA's number of the error that leaves a device as it was."""


def sent(tensor: torch.Tensor, like: torch.Tensor | torch.device) -> torch.Tensor:
    """A tensor of the CPU on a device, or on that of a tensor and in its dtype; it must not be written to afterwards."""
    device, dtype = (like, tensor.dtype) if isinstance(like, torch.device) else (like.device, like.dtype)
    tensor = tensor.to(dtype)
    if device.type == "cuda":  # from other memory a copy waits although it is told not to
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def free_bytes(device: torch.device) -> int | None:
    """How much memory may be allotted on a device, what torch keeps for that included; None where nobody knows."""
    if device.type != "cuda":
        return None
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + kept


def lost(error: BaseException, devices: Iterable[torch.device]) -> bool:
    """Whether a device is of no more use behind an error: after an assertion in a kernel, or an illegal access, all that
    comes fails, and whoever comes first tells of it, in the words of a library too."""
    if isinstance(error, torch.AcceleratorError) and getattr(error, "error_code", None) != NO_MEMORY:
        return True
    try:
        for device in devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False


def fill(table: torch.Tensor, slot: int, value: float) -> None:
    """Write a number to one slot of a table (slots,): to a single element it would be a copy from the CPU."""
    table[slot : slot + 1] = value
