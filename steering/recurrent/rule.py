"""The gated delta rule of one token, in plain torch."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from steering.recurrent.slots import convolved

EPS = 1e-6
"""Added to the squared length of queries and keys, as in transformers."""


def projected(module: Any, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries, keys (rows, n, key heads, k) and values (rows, n, heads, v).

    module: a layer's linear attention. inputs: (rows, channels, width + n), before the convolution, which has `width` + 1
    taps.
    """
    mixed = F.silu(convolved(module.conv1d, inputs))
    parts = mixed.transpose(1, 2).split([module.key_dim, module.key_dim, module.value_dim], -1)
    heads = module.num_k_heads, module.num_k_heads, module.num_v_heads
    query, key, value = (part.unflatten(-1, (count, -1)) for part, count in zip(parts, heads, strict=True))
    return query, key, value


def one_token(
    module: Any, inputs: torch.Tensor, alpha: torch.Tensor, beta: torch.Tensor, matrix: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output (rows, 1, heads, v) of one token a row, and the states behind it, which are `matrix`, changed.

    inputs: (rows, channels, width + 1). alpha, beta: (rows, heads), before their functions. matrix: (rows, heads, k, v).
    """
    query, key, value = (tensor[:, 0].float() for tensor in projected(module, inputs))
    group = value.shape[1] // key.shape[1]
    query, key = (_normalised(tensor).repeat_interleave(group, 1) for tensor in (query, key))
    decay = -module.A_log.float().exp() * F.softplus(alpha.float() + module.dt_bias)
    matrix.mul_(decay.exp()[..., None, None])
    known = (key[:, :, None] @ matrix)[:, :, 0]
    change = (value - known) * beta.sigmoid()[..., None].float()
    matrix.addcmul_(key[..., None], change[:, :, None])
    output = (query[:, :, None] @ matrix)[:, :, 0] * query.shape[-1] ** -0.5
    return output.to(inputs.dtype)[:, None], matrix


def _normalised(vectors: torch.Tensor) -> torch.Tensor:
    return vectors * torch.rsqrt((vectors * vectors).sum(-1, keepdim=True) + EPS)
