"""A compiled step that was loaded, over the weights of the model that is served."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from steering.compiled.library import Library
from steering.compiled.store import StoredStep
from steering.compiled.tensors import Bound, Mould, Pattern, kinds_of, of_json
from steering.decoder.hooks import Hook
from steering.decoder.kv import KVPool


class Package:
    """Passes of one kind, under hooks of one shape."""

    def __init__(self, entry: StoredStep, shape: Pattern, tensors: Mapping[str, torch.Tensor]):
        """Load a package for hooks of this shape. tensors: the model's, by name.

        Raises ValueError for a package of something else, and what `Library` raises.
        """
        if entry.about["shape"] != shape.text():
            raise ValueError("it is of other hooks")
        self._mould = Mould(shape)
        self._changes = self._mould.changes(of_json(entry.about["left"], kinds_of(shape.tree)))
        self._library = Library(entry.package, tensors)
        self._column = torch.zeros(0)

    def given(self, hooks: Bound) -> list[torch.Tensor] | None:
        """The tensors of hooks; None where they are others than it is for."""
        return hooks.tensors(self._mould)

    def decode(
        self,
        hooks: list[Hook],
        given: list[torch.Tensor],
        tokens: torch.Tensor,
        positions: torch.Tensor,
        rope: torch.Tensor,
        columns: int,
        pool: KVPool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Normalised states (rows, 1, d) and logits (rows, vocabulary); the hooks are left as a plain step leaves them.

        given: the hooks' tensors. tokens, positions, rope: (rows,). columns: how many are read.
        """
        return self._run(hooks, given, [tokens, positions, rope], columns, pool)

    def prefill(
        self,
        hooks: list[Hook],
        given: list[torch.Tensor],
        embeds: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        starts: torch.Tensor,
        last: torch.Tensor,
        columns: int,
        pool: KVPool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Normalised states (rows, n, d) and logits (rows, vocabulary) of each row's last token; arguments as those of
        `PrefillStep`, hooks and columns as those of a decode."""
        fed = [one.contiguous() for one in (embeds, positions)]
        return self._run(hooks, given, [*fed, slots, starts, last], columns, pool)

    def _run(
        self, hooks: list[Hook], given: list[torch.Tensor], fed: list[torch.Tensor], columns: int, pool: KVPool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if len(self._column) < pool.length:
            self._column = torch.zeros(pool.length)
        given = [one.contiguous() for one in given]
        hidden, logits, *made = self._library([*fed, self._column[:columns], *given, *pool.tensors])
        self._mould.change(hooks, self._changes, [*given, *made])
        return hidden, logits
