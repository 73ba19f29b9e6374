"""Copies to a device that nobody waits for: others have the host wait until the device has done all it was told before."""

from __future__ import annotations

import torch


def sent(tensor: torch.Tensor, like: torch.Tensor | torch.device) -> torch.Tensor:
    """A tensor of the CPU on a device, or on that of a tensor and in its dtype; it must not be written to afterwards."""
    device, dtype = (like, tensor.dtype) if isinstance(like, torch.device) else (like.device, like.dtype)
    tensor = tensor.to(dtype)
    if device.type == "cuda":  # from other memory a copy waits although it is told not to
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def fill(table: torch.Tensor, slot: int, value: float) -> None:
    """Write a number to one slot of a table (slots,): to a single element it would be a copy from the CPU."""
    table[slot : slot + 1] = value
