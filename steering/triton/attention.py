"""The attention kernels of a device, where there are some that agree with plain torch."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import logging
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

from steering.devices import to_device
from steering.triton.attended import DecodeFunction

WITHIN = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}
"""Largest relative error of the kernel at load against float64, by dtype of the model."""

log = logging.getLogger(__name__)


@functools.lru_cache(maxsize=16)
def decode_kernel(
    device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, width: int
) -> DecodeFunction | None:
    """Return the kernel for heads of this width, None where there is none or it is wrong; the log says why."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None or dtype not in WITHIN:
        return None
    from steering.triton import triton_attention  # noqa: PLC0415 -- only torch's builds for GPUs can import it

    try:
        error = error_of(triton_attention.decode_attention, device, dtype, heads, kv_heads, width)
    except Exception as reason:  # triton also needs a C compiler
        log.warning("decode attention falls back to torch: %s: %s", type(reason).__name__, reason)
        return None
    if not error <= WITHIN[dtype]:
        log.warning("decode attention falls back to torch: the kernel's relative error is %.1e", error)
        return None
    return triton_attention.decode_attention


@torch.inference_mode()
def error_of(
    kernel: DecodeFunction, device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, width: int
) -> float:
    """Return the relative error of a kernel's output and mean weights against float64, with and without changed scores.

    The input is three random rows of different lengths, the last of which pads the batch.
    """
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    columns = 96
    query, key, value = draw(3, heads, 1, width), draw(3, kv_heads, 1, width), draw(3, kv_heads, 1, width)
    keys, values = draw(3, kv_heads, columns, width), draw(3, kv_heads, columns, width)
    positions = torch.tensor([70, 3, columns - 1], device=device)
    by_head, chosen, gains = torch.rand(3, 3, max(heads, columns), generator=generator).to(device)
    bias, gains = (4 * by_head[:, :heads], (chosen[:, :columns] > 0.5).float()), gains[:, :columns].contiguous()
    place = (query, key, value, keys, values, positions, width**-0.5, columns)
    calls = [
        [kernel(*place, **changes, looks=looks) for looks in (True, False)]
        for changes in ({}, {"bias": bias, "gains": gains})
    ]
    near, far = (cache[:2].double().repeat_interleave(heads // kv_heads, 1) for cache in (keys, values))  # now updated
    scores = (query[:2].double() @ near.transpose(2, 3)) * width**-0.5
    later = torch.arange(columns, device=device) > positions[:2, None, None, None]
    biased = scores + (bias[0][:2, :, None, None] * bias[1][:2, None, None]).double()
    changed = biased + gains[:2, None, None].double() * biased.abs()
    errors = []
    for (attended, plain), changed_scores in zip(calls, (scores, changed), strict=True):
        weights = changed_scores.masked_fill(later, -torch.inf).softmax(-1)
        expected, means = (weights @ far)[:, :, 0], weights[:, :, 0].mean(1)
        assert attended.means is not None
        for ours, reference in ((attended.out, expected), (plain.out, expected), (attended.means, means)):
            errors.append(float((ours[:2].double() - reference).norm() / reference.norm()))
    return math.inf if any(map(math.isnan, errors)) else max(errors)


def lower_right(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float) -> torch.Tensor | None:
    """Attend causally where queries (rows, heads, n, D) are the last n columns, by torch's flash kernel without a mask.

    Returns None where that kernel is missing or wrong. key, value: (rows, KV, columns, D), not copied for each head.
    """
    heads = query.shape[1], key.shape[1]
    if not _flash_takes(query) or not _flash_is_right(query.device, query.dtype, *heads, query.shape[3]):
        return None
    return _flash(query, key, value, scaling)


def packed(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ends: tuple[int, ...], scaling: float | None
) -> torch.Tensor | None:
    """Attend within each of several sequences that lie one behind the other, by torch's flash kernel in one call.

    Returns None where that kernel is missing or wrong. query, key, value: (tokens, heads or KV, D). ends: the first start,
    and the end of each sequence.
    """
    heads = query.shape[1], key.shape[1]
    if not _flash_takes(query) or not _packed_flash_is_right(query.device, query.dtype, *heads, query.shape[2]):
        return None
    return _packed_flash(query, key, value, ends, scaling)


class PooledPlaces(NamedTuple):
    """The places of packed prompts in a pool of slots, as torch's flash kernel takes them, int32 on the device.

    bounds: (rows + 1,), the first token of each prompt, and the end of the last one. begins: (rows + 1,), where each
    prompt's slot begins in the pool, in columns of one head; the last number is unused. lengths: (rows,), the number of
    columns in each slot, those of the tokens included.
    """

    bounds: torch.Tensor
    begins: torch.Tensor
    lengths: torch.Tensor

    @classmethod
    def of(cls, bounds: torch.Tensor, slots: torch.Tensor, lengths: torch.Tensor, keys: torch.Tensor) -> PooledPlaces:
        """Return the places of prompts in these slots (rows,) of a pool with such keys (slots, KV, length, D)."""
        begins = nn.functional.pad(slots * (keys.shape[1] * keys.shape[2]), (0, 1))
        return cls(bounds.int(), begins.int(), lengths.int())


def pooled(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    places: PooledPlaces,
    scaling: float,
    window: int | None = None,
) -> torch.Tensor | None:
    """Attend causally to slots of a pool, whose last columns are those of the queries, by torch's flash kernel.

    Returns None where that kernel is missing or wrong. query: (tokens, heads, D), packed prompts. keys, values: (slots, KV,
    length, D), not copied.
    """
    if not _flash_takes(query) or keys.shape != values.shape:
        return None
    shape = query.device, query.dtype, query.shape[1], keys.shape[1], query.shape[2]
    return _pooled_flash(query, keys, values, places, scaling, window) if _pooled_flash_is_right(*shape) else None


def _flash_takes(query: torch.Tensor) -> bool:
    """Return True for queries (..., D) of a dtype and width that torch's flash kernels support."""
    return query.is_cuda and query.dtype != torch.float32 and query.shape[-1] % 8 == 0 and query.shape[-1] <= 256


def _flash(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float) -> torch.Tensor:
    """Return the output of torch's flash kernel, whose causal mask ends at the lower right corner."""
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    out: torch.Tensor = flash(query, key, value, 0.0, True, return_debug_mask=False, scale=scaling)[0]
    return out


def _packed_flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ends: tuple[int, ...], scaling: float | None
) -> torch.Tensor:
    """Return the output of torch's flash kernel for packed sequences."""
    bounds, longest = _bounds(ends, query.device)
    flash = torch.ops.aten._flash_attention_forward
    sizes = (bounds, bounds, longest, longest)
    out: torch.Tensor = flash(query, key, value, *sizes, 0.0, False, return_debug_mask=False, scale=scaling)[0]
    return out


def _pooled_flash(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    places: PooledPlaces,
    scaling: float,
    window: int | None,
) -> torch.Tensor:
    """Return the output of torch's flash kernel for columns of a pool.

    The pool is handed over as one long sequence, in which each slot's own columns begin at its own place.
    """
    slots, kv_heads, length, width = keys.shape
    size, strides = ((slots - 1) * kv_heads + 1) * length, (width, length * width, 1)
    near, far = (tensor.as_strided((size, kv_heads, width), strides) for tensor in (keys, values))
    flash = torch.ops.aten._flash_attention_forward
    out: torch.Tensor = flash(
        query,
        near,
        far,
        places.bounds,
        places.begins,
        len(query),
        length,
        0.0,
        True,
        return_debug_mask=False,
        scale=scaling,
        window_size_left=None if window is None else window - 1,
        seqused_k=places.lengths,
    )[0]
    return out


@functools.lru_cache(maxsize=256)
def _bounds(ends: tuple[int, ...], device: torch.device) -> tuple[torch.Tensor, int]:
    """Return the bounds of packed sequences as the kernel takes them, and the length of the longest one."""
    bounds = list(dict.fromkeys(ends))  # without empty sequences
    with torch.inference_mode(False):
        longest = max((end - begin for begin, end in itertools.pairwise(bounds)), default=0)
        return to_device(torch.tensor(bounds, dtype=torch.int32), device), longest


@functools.lru_cache(maxsize=16)
def _flash_is_right(device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, width: int) -> bool:
    query, key, value = _drawn(device, dtype, width, (heads, 5), (kv_heads, 37), (kv_heads, 37))
    later = torch.arange(37, device=device) > torch.arange(32, 37, device=device)[:, None]
    expected = _attended(query, key, value, later)
    return _agrees(
        lambda: torch.cat([_flash(query[:, :, -n:], key, value, width**-0.5) for n in (5, 1)], 2),
        torch.cat([expected, expected[:, :, -1:]], 2),
        "chunks of prompts fall back to attention with a mask",
    )


@functools.lru_cache(maxsize=16)
def _packed_flash_is_right(device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, width: int) -> bool:
    ends = (0, 5, 6, 6, 300)  # the last one is longer than a block of the kernel
    query, key, value = _drawn(device, dtype, width, (heads, 300), (kv_heads, 300), (kv_heads, 300))
    number = torch.tensor([0] * 5 + [1] + [2] * 294, device=device)
    expected = _attended(query, key, value, number[:, None] != number)
    tokens = [part[0].transpose(0, 1) for part in (query, key, value)]
    return _agrees(
        lambda: _packed_flash(tokens[0], tokens[1], tokens[2], ends, width**-0.5),
        expected[0].transpose(0, 1),
        "packed pictures fall back to a call for each length",
    )


@functools.lru_cache(maxsize=16)
def _pooled_flash_is_right(device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, width: int) -> bool:
    lengths, counts, length = [70, 9, 300, 1], [70, 1, 150, 20], 310  # the last one is padding, mostly without columns
    generator = torch.Generator().manual_seed(0)
    sizes = (sum(counts), heads, width), (4, kv_heads, length, width), (4, kv_heads, length, width)
    query, keys, values = (torch.randn(size, generator=generator).to(device, dtype) for size in sizes)
    slots, window, expected = [2, 0, 3, 0], 40, []
    bounds = torch.tensor([0, *itertools.accumulate(counts)], device=device)
    places = PooledPlaces.of(bounds, torch.tensor(slots, device=device), torch.tensor(lengths, device=device), keys)
    for reach in (length, window):
        queries = query.split(counts)
        for part, slot, end in zip(queries, slots, lengths, strict=True):
            own = (part.transpose(0, 1)[None], keys[slot : slot + 1, :, :end], values[slot : slot + 1, :, :end])
            behind = torch.arange(end - len(part), end, device=device)[:, None] - torch.arange(end, device=device)
            attended = _attended(*own, (behind < 0) | (behind >= reach))[0].transpose(0, 1)
            expected.append(attended.nan_to_num())  # without columns, queries get zeros
    return _agrees(
        lambda: torch.cat([_pooled_flash(query, keys, values, places, width**-0.5, w) for w in (None, window)]),
        torch.cat(expected),
        "prompts are not captured in graphs",
    )


def _drawn(device: torch.device, dtype: torch.dtype, width: int, *sizes: tuple[int, int]) -> list[torch.Tensor]:
    """Return random tensors (2, heads, length, D) of these numbers of heads and lengths."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, *size, width, generator=generator).to(device, dtype) for size in sizes]


def _attended(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """Return attention in float64, whose columns are `hidden` from queries."""
    near, far = (tensor.double().repeat_interleave(query.shape[1] // key.shape[1], 1) for tensor in (key, value))
    scores = query.double() @ near.transpose(2, 3) * query.shape[3] ** -0.5
    return scores.masked_fill(hidden, -torch.inf).softmax(-1) @ far


def _agrees(run: Callable[[], torch.Tensor], expected: torch.Tensor, otherwise: str) -> bool:
    """Return True where a kernel's output is near the expected one; log what happens `otherwise`."""
    try:
        ours = run()
    except torch.OutOfMemoryError:  # which says nothing about the kernel
        raise
    except Exception as reason:  # the kernel is missing, or takes other arguments
        log.warning("%s: %s: %s", otherwise, type(reason).__name__, reason)
        return False
    error = float((ours.double() - expected).norm() / expected.norm())
    if not error <= WITHIN[ours.dtype]:
        log.warning("%s: torch's flash kernel has a relative error of %.1e", otherwise, error)
        return False
    return True
