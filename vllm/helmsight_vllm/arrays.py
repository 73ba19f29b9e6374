"""Arrays as the contract writes them."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import numpy.typing as npt
import torch


def array_of(values: torch.Tensor) -> dict[str, Any]:
    """Return a tensor as JSON: its shape, and its values in base64, little-endian float32."""
    numbers = values.detach().to("cpu", torch.float32).contiguous().numpy()
    return {"shape": list(numbers.shape), "data": base64.b64encode(numbers.astype("<f4").tobytes()).decode()}


def sent(values: npt.NDArray[np.int64], device: torch.device) -> torch.Tensor:
    """Return an array's copy on a device, without waiting for it."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def mean_of(arrays: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the mean of arrays of one shape, such as those of tensor-parallel ranks."""
    if len(arrays) == 1:
        return arrays[0]
    values = [np.frombuffer(base64.b64decode(array["data"]), "<f4") for array in arrays]
    mean = np.mean(values, 0, dtype=np.float64).astype("<f4")
    return {"shape": arrays[0]["shape"], "data": base64.b64encode(mean.tobytes()).decode()}
