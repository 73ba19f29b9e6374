"""The checks that attention kernels pass before they are used."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from steering.triton import attention
from steering.triton.attended import Attended
from steering.triton.attention import (
    WITHIN,
    PooledPlaces,
    decode_kernel,
    error_of,
    lower_right,
    packed,
    pooled,
    with_log_sums,
)
from tests.steering.triton.reference import DecodeAttention

CPU = torch.device("cpu")
SHAPES = [(8, 2, 16), (4, 4, 80), (12, 1, 64)]


@pytest.mark.parametrize(("heads", "kv_heads", "width"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_a_right_kernel_is_within_its_dtypes_tolerance(
    dtype: torch.dtype, heads: int, kv_heads: int, width: int, has_sinks: bool
) -> None:
    assert error_of(DecodeAttention(), CPU, dtype, heads, kv_heads, width, has_sinks) < WITHIN[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_kernel_that_knows_no_sinks_is_outside_its_dtypes_tolerance(dtype: torch.dtype) -> None:
    right = DecodeAttention()

    def without(*given: Any, sinks: torch.Tensor, **more: Any) -> Attended:
        assert sinks.shape == (8,)
        return right(*given, **more)

    assert error_of(without, CPU, dtype, 8, 2, 16, has_sinks=True) > 3 * WITHIN[dtype]


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
    def flash(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float, sinks: None) -> torch.Tensor:
        n, columns = query.shape[2], key.shape[2]
        end = columns - n if n != wrong_at else 0  # else causal from the upper left corner
        mask = torch.arange(columns) <= torch.arange(end, end + n)[:, None]
        return F.scaled_dot_product_attention(query, key, value, mask, scale=scaling, enable_gqa=True)

    monkeypatch.setattr(attention, "_flash", flash)
    assert attention._flash_is_right.__wrapped__(CPU, torch.bfloat16, 8, 2, 16) == (wrong_at is None)


def with_sums(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend from queries (rows, heads, n, D), and return the logarithms of their sums (rows, heads, n), too."""
    near, far = (part.float().repeat_interleave(query.shape[1] // part.shape[1], 1) for part in (key, value))
    scores = query.float() @ near.mT * scale + mask.float()
    return (scores.softmax(-1) @ far).to(query.dtype), scores.logsumexp(-1)


def causal_mask(n: int, columns: int) -> torch.Tensor:
    return torch.full((n, columns), -torch.inf).triu(1 + columns - n)


@pytest.mark.parametrize("fault", [None, "base 2", "no sums"])
def test_a_flash_kernel_beside_sinks_is_tried_for_its_sums(
    fault: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def flash(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        dropout: float,
        causal: bool,
        *,
        scale: float,
        return_debug_mask: bool,
    ) -> list[torch.Tensor]:
        assert (dropout, causal, key.shape[1]) == (0.0, True, 2)
        out, sums = with_sums(query, key, value, causal_mask(query.shape[2], key.shape[2]), scale)
        return [out] if fault == "no sums" else [out, sums / math.log(2) if fault else sums]

    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_flash_attention", flash)
    assert attention._flash_is_right.__wrapped__(CPU, torch.bfloat16, 8, 2, 16, has_sinks=True) == (fault is None)
    assert ("chunks of prompts fall back" in caplog.text) == (fault is not None)
    assert attention._flash_is_right.__wrapped__(CPU, torch.bfloat16, 8, 2, 16), "without sinks nothing reads them"


@pytest.mark.parametrize("fault", [None, "base 2", "no mask", "missing"])
def test_a_memory_efficient_kernel_is_tried_for_its_sums(
    fault: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The library takes masks whose rows begin at multiples of 16 numbers. It pads sums."""

    def efficient(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        sums_too: bool,
        dropout: float,
        causal: bool,
        *,
        scale: float,
    ) -> list[torch.Tensor]:
        assert (sums_too, dropout, causal) == (True, 0.0, mask is None)
        assert query.shape[:2] == key.shape[:2] == value.shape[:2]
        if fault == "missing":
            raise NotImplementedError(fault)
        n, columns = query.shape[2], key.shape[2]
        if mask is not None:
            assert mask.shape == (*query.shape[:3], columns)
            assert mask.stride(2) % 16 == 0
            mask = torch.zeros_like(mask) if fault == "no mask" else mask
        out, sums = with_sums(query, key, value, causal_mask(n, columns) if mask is None else mask, scale)
        sums = F.pad(sums / math.log(2) if fault == "base 2" else sums, (0, -n % 32), value=torch.nan)
        return [out, sums, torch.zeros(0), torch.zeros(0)]

    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_efficient_attention", efficient)
    assert attention._efficient_is_right.__wrapped__(CPU, torch.float32, 8, 2, 16) == (fault is None)
    assert ("falls back to explicit weights" in caplog.text) == (fault is not None)


def test_values_of_another_width_have_no_kernel_with_sums() -> None:
    query, value = torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 3, 4)
    assert with_log_sums(query, query, value, None, 1.0, True) is None
    assert with_log_sums(query, query, query, None, 1.0, True) is not None


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


FAULTS = (None, "other slot", "upper left", "no window", "all columns", "missing")


@pytest.mark.parametrize(
    ("fault", "has_sinks"), [*((fault, False) for fault in FAULTS), (None, True), ("padded sums", True)]
)
def test_a_flash_kernel_for_prompts_in_a_pool_is_tried(
    fault: str | None, has_sinks: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
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
        out, sums = torch.zeros_like(query), torch.zeros(query.shape[1], len(query))
        for row, (begin, end) in enumerate(itertools.pairwise(starts.tolist())):
            first, count = key_starts[row - (fault == "other slot")], end - begin
            columns = seqused_k[row] + (fault == "all columns")
            own = (query[begin:end], key[first : first + columns], value[first : first + columns])
            last = columns - count if fault != "upper left" else 0
            behind = torch.arange(last, last + count)[:, None] - torch.arange(columns)
            seen = behind >= 0
            if window_size_left is not None and fault != "no window":
                seen &= behind <= window_size_left
            mask = torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)
            attended, row_sums = with_sums(*(part.transpose(0, 1)[None] for part in own), mask, scale)
            out[begin:end], sums[:, begin:end] = attended[0].transpose(0, 1).nan_to_num(0), row_sums[0]
        return [out, F.pad(sums, (0, 15)) if fault == "padded sums" else sums]

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", flash)
    assert attention._pooled_flash_is_right.__wrapped__(CPU, torch.bfloat16, 8, 2, 16, has_sinks) == (fault is None)
    assert ("prompts are not captured" in caplog.text) == (fault is not None)
