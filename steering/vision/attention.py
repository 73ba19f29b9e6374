"""Attention of vision encoders that pack pictures, or windows, into one sequence: all of one length in a single call.

On a GPU all are in one call where torch has a kernel for that. transformers calls its attention once for each of them, in
each layer: a hundred times for a picture of 1,500 tokens.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface

from steering.devices import to_device
from steering.triton.attention import packed

NAME = "helmsight_packed_flash"
"""The attention's name; "flash" in it makes transformers pass the packed sequences' ends instead of splitting them."""
KEPT = 256
"""The number of packings whose token order is cached."""


class PackedRuns(NamedTuple):
    """Packed sequences grouped by their lengths.

    runs: (sequences, length) each. order: (tokens,), the source of each token of these runs, and back: its place among them;
    None where they are in order already.
    """

    runs: tuple[tuple[int, int], ...]
    order: torch.Tensor | None
    back: torch.Tensor | None


def packed_tower(wrapper: Any) -> Any:
    """Return a model's vision encoder that packs pictures; None where it has another, or none."""
    tower = getattr(wrapper, "visual", None)
    return tower if hasattr(tower, "blocks") else None


def prepare(wrapper: Any) -> None:
    """Make a model's vision encoder use this attention, if it packs pictures.

    wrapper: the part of the model that takes pictures.
    """
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
    """Attend within each sequence: (1, heads, tokens, head_dim) three times -> (1, tokens, heads, head_dim).

    cu_seq_lens_q: (sequences + 1,), the sequences' starts and the last one's end; its values are read, so it should be on
    the CPU. alike: the number of sequences, where they are known to have one length, so that nothing is read.
    """
    if alike is not None:
        return _attend_alike([tensor[0] for tensor in (query, key, value)], alike, scaling)[None], None
    ends = tuple(cu_seq_lens_q.tolist())
    attended = packed(query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1), ends, scaling)
    if attended is not None:
        return attended[None], None
    runs, order, back = packed_runs(ends, query.device)
    tensors = [tensor[0] if order is None else tensor[0, :, order] for tensor in (query, key, value)]
    begin, parts = 0, []
    for sequences, length in runs:
        end = begin + sequences * length
        parts.append(_attend_alike([tensor[:, begin:end] for tensor in tensors], sequences, scaling))
        begin = end
    outputs = parts[0] if len(parts) == 1 else torch.cat(parts)
    return (outputs if back is None else outputs[back])[None], None


def _attend_alike(tensors: list[torch.Tensor], sequences: int, scaling: float | None) -> torch.Tensor:
    """Attend within `sequences` sequences of one length.

    tensors: queries, keys and values (heads, tokens, head_dim). Returns (tokens, heads, head_dim).
    """
    query, key, value = (tensor.unflatten(1, (sequences, -1)).transpose(0, 1) for tensor in tensors)
    shared = query.shape[1] != key.shape[1]
    out = F.scaled_dot_product_attention(query, key, value, scale=scaling, enable_gqa=shared)
    return out.transpose(1, 2).flatten(0, 1)


@functools.lru_cache(maxsize=KEPT)
def packed_runs(ends: tuple[int, ...], device: torch.device) -> PackedRuns:
    """Return the runs of sequences with these starts and ends; empty sequences do not count."""
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
        return PackedRuns(runs, to_device(order, device), to_device(order.argsort(), device))
