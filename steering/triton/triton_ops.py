"""Elementwise kernels in Triton that replace many kernels of transformers: on a GPU launches take longer than computing.

Results are rounded to the model's dtype wherever transformers' are, except where a compiler fuses a multiplication and an
addition; then the last bit may differ. Needs triton, which torch's builds for GPUs include.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from steering.triton.capture import Capture


@triton.jit  # type: ignore[untyped-decorator]
def _rms_norm_kernel(  # type: ignore[no-untyped-def]  # triton reads what is said of arguments
    states,
    update,
    weight,
    total,
    out,
    width,
    eps,
    shifted: tl.constexpr,
    adds: tl.constexpr,
    block: tl.constexpr,
) -> None:
    first = tl.program_id(0).to(tl.int64) * width
    at = tl.arange(0, block)
    inside = at < width
    values = tl.load(states + first + at, mask=inside, other=0.0).to(tl.float32)
    if adds:
        values += tl.load(update + first + at, mask=inside, other=0.0).to(tl.float32)
        values = values.to(out.dtype.element_ty)
        tl.store(total + first + at, values, mask=inside)
        values = values.to(tl.float32)
    gain = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    values = values * tl.rsqrt(tl.sum(values * values, 0) / width + eps)
    values = values * (1.0 + gain) if shifted else values.to(out.dtype.element_ty).to(tl.float32) * gain
    tl.store(out + first + at, values.to(out.dtype.element_ty), mask=inside)


def rms_norm(states: torch.Tensor, weight: torch.Tensor, eps: float, shifted: bool) -> torch.Tensor:
    """Divide states (..., d) by their root mean square and multiply by weight (d,).

    Where `shifted`, as in Gemma, multiply by 1 + weight instead.
    """
    states = states.contiguous()
    out = torch.empty_like(states)
    _launch_norm(states, states, weight, out, out, eps, shifted, adds=False)
    return out


def add_rms_norm(
    states: torch.Tensor, update: torch.Tensor, weight: torch.Tensor, eps: float, shifted: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return states + update, both (..., d), and its norm as `rms_norm`."""
    states, update = states.contiguous(), update.contiguous()
    total, out = torch.empty_like(states), torch.empty_like(states)
    _launch_norm(states, update, weight, total, out, eps, shifted, adds=True)
    return total, out


