"""Where a forward pass may be looked at and changed: scores, weights, what a layer hands on, and attention as it is read.

The decoder knows these four points, and nothing of who uses them.

What a hook is given is on its layer's device, and what it gives back must be. What it brings along, and `asked` and
`queries`, are on the model's, which is another one for some layers of a model that lies on several.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Self

import torch

from steering.decoder.updates import Updates

Product = Callable[[torch.Tensor], torch.Tensor]
"""Gives a prefill's attention weights times any values (rows, kv_heads, columns, head_dim), float32: (rows, heads, n,
head_dim)."""


class Weights(ABC):
    """A prefill layer's attention weights, float32, as its hooks make them."""

    @abstractmethod
    def __call__(self, queries: torch.Tensor) -> torch.Tensor:
        """Those of some queries (rows, R): (rows, heads, R, columns)."""

    def grouped(self, queries: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
        """Their mean over heads, summed by groups (rows, G, R) that say how much each query counts: (rows, G, columns)."""
        return groups @ self(queries).mean(1).to(groups.device)


class Hook(ABC):  # noqa: B024
    """What is called at points of one forward pass."""

    def settle(self, positions: torch.Tensor | None) -> None:  # noqa: B027
        """Make of what was gathered, behind the last layer, what is read of it. positions: (rows,), the columns that a
        decode writes; None of a prefill."""


class AttentionHook(Hook):
    """Changes the attention of some rows. What it does to the weights of other rows must leave them as they are, to the bit.

    asked: (rows, 1, 1, 1) bool, the rows that it changes. queries: of a prefill, the queries (rows, R) of which it needs the
    weights, -1 where a row has fewer; None where it needs none, as `product` does not.
    """

    asked: torch.Tensor
    queries: torch.Tensor | None = None

    def scores(self, layer: int, scores: torch.Tensor, queries: torch.Tensor | None) -> torch.Tensor:
        """Scores (rows, heads, R, columns) before the mask. queries: (rows, R), which they are of a prefill."""
        return scores

    def weights(self, layer: int, weights: torch.Tensor) -> torch.Tensor:
        """Weights (rows, heads, R, columns) behind the softmax."""
        return weights

    def product(self, layer: int, value: torch.Tensor, exact: Product) -> torch.Tensor | None:
        """Return a prefill layer's changed weights times the values, (rows, heads, n, head_dim), so that no matrix of rows
        and columns is made; None in a layer whose weights it leaves. value: (rows, kv_heads, columns, head_dim). exact: the
        same product of the weights as they were."""
        return None


class LayerHook(Hook):
    """Looks at, or changes, what a layer hands on."""

    @abstractmethod
    def after(
        self, layer: int, before: torch.Tensor, plain: torch.Tensor, hidden: torch.Tensor, updates: Updates
    ) -> torch.Tensor:
        """What the layer hands on. All (rows, n, d): before, its input; plain, its own output; hidden, what the hooks before
        this one made of it."""


class Observer(Hook):
    """Reads attention weights, interventions included; the answer does not depend on it. One is of a prefill or of a decode
    and has its method."""

    def prefill(self, layer: int, weights: Weights, columns: int) -> None:
        """Read those of the first `columns` columns in a prefill."""

    def decode(self, layer: int, means: torch.Tensor) -> None:
        """Read the mean over heads (rows, columns) of the weights of a decode's one query a row."""


@dataclass(frozen=True)
class Hooks:
    """The hooks of one forward pass by the points at which they are called, each kind in order; `scoring` and `weighing` are
    those of `attention` that change scores, and weights."""

    attention: tuple[AttentionHook, ...] = ()
    scoring: tuple[AttentionHook, ...] = ()
    weighing: tuple[AttentionHook, ...] = ()
    layers: tuple[LayerHook, ...] = ()
    observers: tuple[Observer, ...] = ()

    @classmethod
    def of(cls, hooks: Iterable[Hook | None]) -> Self:
        """Each hook that there is at its point."""
        every = [hook for hook in hooks if hook is not None]
        attention = tuple(hook for hook in every if isinstance(hook, AttentionHook))
        return cls(
            attention,
            tuple(hook for hook in attention if type(hook).scores is not AttentionHook.scores),
            tuple(hook for hook in attention if type(hook).weights is not AttentionHook.weights),
            tuple(hook for hook in every if isinstance(hook, LayerHook)),
            tuple(hook for hook in every if isinstance(hook, Observer)),
        )

    @property
    def looks(self) -> bool:
        """Whether some of them concern attention."""
        return bool(self.attention or self.observers)

    def settle(self, positions: torch.Tensor | None) -> None:
        """Have all of them settle."""
        for hook in (*self.attention, *self.layers, *self.observers):
            hook.settle(positions)

    def after_layer(self, layer: int, before: torch.Tensor, plain: torch.Tensor, updates: Updates) -> torch.Tensor:
        """What a layer hands on: its own output (rows, n, d) as its hooks leave it."""
        hidden = plain
        for hook in self.layers:
            hidden = hook.after(layer, before, plain, hidden, updates)
        return hidden


NO_HOOKS = Hooks()
