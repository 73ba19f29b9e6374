"""Linear attention by the gated delta rule, with the recurrent states of slots.

A layer of Qwen3.5 and its likes has, for each head, a matrix S (k, v) in place of keys and values: S <- exp(g) S, then
S <- S + k (beta (v - S^T k))^T, and the output is S^T q (Yang et al. 2025, "Gated Delta Networks", section 3.1). Queries,
keys and values come out of a short causal convolution.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from steering.errors import UnsupportedModel
from steering.recurrent.kernel import StepFunction, step_kernel
from steering.recurrent.rule import one_token, projected
from steering.recurrent.states import LayerStates, RecurrentPass

_PARTS = ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "conv1d", "A_log", "dt_bias", "norm", "out_proj")
"""The parts of such a module, by the names that Qwen3.5 gives them."""


def prepare(layers: nn.ModuleList, config: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Let linear attention keep its states in slots; return the numbers of the other layers, and of those that have it.

    A forward pass without a step is left as it is. Raises UnsupportedModel for linear attention of another form; config: the
    text model's, which tells the types of layers.
    """
    found = []
    for index, layer in enumerate(layers):
        for module in layer.children():
            if all(hasattr(module, part) for part in _PARTS):
                module.forward = GatedDelta(module, index, step_kernel(module))
                found.append(index)
    kinds = getattr(config, "layer_types", None) or ()
    if unknown := {at for at, kind in enumerate(kinds[: len(layers)]) if kind == "linear_attention"} - {*found}:
        raise UnsupportedModel(f"The linear attention of layers {sorted(unknown)} has an unknown form.")
    return tuple(at for at in range(len(layers)) if at not in found), tuple(found)


class GatedDelta:
    """The forward pass of a layer's linear attention; `kernel` computes single tokens, where there is one."""

    def __init__(self, module: Any, layer: int, kernel: StepFunction | None):
        self._module, self._layer, self._own, self._kernel = module, layer, module.forward, kernel
        self._width = module.conv1d.kernel_size[0] - 1
        # transformers' function, or that of flash-linear-attention where it is installed
        self._scan = sys.modules[type(module).__module__].torch_chunk_gated_delta_rule
        functools.update_wrapper(self, self._own)

    def __call__(self, hidden_states: torch.Tensor, *args: Any, step: Any = None, **kwargs: Any) -> torch.Tensor:
        if step is None:
            return self._own(hidden_states, *args, **kwargs)
        module, states, n = self._module, step.recurrent, hidden_states.shape[1]
        names = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")  # which may be one product
        mixed, gate, beta, alpha = (getattr(module, name)(hidden_states) for name in names)
        pooled, read, write = states.places(self._layer, n, functools.partial(self._empty, mixed))
        if n == 1 and self._kernel is not None:
            projections = (tensor.flatten(0, 1) for tensor in (mixed, gate, alpha, beta))
            return module.out_proj(self._kernel(module, *projections, pooled, (read, write))[:, None])
        before, matrix = (tensor.index_select(0, read) for tensor in pooled)
        inputs = torch.cat([before, mixed.transpose(1, 2)], 2)
        if n == 1:
            output, matrix = one_token(module, inputs, alpha[:, 0], beta[:, 0], matrix)
        else:
            output, matrix = self._many(states, inputs, alpha, beta, matrix)
        if write is not None:
            for tensor, new in zip(pooled, (self._last(states, inputs), matrix), strict=True):
                tensor.index_copy_(0, write, new)
        output = module.norm(output.flatten(0, -2), gate.reshape(-1, module.head_v_dim))
        return module.out_proj(output.view_as(gate))

    def _empty(self, mixed: torch.Tensor) -> LayerStates:
        """Return a row of states of any values."""
        module = self._module
        matrix = (1, module.num_v_heads, module.head_k_dim, module.head_v_dim)
        return mixed.new_empty(1, mixed.shape[2], self._width), mixed.new_empty(matrix, dtype=torch.float32)

    def _last(self, states: RecurrentPass, inputs: torch.Tensor) -> torch.Tensor:
        """Return the last inputs of each row, (rows, channels, width)."""
        if states.real is None:
            return inputs[:, :, inputs.shape[2] - self._width :]
        at = states.real_on(inputs.device)[:, None] + torch.arange(self._width, device=inputs.device)
        return inputs.gather(2, at[:, None].expand(-1, inputs.shape[1], -1))

    def _many(
        self,
        states: RecurrentPass,
        inputs: torch.Tensor,
        alpha: torch.Tensor,
        beta: torch.Tensor,
        matrix: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output (rows, n, heads, v) of several tokens a row, and the states behind them.

        inputs: (rows, channels, width + n). alpha, beta: (rows, n, heads), before their functions.
        """
        module = self._module
        decay = -module.A_log.float().exp() * F.softplus(alpha.float() + module.dt_bias)
        tokens = (*projected(module, inputs), decay, beta.sigmoid())
        if states.undivided:
            return self._scanned(tokens, matrix)
        value = tokens[2]
        rows, n, heads, width = value.shape
        output = value.new_zeros(rows, n + 1, heads, width)  # the last is of padding
        row = torch.arange(rows, device=value.device)[:, None]
        for part, (at, own) in enumerate(states.parts_on(value.device)):
            some = [tensor[row, at.clamp(max=n - 1)] for tensor in tokens]
            some[3:] = (tensor * own[..., None] for tensor in some[3:])  # behind padding a state stays as it is
            result, matrix = self._scanned(tuple(some), matrix)
            output[row, torch.where(own, at, n)] = result
            states.take(self._layer, part, inputs, self._width, matrix)
        return output[:, :n], matrix

    def _scanned(self, tokens: tuple[torch.Tensor, ...], matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        query, key, value, decay, beta = tokens
        output, matrix = self._scan(
            query, key, value, g=decay, beta=beta,
            initial_state=matrix, output_final_state=True, use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        return output, matrix
