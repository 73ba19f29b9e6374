"""The checks that attention kernels pass before they are used."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from steering.triton import attention
from steering.triton.attended import Attended
from steering.triton.attention import WITHIN, PooledPlaces, decode_kernel, error_of, lower_right, packed, pooled
from tests.steering.triton.reference import DecodeAttention

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
    assert packed(*(torch.zeros(3, 2, 8, dtype=torch.bfloat16) for _ in range(3)), (0, 3), 1.0) is None
    keys, places = torch.zeros(1, 2, 3, 8, dtype=torch.bfloat16), torch.tensor([0])
    assert pooled(keys[0], keys, keys, PooledPlaces.of(places, places, places, keys), 1.0) is None


def test_values_of_another_width_have_no_kernel_in_a_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_flash_takes", lambda query: True)
    keys, places = torch.zeros(1, 2, 3, 8, dtype=torch.bfloat16), torch.tensor([0])
    place = PooledPlaces.of(places, places, places, keys)
    assert pooled(keys[0], keys, keys[..., :4], place, 1.0) is None


@pytest.mark.parametrize("wrong_at", [None, 1, 5])
def test_a_flash_kernel_is_tried_with_one_query_and_with_several(
    wrong_at: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flash(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float) -> torch.Tensor:
        n, columns = query.shape[2], key.shape[2]
        end = columns - n if n != wrong_at else 0  # else causal from the upper left corner
        mask = torch.arange(columns) <= torch.arange(end, end + n)[:, None]
        return F.scaled_dot_product_attention(query, key, value, mask, scale=scaling, enable_gqa=True)

    monkeypatch.setattr(attention, "_flash", flash)
    assert attention._flash_is_right.__wrapped__(CPU, torch.bfloat16, 8, 2, 16) == (wrong_at is None)


@pytest.mark.parametrize("fault", [None, "neighbour", "scaled", "missing"])
def test_a_flash_kernel_for_packed_sequences_is_tried(
    fault: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def flash(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        starts: torch.Tensor,
        key_starts: torch.Tensor,
        longest: int,
        *rest: Any,
        scale: float,
        return_debug_mask: bool,
    ) -> list[torch.Tensor]:
        assert (longest, starts.dtype) == (294, torch.int32)
        if fault == "missing":
            raise RuntimeError(fault)
        bounds = starts.tolist() if fault != "neighbour" else [0, 6, 300]
        parts = []
        for begin, end in itertools.pairwise(bounds):
            own = (part[begin:end].transpose(0, 1) for part in (query, key, value))
            parts.append(F.scaled_dot_product_attention(*own, scale=scale, enable_gqa=True).transpose(0, 1))
        return [torch.cat(parts) * (1.1 if fault == "scaled" else 1)]

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", flash)
    assert attention._packed_flash_is_right.__wrapped__(CPU, torch.bfloat16, 8, 2, 16) == (fault is None)
    assert ("packed pictures fall back" in caplog.text) == (fault is not None)


@pytest.mark.parametrize("fault", [None, "other slot", "upper left", "no window", "all columns", "missing"])
def test_a_flash_kernel_for_prompts_in_a_pool_is_tried(
    fault: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The stand-in finds columns as the library's kernel does: by a slot's first column, and the strides of heads."""

    def flash(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        starts: torch.Tensor,
        key_starts: torch.Tensor,
        longest: int,
        most_columns: int,
        dropout: float,
        causal: bool,
        *,
        scale: float,
        return_debug_mask: bool,
        window_size_left: int | None,
        seqused_k: torch.Tensor,
    ) -> list[torch.Tensor]:
        assert {starts.dtype, key_starts.dtype, seqused_k.dtype} == {torch.int32}
        assert (len(key_starts), len(seqused_k), most_columns, causal) == (len(starts), len(starts) - 1, 310, True)
        if fault == "missing":
            raise RuntimeError(fault)
        out = torch.zeros_like(query)
        for row, (begin, end) in enumerate(itertools.pairwise(starts.tolist())):
            first, count = key_starts[row - (fault == "other slot")], end - begin
            columns = seqused_k[row] + (fault == "all columns")
            own = (query[begin:end], key[first : first + columns], value[first : first + columns])
            last = columns - count if fault != "upper left" else 0
            behind = torch.arange(last, last + count)[:, None] - torch.arange(columns)
            seen = behind >= 0
            if window_size_left is not None and fault != "no window":
                seen &= behind <= window_size_left
            mask = torch.zeros(seen.shape).masked_fill(~seen, -torch.inf).to(query.dtype)
            own_parts = (part.transpose(0, 1)[None] for part in own)
            attended = F.scaled_dot_product_attention(*own_parts, mask, scale=scale, enable_gqa=True)
            out[begin:end] = attended[0].transpose(0, 1).nan_to_num(0)
        return [out]

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", flash)
    assert attention._pooled_flash_is_right.__wrapped__(CPU, torch.bfloat16, 8, 2, 16) == (fault is None)
    assert ("prompts are not captured" in caplog.text) == (fault is not None)
