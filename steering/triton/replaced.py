"""Replaced forward passes, and the comparison that each replacement has to pass at load."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from steering.forwards import runs_own

WITHIN = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
"""Largest difference of two results relative to the largest of them: the last bits of the dtype."""


class Replaced:
    """A module's forward pass, and its replacement."""

    def __init__(self, module: nn.Module, replacement: Callable[..., Any]):
        self._module, self._replacement = module, replacement

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if runs_own():
            return type(self._module).forward(self._module, *args, **kwargs)
        return self._replacement(*args, **kwargs)


def is_linear(layer: Any) -> bool:
    """Return True for a plain linear layer, whole on one device."""
    return type(layer) is nn.Linear and not isinstance(layer.weight, DTensor)


def drawn(shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    """Return random numbers, the same each time, with the dtype and device of `like`."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator).to(like)


def alike(ours: torch.Tensor, expected: torch.Tensor) -> bool:
    """Return True where two tensors agree up to the last bits of their dtype, relative to the largest number."""
    if ours.shape != expected.shape or ours.dtype != expected.dtype or expected.dtype not in WITHIN:
        return False
    ours, most = ours.float(), expected.float().abs().max()
    return bool((ours - expected.float()).abs().max() <= WITHIN[expected.dtype] * most)
