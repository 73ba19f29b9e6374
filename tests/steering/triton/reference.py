"""The kernels of `steering/accel` in plain torch: they stand for Triton's where there is no GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import nn

from steering.cpu.kernels.looks import enhanced
from steering.triton.attention import PooledPlaces
from steering.triton.products import Product


class Attended(NamedTuple):
    out: torch.Tensor
    means: torch.Tensor | None
    effect: torch.Tensor | None


class DecodeAttention:
    """A stand-in for `triton_attention.decode_attention`, row by row.

    calls: the number of calls; `enhanced` and `looked` count those with an enhancement and with mean weights.
    """

    def __init__(self) -> None:
        self.calls = self.enhanced = self.looked = 0

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        positions: torch.Tensor,
        scaling: float,
        columns: int,
        layer: int = 0,
        window: int | None = None,
        softcap: float | None = None,
        bias: tuple[torch.Tensor, torch.Tensor] | None = None,
        gains: torch.Tensor | None = None,
        enhancement: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
        looks: bool = False,
        sinks: torch.Tensor | None = None,
    ) -> Attended:
        self.calls, self.looked = self.calls + 1, self.looked + looks
        self.enhanced += enhancement is not None
        rows, heads, _, width = query.shape
        out, means = query.new_empty(rows, heads, width), torch.zeros(rows, columns)
        effect = torch.zeros(rows, 3)
        for row, position in enumerate(positions.tolist()):
            keys[row, :, position], values[row, :, position] = key[row, :, 0], value[row, :, 0]
            first = 0 if window is None else max(0, position - window + 1)
            if position == keys.shape[2] - 1:  # it pads the batch
                first = position
            near, far = (cache[row, :, first : position + 1].float() for cache in (keys, values))
            near, far = (part.repeat_interleave(heads // keys.shape[1], 0) for part in (near, far))
            scores = torch.einsum("hd,hcd->hc", query[row, :, 0].float(), near) * scaling
            if softcap is not None:
                scores = torch.tanh(scores / softcap) * softcap
            if bias is not None:
                scores = scores + bias[0][row, :, None] * bias[1][row, first : position + 1]
            if gains is not None and position < columns:
                scores = scores + gains[row, first : position + 1] * scores.abs()
            weights = torch.zeros(1, heads, 1, position + 1)
            weights[0, :, 0, first:] = beside(sinks, scores)
            if enhancement is not None:
                masks, settings, reading = (part[row : row + 1] for part in enhancement)
                weights, effect[row] = enhanced(weights, masks, settings, reading, layer)
            out[row] = torch.einsum("hc,hcd->hd", weights[0, :, 0, first:], far)
            visible = min(columns, position + 1)
            means[row, :visible] = weights[0, :, 0, :visible].mean(0)
        return Attended(out, means if looks else None, effect if enhancement is not None else None)


def beside(sinks: torch.Tensor | None, scores: torch.Tensor) -> torch.Tensor:
    """Return the softmax of scores (..., columns) over one more column of sinks (...), which is left out again."""
    if sinks is None:
        return scores.softmax(-1)
    column = sinks.to(scores.dtype).expand(scores.shape[:-1])[..., None]
    return torch.cat([scores, column], -1).softmax(-1)[..., :-1]


class Ops:
    """A stand-in for `steering.triton.triton_ops`.

    calls: by name. wrong: a number that is added to every result. times: in seconds, of torch's product with a single state,
    and of the kernel for it.
    """

    def __init__(self, wrong: float = 0.0, times: tuple[float, float] = (2.0, 1.0)):
        self.calls = dict.fromkeys(("rms_norm", "rotated", "add_rms_norm", "silu_product", "matvec"), 0)
        self._wrong, self._times = wrong, times
        self.matvecs: Sequence[Product] = (self.matvec,)

    def rms_norm(self, states: torch.Tensor, weight: torch.Tensor, eps: float, shifted: bool) -> torch.Tensor:
        self.calls["rms_norm"] += 1
        return self._normed(states, weight, eps, shifted)

    def _normed(self, states: torch.Tensor, weight: torch.Tensor, eps: float, shifted: bool) -> torch.Tensor:
        gain = weight.float() + shifted + self._wrong
        return nn.functional.rms_norm(states.float(), states.shape[-1:], gain, eps).to(states.dtype)

    def rotated(
        self, query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rounded: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls["rotated"] += 1
        return self._turned(query, cos, sin), self._turned(key, cos, sin)

    def _turned(self, states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        first, second = states.float().chunk(2, -1)
        cos, sin = cos.float()[:, None], sin.float()[:, None]
        rotated = states.float() * cos + torch.cat([-second, first], -1) * sin
        return (rotated + self._wrong).to(states.dtype)

    def add_rms_norm(
        self, states: torch.Tensor, update: torch.Tensor, weight: torch.Tensor, eps: float, shifted: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls["add_rms_norm"] += 1
        total = states + update
        return total, self._normed(total, weight, eps, shifted)

    def silu_product(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        self.calls["silu_product"] += 1
        return nn.functional.silu(gate) * up + self._wrong

    def seconds(self, run: Callable[[], list[torch.Tensor]], device: torch.device) -> float:
        before = self.calls["matvec"]
        run()
        return self._times[self.calls["matvec"] > before]

    def matvec(self, state: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        self.calls["matvec"] += 1
        return nn.functional.linear(state, weight, bias) + self._wrong


def pooled(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    places: PooledPlaces,
    scaling: float,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Stand in for `steering.triton.attention.pooled`, token by token, without a wait for the host."""
    token, (_, kv_heads, length, _) = torch.arange(len(query), device=query.device), keys.shape
    row = (token[:, None] >= places.bounds[None, 1:]).sum(1)
    slot = places.begins[row] // (kv_heads * length)
    column = places.lengths[row] - places.bounds[row + 1] + token
    behind = column[:, None] - torch.arange(length, device=query.device)
    hidden = (behind < 0) if window is None else (behind < 0) | (behind >= window)
    scores = (query.unflatten(1, (kv_heads, -1)) @ keys[slot].mT * scaling).flatten(1, 2)
    weights = beside(sinks, scores.masked_fill(hidden[:, None], -torch.inf)).nan_to_num(0)
    return (weights.unflatten(1, (kv_heads, -1)) @ values[slot]).flatten(1, 2)
