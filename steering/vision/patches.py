"""Convolutions of single patches, computed as the linear layers that they are.

Processors that cut pictures into patches leave a vision encoder a convolution whose kernel covers its whole input. Libraries
still run a general convolution, which takes two to four times as long on a CPU.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class _OfPatches(nn.modules.conv._ConvNd):
    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        """Return (n, outputs, *ones) for patches (n, channels, *sizes) if the kernel has these sizes."""
        if patches.shape[2:] != self.kernel_size:
            out: torch.Tensor = super().forward(patches)
            return out
        flat = F.linear(patches.flatten(1), self.weight.flatten(1), self.bias)
        return flat[(..., *[None] * len(self.kernel_size))]


class Patches2d(_OfPatches, nn.Conv2d):
    """A convolution of patches of pictures."""


class Patches3d(_OfPatches, nn.Conv3d):
    """A convolution of patches of pictures in time."""


_OF: dict[type[nn.Module], type[_OfPatches]] = {nn.Conv2d: Patches2d, nn.Conv3d: Patches3d}


def prepare(model: nn.Module) -> None:
    """Replace every convolution of a model that may be one of patches; other inputs are computed as before."""
    for module in model.modules():
        patched = _OF.get(type(module))
        if patched is None or "forward" in vars(module):  # its forward is wrapped already
            continue
        assert isinstance(module, nn.modules.conv._ConvNd)
        if module.groups == 1 and not any(module.padding) and set(module.dilation) == {1}:
            module.__class__ = patched
