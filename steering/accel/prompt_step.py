"""A pass of prompts that lie one behind the other, as a function of tensors alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch

from steering.accel.step import DecoderStep
from steering.accel.tensors import Pattern, put_together
from steering.decoder import kernels
from steering.decoder.hooks import NO_HOOKS, AttentionHook, Hook, Hooks
from steering.decoder.kernels import Heads
from steering.decoder.kv import KVPool
from steering.decoder.prompts import LayerWeights, PromptStep
from steering.model.mllm import MLLM
from steering.recurrent.padded import PaddedPass
from steering.triton.attention import PooledPlaces, pooled

ADDING = "_deepstack_process"
"""The method by which transformers' decoders add features to some tokens."""


class Unsupported(RuntimeError):
    """No kernel computes a layer's attention."""


def places_of(
    tokens: int, slots: Sequence[int], starts: Sequence[int], lengths: Sequence[int], rows: int, spare: int
) -> torch.Tensor:
    """Return the `places` of `PackedPrompts`, on the CPU, for prompts of up to `rows` rows, padded to `tokens` tokens.

    slots, starts, lengths: of each prompt, its slot, the column of its first token, and its number of tokens. Padding is one
    more prompt, which writes to the column `spare` of the first slot and reads a single column.
    """
    ends, empty, padding = np.cumsum(lengths), rows - len(slots), tokens - sum(lengths)
    columns = [np.arange(start, start + length) for start, length in zip(starts, lengths, strict=True)]
    parts: list[Any] = [
        np.repeat([*slots, slots[0]], [*lengths, padding]),  # each token's slot
        *columns,  # the column that it fills
        [spare] * padding,
        [0, *ends, *[ends[-1]] * empty, tokens],  # each prompt's first token, and the end
        [*slots, *[slots[0]] * (empty + 1)],  # its slot
        np.add(starts, lengths),  # the columns that it reads
        [1] * (empty + 1),
    ]
    return torch.from_numpy(np.concatenate([np.asarray(part, np.int64) for part in parts]))


@dataclass
class PackedPrompts(PromptStep):
    """The attention of prompts that are packed into one row.

    places: the numbers of `places_of`. columns: the number of columns that hooks read, of a single prompt. Recurrent states
    are those of a single prompt, too.
    """

    pool: KVPool
    places: torch.Tensor
    tokens: int
    columns: int
    hooks: Hooks = NO_HOOKS
    _pooled: dict[int, PooledPlaces] = field(default_factory=dict)
    _masks: dict[int | None, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rows = (len(self.places) - 2 * self.tokens - 1) // 3
        self._slots, self._filled, *by_row = self.places.split([self.tokens, self.tokens, rows + 1, rows, rows])
        self._bounds, self._slot_by_row, self._lengths = by_row

    @cached_property
    def recurrent(self) -> PaddedPass:
        slot, start, length = self._slot_by_row[:1], self._filled[:1], self._bounds[1:2]
        return PaddedPass(self.pool.states, slot, start, real=(), tokens=self.tokens, length=length)

    def attend(
        self, heads: Heads, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        keys, values = self.pool.layer(heads.layer, key, value)
        for cached, new in ((keys, key), (values, value)):
            cached[self._slots, :, self._filled] = new[0].transpose(0, 1)
        kv_heads, packed, attended = keys.shape[1], query[0].transpose(0, 1), None
        if kv_heads not in self._pooled:
            self._pooled[kv_heads] = PooledPlaces.of(self._bounds, self._slot_by_row, self._lengths, keys)
        if heads.softcap is None:
            attended = pooled(packed, keys, values, self._pooled[kv_heads], heads.scaling, heads.window, heads.sinks)
        if attended is None:
            raise Unsupported("no kernel attends to prompts in the pool")
        out = attended.transpose(0, 1)[None]
        if not self.hooks.looks:
            return out
        near, far = (cached[:, :, : self.columns].index_select(0, self._slot_by_row[:1]) for cached in (keys, values))
        if heads.window not in self._masks:
            filled = self._filled.clamp(max=self.columns - 1)  # padding, too, must see a column
            self._masks[heads.window] = kernels.visible(filled[None], self.columns, heads.window)[:, None]
        seen = self._masks[heads.window]
        if any(type(hook).product is not AttentionHook.product for hook in self.hooks.attention):
            return self._attend_with_hooks(heads, query, near, far, seen, out)
        return self._apply_weight_hooks(LayerWeights(self, heads, query, near, seen), far, out)


class PackedPromptStep(DecoderStep):
    """A pass of prompts that are packed into one row, under hooks of one shape.

    columns: the number of columns that hooks read. overlay: the names of the arguments by which the decoder adds features to
    its first layers, as those of `Overlay`; empty without.
    """

    def __init__(self, mllm: MLLM, shape: Pattern, axes: int | None, columns: int, overlay: Sequence[str] = ()):
        super().__init__(mllm, shape, axes)
        self._columns, self._overlay = columns, overlay

    def forward(
        self,
        embeds: torch.Tensor,
        positions: torch.Tensor,
        places: torch.Tensor,
        features: list[torch.Tensor],
        tensors: list[torch.Tensor],
        cached: list[torch.Tensor],
    ) -> list[torch.Tensor]:
        """Return the states (1, n, d), normalised, and the hooks' new tensors.

        embeds: (1, n, d). positions: (1, n), or (axes, 1, n), rotary. places: as `PackedPrompts` has them. features: of the
        first layers, (1, n, d) each, 0 where a token has none. tensors: the hooks' tensors. cached: keys and values of all
        layers.
        """
        hooks: list[Hook] = put_together(self.shape.tree, tensors)
        (mllm,) = self._mllm
        pool = KVPool.of(cached, mllm.attention_layers, mllm.recurrent_layers)
        step = PackedPrompts(pool, places, embeds.shape[1], self._columns, Hooks.of(hooks))
        if not self._overlay:
            return self.run(embeds, positions, step, None, hooks, tensors)
        marks, argument = self._overlay
        with _added_everywhere(self.decoder):
            return self.run(embeds, positions, step, None, hooks, tensors, **{marks: places, argument: features})


@contextmanager
def _added_everywhere(decoder: Any) -> Iterator[None]:
    """Let a decoder add features to all tokens within the block, without their places."""
    replaced = vars(decoder).get(ADDING)
    setattr(decoder, ADDING, lambda states, marks, features: states + features)
    try:
        yield
    finally:
        delattr(decoder, ADDING) if replaced is None else setattr(decoder, ADDING, replaced)
