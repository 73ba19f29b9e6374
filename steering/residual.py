"""What happens to the residual stream behind each decoder layer: vectors are added, states are read.

The layers are extended once, at load, and find their settings in the step that travels with the forward pass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

TEXT, IMAGE = 0, 1
"""Classes of prompt tokens that a vector may be added to separately."""


def install(layers: nn.ModuleList) -> None:
    """Extend every decoder layer; a forward pass without a step is left as it is.

    The layer's `forward` is wrapped, because a forward hook that sees keyword arguments takes torch's slow call path.
    """
    for index, layer in enumerate(layers):
        layer.forward = _extended(layer.forward, index)


def _extended(forward: Callable[..., torch.Tensor], index: int) -> Callable[..., torch.Tensor]:
    @functools.wraps(forward)
    def extended(*args: Any, **kwargs: Any) -> torch.Tensor:
        output = forward(*args, **kwargs)
        step = kwargs.get("step")
        return output if step is None else step.residual.after_layer(index, output)

    return extended


class DecodeResidual:
    """What is added to each row's token. delta: (layers, rows, d), zero where a row is not steered: the same work for
    every batch."""

    def __init__(self, delta: torch.Tensor):
        self._by_layer = delta.unsqueeze(2).unbind(0)  # views (rows, 1, d)

    def after_layer(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self._by_layer[layer]


@dataclass
class PrefillResidual:
    """classes: (rows, n, 2) one-hot TEXT or IMAGE, zero on padding. delta: for each steered layer (rows, 2, d).

    norms: for each steered layer (rows, 2), the sum over the class's tokens of |h| before the addition.
    last: (rows,) index of the prompt's last token where the residual stream is to be read into `states`
    (layers, rows, d), else None.
    """

    classes: torch.Tensor
    delta: dict[int, torch.Tensor] = field(default_factory=dict)
    norms: dict[int, torch.Tensor] = field(default_factory=dict)
    last: torch.Tensor | None = None
    states: torch.Tensor | None = None

    def after_layer(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        if layer in self.delta:
            self.norms[layer] = (hidden.float().norm(dim=-1, keepdim=True) * self.classes).sum(1)
            hidden = hidden + (self.classes.to(hidden.dtype) @ self.delta[layer])
        if self.last is not None and self.states is not None:
            self.states[layer] = hidden[torch.arange(len(hidden), device=hidden.device), self.last]
        return hidden
