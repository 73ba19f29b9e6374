"""A Triton kernel that finds where top_k, top_p and min_p truncate a distribution, without sorting it.

Floats are compared as integers in the same order. A threshold is found two bits at a time: a pass over the row adds up the
weights at or above three candidates.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK, WARPS = 8192, 16


@triton.jit
def _ordered(values):  # type: ignore[no-untyped-def]
    """Return integers in the order of these floats."""
    bits = values.to(tl.uint32, bitcast=True)
    return tl.where(bits >= 0x80000000, ~bits, bits | 0x80000000)


@triton.jit  # type: ignore[untyped-decorator]
def _weights(  # type: ignore[no-untyped-def]
    values, keys, inside, greatest, kept, by_mass: tl.constexpr
):
    """Return the weight of each token: its mass, where its key is `kept` or above, or 1."""
    if by_mass:
        return tl.where(inside & (keys >= kept), tl.exp(values - greatest), 0.0)
    return inside.to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def _threshold(  # type: ignore[no-untyped-def]
    row, vocabulary, greatest, kept, wanted, by_mass: tl.constexpr, block: tl.constexpr
):
    """Return the greatest key whose tokens at or above it weigh `wanted`."""
    at = tl.arange(0, block)
    found, step = tl.full([], 0, tl.uint32), tl.full([], 1 << 30, tl.uint32)
    for _ in range(16):
        low, middle, high = found + step, found + 2 * step, found + 3 * step
        above_low = tl.zeros([block], tl.float32)
        above_middle = tl.zeros([block], tl.float32)
        above_high = tl.zeros([block], tl.float32)
        for start in range(0, vocabulary, block):
            inside = start + at < vocabulary
            values = tl.load(row + start + at, mask=inside, other=-float("inf"))
            keys = _ordered(values)
            weights = _weights(values, keys, inside, greatest, kept, by_mass)
            above_low += tl.where(keys >= low, weights, 0.0)
            above_middle += tl.where(keys >= middle, weights, 0.0)
            above_high += tl.where(keys >= high, weights, 0.0)
        if tl.sum(above_high, 0) >= wanted:
            found = high
        elif tl.sum(above_middle, 0) >= wanted:
            found = middle
        elif tl.sum(above_low, 0) >= wanted:
            found = low
        step = step >> 2
    return found


@triton.jit(do_not_specialize_on_alignment=["top_k", "top_p", "min_p"])  # type: ignore[untyped-decorator]
def _thresholds_kernel(  # type: ignore[no-untyped-def]
    scaled,
    top_k,
    top_p,
    min_p,
    out,
    vocabulary,
    block: tl.constexpr,
) -> None:
    program = tl.program_id(0)
    row = scaled + program.to(tl.int64) * vocabulary
    number, mass, relative = tl.load(top_k + program), tl.load(top_p + program), tl.load(min_p + program)
    at = tl.arange(0, block)
    greatest = tl.max(tl.load(row + at, mask=at < vocabulary, other=-float("inf")), 0)
    for start in range(block, vocabulary, block):
        inside = start + at < vocabulary
        greatest = tl.maximum(greatest, tl.max(tl.load(row + start + at, mask=inside, other=-float("inf")), 0))
    found = _ordered(tl.full([], -float("inf"), tl.float32))
    if (number > 0) & (number < vocabulary):
        found = _threshold(row, vocabulary, greatest, found, number.to(tl.float32), False, block)
    if mass < 1.0:
        total = tl.zeros([block], tl.float32)
        for start in range(0, vocabulary, block):
            inside = start + at < vocabulary
            values = tl.load(row + start + at, mask=inside, other=-float("inf"))
            total += _weights(values, _ordered(values), inside, greatest, found, True)
        found = tl.maximum(found, _threshold(row, vocabulary, greatest, found, mass * tl.sum(total, 0), True, block))
    bits = tl.where(found >= 0x80000000, found ^ 0x80000000, ~found)
    least = bits.to(tl.float32, bitcast=True)
    if relative > 0.0:
        least = tl.maximum(least, greatest + tl.log(relative))
    tl.store(out + program, least)


def thresholds(scaled: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Return the least logit that each row keeps, (rows, 1).

    scaled: (rows, vocabulary) float32, logits over temperature. top_k, top_p, min_p: (rows, 1), as in
    `steering.runner.truncation`; 0, 1 and 0 keep everything.
    """
    scaled = scaled.contiguous()
    rows, vocabulary = scaled.shape
    out = torch.empty(rows, 1, device=scaled.device)
    with torch.cuda.device_of(scaled):
        _thresholds_kernel[(rows,)](
            scaled, top_k.contiguous(), top_p.contiguous(), min_p.contiguous(), out, vocabulary, BLOCK, num_warps=WARPS
        )
    return out
