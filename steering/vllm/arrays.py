"""Arrays in the JSON of vLLM servers: their shape, and their float32 values as base64."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def tensor_of(array: Mapping[str, Any]) -> torch.Tensor:
    """Return an array as a tensor; raise ValueError where its size is not that of its shape."""
    shape, data = [int(size) for size in array["shape"]], base64.b64decode(array["data"])
    if len(data) != 4 * math.prod(shape):
        raise ValueError(f"an array of shape {shape} came with {len(data)} bytes")
    # A copy: torch wants memory that may be written.
    return torch.from_numpy(np.frombuffer(data, "<f4").astype(np.float32).reshape(shape))


def array_of(tensor: torch.Tensor) -> dict[str, Any]:
    """Return a tensor as such an array."""
    values = tensor.detach().to("cpu", torch.float32).contiguous().numpy().astype("<f4", copy=False)
    return {"shape": list(tensor.shape), "data": base64.b64encode(values.tobytes()).decode()}
