"""Modules with a causal convolution, whose last inputs lie in slots, with what else they keep of all tokens before."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from steering.recurrent.states import RecurrentPass, inputs_before


def convolved(convolution: Any, inputs: torch.Tensor) -> torch.Tensor:
    """Return the output (rows, channels, n) of a causal convolution of each channel.

    inputs: (rows, channels, width + n), where the convolution has `width` + 1 taps.
    """
    weight, bias = convolution.weight, convolution.bias
    if inputs.shape[2] != weight.shape[2]:
        return F.conv1d(inputs.to(weight.dtype), weight, bias, groups=len(weight)).to(inputs.dtype)
    total = (inputs.float() * weight[:, 0].float()).sum(-1, keepdim=True)  # one token, for which torch's own is slow
    return (total if bias is None else total + bias.float()[:, None]).to(inputs.dtype)


class InSlots(ABC):
    """The forward pass of a module that keeps its states in the slots of a step; without one, it is the module's own."""

    def __init__(self, module: Any, layer: int, convolution: nn.Conv1d):
        self._module, self._layer, self._own = module, layer, module.forward
        self._width = convolution.kernel_size[0] - 1
        functools.update_wrapper(self, self._own)

    def __call__(self, hidden_states: torch.Tensor, *args: Any, step: Any = None, **kwargs: Any) -> torch.Tensor:
        if step is None:
            output: torch.Tensor = self._own(hidden_states, *args, **kwargs)
            return output
        return self._run(hidden_states, step.recurrent)

    @abstractmethod
    def _run(self, hidden_states: torch.Tensor, states: RecurrentPass) -> torch.Tensor:
        """Return the output (rows, n, d) for states (rows, n, d) of a pass."""

    def _out(self, mixed: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self._module.out_proj(mixed)
        return output

    def _last(self, states: RecurrentPass, inputs: torch.Tensor) -> torch.Tensor:
        """Return the last inputs of each row, (rows, channels, width), of those and the ones before, width + n."""
        if states.real is None:
            return inputs[:, :, inputs.shape[2] - self._width :]
        return inputs_before(inputs, states.real_on(inputs.device), self._width)
