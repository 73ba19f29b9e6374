"""A convolution that covers its whole input is a linear layer; of other inputs it stays a convolution."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from steering.vision import patches

CASES = [
    (nn.Conv3d(3, 5, (2, 4, 4), (2, 4, 4), bias=False), (6, 3, 2, 4, 4)),
    (nn.Conv2d(3, 5, 4, 4), (6, 3, 4, 4)),
    (nn.Conv2d(3, 5, 4, 2), (6, 3, 4, 4)),
    (nn.Conv2d(3, 5, 4, 4), (2, 3, 12, 8)),
    (nn.Conv2d(4, 6, 3, padding=1), (2, 4, 3, 3)),
    (nn.Conv2d(4, 6, 3, groups=2), (2, 4, 3, 3)),
    (nn.Conv2d(4, 6, 2, dilation=2), (2, 4, 3, 3)),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", range(len(CASES)))
def test_values_and_sizes_are_those_of_the_convolution(case: int, dtype: torch.dtype) -> None:
    plain, size = CASES[case]
    torch.manual_seed(0)
    inputs = torch.randn(size)
    prepared = nn.Sequential(copy.deepcopy(plain)).to(dtype)
    patches.prepare(prepared)
    expected = copy.deepcopy(plain).to(dtype).double()(inputs.to(dtype).double())
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(prepared(inputs.to(dtype)).double(), expected, rtol=tolerance, atol=tolerance)


def test_only_convolutions_of_patches_are_changed() -> None:
    kinds = [type(nn.Sequential(copy.deepcopy(plain))[0]) for plain, _ in CASES]
    model = nn.Sequential(*[copy.deepcopy(plain) for plain, _ in CASES])
    patches.prepare(model)
    changed = [type(module) is not before for module, before in zip(model, kinds, strict=True)]
    assert changed == [True, True, True, True, False, False, False]
    assert all(isinstance(module, before) for module, before in zip(model, kinds, strict=True))
