"""The attention kernels of a device, where there are some that agree with plain torch."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import logging
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from steering.devices import to_device
from steering.triton.attended import DecodeFunction

WITHIN = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}
"""Largest relative error of the kernel at load against float64, by dtype of the model."""

log = logging.getLogger(__name__)


@functools.lru_cache(maxsize=16)
def decode_kernel(
    device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, width: int, has_sinks: bool = False
) -> DecodeFunction | None:
    """Return the kernel for heads of this width, None where there is none or it is wrong; the log says why."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None or dtype not in WITHIN:
        return None
    from steering.triton import triton_attention  # noqa: PLC0415 -- only torch's builds for GPUs can import it

    try:
        error = error_of(triton_attention.decode_attention, device, dtype, heads, kv_heads, width, has_sinks)
    except Exception as reason:  # triton also needs a C compiler
        log.warning("decode attention falls back to torch: %s: %s", type(reason).__name__, reason)
        return None
    if not error <= WITHIN[dtype]:
        log.warning("decode attention falls back to torch: the kernel's relative error is %.1e", error)
        return None
    return triton_attention.decode_attention


@torch.inference_mode()
def error_of(
    kernel: DecodeFunction,
    device: torch.device,
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    width: int,
    has_sinks: bool = False,
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
    sinks = _drawn_sinks(device, heads).to(dtype) if has_sinks else None
    place = (query, key, value, keys, values, positions, width**-0.5, columns)
    calls = [
        [kernel(*place, **changes, looks=looks, sinks=sinks) for looks in (True, False)]
        for changes in ({}, {"bias": bias, "gains": gains})
    ]
    near, far = (cache[:2].double().repeat_interleave(heads // kv_heads, 1) for cache in (keys, values))  # now updated
    scores = (query[:2].double() @ near.transpose(2, 3)) * width**-0.5
    later = torch.arange(columns, device=device) > positions[:2, None, None, None]
    biased = scores + (bias[0][:2, :, None, None] * bias[1][:2, None, None]).double()
    changed = biased + gains[:2, None, None].double() * biased.abs()
    errors = []
    for (attended, plain), changed_scores in zip(calls, (scores, changed), strict=True):
        weights = _weights(changed_scores, later, sinks)
        expected, means = (weights @ far)[:, :, 0], weights[:, :, 0].mean(1)
        assert attended.means is not None
        for ours, reference in ((attended.out, expected), (plain.out, expected), (attended.means, means)):
            errors.append(float((ours[:2].double() - reference).norm() / reference.norm()))
    return math.inf if any(map(math.isnan, errors)) else max(errors)


def kept(log_sums: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Return the share of attention that columns keep beside sinks. log_sums: the logarithms of their softmax's sums."""
    return (log_sums - sinks.float()).sigmoid()


def beside(out: torch.Tensor, log_sums: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Return an output (..., D) with sinks in its denominators. log_sums: (...). sinks: of any shape that fits these."""
    return (out * kept(log_sums, sinks)[..., None]).to(out.dtype)


def with_log_sums(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    causal: bool = False,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Attend by a fused kernel of torch that also returns the logarithm of each query's sum of exponentials.

    Returns None where there is no such kernel, or it is wrong; otherwise the output, and (rows, heads, n) in float32. query:
    (rows, heads, n, D). key, value: (rows, heads or KV, columns, D). mask: as SDPA takes it.
    """
    if query.shape[3] != value.shape[3]:
        return None
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=query.dtype, device=mask.device).masked_fill(~mask, -torch.inf)
    if query.device.type == "cpu":
        cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, log_sums = cpu(query, key, value, 0.0, causal, attn_mask=mask, scale=scaling)
        return out, log_sums
    shape = query.device, query.dtype, query.shape[1], key.shape[1], query.shape[3]
    if not query.is_cuda or not _efficient_is_right(*shape):
        return None
    return _efficient(query, key, value, mask, scaling, causal)


def lower_right(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float, sinks: torch.Tensor | None = None
) -> torch.Tensor | None:
    """Attend causally where queries (rows, heads, n, D) are the last n columns, by torch's flash kernel without a mask.

    Returns None where that kernel is missing or wrong. key, value: (rows, KV, columns, D), not copied for each head. sinks:
    (heads,), scores that join each denominator.
    """
    shape = query.dtype, query.shape[1], key.shape[1], query.shape[3], sinks is not None
    if not _flash_takes(query) or not _flash_is_right(query.device, *shape):
        return None
    return _flash(query, key, value, scaling, sinks)


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
    sinks: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """Attend causally to slots of a pool, whose last columns are those of the queries, by torch's flash kernel.

    Returns None where that kernel is missing or wrong. query: (tokens, heads, D), packed prompts. keys, values: (slots, KV,
    length, D), not copied. sinks: (heads,), scores that join each denominator.
    """
    shape = query.dtype, query.shape[1], keys.shape[1], query.shape[2], sinks is not None
    if not _flash_takes(query) or keys.shape != values.shape or not _pooled_flash_is_right(query.device, *shape):
        return None
    return _pooled_flash(query, keys, values, places, scaling, window, sinks)


def _flash_takes(query: torch.Tensor) -> bool:
    """Return True for queries (..., D) of a dtype and width that torch's flash kernels support."""
    return query.is_cuda and query.dtype != torch.float32 and query.shape[-1] % 8 == 0 and query.shape[-1] <= 256


def _flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float, sinks: torch.Tensor | None
) -> torch.Tensor:
    """Return the output of torch's flash kernel, whose causal mask ends at the lower right corner."""
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    attended = flash(query, key, value, 0.0, True, return_debug_mask=False, scale=scaling)
    out: torch.Tensor = attended[0]
    return out if sinks is None else beside(out, attended[1], sinks[:, None])


def _efficient(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scaling: float, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output and sums of torch's memory-efficient kernel, which takes any mask and no grouped heads."""
    rows, heads, n, _ = query.shape
    if key.shape[1] != heads:
        key, value = (tensor.repeat_interleave(heads // key.shape[1], 1) for tensor in (key, value))
    if mask is not None:  # whose rows must begin at multiples of 16 numbers
        columns = mask.shape[3]
        mask = nn.functional.pad(mask, (0, -columns % 16))[..., :columns].expand(rows, heads, n, columns)
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    out, log_sums, *_ = efficient(query, key, value, mask, True, 0.0, causal, scale=scaling)
    return out, log_sums[..., :n]  # which is padded, too


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
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Return the output of torch's flash kernel for columns of a pool.

    The pool is handed over as one long sequence, in which each slot's own columns begin at its own place.
    """
    slots, kv_heads, length, width = keys.shape
    size, strides = ((slots - 1) * kv_heads + 1) * length, (width, length * width, 1)
    near, far = (tensor.as_strided((size, kv_heads, width), strides) for tensor in (keys, values))
    flash = torch.ops.aten._flash_attention_forward
    attended = flash(
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
    )
    out: torch.Tensor = attended[0]
    return out if sinks is None else beside(out, attended[1].t(), sinks)  # (heads, tokens)


@functools.lru_cache(maxsize=256)
def _bounds(ends: tuple[int, ...], device: torch.device) -> tuple[torch.Tensor, int]:
    """Return the bounds of packed sequences as the kernel takes them, and the length of the longest one."""
    bounds = list(dict.fromkeys(ends))  # without empty sequences
    with torch.inference_mode(False):
        longest = max((end - begin for begin, end in itertools.pairwise(bounds)), default=0)
        return to_device(torch.tensor(bounds, dtype=torch.int32), device), longest


@functools.lru_cache(maxsize=16)
def _efficient_is_right(device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, width: int) -> bool:
    query, key, value = _drawn(device, dtype, width, (heads, 37), (kv_heads, 37), (kv_heads, 37))
    later = torch.arange(37, device=device) > torch.arange(37, device=device)[:, None]
    mask = torch.zeros(1, 1, 37, 37, dtype=dtype, device=device).masked_fill(later, -torch.inf)
    sinks = _drawn_sinks(device, heads)

    def run(*masked: Any) -> torch.Tensor:
        return beside(*_efficient(query, key, value, masked[0], width**-0.5, masked[1]), sinks[:, None])

    return _agrees(
        lambda: torch.cat([run(None, True), run(mask, False)], 2),
        torch.cat([_attended(query, key, value, later, sinks)] * 2, 2),
        "attention beside sinks falls back to explicit weights",
    )


@functools.lru_cache(maxsize=16)
def _flash_is_right(
    device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, width: int, has_sinks: bool = False
) -> bool:
    query, key, value = _drawn(device, dtype, width, (heads, 5), (kv_heads, 37), (kv_heads, 37))
    later = torch.arange(37, device=device) > torch.arange(32, 37, device=device)[:, None]
    sinks = _drawn_sinks(device, heads) if has_sinks else None
    expected = _attended(query, key, value, later, sinks)
    return _agrees(
        lambda: torch.cat([_flash(query[:, :, -n:], key, value, width**-0.5, sinks) for n in (5, 1)], 2),
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
def _pooled_flash_is_right(
    device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, width: int, has_sinks: bool = False
) -> bool:
    lengths, counts, length = [70, 9, 300, 1], [70, 1, 150, 20], 310  # the last one is padding, mostly without columns
    generator = torch.Generator().manual_seed(0)
    sizes = (sum(counts), heads, width), (4, kv_heads, length, width), (4, kv_heads, length, width)
    query, keys, values = (torch.randn(size, generator=generator).to(device, dtype) for size in sizes)
    slots, window, expected = [2, 0, 3, 0], 40, []
    sinks = _drawn_sinks(device, heads) if has_sinks else None
    bounds = torch.tensor([0, *itertools.accumulate(counts)], device=device)
    places = PooledPlaces.of(bounds, torch.tensor(slots, device=device), torch.tensor(lengths, device=device), keys)
    for reach in (length, window):
        queries = query.split(counts)
        for part, slot, end in zip(queries, slots, lengths, strict=True):
            own = (part.transpose(0, 1)[None], keys[slot : slot + 1, :, :end], values[slot : slot + 1, :, :end])
            behind = torch.arange(end - len(part), end, device=device)[:, None] - torch.arange(end, device=device)
            attended = _attended(*own, (behind < 0) | (behind >= reach), sinks)[0].transpose(0, 1)
            expected.append(attended.nan_to_num())  # without columns, queries get zeros
    return _agrees(
        lambda: torch.cat([_pooled_flash(query, keys, values, places, width**-0.5, w, sinks) for w in (None, window)]),
        torch.cat(expected),
        "prompts are not captured in graphs",
    )


def _drawn(device: torch.device, dtype: torch.dtype, width: int, *sizes: tuple[int, int]) -> list[torch.Tensor]:
    """Return random tensors (2, heads, length, D) of these numbers of heads and lengths."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, *size, width, generator=generator).to(device, dtype) for size in sizes]


def _drawn_sinks(device: torch.device, heads: int) -> torch.Tensor:
    """Return random sinks, which are about as much as some tens of columns."""
    return (torch.randn(heads, generator=torch.Generator().manual_seed(1)) + 4).to(device)


def _attended(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    hidden: torch.Tensor,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return attention in float64, whose columns are `hidden` from queries."""
    near, far = (tensor.double().repeat_interleave(query.shape[1] // key.shape[1], 1) for tensor in (key, value))
    scores = query.double() @ near.transpose(2, 3) * query.shape[3] ** -0.5
    return _weights(scores, hidden, sinks) @ far


def _weights(scores: torch.Tensor, hidden: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Return the weights of scores (rows, heads, n, columns), with sinks as one more column that is left out again."""
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is None:
        return scores.softmax(-1)
    column = sinks.to(scores)[:, None, None].expand(*scores.shape[:3], 1)
    return torch.cat([scores, column], -1).softmax(-1)[..., :-1]


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
        log.warning("%s: torch's fused kernel has a relative error of %.1e", otherwise, error)
        return False
    return True
