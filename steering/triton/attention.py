"""The decode attention kernel of a device, where there is one that agrees with plain torch."""

from __future__ import annotations

import functools
import importlib.util
import logging
import math

import torch

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
    if not query.is_cuda or query.dtype == torch.float32 or query.shape[3] % 8 or query.shape[3] > 256:
        return None
    if not _flash_is_right(query.device, query.dtype, query.shape[1], key.shape[1], query.shape[3]):
        return None
    return _flash(query, key, value, scaling)


def _flash(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float) -> torch.Tensor:
    """Return the output of torch's flash kernel, whose causal mask ends at the lower right corner."""
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    out: torch.Tensor = flash(query, key, value, 0.0, True, return_debug_mask=False, scale=scaling)[0]
    return out


@functools.lru_cache(maxsize=16)
def _flash_is_right(device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, width: int) -> bool:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(2, count, length, width, generator=generator).to(device, dtype)
        for count, length in ((heads, 5), (kv_heads, 37), (kv_heads, 37))
    )
    try:
        ours = torch.cat([_flash(query[:, :, -n:], key, value, width**-0.5) for n in (5, 1)], 2)
    except Exception as reason:  # the kernel is missing, or takes other arguments
        log.warning("chunks of prompts fall back to attention with a mask: %s: %s", type(reason).__name__, reason)
        return False
    near, far = (tensor.double().repeat_interleave(heads // kv_heads, 1) for tensor in (key, value))
    scores = query.double() @ near.transpose(2, 3) * width**-0.5
    later = torch.arange(37, device=device) > torch.arange(32, 37, device=device)[:, None]
    expected = scores.masked_fill(later, -torch.inf).softmax(-1) @ far
    expected = torch.cat([expected, expected[:, :, -1:]], 2)
    return bool((ours.double() - expected).norm() <= WITHIN[dtype] * expected.norm())
