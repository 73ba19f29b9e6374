"""Linear layers over packed weights give what the layers give, those of the same input in one product."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from steering.cpu.kernels.linear import HALVES
from steering.cpu.packing import PackedWeights, Packing, groups_of, joined, reordered
from steering.decoder.packed import supported
from tests.steering.conftest import LoadMLLM

DTYPES = [torch.float32, *[dtype for dtype in (torch.bfloat16, torch.float16) if supported(dtype)]]


class Block(nn.Module):
    """Layers as a decoder has them; `odd` are of one name alone, or not alike."""

    def __init__(self, bias: bool, value_bias: bool):
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(24, 16, bias=bias), nn.Linear(24, 8, bias=bias)
        self.v_proj, self.o_proj = nn.Linear(24, 8, bias=value_bias), nn.Linear(16, 24)
        self.gate_proj, self.norm = nn.Linear(24, 40, bias=False), nn.LayerNorm(24)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        key, value = self.k_proj(states), self.v_proj(states)
        query = self.q_proj(states) * torch.cat([key, value], -1)
        return self.norm(states + self.o_proj(query)) + self.gate_proj(states).sum(-1, keepdim=True)


@pytest.mark.parametrize(
    ("dtype", "published"),
    [*((dtype, dtype) for dtype in DTYPES), *((torch.float32, half) for half in HALVES)],
    ids=str,
)
@pytest.mark.parametrize(("bias", "value_bias"), [(True, True), (False, False), (True, False)])
def test_packed_products_equal_the_layers(
    dtype: torch.dtype, published: torch.dtype, bias: bool, value_bias: bool
) -> None:
    torch.manual_seed(0)
    blocks = nn.Sequential(Block(bias, value_bias), Block(bias, value_bias)).to(published).to(dtype)
    head = nn.Linear(24, 11, bias=False).to(published).to(dtype)
    groups = groups_of([blocks, head], dtype)
    assert [len(group) for group in groups] == ([3, 1, 1] * 2 if bias == value_bias else [1] * 10) + [1]
    weights = {name: reordered(tensor) for name, tensor in joined(groups).items()}
    packed = [tensor for name, tensor in weights.items() if name.startswith("weight")]
    assert all(tensor.ndim == 3 if dtype == torch.float32 else tensor.is_mkldnn for tensor in packed)
    assert {tensor.dtype for tensor in packed} == {published}
    calls: list[str] = []

    def named(name: str) -> torch.Tensor | None:
        calls.append(name)
        return weights.get(name)

    states = torch.randn(3, 5, 24, dtype=dtype)
    with torch.no_grad():
        plain = head(blocks(states))
        with Packing(groups, named):
            actual = head(blocks(states))
    torch.testing.assert_close(
        actual, plain, rtol=1e-5 if dtype == torch.float32 else 2e-2, atol=1e-5 if dtype == torch.float32 else 2e-2
    )
    assert len(calls) == 2 * len(groups)  # a weight and a bias each: no product was made twice


def test_unsuitable_layers_are_not_packed() -> None:
    inside, outside = nn.Linear(8, 8), nn.Linear(8, 8)
    groups = groups_of([inside], torch.float32)
    weights = {name: reordered(tensor) for name, tensor in joined(groups).items()}
    states = torch.randn(2, 8)
    with torch.no_grad(), Packing(groups, weights.get):
        assert torch.equal(outside(states), states @ outside.weight.T + outside.bias)
        torch.testing.assert_close(inside(states), states @ inside.weight.T + inside.bias)
    assert groups_of([inside], torch.float64) == []


@pytest.mark.parametrize(("family", "encoded"), [("qwen2_vl", True), ("qwen2_5_vl", False), ("qwen3_vl", False)])
def test_a_tower_is_packed_only_where_a_step_encodes_pictures(family: str, encoded: bool, load_mllm: LoadMLLM) -> None:
    mllm = load_mllm(family)
    weights = {id(layer.weight) for group in PackedWeights(mllm).groups for layer in group}
    assert any(id(parameter) in weights for parameter in mllm.model.model.visual.parameters()) is encoded
