"""The hooks of a forward pass: on attention scores, attention weights, layer outputs, and observers of attention.

The decoder knows only these four points, not their users.

Tensors that a hook gets are on its layer's device, and those that it returns must be too. Its own tensors, and `asked` and
`queries`, are on the model's device, which differs for some layers of a model on several devices.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, Self

import torch

from steering.decoder.updates import Updates


class Product(Protocol):
    """Multiplies a prefill's attention weights with values."""

    def __call__(self, values: torch.Tensor, /) -> torch.Tensor:
        """Return (rows, heads, n, head_dim) for values (rows, kv_heads, columns, head_dim), float32."""

    def of_sinks(self) -> torch.Tensor | None:
        """Return the share (rows, heads, n, 1) of attention that goes to sinks, before hooks; None where heads have none."""


class Weights(ABC):
    """A prefill layer's attention weights, float32, as its hooks leave them."""

    @abstractmethod
    def __call__(self, queries: torch.Tensor) -> torch.Tensor:
        """Return the weights of some queries (rows, R): (rows, heads, R, columns)."""

    def grouped(self, queries: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
        """Return the mean over heads, summed by groups: (rows, G, columns).

        groups: (rows, G, R), the factor of each query in each group.
        """
        return groups @ self(queries).mean(1).to(groups.device)


class Hook(ABC):  # noqa: B024
    """A set of callbacks in one forward pass."""

    def settle(self, positions: torch.Tensor | None) -> None:  # noqa: B027
        """Compute the results, after the last layer, from what was gathered.

        positions: (rows,), the columns that a decode writes; None in a prefill.
        """


class AttentionHook(Hook):
    """Changes the attention of some rows; the weights of other rows must stay the same to the bit.

    asked: (rows, 1, 1, 1) bool, the rows that it changes. queries: in a prefill, the queries (rows, R) whose weights it
    needs, -1 where a row has fewer; None where it needs none, as `product` does not.
    """

    asked: torch.Tensor
    queries: torch.Tensor | None = None

    def scores(self, layer: int, scores: torch.Tensor, queries: torch.Tensor | None) -> torch.Tensor:
        """Change scores (rows, heads, R, columns) before the mask. queries: (rows, R), their indices in a prefill."""
        return scores

    def weights(self, layer: int, weights: torch.Tensor) -> torch.Tensor:
        """Change weights (rows, heads, R, columns) after the softmax."""
        return weights

    def product(self, layer: int, value: torch.Tensor, exact: Product) -> torch.Tensor | None:
        """Return a prefill layer's changed weights times the values, (rows, heads, n, head_dim).

        This avoids a matrix of rows and columns; None in a layer whose weights it does not change. value: (rows, kv_heads,
        columns, head_dim). exact: the same product of the unchanged weights.
        """
        return None

    def reads(self, layer: int) -> bool:
        """Return False for a layer in which `read` need not be called, so that a kernel may compute its attention."""
        return True

    def read(self, layer: int, weights: torch.Tensor, value: torch.Tensor) -> None:
        """Read the weights (rows, heads, R, columns) as all hooks leave them, of `queries` in a prefill, and the values.

        value: (rows, kv_heads, columns, head_dim).
        """


class LayerHook(Hook):
    """Observes or changes a layer's output."""

    @abstractmethod
    def after(
        self, layer: int, before: torch.Tensor, plain: torch.Tensor, hidden: torch.Tensor, updates: Updates
    ) -> torch.Tensor:
        """Return the layer's output.

        All are (rows, n, d): before, its input; plain, its own output; hidden, that output as changed by earlier hooks.
        """


class Observer(Hook):
    """Reads attention weights, interventions included, without effect on the answer.

    An observer is of a prefill or of a decode, and implements its method.
    """

    def prefill(self, layer: int, weights: Weights, columns: int) -> None:
        """Read the weights of the first `columns` columns in a prefill."""

    def decode(self, layer: int, means: torch.Tensor) -> None:
        """Read the weights of a decode, mean over heads (rows, columns), of one query a row."""


@dataclass(frozen=True)
class Hooks:
    """The hooks of one forward pass by the points at which they are called, each kind in order.

    `scoring`, `weighing` and `reading` are those of `attention` that change scores, change weights, and read both weights
    and values. A hook may be of several kinds.
    """

    attention: tuple[AttentionHook, ...] = ()
    scoring: tuple[AttentionHook, ...] = ()
    weighing: tuple[AttentionHook, ...] = ()
    reading: tuple[AttentionHook, ...] = ()
    layers: tuple[LayerHook, ...] = ()
    observers: tuple[Observer, ...] = ()

    @classmethod
    def of(cls, hooks: Iterable[Hook | None]) -> Self:
        """Return each hook, if not None, at its point."""
        every = [hook for hook in hooks if hook is not None]
        attention = tuple(hook for hook in every if isinstance(hook, AttentionHook))
        return cls(
            attention,
            tuple(hook for hook in attention if type(hook).scores is not AttentionHook.scores),
            tuple(hook for hook in attention if type(hook).weights is not AttentionHook.weights),
            tuple(hook for hook in attention if type(hook).read is not AttentionHook.read),
            tuple(hook for hook in every if isinstance(hook, LayerHook)),
            tuple(hook for hook in every if isinstance(hook, Observer)),
        )

    @property
    def every(self) -> tuple[Hook, ...]:
        """All hooks, each once."""
        return tuple(dict.fromkeys((*self.attention, *self.layers, *self.observers)))

    @property
    def looks(self) -> bool:
        """True where some hooks concern attention."""
        return bool(self.attention or self.observers)

    def readers(self, layer: int) -> list[AttentionHook]:
        """Return the hooks that read a layer's weights and values."""
        return [hook for hook in self.reading if hook.reads(layer)]

    def settle(self, positions: torch.Tensor | None) -> None:
        """Settle all hooks."""
        for hook in self.every:
            hook.settle(positions)

    def after_layer(self, layer: int, before: torch.Tensor, plain: torch.Tensor, updates: Updates) -> torch.Tensor:
        """Return a layer's output: its own (rows, n, d), as changed by its hooks."""
        hidden = plain
        for hook in self.layers:
            hidden = hook.after(layer, before, plain, hidden, updates)
        return hidden


NO_HOOKS = Hooks()