def _launch_norm(
    states: torch.Tensor,
    update: torch.Tensor,
    weight: torch.Tensor,
    total: torch.Tensor,
    out: torch.Tensor,
    eps: float,
    shifted: bool,
    adds: bool,
) -> None:
    width = states.shape[-1]
    block = triton.next_power_of_2(width)
    grid = (states.numel() // width,)
    if grid[0]:
        with torch.cuda.device_of(states):  # otherwise it is launched on the first device
            warps = min(max(block // 512, 1), 16)
            _rms_norm_kernel[grid](
                states, update, weight, total, out, width, eps, shifted, adds, block, num_warps=warps
            )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _rotate(  # type: ignore[no-untyped-def]
    states,
    out,
    row,
    token,
    heads,
    half,
    row_stride,
    head_stride,
    token_stride,
    out_row_stride,
    out_head_stride,
    out_token_stride,
    cos_first,
    cos_second,
    sin_first,
    sin_second,
    rounded: tl.constexpr,
    head_block: tl.constexpr,
    block: tl.constexpr,
) -> None:
    head = tl.arange(0, head_block)[:, None].to(tl.int64)
    at = tl.arange(0, block)[None, :]
    inside = (head < heads) & (at < half)
    source = states + row * row_stride + head * head_stride + token * token_stride + at
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + half, mask=inside, other=0.0).to(tl.float32)
    a, b = first * cos_first, second * sin_first
    c, d = second * cos_second, first * sin_second
    if rounded:
        dtype = out.dtype.element_ty
        a, b = a.to(dtype).to(tl.float32), b.to(dtype).to(tl.float32)
        c, d = c.to(dtype).to(tl.float32), d.to(dtype).to(tl.float32)
    target = out + row * out_row_stride + head * out_head_stride + token * out_token_stride + at
    tl.store(target, (a - b).to(out.dtype.element_ty), mask=inside)
    tl.store(target + half, (c + d).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["tokens"])  # type: ignore[untyped-decorator]
def _rotated_kernel(  # type: ignore[no-untyped-def]
    query,
    key,
    cos,
    sin,
    query_out,
    key_out,
    tokens,
    heads,
    kv_heads,
    half,
    query_row,
    query_head,
    query_token,
    key_row,
    key_head,
    key_token,
    query_out_row,
    query_out_head,
    query_out_token,
    key_out_row,
    key_out_head,
    key_out_token,
    angle_row,
    angle_token,
    rounded: tl.constexpr,
    head_block: tl.constexpr,
    kv_head_block: tl.constexpr,
    block: tl.constexpr,
) -> None:
    program = tl.program_id(0)
    row, token = (program // tokens).to(tl.int64), (program % tokens).to(tl.int64)
    at = tl.arange(0, block)[None, :]
    angle = row * angle_row + token * angle_token + at
    within = at < half
    cos_first = tl.load(cos + angle, mask=within, other=0.0).to(tl.float32)
    cos_second = tl.load(cos + angle + half, mask=within, other=0.0).to(tl.float32)
    sin_first = tl.load(sin + angle, mask=within, other=0.0).to(tl.float32)
    sin_second = tl.load(sin + angle + half, mask=within, other=0.0).to(tl.float32)
    _rotate(
        query, query_out, row, token, heads, half, query_row, query_head, query_token,
        query_out_row, query_out_head, query_out_token, cos_first, cos_second, sin_first, sin_second,
        rounded, head_block, block,
    )  # fmt: skip
    _rotate(
        key, key_out, row, token, kv_heads, half, key_row, key_head, key_token,
        key_out_row, key_out_head, key_out_token, cos_first, cos_second, sin_first, sin_second,
        rounded, kv_head_block, block,
    )  # fmt: skip


def rotated(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rounded: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply rotary embeddings to query (rows, heads, n, d) and key (rows, kv_heads, n, d) by angles (1 or rows, n, d).

    The two halves of d are the two parts of each complex number. With `rounded`, products are rounded to the dtype before
    they are added.
    """
    rows, heads, tokens, width = query.shape
    outs = torch.empty_like(query), torch.empty_like(key)
    cos, sin = cos.expand(rows, -1, -1), sin.expand(rows, -1, -1)
    if sin.stride() != cos.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
    if not rows * tokens:
        return outs
    blocks = [triton.next_power_of_2(count) for count in (heads, key.shape[1], width // 2)]
    strides = [stride for tensor in (query, key, *outs) for stride in tensor.stride()[:3]]
    with torch.cuda.device_of(query):
        _rotated_kernel[(rows * tokens,)](
            query, key, cos, sin, *outs, tokens, heads, key.shape[1], width // 2, *strides, *cos.stride()[:2],
            rounded, *blocks, num_warps=min(max(blocks[0] * blocks[2] // 512, 1), 8),
        )  # fmt: skip
    return outs


@triton.jit  # type: ignore[untyped-decorator]
def _silu_product_kernel(  # type: ignore[no-untyped-def]
    gate,
    up,
    out,
    width,
    gate_row,
    up_row,
    block: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * block + tl.arange(0, block)
    inside = at < width
    gates = tl.load(gate + row * gate_row + at, mask=inside, other=0.0).to(tl.float32)
    ups = tl.load(up + row * up_row + at, mask=inside, other=0.0).to(tl.float32)
    dtype = out.dtype.element_ty
    gates = (gates / (1.0 + tl.exp(-gates))).to(dtype).to(tl.float32)
    tl.store(out + row * width + at, (gates * ups).to(dtype), mask=inside)


def silu_product(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up, both (..., width) with rows of one stride each, as the halves of a fused product are."""
    width = gate.shape[-1]
    gate_rows, up_rows = gate.flatten(0, -2), up.flatten(0, -2)
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if out.numel():
        with torch.cuda.device_of(gate):
            grid = (len(gate_rows), triton.cdiv(width, 1024))
            _silu_product_kernel[grid](gate_rows, up_rows, out, width, gate_rows.stride(0), up_rows.stride(0), 1024)
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _matvec_kernel(  # type: ignore[no-untyped-def]
    state,
    weight,
    bias,
    out,
    outputs,
    inputs,
    has_bias: tl.constexpr,
    rows: tl.constexpr,
    block: tl.constexpr,
    stages: tl.constexpr,
) -> None:
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    valid = row < outputs
    at = tl.arange(0, block)
    sums = tl.zeros([rows, block], tl.float32)
    base = weight + row.to(tl.int64)[:, None] * inputs
    for start in tl.range(0, inputs, block, num_stages=stages):
        inside = start + at < inputs
        states = tl.load(state + start + at, mask=inside, other=0.0).to(tl.float32)
        tile = valid[:, None] & inside[None, :]
        sums += tl.load(base + (start + at)[None, :], mask=tile, other=0.0).to(tl.float32) * states[None, :]
    total = tl.sum(sums, 1)
    if has_bias:
        total += tl.load(bias + row, mask=valid, other=0.0).to(tl.float32)
    tl.store(out + row, total.to(out.dtype.element_ty), mask=valid)


class MatvecForm(NamedTuple):
    """The sizes of a product's programs.

    rows: outputs of one program. block: inputs of a tile. stages: 1 for tiles that go straight to registers, of which ptxas
    keeps one or two loads in flight; more for tiles that are copied to shared memory before they are needed.
    """

    rows: int
    block: int
    warps: int
    stages: int


MATVEC_FORMS = tuple(
    MatvecForm(*sizes)
    for sizes in ((1, 2048, 4, 1), (2, 2048, 8, 1), (1, 2048, 4, 3), (2, 2048, 8, 3), (2, 1024, 4, 4))
)


def matvec(
    state: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, form: MatvecForm = MATVEC_FORMS[0]
) -> torch.Tensor:
    """Multiply a single state (..., inputs) by weight (outputs, inputs): (..., outputs).

    It is bound by reading the weight. `form` changes its speed, and the order of its sums, by rows, block and warps.
    """
    outputs, inputs = weight.shape
    out = torch.empty(*state.shape[:-1], outputs, dtype=state.dtype, device=state.device)
    with torch.cuda.device_of(state):
        _matvec_kernel[(triton.cdiv(outputs, form.rows),)](
            state, weight, weight if bias is None else bias, out, outputs, inputs, bias is not None, form.rows, form.block,
            form.stages, num_warps=form.warps,
        )  # fmt: skip
    return out


matvecs = tuple(partial(matvec, form=form) for form in MATVEC_FORMS)
"""The product in each form."""


_capture = cache(Capture)


def seconds(run: Callable[[], list[torch.Tensor]], device: torch.device) -> float:
    """Return the device's time for a call, which is captured as a CUDA graph: the shortest of ten."""
    replay, _ = _capture()(run, device)
    times = []
    for _ in range(10):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.device(device):
            began.record()
            replay()
            ended.record()
        ended.synchronize()
        times.append(began.elapsed_time(ended))
    return min(times) / 1000
