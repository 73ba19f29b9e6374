"""A decode step as a function of tensors alone, which is what can be compiled before it is used."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from steering.compiled.tensors import Hole, Made, Pattern, put_together, taken_apart
from steering.decoder.attention import Decode
from steering.decoder.hooks import Hook, Hooks
from steering.decoder.kv import KVPool
from steering.model.mllm import MLLM


class Step(nn.Module):
    """One token for each of the first rows of the pool under hooks of one shape.

    axes: how many axes rotary positions have, None for one that is not told apart. Called once, it knows `left`: what the
    hooks are afterwards, as a tree whose tensors are those that were given, then those that were made.
    """

    def __init__(self, mllm: MLLM, shape: Pattern, axes: int | None):
        super().__init__()
        self.decoder = mllm.decoder
        self.embeddings = mllm.model.get_input_embeddings()
        self.output = mllm.model.get_output_embeddings()
        self._mllm, self._shape, self._axes = [mllm], shape, axes  # in a list, as it is no part of what is compiled
        self._note = _Note()  # torch.export sets back what tracing sets, and what lists held

    @property
    def left(self) -> Any:
        return self._note.left

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        rope: torch.Tensor,
        column: torch.Tensor,
        given: list[torch.Tensor],
        pooled: list[torch.Tensor],
    ) -> list[torch.Tensor]:
        """The normalised states (rows, 1, d) and logits (rows, vocabulary), then what the hooks made.

        tokens, positions, rope: (rows,), what is fed, where it is written, and its rotary position. column: (columns,) of
        anything: how many columns are read. given: the hooks' tensors. pooled: keys and values of each layer.
        """
        (mllm,) = self._mllm
        rows, columns = tokens.shape[0], column.shape[0]
        hooks: list[Hook] = put_together(self._shape.tree, given)
        pool = KVPool.of(pooled)
        angles = rope[:, None]
        if self._axes is not None:
            angles = angles.expand(self._axes, -1, -1)
        hidden = self.decoder(
            inputs_embeds=self.embeddings(tokens[:, None]),
            position_ids=angles,
            attention_mask=torch.ones(rows, 1, 1, 1, dtype=torch.bool, device=tokens.device),
            use_cache=False,
            step=Decode(pool, positions, columns, Hooks.of(hooks)),
        ).last_hidden_state
        left, found = taken_apart(hooks)
        known = {id(one): number for number, one in enumerate(given)}
        made = [one for one in found if id(one) not in known]
        fresh = {id(one): len(given) + number for number, one in enumerate(made)}
        self._note.left = renumbered(left.tree, [(known | fresh)[id(one)] for one in found])
        return [hidden, mllm.head(hidden[:, -1]), *made]


class _Note:
    left: Any = None


def renumbered(tree: Any, numbers: list[int]) -> Any:
    """The same, tensors counted otherwise."""
    if type(tree) is Hole:
        return Hole(numbers[tree.number])
    if type(tree) is Made:
        return tree._replace(parts=tuple(renumbered(part, numbers) for part in tree.parts))
    return tree


def constants(step: Step) -> dict[str, torch.Tensor]:
    """All tensors of the model that a step may need, by name."""
    return {
        **dict(step.named_parameters(remove_duplicate=False)),
        **dict(step.named_buffers(remove_duplicate=False)),
    }
