"""The peak memory of a request."""

from __future__ import annotations

import re
from pathlib import Path

import torch

_CLEAR, _STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")


def forget_peak(device: torch.device) -> None:
    """Reset the peak that the next call of `peak` returns."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif _CLEAR.exists():
        _CLEAR.write_text("5")


def peak(device: torch.device) -> float | None:
    """Return the most megabytes (10^6 bytes) in use since the last reset; None if the system does not report it.

    On a GPU this is torch's memory there, otherwise this process's resident memory.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e6
    match = re.search(r"VmHWM:\s+(\d+) kB", _STATUS.read_text()) if _CLEAR.exists() else None
    return None if match is None else int(match[1]) * 1024 / 1e6
