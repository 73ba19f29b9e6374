"""The check that a decode attention kernel passes before it is used."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from steering.accel.triton.attended import Attended
from steering.accel.triton.attention import WITHIN, decode_kernel, error_of, lower_right
from tests.steering.accel.triton.reference import DecodeAttention

CPU = torch.device("cpu")
SHAPES = [(8, 2, 16), (4, 4, 80), (12, 1, 64)]


@pytest.mark.parametrize(("heads", "kv_heads", "width"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_right_kernel_is_within_its_dtypes_tolerance(
    dtype: torch.dtype, heads: int, kv_heads: int, width: int
) -> None:
    assert error_of(DecodeAttention(), CPU, dtype, heads, kv_heads, width) < WITHIN[dtype]


@pytest.mark.parametrize("fault", ["out", "means", "nan", "cache"])
def test_a_wrong_kernel_is_outside_its_dtypes_tolerance(fault: str) -> None:
    right = DecodeAttention()

    def wrong(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any, **more: Any) -> Attended:
        attended = right(query, key, value, *rest, **more)
        if fault == "cache":
            rest[0][0, 0, 3] += 1  # it wrote where it should not have
        changed = {
            "out": attended._replace(out=attended.out * 1.001),
            "means": attended._replace(means=None if attended.means is None else attended.means * 1.001),
            "nan": attended._replace(out=attended.out * torch.nan),
            "cache": attended,
        }
        return changed[fault]

    assert not error_of(wrong, CPU, torch.float32, 8, 2, 16) <= WITHIN[torch.float32]


def test_there_is_no_kernel_without_a_gpu() -> None:
    assert decode_kernel(CPU, torch.float32, 8, 2, 16) is None
    assert lower_right(*(torch.zeros(1, 2, 3, 8, dtype=torch.bfloat16) for _ in range(3)), 1.0) is None
