"""Limits of a device, and timing of calls on it."""

from __future__ import annotations

import platform
import resource
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import torch

from steering.bench.rows import Unavailable
from steering.triton.capture import Capture


def wait(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def seconds(device: torch.device, run: Callable[[], object], repeats: int, times: int = 1) -> float:
    """Return the seconds of a call: the median over repeats of `times` calls in a row, with one wait at the end.

    A first repeat is not counted.
    """
    durations = []
    for _ in range(repeats + 1):
        wait(device)
        begun = time.perf_counter()
        for _ in range(times):
            run()
        wait(device)
        durations.append((time.perf_counter() - begun) / times)
    return statistics.median(durations[1:])


def bandwidth(device: torch.device, size: int) -> float:
    """Return the bytes a second that a copy of `size` bytes reads and writes."""
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / seconds(device, lambda: target.copy_(source), repeats=5, times=4)


def products(device: torch.device, dtype: torch.dtype, width: int) -> float:
    """Return the operations a second of a product of square matrices."""
    matrix = torch.randn(width, width, device=device, dtype=dtype)
    return 2 * width**3 / seconds(device, lambda: matrix @ matrix, repeats=5, times=4)


def peak_bytes(device: torch.device) -> dict[str, int]:
    """Return the peak memory of this process: of the device, or otherwise of the machine."""
    if device.type == "cuda":
        return {
            "allocated": torch.cuda.max_memory_allocated(device),
            "reserved": torch.cuda.max_memory_reserved(device),
        }
    return {"resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}


def graphed(device: torch.device, run: Callable[[], torch.Tensor]) -> Callable[[], object]:
    """Return the call as a CUDA graph, which launches all its kernels at once; raise Unavailable without CUDA."""
    if device.type != "cuda":
        raise Unavailable(f"{device.type} has no CUDA graphs.")
    replay, _ = Capture()(lambda: [run()], device)
    return replay


def facts(device: torch.device) -> dict[str, Any]:
    """Return the facts that figures depend on: the device, and versions."""
    details: dict[str, Any] = {"device": platform.processor() or platform.machine()}
    if device.type == "cuda":
        about = torch.cuda.get_device_properties(device)
        details = {
            "device": f"{about.name}, {about.total_memory / 2**30:.0f} GiB, {about.multi_processor_count} processors",
            "CUDA": torch.version.cuda,
        }
    packages = {name: version(name) for name in ("torch", "transformers", "helmsight")}
    return details | packages | {"Python": platform.python_version(), "system": platform.platform()}
