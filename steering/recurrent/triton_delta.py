"""A Triton kernel of a decode's linear attention, from the projections of its layer to the gated norm.

A program computes a head of a row: it reads its state once, and writes the one behind the token, where plain torch reads
and writes a state ten times. It rounds where transformers rounds.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from steering.recurrent.states import LayerStates


@triton.jit  # type: ignore[untyped-decorator]
def _convolved(  # type: ignore[no-untyped-def]
    mixed, weight, inputs, source, channel, inside, channels, taps: tl.constexpr
):
    """Return these channels of a row behind the causal convolution and SiLU."""
    dtype = mixed.dtype.element_ty
    new = tl.load(mixed + channel, mask=inside, other=0.0).to(tl.float32)
    total = new * tl.load(weight + channel * taps + taps - 1, mask=inside, other=0.0).to(tl.float32)
    for tap in tl.static_range(taps - 1):
        before = tl.load(inputs + (source * channels + channel) * (taps - 1) + tap, mask=inside, other=0.0)
        total += before.to(tl.float32) * tl.load(weight + channel * taps + tap, mask=inside, other=0.0).to(tl.float32)
    total = total.to(dtype).to(tl.float32)
    return (total * tl.sigmoid(total)).to(dtype).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def _shift(mixed, inputs, source, target, channel, inside, channels, taps: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write the last inputs of these channels, the row's new one among them."""
    old, new = inputs + (source * channels + channel) * (taps - 1), inputs + (target * channels + channel) * (taps - 1)
    for tap in tl.static_range(taps - 2):
        tl.store(new + tap, tl.load(old + tap + 1, mask=inside), mask=inside)
    tl.store(new + taps - 2, tl.load(mixed + channel, mask=inside), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _step(  # type: ignore[no-untyped-def]
    mixed, gate, alpha, beta, weight, a_log, dt_bias, norm, inputs, matrices, read, write, out,
    mixed_row, gate_row, alpha_row, beta_row, channels, heads, key_heads, norm_eps,
    group: tl.constexpr, k: tl.constexpr, v: tl.constexpr, block_k: tl.constexpr, block_v: tl.constexpr,
    taps: tl.constexpr, keeps: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    dtype = mixed.dtype.element_ty
    source = tl.load(read + row)
    mixed += row * mixed_row
    at_k, at_v = tl.arange(0, block_k), tl.arange(0, block_v)
    in_k, in_v = at_k < k, at_v < v
    of_query = head // group * k + at_k
    of_key, of_value = key_heads * k + of_query, 2 * key_heads * k + head * v + at_v
    query = _convolved(mixed, weight, inputs, source, of_query, in_k, channels, taps)
    key = _convolved(mixed, weight, inputs, source, of_key, in_k, channels, taps)
    value = _convolved(mixed, weight, inputs, source, of_value, in_v, channels, taps)
    query *= tl.rsqrt(tl.sum(query * query) + 1e-6) * (1.0 / tl.sqrt(k * 1.0))
    key *= tl.rsqrt(tl.sum(key * key) + 1e-6)

    rate = tl.load(alpha + row * alpha_row + head).to(tl.float32) + tl.load(dt_bias + head).to(tl.float32)
    rate = tl.where(rate > 20.0, rate, tl.log(1.0 + tl.exp(rate)))
    decay = tl.exp(-tl.exp(tl.load(a_log + head).to(tl.float32)) * rate)
    share = tl.sigmoid(tl.load(beta + row * beta_row + head).to(tl.float32)).to(dtype).to(tl.float32)

    cell, inside = at_k[:, None] * v + at_v[None], in_k[:, None] & in_v[None]
    matrix = tl.load(matrices + (source * heads + head) * (k * v) + cell, mask=inside, other=0.0) * decay
    change = (value - tl.sum(matrix * key[:, None], 0)) * share
    matrix += key[:, None] * change[None]
    result = tl.sum(matrix * query[:, None], 0).to(dtype).to(tl.float32)
    if keeps:
        target = tl.load(write + row)
        tl.store(matrices + (target * heads + head) * (k * v) + cell, matrix, mask=inside)
        _shift(mixed, inputs, source, target, of_value, in_v, channels, taps)
        if head % group == 0:
            _shift(mixed, inputs, source, target, of_query, in_k, channels, taps)
            _shift(mixed, inputs, source, target, of_key, in_k, channels, taps)

    result *= tl.rsqrt(tl.sum(result * result) / v + norm_eps)
    scaled = (tl.load(norm + at_v, mask=in_v, other=0.0) * result.to(dtype)).to(tl.float32)
    opened = tl.load(gate + row * gate_row + head * v + at_v, mask=in_v, other=0.0).to(tl.float32)
    tl.store(out + (row * heads + head) * v + at_v, (scaled * opened * tl.sigmoid(opened)).to(dtype), mask=in_v)


def delta_step(
    mixed: torch.Tensor,
    gate: torch.Tensor,
    alpha: torch.Tensor,
    beta: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    eps: float,
    states: LayerStates,
    places: tuple[torch.Tensor, torch.Tensor | None],
    key_heads: int,
) -> torch.Tensor:
    """Return the gated and normalised output of one token a row, (rows, heads * v), and write the states behind it.

    mixed: (rows, channels), of queries, keys and values. gate: (rows, heads * v). alpha, beta: (rows, heads), before their
    functions. Their rows may be apart, as parts of one product are. weights: of the convolution (channels, 1, taps),
    `A_log`, `dt_bias` (heads,), and of the norm (v,), to whose variance `eps` is added. states: of all slots. places:
    (rows,), the rows of `states` that are read, and those written.
    """
    inputs, matrices = states
    _, heads, k, v = matrices.shape
    rows, channels = mixed.shape
    out, (read, write) = gate.new_empty(gate.shape), places
    strides = (tensor.stride(0) for tensor in (mixed, gate, alpha, beta))
    block_k, block_v = triton.next_power_of_2(k), triton.next_power_of_2(v)
    with torch.cuda.device_of(mixed):
        _step[(rows, heads)](
            mixed, gate, alpha, beta, *weights, inputs, matrices, read, read if write is None else write, out,
            *strides, channels, heads, key_heads, eps, group=heads // key_heads, k=k, v=v, block_k=block_k, block_v=block_v,
            taps=weights[0].shape[2], keeps=write is not None, num_warps=8 if block_k * block_v > 4096 else 4,
        )  # fmt: skip
    return out
