"""Linear attention of Qwen3.5 and short convolutions of LFM2, by themselves."""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.lfm2.modeling_lfm2 import Lfm2Config, Lfm2ShortConv
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet, Qwen3_5TextConfig

from steering.recurrent.rule import one_token

SHAPES = ((2, 4, 8, 8, 4), (16, 32, 128, 128, 4), (2, 6, 16, 24, 3), (1, 4, 64, 32, 2))
"""Key heads, value heads, their widths, and the taps of the convolution: the second are those of Qwen3.5-9B."""
HIDDEN = 64


def a_module(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Qwen3_5GatedDeltaNet:
    """Return a layer's linear attention with random weights."""
    key_heads, heads, k, v, taps = shape
    config = Qwen3_5TextConfig(
        hidden_size=HIDDEN, num_hidden_layers=2, linear_num_key_heads=key_heads, linear_num_value_heads=heads,
        linear_key_head_dim=k, linear_value_head_dim=v, linear_conv_kernel_dim=taps,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = Qwen3_5GatedDeltaNet(config, 0)
        module.dt_bias.data.normal_()
        module.norm.weight.data.normal_(1.0, 0.1)
        module.conv1d.weight.data.mul_(2)
    return module.to(dtype).requires_grad_(False)


def a_convolution(taps: int, bias: bool) -> Lfm2ShortConv:
    """Return a layer's short convolution with random weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = Lfm2Config(
            hidden_size=HIDDEN, num_hidden_layers=1, layer_types=["conv"], conv_L_cache=taps, conv_bias=bias
        )
        return Lfm2ShortConv(config, 0).requires_grad_(False)


def by_torch(
    mixed: torch.Tensor, gate: torch.Tensor, alpha: torch.Tensor, beta: torch.Tensor, weights: Any, eps: float,
    states: Any, places: Any, key_heads: int, module: Any,
) -> torch.Tensor:  # fmt: skip
    """Stand in for the Triton kernel."""
    read, write = places
    inputs = torch.cat([states[0][read], mixed[..., None]], 2)
    output, matrix = one_token(module, inputs, alpha, beta, states[1][read])
    if write is not None:
        states[0][write], states[1][write] = inputs[:, :, 1:], matrix
    return module.norm(output.flatten(0, -2), gate.reshape(-1, module.head_v_dim)).view_as(gate)
