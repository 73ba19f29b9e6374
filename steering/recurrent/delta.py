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

from steering.recurrent.kernel import StepFunction
from steering.recurrent.rule import one_token, projected
from steering.recurrent.slots import InSlots
from steering.recurrent.states import LayerStates, RecurrentPass

PARTS = ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "conv1d", "A_log", "dt_bias", "norm", "out_proj")
"""The parts of such a module, by the names that Qwen3.5 gives them."""


class GatedDelta(InSlots):
    """The forward pass of a layer's linear attention; `kernel` computes single tokens, where there is one."""

    def __init__(self, module: Any, layer: int, kernel: StepFunction | None):
        super().__init__(module, layer, module.conv1d)
        self._kernel = kernel
        # transformers' function, or that of flash-linear-attention where it is installed
        self._scan = sys.modules[type(module).__module__].torch_chunk_gated_delta_rule

    def _run(self, hidden_states: torch.Tensor, states: RecurrentPass) -> torch.Tensor:
        module, n = self._module, hidden_states.shape[1]
        names = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")  # which may be one product
        mixed, gate, beta, alpha = (getattr(module, name)(hidden_states) for name in names)
        pooled, read, write = states.places(self._layer, n, functools.partial(self._empty, mixed))
        if n == 1 and self._kernel is not None:
            projections = (tensor.flatten(0, 1) for tensor in (mixed, gate, alpha, beta))
            return self._out(self._kernel(module, *projections, pooled, (read, write))[:, None])
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
        return self._out(output.view_as(gate))

    def _empty(self, mixed: torch.Tensor) -> LayerStates:
        """Return a row of states of any values."""
        module = self._module
        matrix = (1, module.num_v_heads, module.head_k_dim, module.head_v_dim)
        return mixed.new_empty(1, mixed.shape[2], self._width), mixed.new_empty(matrix, dtype=torch.float32)

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
