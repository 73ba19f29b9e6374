"""Attention of vision towers that pack pictures, or windows of them, one behind the other: all of one length in one call.

transformers calls its attention once for each of them, in each layer: of a picture of 1,500 tokens a hundred times.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface

from steering.devices import sent

NAME = "helmsight_packed_flash"
"""What has "flash" in its name is told by transformers where packed sequences end, instead of being called for each."""
KEPT = 256
"""Packings of which the order of their tokens is kept."""


class PackedRuns(NamedTuple):
    """How packed sequences are taken by their lengths.

    runs: (sequences, length); order: (tokens,), where the tokens of these runs come from, and back: where they then lie;
    None where they lie so already.
    """

    runs: tuple[tuple[int, int], ...]
    order: torch.Tensor | None
    back: torch.Tensor | None


def packed_tower(wrapper: Any) -> Any:
    """A model's tower that packs pictures; None where it has another, or none."""
    tower = getattr(wrapper, "visual", None)
    return tower if hasattr(tower, "blocks") else None


def prepare(wrapper: Any) -> None:
    """Have a model's tower attend so, if it is one that packs pictures. wrapper: the model's part that takes pictures."""
    AttentionInterface.register(NAME, attend)
    tower = packed_tower(wrapper)
    if tower is not None and tower.config._attn_implementation == "sdpa":
        tower.config._attn_implementation = NAME


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    cu_seq_lens_q: torch.Tensor,
    scaling: float | None = None,
    alike: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """query, key, value: (1, heads, tokens, head_dim) -> (1, tokens, heads, head_dim), of each sequence within itself.

    cu_seq_lens_q: (sequences + 1,), where they begin and the last one ends; read, so that it is better on the CPU. alike:
    how many sequences of one length there are, where that is known without reading.
    """
    if alike is not None:
        return _in_runs([one[0] for one in (query, key, value)], alike, scaling)[None], None
    runs, order, back = packed_runs(tuple(cu_seq_lens_q.tolist()), query.device)
    given = [one[0] if order is None else one[0, :, order] for one in (query, key, value)]
    begin, parts = 0, []
    for sequences, length in runs:
        end = begin + sequences * length
        parts.append(_in_runs([one[:, begin:end] for one in given], sequences, scaling))
        begin = end
    whole = parts[0] if len(parts) == 1 else torch.cat(parts)
    return (whole if back is None else whole[back])[None], None


def _in_runs(given: list[torch.Tensor], sequences: int, scaling: float | None) -> torch.Tensor:
    """(tokens, heads, head_dim) of queries, keys and values (heads, tokens, head_dim) of so many sequences of one length."""
    query, key, value = (one.unflatten(1, (sequences, -1)).transpose(0, 1) for one in given)
    shared = query.shape[1] != key.shape[1]
    out = F.scaled_dot_product_attention(query, key, value, scale=scaling, enable_gqa=shared)
    return out.transpose(1, 2).flatten(0, 1)


@functools.lru_cache(maxsize=KEPT)
def packed_runs(ends: tuple[int, ...], device: torch.device) -> PackedRuns:
    """That of sequences that begin and end so; empty ones count for nothing."""
    by_length: dict[int, list[int]] = {}
    for begin, end in itertools.pairwise(ends):
        if end > begin:
            by_length.setdefault(end - begin, []).append(begin)
    runs = tuple((len(begins), length) for length, begins in by_length.items())
    places = [begin + at for length, begins in by_length.items() for begin in begins for at in range(length)]
    if places == sorted(places):
        return PackedRuns(runs, None, None)
    with torch.inference_mode(False):
        order = torch.tensor(places)
        return PackedRuns(runs, sent(order, device), sent(order.argsort(), device))
