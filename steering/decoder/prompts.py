"""Attention of prefill passes: over some columns of some slots of the pool, under hooks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import torch

from steering.decoder import kernels
from steering.decoder.hooks import NO_HOOKS, AttentionHook, Hooks, Product, Weights
from steering.decoder.kernels import Heads
from steering.decoder.kv import KVPool
from steering.devices import to_device
from steering.recurrent.states import RecurrentPass

Grouped = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""The type of `Weights.grouped`: a function of queries and groups."""


class PromptKernel(Protocol):
    """Computes a layer's attention of prompts directly from the pool, without torch's operations."""

    def __call__(
        self,
        hooks: Hooks,
        heads: Heads,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        slots: torch.Tensor,
        starts: torch.Tensor,
        columns: int,
    ) -> tuple[torch.Tensor | None, Grouped | None]:
        """Return the output (rows, heads, n, head_dim) and the layer's `Weights.grouped`.

        The output leaves out queries that hooks name; it is None where a hook is unknown to the kernel. `Weights.grouped` is
        None where it is not wanted or the output is None.

        query: (rows, heads, n, head_dim), contiguous. keys, values: of the pool, with those of the queries. slots, starts:
        (rows,). columns: at least those that are seen.
        """


class PromptStep:
    """The attention of a prefill pass under its hooks."""

    hooks: Hooks
    start: int = 0

    @property
    def recurrent(self) -> RecurrentPass:
        """The states of layers with linear attention or a convolution."""
        raise NotImplementedError

    def _attend_with_hooks(
        self,
        heads: Heads,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        plain: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the output of queries, (rows, heads, n, head_dim) both, over all columns that are given.

        plain: the output without hooks, where it is known.
        """
        plain = out = kernels.product(heads, query, key, value, mask) if plain is None else plain
        changed: Product = _Exact(heads, query, key, value, mask, plain)
        for hook in self.hooks.attention:
            if (product := hook.product(heads.layer, value, changed)) is not None:
                out = torch.where(hook.asked.to(out.device), product.to(out.dtype), out)
                changed = _Changed(hook, heads.layer, changed)
        return self._apply_weight_hooks(LayerWeights(self, heads, query, key, mask), value, out)

    def _apply_weight_hooks(self, weights: LayerWeights, value: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Return an output (rows, heads, n, head_dim) after the hooks that need weights. value: of all columns."""
        for observer in self.hooks.observers:
            observer.prefill(weights.heads.layer, weights, value.shape[2])
        for hook in self.hooks.attention:
            if hook.queries is not None:
                read = weights(hook.queries.clamp(min=0))
                out = _replace_queries(out, hook.queries.to(out.device), kernels.weighted(read, value))
                if hook in self.hooks.readers(weights.heads.layer):
                    hook.read(weights.heads.layer, read, value)
        return out


@dataclass
class LayerWeights(Weights):
    """The weights of a layer in a pass.

    query: (rows, heads, n, head_dim). key: (rows, kv_heads, columns, head_dim). summed: computes `grouped` for queries and
    groups on the CPU.
    """

    step: PromptStep
    heads: Heads
    query: torch.Tensor
    key: torch.Tensor
    mask: torch.Tensor | None
    summed: Grouped | None = None

    def __call__(self, queries: torch.Tensor) -> torch.Tensor:
        hooks, columns, rows = self.step.hooks, self.key.shape[2], queries
        queries = queries.to(self.query.device)
        index = queries[:, None, :, None].expand(-1, self.query.shape[1], -1, self.query.shape[3])
        scores = kernels.grouped_scores(self.heads, self.query.gather(2, index), self.key)
        for hook in hooks.scoring:
            scores = hook.scores(self.heads.layer, scores, rows)
        if self.mask is None:
            visible = kernels.visible(queries + self.step.start, columns, None)[:, None]
        else:
            visible = self.mask.expand(queries.shape[0], -1, -1, -1)
            visible = visible.gather(2, queries[:, None, :, None].expand(-1, 1, -1, columns))
        weights = self.heads.weights(kernels.masked(scores, visible))
        for hook in hooks.attention:
            weights = hook.weights(self.heads.layer, weights)
        return weights

    def grouped(self, queries: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
        return super().grouped(queries, groups) if self.summed is None else self.summed(queries, groups)


@dataclass
class Prefill(PromptStep):
    """A forward pass that fills columns start..start+n of some slots, `rows`, one prompt a row, padded on the right.

    Padding writes garbage behind a prompt's end, where decode overwrites every column before it reads it. Where rows begin
    at different columns, `ragged` holds those columns. kernel: computes attention where it supports all hooks.
    """

    pool: KVPool
    rows: slice
    start: int = 0
    hooks: Hooks = NO_HOOKS
    ragged: Ragged | None = None
    kernel: PromptKernel | None = None
    lengths: Sequence[int] | None = None
    wanted: Sequence[Sequence[int]] = ()
    kept: bool = True
    _masks: dict[tuple[int | None, torch.device], torch.Tensor] = field(default_factory=dict)

    @property
    def starts(self) -> list[int]:
        """The first column of each row."""
        return [self.start] * (self.rows.stop - self.rows.start) if self.ragged is None else self.ragged.starts

    @cached_property
    def recurrent(self) -> RecurrentPass:
        places = torch.tensor([[*range(self.rows.start, self.rows.stop)], self.starts])
        slots, starts = places
        return RecurrentPass(self.pool.states, slots, starts, self.lengths, self.kept, self.wanted)

    def attend(
        self, heads: Heads, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        keys, values = self.pool.layer(heads.layer, key, value)
        n = key.shape[2]
        end = self.start + n
        if self.ragged is not None:
            self.ragged.write(keys[self.rows], key)
            self.ragged.write(values[self.rows], value)
            end = self.ragged.columns
        else:
            keys[self.rows, :, self.start : end], values[self.rows, :, self.start : end] = key, value
        attended = grouped = None
        starts = self.starts
        if self.kernel is not None and max(starts) + n <= self.pool.length:
            query = query.contiguous()
            places = torch.arange(self.rows.start, self.rows.stop), torch.tensor(starts)
            attended, grouped = self.kernel(self.hooks, heads, query, keys, values, *places, end)
            if attended is not None and not self.hooks.looks:
                return attended
        if self.start or self.ragged is not None:
            key, value = keys[self.rows, :, :end], values[self.rows, :, :end]
            plain = self.ragged is None and heads.window is None and heads.softcap is None
            unmasked = plain and query.is_cuda and query.dtype != torch.float32
            mask = None if unmasked else self._chunk_mask(n, end, heads.window, query.device)
        elif mask is not None and mask.shape[-2:] == (1, 1):  # it only keeps the model from building one
            windowed = heads.window is not None and n >= heads.window
            mask = self._chunk_mask(n, end, heads.window, query.device) if windowed else None
        if attended is None:
            return self._attend_with_hooks(heads, query, key, value, mask)
        return self._apply_weight_hooks(LayerWeights(self, heads, query, key, mask, grouped), value, attended)

    def _chunk_mask(self, n: int, columns: int, window: int | None, device: torch.device) -> torch.Tensor:
        """Return a mask (1 or rows, 1, n, columns): causal with an offset, unlike is_causal, and within the window."""
        if (window, device) not in self._masks:
            starts = torch.tensor([self.start] if self.ragged is None else self.starts)
            rows = to_device(starts[:, None] + torch.arange(n), device)
            rows = rows.clamp(
                max=columns - 1
            )  # padding sees a column, too: weights of none are NaN, which 0 * NaN spreads
            self._masks[window, device] = kernels.visible(rows, columns, window)[:, None]
        return self._masks[window, device]


@dataclass
class Ragged:
    """The starts and lengths of a prefill's rows, where they begin at different columns."""

    starts: list[int]
    lengths: list[int]
    _places: dict[torch.device, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    @property
    def columns(self) -> int:
        """The number of columns that its queries may see."""
        return max(start + length for start, length in zip(self.starts, self.lengths, strict=True))

    def write(self, pooled: torch.Tensor, new: torch.Tensor) -> None:
        """Write own (rows, kv_heads, n, head_dim), except its padding, into pooled (rows, kv_heads, length, head_dim)."""
        if new.device not in self._places:
            real = torch.arange(new.shape[2]) < torch.tensor(self.lengths)[:, None]
            row, at = real.nonzero().unbind(1)
            column = torch.tensor(self.starts)[row] + at
            self._places[new.device] = (
                to_device(row, new.device),
                to_device(at, new.device),
                to_device(column, new.device),
            )
        row, at, column = self._places[new.device]
        pooled[row, :, column] = new[row, :, at]


@dataclass
class _Exact:
    """The product of a layer's unchanged weights, in float32. plain: its output, which is that of `value`."""

    heads: Heads
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    plain: torch.Tensor

    @cached_property
    def _wide(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.query.float(), self.key.float()

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        if values is self.value and self.plain.dtype == torch.float32:
            return self.plain
        return kernels.product(self.heads, *self._wide, values, self.mask)

    def of_sinks(self) -> torch.Tensor | None:
        return kernels.shares_of_sinks(self.heads, *self._wide, self.mask)


@dataclass
class _Changed:
    """A product as changed by a hook, for later hooks."""

    hook: AttentionHook
    layer: int
    exact: Product

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        plain, changed = self.exact(values), self.hook.product(self.layer, values, self.exact)
        return plain if changed is None else torch.where(self.hook.asked.to(changed.device), changed, plain)

    def of_sinks(self) -> torch.Tensor | None:
        return self.exact.of_sinks()


def _replace_queries(out: torch.Tensor, queries: torch.Tensor, replacement: torch.Tensor) -> torch.Tensor:
    """Write own (rows, heads, R, head_dim) into out (rows, heads, n, head_dim) at queries (rows, R), except at -1."""
    index = queries.clamp(min=0)[:, None, :, None].expand(-1, out.shape[1], -1, out.shape[3])
    return out.scatter(2, index, torch.where((queries >= 0)[:, None, :, None], replacement, out.gather(2, index)))
