"""Linear attention by the gated delta rule, with the recurrent states of slots.

A layer of Qwen3.5 and its likes has, for each head, a matrix S (k, v) in place of keys and values: S <- exp(g) S, then
S <- S + k (beta (v - S^T k))^T, and the output is S^T q (Yang et al. 2025, "Gated Delta Networks", section 3.1). Queries,
keys and values come out of a short causal convolution.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from steering.errors import UnsupportedModel
from steering.recurrent.states import LayerStates, RecurrentPass

_PARTS = ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "conv1d", "A_log", "dt_bias", "norm", "out_proj")
"""The parts of such a module, by the names that Qwen3.5 gives them."""
_EPS = 1e-6
"""Added to the squared length of queries and keys, as in transformers."""


def prepare(layers: nn.ModuleList, config: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Let linear attention keep its states in slots; return the numbers of the other layers, and of those that have it.

    A forward pass without a step is left as it is. Raises UnsupportedModel for linear attention of another form; config: the
    text model's, which tells the types of layers.
    """
    found = []
    for index, layer in enumerate(layers):
        for module in layer.children():
            if all(hasattr(module, part) for part in _PARTS):
                module.forward = GatedDelta(module, index, module.forward)
                found.append(index)
    kinds = getattr(config, "layer_types", None) or ()
    if unknown := {at for at, kind in enumerate(kinds[: len(layers)]) if kind == "linear_attention"} - {*found}:
        raise UnsupportedModel(f"The linear attention of layers {sorted(unknown)} has an unknown form.")
    return tuple(at for at in range(len(layers)) if at not in found), tuple(found)


class GatedDelta:
    """The forward pass of a layer's linear attention."""

    def __init__(self, module: Any, layer: int, own: Callable[..., torch.Tensor]):
        self._module, self._layer, self._own = module, layer, own
        self._width = module.conv1d.kernel_size[0] - 1
        # transformers' function, or that of flash-linear-attention where it is installed
        self._scan = sys.modules[type(module).__module__].torch_chunk_gated_delta_rule
        functools.update_wrapper(self, own)

    def __call__(self, hidden_states: torch.Tensor, *args: Any, step: Any = None, **kwargs: Any) -> torch.Tensor:
        if step is None:
            return self._own(hidden_states, *args, **kwargs)
        module, (rows, n, _) = self._module, hidden_states.shape
        mixed = module.in_proj_qkv(hidden_states).transpose(1, 2)
        gate = module.in_proj_z(hidden_states).reshape(-1, module.head_v_dim)
        beta = module.in_proj_b(hidden_states).sigmoid()
        decay = -module.A_log.float().exp() * F.softplus(module.in_proj_a(hidden_states).float() + module.dt_bias)
        output = self._attend(step.recurrent, mixed, decay, beta)
        output = module.norm(output.reshape(-1, module.head_v_dim), gate).reshape(rows, n, -1)
        return module.out_proj(output)

    def _attend(
        self, states: RecurrentPass, mixed: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor
    ) -> torch.Tensor:
        """Return the output (rows, n, heads, v). mixed: (rows, channels, n). decay, beta: (rows, n, heads)."""
        n = mixed.shape[2]
        before, matrix = states.read(self._layer, n, functools.partial(self._empty, mixed))
        inputs = torch.cat([before, mixed], 2)
        query, key, value = self._projected(inputs)
        if n == 1:
            output, matrix = _one(query[:, 0], key[:, 0], value[:, 0], decay[:, 0], beta[:, 0], matrix)
            output = output[:, None]
        else:
            output, matrix = self._many(states, inputs, (query, key, value, decay, beta), matrix)
        if states.real is None:
            last = inputs[:, :, n:]
        else:
            at = states.real_on(inputs.device)[:, None] + torch.arange(self._width, device=inputs.device)
            last = inputs.gather(2, at[:, None].expand(-1, inputs.shape[1], -1))
        states.write(self._layer, last, matrix)
        return output

    def _empty(self, mixed: torch.Tensor) -> LayerStates:
        """Return a row of states of any values."""
        module = self._module
        matrix = (1, module.num_v_heads, module.head_k_dim, module.head_v_dim)
        return mixed.new_empty(1, mixed.shape[1], self._width), mixed.new_empty(matrix, dtype=torch.float32)

    def _projected(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries, keys (rows, n, key heads, k) and values (rows, n, heads, v).

        inputs: (rows, channels, width + n).
        """
        module = self._module
        weight = module.conv1d.weight
        if inputs.shape[2] == weight.shape[2]:  # one token, for which torch's convolution is slow
            mixed = (inputs.float() * weight[:, 0].float()).sum(-1, keepdim=True).to(inputs.dtype)
        else:
            mixed = F.conv1d(inputs.to(weight.dtype), weight, groups=len(weight)).to(inputs.dtype)
        parts = F.silu(mixed).transpose(1, 2).split([module.key_dim, module.key_dim, module.value_dim], -1)
        query, key, value = (part.unflatten(-1, (heads, -1)) for part, heads in zip(parts, self._heads, strict=True))
        return query, key, value

    @property
    def _heads(self) -> tuple[int, int, int]:
        module = self._module
        return module.num_k_heads, module.num_k_heads, module.num_v_heads

    def _many(
        self, states: RecurrentPass, inputs: torch.Tensor, tokens: tuple[torch.Tensor, ...], matrix: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output (rows, n, heads, v) of several tokens a row, and the states behind them.

        tokens: queries, keys, values, decay and beta, (rows, n, ...).
        """
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


def _one(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    matrix: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output (rows, heads, v) of one token a row, and the states behind it, which are `matrix`, changed.

    query, key: (rows, key heads, k). value: (rows, heads, v). decay, beta: (rows, heads). matrix: (rows, heads, k, v).
    """
    group = value.shape[1] // key.shape[1]
    query, key = (_normalised(tensor.float()).repeat_interleave(group, 1) for tensor in (query, key))
    matrix.mul_(decay.exp()[..., None, None])
    known = (key[:, :, None] @ matrix)[:, :, 0]
    change = (value.float() - known) * beta[..., None].float()
    matrix.addcmul_(key[..., None], change[:, :, None])
    output = (query[:, :, None] @ matrix)[:, :, 0] * query.shape[-1] ** -0.5
    return output.to(value.dtype), matrix


def _normalised(vectors: torch.Tensor) -> torch.Tensor:
    return vectors * torch.rsqrt((vectors * vectors).sum(-1, keepdim=True) + _EPS)
