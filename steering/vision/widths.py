"""FFN widths of vision encoders for a GPU's fast kernels.

The kernels of half precision want multiples of 8, and Qwen2.5-VL has 3,420.
"""

from __future__ import annotations

import torch
from torch import nn

MULTIPLE = 32


def align(model: nn.Module, decoder: nn.Module, device: torch.device) -> None:
    """Widen a half-precision model's narrow gated FFNs on a GPU by neurons that are always 0.

    The decoder's are left as they are, because their neurons are counted.
    """
    if device.type == "cuda":
        decoder_modules = set(decoder.modules())
        for module in model.modules():
            if module not in decoder_modules and _is_narrow(module):
                widen(module)


def widen(ffn: nn.Module) -> None:
    """Pad an FFN's width to a multiple; its results stay the same."""
    gate, up, down = (getattr(ffn, name) for name in ("gate_proj", "up_proj", "down_proj"))
    more = -gate.out_features % MULTIPLE
    for linear in (gate, up):
        linear.weight = _pad(linear.weight, (0, 0, 0, more))
        if linear.bias is not None:
            linear.bias = _pad(linear.bias, (0, more))
        linear.out_features += more
    down.weight = _pad(down.weight, (0, more))
    down.in_features += more


def _is_narrow(ffn: nn.Module) -> bool:
    """Return whether a module is an FFN with a width that such a kernel does not take."""
    parts = [getattr(ffn, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    linear = all(type(part) is nn.Linear and "forward" not in vars(part) for part in parts)
    return linear and parts[0].weight.element_size() == 2 and bool(parts[0].out_features % 8)  # type: ignore[union-attr]


def _pad(parameter: nn.Parameter, more: tuple[int, ...]) -> nn.Parameter:
    """Return the parameter padded with zeros."""
    return nn.Parameter(nn.functional.pad(parameter.data, more), requires_grad=parameter.requires_grad)
