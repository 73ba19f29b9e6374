"""What transformers computes in many kernels, each a single one: a GPU waits longer for launches than for what it computes.

Results are rounded to the model's dtype wherever transformers' are, but where a compiler adds what it multiplied in one
instruction: then the last bit may be another. Needs triton, which torch's builds for GPUs bring.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def _rms_norm_kernel(  # type: ignore[no-untyped-def]  # triton reads what is said of arguments
    states,
    weight,
    out,
    width,
    eps,
    shifted: tl.constexpr,
    block: tl.constexpr,
) -> None:
    first = tl.program_id(0).to(tl.int64) * width
    at = tl.arange(0, block)
    inside = at < width
    own = tl.load(states + first + at, mask=inside, other=0.0).to(tl.float32)
    gain = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    own = own * tl.rsqrt(tl.sum(own * own, 0) / width + eps)
    own = own * (1.0 + gain) if shifted else own.to(out.dtype.element_ty).to(tl.float32) * gain
    tl.store(out + first + at, own.to(out.dtype.element_ty), mask=inside)


def rms_norm(states: torch.Tensor, weight: torch.Tensor, eps: float, shifted: bool) -> torch.Tensor:
    """states (..., d) over their root mean square, times weight (d,), or times 1 + weight where it is `shifted`, as
    Gemma's is."""
    states = states.contiguous()
    out = torch.empty_like(states)
    width = states.shape[-1]
    block = triton.next_power_of_2(width)
    grid = (states.numel() // width,)
    if grid[0]:
        with torch.cuda.device_of(states):  # else it is launched on the first one
            warps = min(max(block // 512, 1), 16)
            _rms_norm_kernel[grid](states, weight, out, width, eps, shifted, block, num_warps=warps)
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _rotated_kernel(  # type: ignore[no-untyped-def]
    states,
    cos,
    sin,
    out,
    tokens,
    heads,
    half,
    row_stride,
    head_stride,
    token_stride,
    out_row_stride,
    out_head_stride,
    out_token_stride,
    angle_row_stride,
    angle_token_stride,
    rounded: tl.constexpr,
    head_block: tl.constexpr,
    block: tl.constexpr,
) -> None:
    row = (tl.program_id(0) // tokens).to(tl.int64)
    token = (tl.program_id(0) % tokens).to(tl.int64)
    head = tl.arange(0, head_block)[:, None].to(tl.int64)
    at = tl.arange(0, block)[None, :]
    inside = (head < heads) & (at < half)
    here = states + row * row_stride + head * head_stride + token * token_stride + at
    first = tl.load(here, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(here + half, mask=inside, other=0.0).to(tl.float32)
    angle = row * angle_row_stride + token * angle_token_stride + at
    within = at < half
    cos_first = tl.load(cos + angle, mask=within, other=0.0).to(tl.float32)
    cos_second = tl.load(cos + angle + half, mask=within, other=0.0).to(tl.float32)
    sin_first = tl.load(sin + angle, mask=within, other=0.0).to(tl.float32)
    sin_second = tl.load(sin + angle + half, mask=within, other=0.0).to(tl.float32)
    a, b = first * cos_first, second * sin_first
    c, d = second * cos_second, first * sin_second
    if rounded:
        dtype = out.dtype.element_ty
        a, b = a.to(dtype).to(tl.float32), b.to(dtype).to(tl.float32)
        c, d = c.to(dtype).to(tl.float32), d.to(dtype).to(tl.float32)
    there = out + row * out_row_stride + head * out_head_stride + token * out_token_stride + at
    tl.store(there, (a - b).to(out.dtype.element_ty), mask=inside)
    tl.store(there + half, (c + d).to(out.dtype.element_ty), mask=inside)


def rotated(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rounded: bool) -> torch.Tensor:
    """Rotary embedding of states (rows, heads, n, d), whose halves are the two parts of each number, by angles (1 or rows,
    n, d); products are `rounded` to the dtype before they are added, or not."""
    rows, heads, tokens, width = states.shape
    out = torch.empty_like(states)
    cos, sin = cos.expand(rows, -1, -1), sin.expand(rows, -1, -1)
    if sin.stride() != cos.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
    blocks = triton.next_power_of_2(heads), triton.next_power_of_2(width // 2)
    if not rows * tokens:
        return out
    with torch.cuda.device_of(states):
        _rotated_kernel[(rows * tokens,)](
            states,
            cos,
            sin,
            out,
            tokens,
            heads,
            width // 2,
            *states.stride()[:3],
            *out.stride()[:3],
            *cos.stride()[:2],
            rounded,
            *blocks,
            num_warps=min(max(blocks[0] * blocks[1] // 512, 1), 8),
        )
    return out
