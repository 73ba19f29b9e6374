"""Attention of prompts, directly from the pool (`prompts.cpp`).

In all functions: query (rows, heads, n, head_dim), contiguous. key, value: (slots, kv_heads, length, head_dim), where row
i's tokens, whose keys are there, fill n columns of slot slots[i] from starts[i] on (both (rows,)). All three are float32. A
token sees the columns up to its own, and of these the last `window` where that is above 0. softcap: 0 for none. sinks:
as in `kernels.attention`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from steering.cpu.kernels.attention import seen_columns
from steering.cpu.kernels.looks import enhanced
from steering.cpu.kernels.native import Loops
from steering.cpu.kernels.operators import operator
from steering.decoder.kernels import softmax


def _output(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *others: object) -> torch.Tensor:
    return query.new_empty(*query.shape[:3], value.shape[3])


@operator(_output)
def prompt_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor,
    sinks: torch.Tensor | None,
    scaling: float,
    window: int,
    softcap: float,
) -> torch.Tensor:
    """Return the output (rows, heads, n, head_dim)."""
    return _sums(prompt_weights(query, key, slots, starts, sinks, scaling, window, softcap), value, slots)


@operator(_output)
def enhanced_prompt_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor,
    masks: torch.Tensor,
    settings: torch.Tensor,
    reading: torch.Tensor,
    layer: int,
    sinks: torch.Tensor | None,
    scaling: float,
    window: int,
    softcap: float,
) -> torch.Tensor:
    """Return the output for weights enhanced by See with a fixed alpha.

    masks, settings, reading: as in `looks.enhanced`; a column is an image's, the text's or neither.
    """
    weights = prompt_weights(query, key, slots, starts, sinks, scaling, window, softcap)
    return _sums(_enhance_by_query(weights, masks, settings, reading, layer), value, slots)


def _by_group(
    query: torch.Tensor,
    key: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor,
    queries: torch.Tensor,
    groups: torch.Tensor,
    columns: int,
    *others: object,
) -> torch.Tensor:
    return query.new_empty(*groups.shape[:2], columns)


@operator(_by_group)
def grouped_prompt_weights(
    query: torch.Tensor,
    key: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor,
    queries: torch.Tensor,
    groups: torch.Tensor,
    columns: int,
    sinks: torch.Tensor | None,
    scaling: float,
    window: int,
    softcap: float,
) -> torch.Tensor:
    """Return the weights of some queries, mean over heads, summed by groups: (rows, G, columns).

    queries: (rows, R). groups: (rows, G, R), the factor of each query. columns: at least all that a query may see.
    """
    return _sum_by_group(
        prompt_weights(query, key, slots, starts, sinks, scaling, window, softcap), queries, groups, columns
    )


@operator(_by_group)
def enhanced_grouped_prompt_weights(
    query: torch.Tensor,
    key: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor,
    queries: torch.Tensor,
    groups: torch.Tensor,
    columns: int,
    masks: torch.Tensor,
    settings: torch.Tensor,
    reading: torch.Tensor,
    layer: int,
    sinks: torch.Tensor | None,
    scaling: float,
    window: int,
    softcap: float,
) -> torch.Tensor:
    """Return the same for weights as in `enhanced_prompt_attention`."""
    weights = prompt_weights(query, key, slots, starts, sinks, scaling, window, softcap)
    return _sum_by_group(_enhance_by_query(weights, masks, settings, reading, layer), queries, groups, columns)


class PromptLoops(NamedTuple):
    """The loops `prompt_attention`, `enhanced_prompt_attention` and their grouped weights, as callables.

    In order: `prompt_attention`, `enhanced_prompt_attention`, `grouped_prompt_weights` and
    `enhanced_grouped_prompt_weights`.
    """

    plain: Callable[..., torch.Tensor]
    enhanced: Callable[..., torch.Tensor]
    grouped: Callable[..., torch.Tensor]
    enhanced_grouped: Callable[..., torch.Tensor]

    @classmethod
    def of(cls, loops: Loops) -> PromptLoops:
        """Return the callables for use outside of a compiled step."""
        return cls(*(partial(loops, loop.__name__) for loop in WITHIN))


WITHIN = PromptLoops(
    prompt_attention, enhanced_prompt_attention, grouped_prompt_weights, enhanced_grouped_prompt_weights
)


def prompt_weights(
    query: torch.Tensor,
    key: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor,
    sinks: torch.Tensor | None,
    scaling: float,
    window: int,
    softcap: float,
) -> torch.Tensor:
    """Return attention weights (rows, heads, n, length), 0 on columns that a query does not see."""
    heads, n = query.shape[1:3]
    keys = key[slots].repeat_interleave(heads // key.shape[1], 1)
    scores = query @ keys.transpose(-1, -2) * scaling
    if softcap > 0:
        scores = torch.tanh(scores / softcap) * softcap
    last = (starts[:, None] + torch.arange(n, device=query.device))[:, None, :, None]
    visible = seen_columns(last, key.shape[2], window)
    return softmax(scores.masked_fill(~visible, -torch.inf), None if sinks is None else sinks[:, None])


def _enhance_by_query(
    weights: torch.Tensor, masks: torch.Tensor, settings: torch.Tensor, reading: torch.Tensor, layer: int
) -> torch.Tensor:
    alone = torch.cat([settings[..., :1], torch.zeros_like(settings[..., 1:])], -1)
    parts = [enhanced(part[:, :, None], masks, alone, reading, layer)[0] for part in weights.unbind(2)]
    return torch.cat(parts, 2)


def _sum_by_group(weights: torch.Tensor, queries: torch.Tensor, groups: torch.Tensor, columns: int) -> torch.Tensor:
    chosen = weights.mean(1)[..., :columns].gather(1, queries[..., None].expand(-1, -1, columns))
    return groups @ chosen


def _sums(weights: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    values = value[slots].repeat_interleave(weights.shape[1] // value.shape[1], 1)
    return weights @ values
