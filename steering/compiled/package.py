"""A compiled step that was loaded, over the weights of the model that is served."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from steering.compiled.store import StoredStep
from steering.compiled.tensors import Pattern, kinds_of, of_json, put_together
from steering.decoder.hooks import Hook
from steering.decoder.kv import KVPool


class Package:
    """One token for each of the first rows of a pool, under hooks of one shape."""

    def __init__(self, entry: StoredStep, shape: Pattern, tensors: Mapping[str, torch.Tensor]):
        """Load a package for hooks of this shape. tensors: the model's, by name.

        Raises ValueError for a package of something else, KeyError where it needs what the model has not, and RuntimeError
        where torch cannot load it.
        """
        if entry.about["shape"] != shape.text():
            raise ValueError("it is of other hooks")
        self._left = of_json(entry.about["left"], kinds_of(shape.tree))
        self._loader: Any = torch._C._aoti.AOTIModelPackageLoader(str(entry.package), "model", False, 1, -1)  # type: ignore[attr-defined]
        self._tensors = {name: tensors[name].data for name in self._loader.get_constant_fqns()}
        self._loader.load_constants(self._tensors, False, True, True, False)  # used where they are, and kept by us
        self._column = torch.zeros(0)

    def __call__(
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
        if len(self._column) < pool.length:
            self._column = torch.zeros(pool.length)
        given = [one.contiguous() for one in given]
        inputs = [tokens, positions, rope, self._column[:columns], *given, *pool.tensors]
        hidden, logits, *made = self._loader.boxed_run(inputs)
        for hook, left in zip(hooks, put_together(self._left, [*given, *made]), strict=True):
            vars(hook).update(vars(left))
        return hidden, logits
