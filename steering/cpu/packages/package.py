"""A loaded compiled step, over the weights of the served model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch

from steering.accel.tensors import Bound, Pattern, Sizes, TreeSpec, kinds_of, of_json
from steering.cpu.packages.library import Library
from steering.cpu.packages.store import StoredStep
from steering.cpu.packages.team import Team
from steering.decoder.hooks import Hook
from steering.decoder.kv import KVPool


class Package:
    """Runs passes of one kind, under hooks of one shape."""

    def __init__(
        self,
        entry: StoredStep,
        shape: Pattern,
        sizes: Sequence[Sizes],
        tensors: Mapping[str, torch.Tensor],
        team: Team,
    ):
        """Load a package for hooks of this shape.

        sizes: of the hooks' tensors. tensors: the model's, by name. team: threads that share its passes.

        Raises ValueError for a package of other hooks, and what `Library` raises.
        """
        if entry.about["shape"] != shape.text():
            raise ValueError("it was compiled for other hooks")
        self._tree_spec = TreeSpec(shape, sizes)
        self._changes = self._tree_spec.changes(of_json(entry.about["left"], kinds_of(shape.tree)))
        self._library = Library(entry.package, tensors, team.threads)
        self._team = team
        self._inputs, self._outputs = (entry.about["rows"][kind] for kind in ("inputs", "outputs"))
        """The row axis of each tensor."""
        self.native = self._library.native
        self.divisible = None not in self._outputs
        """True where some rows of a pass may run by themselves."""
        self._column = torch.zeros(0)

    def given(self, hooks: Bound) -> list[torch.Tensor] | None:
        """Return the tensors of hooks; None where they do not match the package."""
        return hooks.tensors(self._tree_spec)

    def decode(
        self,
        hooks: list[Hook],
        tensors: list[torch.Tensor],
        tokens: torch.Tensor,
        positions: torch.Tensor,
        rope: torch.Tensor,
        columns: int,
        pool: KVPool,
        shares: list[slice],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return normalised states (rows, 1, d) and logits (rows, vocabulary); leave the hooks as a plain step does.

        tensors: the hooks' tensors. tokens, positions, rope: (rows,). columns: the number of columns read. shares: the rows
        of each thread, which cover all rows in order.
        """
        return self._run(hooks, tensors, [tokens, positions, rope], columns, pool, shares, by_slot=True)

    def prefill(
        self,
        hooks: list[Hook],
        tensors: list[torch.Tensor],
        embeds: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        starts: torch.Tensor,
        last: torch.Tensor,
        columns: int,
        pool: KVPool,
        shares: list[slice],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return normalised states (rows, n, d) and logits (rows, vocabulary) of each row's last token.

        The arguments are those of `PackedPrefill`; hooks, columns and shares are as in `decode`.
        """
        return self._run(hooks, tensors, [embeds, positions, slots, starts, last], columns, pool, shares, by_slot=False)

    def encode(self, inputs: list[torch.Tensor], shares: list[slice]) -> torch.Tensor:
        """Return (pictures, tokens, d) of a `PackedPictures` step's arguments. shares: the pictures of each thread."""
        (features,) = self._run_shares(inputs, [], shares, by_slot=False)
        return features

    def _run(
        self,
        hooks: list[Hook],
        tensors: list[torch.Tensor],
        fed: list[torch.Tensor],
        columns: int,
        pool: KVPool,
        shares: list[slice],
        by_slot: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run a pass with hooks; by_slot: row i is slot i."""
        if len(self._column) < pool.length:
            self._column = torch.zeros(pool.length)
        hidden, logits, *new_tensors = self._run_shares(
            [*fed, self._column[:columns], *tensors], [*pool.tensors], shares, by_slot
        )
        self._tree_spec.change(hooks, self._changes, [*tensors, *new_tensors])
        return hidden, logits

    def _run_shares(
        self, inputs: list[torch.Tensor], pooled: list[torch.Tensor], shares: list[slice], by_slot: bool
    ) -> list[torch.Tensor]:
        """Return the library's outputs, each thread computing its share."""
        if len(shares) == 1:
            calls = [partial(self._library, [*map(torch.Tensor.contiguous, inputs), *pooled])]
        else:
            calls = [partial(self._library, self._part(share, inputs, pooled, by_slot)) for share in shares]
        parts = self._team.run(calls)
        return parts[0] if len(parts) == 1 else [*map(torch.cat, zip(*parts, strict=True), self._outputs)]

    def _part(
        self, rows: slice, inputs: list[torch.Tensor], pooled: list[torch.Tensor], by_slot: bool
    ) -> list[torch.Tensor]:
        """Return the arguments for some rows, contiguous as compiled steps need them."""
        parts = [
            tensor if axis is None else tensor.narrow(axis, rows.start, rows.stop - rows.start)
            for tensor, axis in zip(inputs, self._inputs, strict=False)
        ]
        own_slots = [tensor[rows.start :] for tensor in pooled] if by_slot and rows.start else pooled
        return [*map(torch.Tensor.contiguous, parts), *own_slots]
