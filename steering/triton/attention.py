"""The attention kernels of a device, where there are some that agree with plain torch."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import logging
import math
from collections.abc import Callable

import torch

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
