"""FFNs that are as wide as fast kernels want them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as qwen
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig

from steering.vision.widths import _is_narrow, align, widen


def ffn(width: int, dtype: torch.dtype, bias: bool) -> nn.Module:
    config = Qwen2_5_VLVisionConfig(hidden_size=16, intermediate_size=width, hidden_act="silu")
    return qwen.Qwen2_5_VLMLP(config, bias=bias).to(dtype).requires_grad_(False)


@pytest.mark.parametrize("bias", [False, True])
def test_a_wider_ffn_computes_the_same(bias: bool) -> None:
    original = ffn(60, torch.float32, bias)
    wide = copy.deepcopy(original)
    widen(wide)
    states = torch.randn(3, 16, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(wide(states), original(states))
    widths = [
        (layer.in_features, layer.out_features, tuple(layer.weight.shape)) for layer in (wide.gate_proj, wide.down_proj)
    ]  # type: ignore[union-attr]
    assert widths == [(16, 64, (64, 16)), (64, 16, (16, 64))]


def test_only_narrow_layers_are_widened() -> None:
    assert _is_narrow(ffn(60, torch.bfloat16, True))
    assert not _is_narrow(ffn(60, torch.float32, True)), "which has other kernels"
    assert not _is_narrow(ffn(72, torch.float16, True)), "which is a multiple of 8"
    assert not _is_narrow(nn.Linear(16, 60, dtype=torch.bfloat16))


@pytest.mark.parametrize(("device", "widths"), [("cpu", [60, 60]), ("cuda", [64, 60])])
def test_on_a_gpu_all_but_the_decoder_s_are_widened(device: str, widths: list[int]) -> None:
    tower, decoder = (ffn(60, torch.bfloat16, False) for _ in range(2))
    align(nn.ModuleList([tower, decoder]), decoder, torch.device(device))
    assert [module.gate_proj.out_features for module in (tower, decoder)] == widths  # type: ignore[union-attr]
